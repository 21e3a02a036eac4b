"""Steps of a causal model on rows that begin with the same tokens: padded, packed, and with shared prefixes.

    python benchmarks/shared_prefixes.py [--rounds 9] [--width 256] [--layers 4] [--save FILE]

On a GPU in bf16, else on two threads of a CPU in float32. The ways run by turns, on the same batch; times are medians
in ms. A step is a forward, and a backward where the batch is for training. The model is a Llama with random weights.
Lengths are lognormal.

    GRPO        4 prompts of at most 512 tokens, with 8 answers of at most 64 each, logits of the answers
    DPO         4 pairs, prompts of 256 tokens, answers of at most 64, logits of all tokens
    evaluation  32 rows with 384 common tokens and 16 of their own, without gradients
    nothing     16 rows that share nothing
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
from pathlib import Path
from typing import Any

import torch
from by_turns import by_turns, show
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import nt_attention as nta
from nt_attention.cli.environment import device_name

VOCABULARY = 8192


def lognormal(count: int, most: int) -> list[int]:
    draws = torch.empty(count).log_normal_(0.0, 0.6) * most / 2
    return draws.long().clamp(min=4, max=most).tolist()


def rows_of(prompts: list[int], answers: list[list[int]]) -> list[Tensor]:
    """Rows of a prompt and an answer, prompt by prompt."""
    rows = []
    for length, group in zip(prompts, answers, strict=True):
        prompt = torch.randint(1, VOCABULARY, (length,))
        rows += [torch.cat([prompt, torch.randint(1, VOCABULARY, (answer,))]) for answer in group]
    return rows


def batches() -> dict[str, tuple[list[Tensor], int, bool]]:
    """Name → rows, the number of last positions whose logits are kept (0 for all), and whether it trains."""
    prompts = lognormal(4, 512)
    return {
        "GRPO": (rows_of(prompts, [lognormal(8, 64) for _ in prompts]), 64, True),
        "DPO": (rows_of([256] * 4, [lognormal(2, 64) for _ in range(4)]), 0, True),
        "evaluation": (rows_of([384], [[16] * 32]), 16, False),
        "nothing": (rows_of([0] * 16, [[n] for n in lognormal(16, 512)]), 0, True),
    }


def run(model: Any, batch: dict[str, Any], trains: bool) -> None:
    with torch.set_grad_enabled(trains):
        logits = model(**batch).logits
        if trains:
            logits.float().square().mean().backward()
            model.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width, intermediate_size=3 * options.width, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=VOCABULARY, pad_token_id=0,
    )  # fmt: skip
    padded = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    packed, shared = copy.deepcopy(padded), copy.deepcopy(padded)
    nta.patch(packed, packing="always", logits="padded")
    handle = nta.patch(shared, packing="always", logits="padded", shared_prefixes=True)
    models = {"padded": padded, "packed": packed, "shared": shared}
    lines = [f"{device_name(torch.device(device))}, {platform.python_version()}, torch {torch.__version__}", ""]
    lines += [
        "| batch | tokens | computed | padded | packed | shared | packed / shared |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (rows, keep, trains) in batches().items():
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "logits_to_keep": keep, "use_cache": False}
        for model in models.values():
            model.train(trains)
        tokens, computed = handle.prefixes.tokens, handle.prefixes.computed
        run(shared, batch, trains)
        tokens = int((ids != 0).sum())
        computed = handle.prefixes.computed - computed or tokens
        calls = {way: functools.partial(run, model, batch, trains) for way, model in models.items()}
        times = by_turns(calls, options.rounds)
        ratio = times["packed"] / times["shared"]
        shown = " | ".join(f"{times[way]:.1f}" for way in models)
        lines.append(f"| {name} | {tokens} | {computed} | {shown} | {ratio:.2f} |")
    show(lines, options.save)


if __name__ == "__main__":
    main()
