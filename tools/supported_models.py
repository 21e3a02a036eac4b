"""Writes the tables of supported models in docs/reference/hugging_face.md, from the newest proofs that are shipped, and
from the outcomes of rows packed by hand (tests/hugging_face/rows_outcomes.json).

With ``--check``, the exit status is 1 if the page is not up to date. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "hugging_face.md"
TABLES = re.compile(r"(?<=<!-- tables: begin -->\n).*(?=<!-- tables: end -->)", re.DOTALL)
ROWS = re.compile(r"(?<=<!-- rows: begin -->\n).*(?=<!-- rows: end -->)", re.DOTALL)
OUTCOMES = ROOT / "tests" / "hugging_face" / "rows_outcomes.json"
BORDER = re.compile("^|(?= |$)")  # of the first word
HEADS = ("base, text encoding, causal LM, masked LM, seq2seq LM, token, sequence, QA, multiple choice, next sentence, "
         "pretraining")  # fmt: skip
# What a reason contains → what the table says. Other reasons are in the table as they are.
WORDS = {
    "apart without `flash-linear-attention`": "needs `flash-linear-attention` to keep packed sequences apart",
    "apart without `causal_conv1d`": "needs `causal_conv1d` to keep packed sequences apart",
    "uses the attention mask, which": "a layer reads the attention mask, which a packed row does not have",
    "uses its attention mask with": "its code computes with the padding mask what a packed row can't have",
    "computes attention over the whole row": "it has attention code of its own, for blocks or windows",
    "computes its attention with": "it has attention code of its own, which `varlen_attention` can't express",
    "mixes all tokens of the row": "a layer mixes the tokens of a row",
    "keeps a state along the row": "a layer keeps a state along the row",
    "has a convolution along the row": "a layer has a convolution along the row",
    "does not keep the sequences": "its attention does not keep the sequences of a packed row apart",
    "counts positions along the row": "it counts positions along the whole row",
    "no small model of its class": "it could not be tried: no small model could be built",
    "an error without the patch": "it could not be tried: the small model raised an error",
    "training updates its buffer": "in training, it updates statistics from all positions, with padding",
    "mixes neighboring tokens": "a layer mixes neighboring tokens of the row",
    " raises ": "its code raises an error on a packed row",
    "differs between": "it gives other values in packed rows than for each sequence alone",
    "other values in a packed row": "it gives other values in packed rows than for each sequence alone",
    "its attention_mask is not (batch, length)": "its `attention_mask` is not (batch, length)",
    "'attention_mask' is not known": "it returns a mask, which may have a value for each token",
    "its input is": "its input is not `input_ids`",
    "no default config": "no model could be made from its default config; `patch` tries the config of your model",
}


# What an outcome of a registered model contains → what the table says.
REGISTERED = {
    "without position_ids": "needs `position_ids` beside `cu_seq_lens_q`",
    "do not know where sequences begin": "a layer mixes the sequences of a row",
    "need cu_seq_lens_q": "needs `cu_seq_lens_q`",
    "takes no position_ids": "takes no `position_ids`, and counts positions along the row: use `patch`",
    "the mask of eager": 'needs `register("eager")`',
    "arguments to its attention": "is not supported by `register`",
    "does not run its attn_implementation": "does not run the attention in its config: use `patch`",
    "does not run an attention implementation": "does not run the attention in its config: use `patch`",
    "refused by transformers": "transformers refuses the name of our attention: use `patch`",
    "WRONG": "**mixes sequences, and is not noticed**: it runs layers of its own, and calls none of our functions",
}


def table(title: str, rows: dict[str, list[str]]) -> str:
    lists = sorted((sorted(types), text) for text, types in rows.items())
    lines = (f"| {', '.join(BORDER.sub('`', each, 2) for each in types)} | {text} |" for types, text in lists)
    return "\n".join([f"| `config.model_type` | {title} |", "|---|---|", *lines])


def listed(heads: set[str]) -> str:
    return ", ".join(sorted(heads, key=HEADS.split(", ").index))


def tables(file: Path) -> str:
    heads: dict[str, set[str]] = defaultdict(set)  # model type → all of its heads
    packed: dict[str, set[str]] = defaultdict(set)  # model type → heads that are packed
    refused: dict[tuple[str, str], set[str]] = defaultdict(set)  # model type and reason → heads that are not
    for entry in json.loads(file.read_text()):
        reason, kind = entry["proof"].get("reason"), entry["type"]
        reason = reason and next((text for part, text in WORDS.items() if part in reason), reason)
        (packed[kind] if reason is None else refused[kind, reason]).add(entry["head"])
        heads[kind].add(entry["head"])
    by_heads, by_reason = defaultdict(list), defaultdict(list)
    for kind, found in packed.items():
        by_heads[listed(found)].append(kind)
    for (kind, reason), found in refused.items():
        by_reason[reason].append(kind + ("" if found == heads[kind] else f" ({listed(found)})"))
    count = f"Packed: {len(packed)} of {len(heads)} types in transformers {file.stem}"
    return "\n" + details(count, table("packed", by_heads)) + details("Not packed", table("not packed", by_reason))


def details(summary: str, text: str) -> str:
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>\n\n'


def read_outcomes(file: Path) -> list[dict[str, Any]]:
    """The outcomes of all classes. The file has each different outcome once, and its number in the classes."""
    content = json.loads(file.read_text())
    different = content["outcomes"]
    return [{k: different[x] if isinstance(x, int) else x for k, x in entry.items()} for entry in content["classes"]]


def rows_tables(file: Path) -> str:
    """The tables of rows packed by hand."""
    entries = [entry for entry in read_outcomes(file) if "register" in entry]
    lines = ["| | | right | refused | wrong |", "|---|---|---|---|---|"]
    for way in ("patch", "register"):
        for form in entries[0][way]:
            found = [entry[way][form] for entry in entries]
            right, wrong = sum(x.startswith("right") for x in found), sum(x.startswith("WRONG") for x in found)
            lines.append(f"| `{way}` | {form} | {right} | {len(found) - right - wrong} | {wrong} |")
    by_reason: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        for form, outcome in entry["register"].items():
            if form != "padded" and (text := next((x for part, x in REGISTERED.items() if part in outcome), None)):
                by_reason[text].add(entry["type"])
    counts = f"{len(entries)} classes, each as a small model in float64, compared with each sequence alone:"
    types = table("registered, with rows packed by hand", {text: list(x) for text, x in by_reason.items()})
    return f"\n{counts}\n\n" + "\n".join(lines) + "\n\n" + details("By type", types)


def main(argv: list[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(description="Writes the tables of supported models.")
    parser.add_argument("--check", action="store_true", help="exit status 1 if the page is not up to date")
    files = (ROOT / "nt_attention" / "hf" / "prove" / "proofs").glob("*.json")
    newest = max(files, key=lambda file: [int(part) for part in file.stem.split(".")])
    updated = TABLES.sub(lambda _: tables(newest), page.read_text())
    updated = ROWS.sub(lambda _: rows_tables(OUTCOMES), updated)
    if not parser.parse_args(argv).check:
        page.write_text(updated)
    elif updated != page.read_text():
        print(f"{page.name} is not up to date: run python tools/supported_models.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
