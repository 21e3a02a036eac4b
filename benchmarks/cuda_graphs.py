"""Inference of small batches: padded, patched by ``nta.patch``, and patched with ``cuda_graphs=True``.

    python benchmarks/cuda_graphs.py [--rounds 20] [--save FILE]

BERTs with random weights, bf16, no dropout. All ways run the same batches by turns, each with other lengths. Times are
medians from device sync to device sync, in ms. Without a GPU it is a test run of tiny models, without graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import reserve_memory, show, wall_clock_ms
from torch import Tensor
from transformers import BertConfig, BertModel

import nt_attention as nta

GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if GPU else (torch.device("cpu"), torch.float32)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "6 × 384": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "12 × 768": {},
}
# model, rows, and the shortest and longest row
SPEED = [("6 × 384", 32, 4, 64), ("12 × 768", 8, 4, 64), ("12 × 768", 64, 4, 256), ("12 × 768", 64, 4, 512)]
WARMUP = 12  # batches, in which graphs are captured


def make(name: str) -> Any:
    torch.manual_seed(0)
    config = BertConfig(**MODELS[name], **NO_DROPOUT)  # of its own: `nta.patch` writes its attention to the config
    return BertModel._from_config(config, attn_implementation="sdpa").to(DEVICE, DTYPE).eval()


def draw(rows: int, shortest: int, longest: int) -> dict[str, Tensor]:
    """A padded batch of uniform lengths."""
    lengths = torch.randint(shortest, longest + 1, (rows,))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(5, 30000, mask.shape)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def row(name: str, rows: int, shortest: int, longest: int, rounds: int) -> str:
    models = {way: make(name) for way in ("padded", "patch", "graphs")}
    nta.patch(models["patch"], packing="always")
    handle = nta.patch(models["graphs"], cuda_graphs=True)
    times: dict[str, list[float]] = {way: [] for way in models}
    with torch.inference_mode():
        for at in range(WARMUP + rounds):
            batch = draw(rows, shortest, longest)
            for way, model in models.items():
                took = wall_clock_ms(partial(model, **batch))
                times[way] += [took] if at >= WARMUP else []
    ms = {way: statistics.median(each) for way, each in times.items()}
    print(handle, file=sys.stderr)
    shown = " | ".join(f"{ms[way]:.2f}" for way in models)
    return f"| {name}, {rows} rows of {shortest} to {longest} | {shown} | {ms['padded'] / ms['graphs']:.2f} × |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    reserve_memory()
    name = torch.cuda.get_device_name() if GPU else "CPU"
    lines = [f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; ms", ""]
    lines += ["| layers × width, batch | padded | packed | graphs | padded over graphs |", "|---" * 5 + "|"]
    lines += [row(*each, options.rounds) for each in (SPEED if GPU else SPEED[:1])]
    show(lines, options.save)


if __name__ == "__main__":
    main()
