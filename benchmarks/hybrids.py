"""Training steps and forwards of models that mix attention with states or convolutions: padded, and patched.

    python benchmarks/hybrids.py [--models lfm3 qwen3_5 nemotron_h] [--tokens 16384] [--longest 2048] [--save FILE]

Models of 8 layers with random weights, in bf16 on a GPU and float32 on a CPU, where they are smaller. The ways run by
turns on the same batch of lognormal lengths. Times are medians in ms; memory is the peak of a GPU in GB, without the
weights. A step is a forward and a backward of the loss, without an optimizer. Padded attention is sdpa. States and
convolutions are computed by transformers, with the packages for them that are installed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import torch
from by_turns import by_turns, show
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import nt_attention as nta
from nt_attention.cli.environment import device_name

VOCABULARY = 32_000
MIXERS = ("fla", "causal_conv1d", "mamba_ssm")


def config_of(model: str, width: int) -> Any:
    """A config of 8 layers, whose other sizes follow from the width as in released models."""
    heads = width // 128
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": 8, "num_attention_heads": heads,
        "head_dim": 128, "num_key_value_heads": max(1, heads // 4), "intermediate_size": 3 * width, "pad_token_id": 0,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    if model == "lfm3":
        layers = ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv"]
        return AutoConfig.for_model("lfm3", **sizes, layer_types=layers)
    if model == "qwen3_5":
        of_mixer = {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads}
        return AutoConfig.for_model("qwen3_5_text", **sizes, **of_mixer)
    assert model == "nemotron_h"
    layers = ["linear_attention", "mlp", "linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"]
    del sizes["num_hidden_layers"]
    of_mixer = {"mamba_num_heads": 2 * width // 64, "mamba_head_dim": 64, "n_groups": 1}
    return AutoConfig.for_model("nemotron_h", **sizes, **of_mixer, layers_block_type=layers)


def batch_of(tokens: int, longest: int, device: str) -> dict[str, Tensor]:
    """Rows of lognormal lengths, padded on the right, with a given number of tokens, and their labels."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = math.exp(0.9 * float(torch.randn(())) + math.log(longest / 6))
        lengths.append(min(max(1, int(drawn)), longest, left))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape) * mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    return {name: x.to(device) for name, x in batch.items()}


def train(model: Any, batch: dict[str, Tensor]) -> None:
    model.train()
    model(**batch, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def infer(model: Any, batch: dict[str, Tensor]) -> None:
    model.eval().base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)


def peak_of(call: Any) -> float:
    """The peak memory of a call in GB, without what is allocated now. 0 on a CPU, infinity if there is not enough."""
    if not torch.cuda.is_available():
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        call()
    except torch.OutOfMemoryError:
        return math.inf
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def compare(name: str, models: dict[str, Any], batch: dict[str, Tensor], rounds: int) -> list[str]:
    """A line for training and one for inference."""
    padding = f"{batch['attention_mask'].numel() / int(batch['attention_mask'].sum()):.2f}"
    lines = []
    for what, step in (("training", train), ("inference", infer)):
        calls = {way: functools.partial(step, model, batch) for way, model in models.items()}
        peaks = {way: peak_of(call) for way, call in calls.items()}
        gc.collect()
        fits = {way: call for way, call in calls.items() if peaks[way] < math.inf}
        times = by_turns(fits, rounds)
        shown = [f"{times[way]:.1f} ({peaks[way]:.1f})" if way in times else "out of memory" for way in models]
        ratio = f"{times['padded'] / times['patched']:.2f}" if len(times) == len(models) else ""
        lines.append(" | ".join(["", name, what, padding, *shown, ratio, ""]).strip())
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lfm3", "qwen3_5", "nemotron_h"])
    parser.add_argument("--width", type=int, default=2048 if on_gpu else 256)
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 1024)
    parser.add_argument("--longest", type=int, default=2048 if on_gpu else 256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    there = [name for name in MIXERS if importlib.util.find_spec(name) is not None]
    lines = [f"{device_name(torch.device(device))}, torch {torch.__version__}, width {options.width}, ", ""]
    lines[0] += f"{options.tokens:,} tokens ≤ {options.longest}, with {', '.join(there) or 'no package'} for mixers"
    lines += ["| model | what | pad ratio | padded | patched | padded / patched |", "|---" * 6 + "|"]
    for name in options.models:
        torch.manual_seed(7)
        batch = batch_of(options.tokens, options.longest, device)
        config = config_of(name, options.width)
        padded = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32).to(device)
        patched = copy.deepcopy(padded)
        handle = nta.patch(patched, packing="always")
        lines += compare(name, {"padded": padded, "patched": patched}, batch, options.rounds)
        lines += [] if handle.calls.keys() == {None} else [str(handle)]
        del padded, patched, handle
    show(lines, options.save)


if __name__ == "__main__":
    main()
