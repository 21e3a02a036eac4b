"""Writes the tables of supported models in docs/reference/hugging_face.md, from the newest proofs that are shipped.

With ``--check``, the exit status is 1 if the page is not up to date. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "hugging_face.md"
TABLES = re.compile(r"(?<=<!-- tables: begin -->\n).*(?=<!-- tables: end -->)", re.DOTALL)
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
    "no default config": "no model could be made from its default config; `patch` tries the config of your model",
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
        by_heads[listed(found - {"base"}) or "–"].append(kind)
    for (kind, reason), found in refused.items():
        by_reason[reason].append(kind + ("" if found == heads[kind] else f" ({listed(found)})"))
    counts = f"Of {len(heads)} types in transformers {file.stem}, {len(packed)} are packed:"
    return f"\n{counts}\n\n{table('heads', by_heads)}\n\nNot packed:\n\n{table('because', by_reason)}\n\n"


def main(argv: list[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(description="Writes the tables of supported models.")
    parser.add_argument("--check", action="store_true", help="exit status 1 if the page is not up to date")
    files = (ROOT / "nt_attention" / "hf" / "proofs").glob("*.json")
    newest = max(files, key=lambda file: [int(part) for part in file.stem.split(".")])
    updated = TABLES.sub(lambda _: tables(newest), page.read_text())
    if not parser.parse_args(argv).check:
        page.write_text(updated)
    elif updated != page.read_text():
        print(f"{page.name} is not up to date: run python tools/supported_models.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
