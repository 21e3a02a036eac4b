"""Batches from one row of 8 tokens to 64 rows of 512: a padded model, and the same model patched by ``nta.patch``.

    python benchmarks/small_batches.py [--packing always] [--rounds 20] [--save FILE]

MiniLM (6 layers, 384 wide), BERT-base (12 × 768) and a Llama (8 × 1024), random weights, bf16, base models without
dropout. The first row is as long as the batch; the lengths of the other rows are lognormal. Each round has a new batch
of the same shape, and both ways run it by turns. Times are medians of wall-clock times in ms, from device sync to
device sync; the ratio is the median over rounds of padded over patched.

Without a GPU it is a test run of small models in float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from by_turns import reserve_memory, show, wall_clock_ms
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel
from workloads import draw_lengths

import nt_attention as nta

GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if GPU else (torch.device("cpu"), torch.float32)
SHAPES = [(rows, length) for rows in (1, 4, 8, 16, 32, 64) for length in (8, 64, 256, 512)]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[Any, Any]] = {
    "MiniLM": (BertModel, BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6 if GPU else 1, num_attention_heads=12, **NO_DROPOUT
    )),
    "BERT-base": (BertModel, BertConfig(num_hidden_layers=12 if GPU else 1, **NO_DROPOUT)),
    "Llama": (LlamaModel, LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8 if GPU else 1, num_attention_heads=16,
        num_key_value_heads=4, use_cache=False,
    )),
}  # fmt: skip


def draw(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """A padded batch of new tensors."""
    others = draw_lengths(f"lognormal:{length}", rows * length, seed)[: rows - 1]
    mask = torch.arange(length) < torch.tensor([length, *others])[:, None]
    ids = torch.randint(5, 30000, mask.shape)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def infer(model: Any, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model(**batch)


def train(model: Any, batch: dict[str, Tensor]) -> None:
    model(**batch).last_hidden_state.float().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def rows_of(name: str, rounds: int, packing: Literal["auto", "always"]) -> list[str]:
    kind, config = MODELS[name]
    models = {}
    for way in ("padded", "patched"):
        torch.manual_seed(0)
        own = copy.deepcopy(config)  # `nta.patch` writes its attention to the config
        models[way] = kind._from_config(own, attn_implementation="sdpa").to(DEVICE, DTYPE)
    nta.patch(models["patched"], on_fallback="raise", packing=packing)
    lines = []
    for rows, length in SHAPES if GPU else SHAPES[:3]:
        cells = []
        for step in (infer, train):
            times: dict[str, list[float]] = {way: [] for way in models}
            for seed in range(3 + rounds):
                batch = draw(rows, length, seed)
                for way, model in models.items():
                    model.train(step is train)
                    ms = wall_clock_ms(lambda step=step, model=model, batch=batch: step(model, batch))
                    times[way] += [ms] if seed >= 3 else []
            padded, patched = times.values()
            ratio = statistics.median(a / b for a, b in zip(padded, patched, strict=True))
            cells += [f"{statistics.median(padded):.2f}", f"{statistics.median(patched):.2f}", f"{ratio:.2f}"]
        lines.append(f"| {name} | {rows} × {length} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packing", default="auto", choices=["auto", "always"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    reserve_memory()
    machine = torch.cuda.get_device_name() if GPU else "CPU"
    lines = [
        f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}, {str(DTYPE)[6:]}; wall-clock",
        "",
        "| model | rows × length | inference: padded | patched | ratio | training: padded | patched | ratio |",
        "|---|---|---|---|---|---|---|---|",
        *(line for name in MODELS for line in rows_of(name, options.rounds, options.packing)),
    ]
    show(lines, options.save)


if __name__ == "__main__":
    main()
