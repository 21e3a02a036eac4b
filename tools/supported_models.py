"""Writes the tables of supported models in docs/reference/hugging_face.md, and supported_models.json for docs/site.js.

Both are made from the newest file in tools/checked_classes, which check_classes.py writes. The tables of rows packed by
hand are made from tools/rows_outcomes.json.

With ``--check``, the exit status is 1 if a file is not up to date. Needs the standard library only.
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
DATA = PAGE.with_name("supported_models.json")
TABLES = re.compile(r"(?<=<!-- tables: begin -->\n).*(?=<!-- tables: end -->)", re.DOTALL)
ROWS = re.compile(r"(?<=<!-- rows: begin -->\n).*(?=<!-- rows: end -->)", re.DOTALL)
CHECKED = ROOT / "tools" / "checked_classes"
OUTCOMES = ROOT / "tools" / "rows_outcomes.json"
BORDER = re.compile("^|(?= |$)")  # of the first word
HEADS = ("base, text encoding, causal LM, masked LM, seq2seq LM, token, sequence, QA, multiple choice, next sentence, "
         "pretraining")  # fmt: skip
# What a reason contains → what the table says. Other reasons are in the table as they are.
WORDS = {
    "no small model could be built": "not known: no small model could be built; `patch` checks your model itself",
    "its check raises": "the check raised an error",
    "its check has no result": "the check of the small model took too long",
    "apart without": "needs a package to keep packed sequences apart",
    "uses the attention mask, which": "a layer reads the attention mask, which a packed row does not have",
    "uses its attention mask with": "its code computes with the padding mask what a packed row can't have",
    "computes attention over the whole row": "it has attention code of its own, for blocks or windows",
    "computes its attention with": "it has attention code of its own, which `varlen_attention` can't express",
    "mixes the sequences of a packed row": "it mixes the sequences of a packed row",
    "differs between": "it gives other values in packed rows than for each sequence alone",
    " raises ": "its code raises an error on a packed row",
    "'attention_mask' is not known": "it returns a mask, which may have a value for each token",
    "rows of": "its output has other rows than its input",
    "not finite": "its outputs have no values for tokens",
    "its input is": "its input is not `input_ids`",
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


# Patterns of names on the Hub → the model type of such models, if their type is not a part of their name, or if another
# type is. Names are in lower case, without the organization, and with "-" for what is neither a letter nor a digit. The
# first pattern that fits counts. "" is for models that are not in the tables.
FAMILIES = {
    "minilm|labse|(^|-)splade-(?!v3-distil)|colbert|chinese-roberta|mxbai-embed|sbert": "bert",
    "distil-splade|splade-v3-distil": "distilbert",
    "codebert|graphcodebert|unixcoder|bertweet|distilroberta": "roberta",
    "m?deberta-?v[23]": "deberta-v2",
    "bge-multilingual-gemma2": "gemma2",
    "bge-reranker-v2-gemma": "gemma",
    "bge-m3|bge-reranker": "xlm-roberta",
    "(^|-)bge-(small|base|large|micro)": "bert",
    "(^|-)e5-mistral|zephyr": "mistral",
    "multilingual-e5-(base|large)": "xlm-roberta",
    "(^|-)e5-(small|base|large)": "bert",
    "(^|-)gte-(small|base|large)(?!-en-v1-5)": "bert",
    "arctic-embed-l-v2": "xlm-roberta",
    "arctic-embed-m-v2": "gte",
    "arctic-embed": "bert",
    "mxbai-rerank-[a-z]+-v2": "qwen2",
    "mxbai-rerank": "deberta-v2",
    "nomic-embed-text": "nomic_bert",
    "granite-embedding-[a-z]+-r2|gte-modernbert|moderncamembert": "modernbert",
    "granite-embedding-(107|278)m": "xlm-roberta",
    "granite-embedding": "roberta",
    "embeddinggemma|gemma-3-(270m|1b)": "gemma3_text",
    "prot-?bert|biobert|scibert|finbert|legal-bert": "bert",
    "(^|-)esm-?2": "esm",
    "deepseek-r1-distill-qwen": "qwen2",
    "deepseek-r1-distill-llama|(tiny|code|open)-?llama|vicuna|(^|-)yi-|smollm(?!-?3)|falcon-?3": "llama",
    "deepseek-v3-2": "deepseek_v32",
    "deepseek-r1": "deepseek_v3",
    "qwen-?3-5-.*-a[0-9]+b": "qwen3_5_moe",
    "qwen-?3(?!-next)(-coder)?-[0-9]+b-a[0-9]+b": "qwen3_moe",
    "llama-3-2-.*vision": "mllama",
    "qwen-?2-audio": "qwen2_audio",
    "phi-?4-multimodal": "phi4_multimodal",
    "phi-?4": "phi3",
    "granite-?4": "granitemoehybrid",
    "starcoder(?!-?2)|santacoder": "gpt_bigcode",
    "gpt-?j(?![a-z])": "gptj",
    "pythia|dolly": "gpt_neox",
    "distilgpt2|dialogpt": "gpt2",
    "codet5": "t5",
    "mt0": "mt5",
    "bloomz": "bloom",
    "opus-mt": "marian",
    "nllb": "m2m_100",
    "(^|-)(vl|vlm|omni|vision|vit|image|audio|tts)(-|$)": "",
}


def name_patterns(types: list[str]) -> list[list[str]]:
    """FAMILIES, then the types themselves, the longest first: "qwen3" is a part of "Qwen3-0.6B", and "gemma2" of
    "gemma-2-9b", but not of "gemma-2b"."""
    own = ["-?".join(re.findall("[a-z]+|[0-9]+", kind)) for kind in types]
    found = [[f"(^|-){pattern}(?![a-z0-9])", kind] for pattern, kind in zip(own, types, strict=True)]
    return [list(each) for each in FAMILIES.items()] + sorted(found, key=lambda each: (-len(each[1]), each[1]))


def finder(file: Path) -> dict[str, Any]:
    """What docs/site.js searches in.

    Returns:
        "types": model type → lines about it. "classes": class → its type, and why it is not packed or "". "names":
        patterns of names on the Hub, and the model type of such a model.
    """
    heads: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # model type → reason or "" → heads
    classes = {}
    for entry in json.loads(file.read_text()):
        reason = why(entry)
        heads[entry["type"]][reason or ""].add(entry["head"])
        classes[entry["class"]] = [entry["type"], reason or ""]
    types = {
        kind: [
            f"not packed: {listed(found)}: {reason}" if reason else f"packed: {listed(found)}"
            for reason, found in sorted(by_reason.items())
        ]
        for kind, by_reason in heads.items()
    }
    return {"version": file.stem, "types": types, "classes": classes, "names": name_patterns(list(types))}


def why(entry: dict[str, Any]) -> str | None:
    """Why a class is not packed, in the words of the tables; None if it is packed."""
    reason = entry.get("reason")
    return reason and next((text for part, text in WORDS.items() if part in reason), reason)


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
        reason, kind = why(entry), entry["type"]
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
    for how in ("patch", "register"):
        for form in entries[0][how]:
            found = [entry[how][form] for entry in entries]
            right, wrong = sum(x.startswith("right") for x in found), sum(x.startswith("WRONG") for x in found)
            lines.append(f"| `{how}` | {form} | {right} | {len(found) - right - wrong} | {wrong} |")
    by_reason: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        for form, outcome in entry["register"].items():
            if form != "padded" and (text := next((x for part, x in REGISTERED.items() if part in outcome), None)):
                by_reason[text].add(entry["type"])
    counts = f"{len(entries)} classes, each as a small model in float64, compared with each sequence alone:"
    types = table("registered, with rows packed by hand", {text: list(x) for text, x in by_reason.items()})
    return f"\n{counts}\n\n" + "\n".join(lines) + "\n\n" + details("By type", types)


def main(argv: list[str] | None = None, page: Path = PAGE, data: Path = DATA) -> int:
    parser = argparse.ArgumentParser(description="Writes the tables of supported models.")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a file is not up to date")
    check = parser.parse_args(argv).check
    newest = max(CHECKED.glob("*.json"), key=lambda file: [int(part) for part in file.stem.split(".")])
    updated = TABLES.sub(lambda _: tables(newest), page.read_text())
    updated = ROWS.sub(lambda _: rows_tables(OUTCOMES), updated)
    status = 0
    for file, text in {page: updated, data: json.dumps(finder(newest), separators=(",", ":")) + "\n"}.items():
        if not check:
            file.write_text(text)
        elif not file.exists() or text != file.read_text():
            print(f"{file.name} is not up to date: run python tools/supported_models.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
