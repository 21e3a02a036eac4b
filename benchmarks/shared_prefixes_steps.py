"""Steps of a model of the size of Qwen3-1.7B on a GPU: padded with sdpa, packed, and with shared prefixes.

    python benchmarks/shared_prefixes_steps.py [--rounds 5] [--layers 28] [--save FILE]

In bf16 with random weights and gradient checkpointing. The ways run by turns on the same batches. Times are medians in
ms, from device sync to device sync; memory is the peak in GB, without the weights. A step is a forward and a backward
of the loss, without an optimizer.

    GRPO        4 prompts, lognormal up to 2,048 tokens, padded on the left, 8 answers each, lognormal up to 256; the
                policy gradient of the answers
    DPO         8 pairs, prompts of 1,024 tokens, answers of 256; the loss of the pairs, without a reference model
    evaluation  64 rows with 1,500 common tokens and 16 of their own: log probabilities of these, without gradients
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from by_turns import by_turns, show
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import nt_attention as nta
from nt_attention.cli.environment import device_name

VOCABULARY = 151_936


def lognormal(count: int, most: int) -> list[int]:
    return (torch.empty(count).log_normal_(0.0, 0.6) * most / 2).long().clamp(16, most).tolist()


def batch_of(prompts: list[int], answers: list[list[int]]) -> dict[str, Tensor]:
    """Prompts padded on the left, each with its answers, padded on the right."""
    width, longest = max(prompts), max(max(group) for group in answers)
    rows = []
    for length, group in zip(prompts, answers, strict=True):
        prompt = torch.zeros(width, dtype=torch.int64)
        prompt[width - length :] = torch.randint(1, VOCABULARY, (length,))
        for n in group:
            answer = torch.zeros(longest, dtype=torch.int64)
            answer[:n] = torch.randint(1, VOCABULARY, (n,))
            rows.append(torch.cat([prompt, answer]))
    ids = torch.stack(rows).cuda()
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "logits_to_keep": longest + 1}


def scores(model: Any, batch: dict[str, Any]) -> Tensor:
    """(B, L) the log probability of each token of the answers."""
    keep = batch["logits_to_keep"] - 1
    logits = model(**batch, use_cache=False).logits[:, :-1]
    targets = batch["input_ids"][:, -keep:]
    rows = [
        torch.log_softmax(row.float(), -1).gather(1, target[:, None])[:, 0]
        for row, target in zip(logits, targets, strict=True)
    ]
    return torch.stack(rows) * batch["attention_mask"][:, -keep:]


def grpo(model: Any, batch: dict[str, Any]) -> None:
    scored = scores(model, batch)
    weight = torch.linspace(-1, 1, len(scored), device="cuda")[:, None]
    (-(weight * (scored - scored.detach()).exp()).mean()).backward()
    model.zero_grad(set_to_none=True)


def dpo(model: Any, batch: dict[str, Any]) -> None:
    chosen, rejected = scores(model, batch).sum(1).view(-1, 2).unbind(1)
    (-torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()).backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(model: Any, batch: dict[str, Any]) -> None:
    scores(model, batch)


def peak_of(call: Any) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def make(layers: int) -> Any:
    config = Qwen3Config(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=VOCABULARY, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    prompts = lognormal(4, 2048)
    batches: dict[str, tuple[Any, dict[str, Tensor]]] = {
        "GRPO": (grpo, batch_of(prompts, [lognormal(8, 256) for _ in prompts])),
        "DPO": (dpo, batch_of([1024] * 8, [[256, 256]] * 8)),
        "evaluation": (evaluate, batch_of([1500], [[16] * 64])),
    }
    padded = make(options.layers)
    packed, shared = copy.deepcopy(padded), copy.deepcopy(padded)
    nta.patch(packed, packing="always")
    handle = nta.patch(shared, packing="always", shared_prefixes=True)
    models = {"padded": padded, "packed": packed, "shared": shared}
    lines = [f"{device_name(torch.device('cuda'))}, torch {torch.__version__}, {options.layers} layers, bf16", ""]
    lines += ["| batch | tokens | padded | packed | shared | packed / shared | padded / shared |", "|---" * 7 + "|"]
    for name, (step, batch) in batches.items():
        steps = {way: functools.partial(step, model, batch) for way, model in models.items()}
        peaks = {way: peak_of(call) for way, call in steps.items()}
        times = by_turns(steps, options.rounds)
        shown = " | ".join(f"{times[way]:.0f} ({peaks[way]:.1f})" for way in times)
        ratios = f"{times['packed'] / times['shared']:.2f} | {times['padded'] / times['shared']:.2f}"
        lines.append(f"| {name} | {int(batch['attention_mask'].sum())} | {shown} | {ratios} |")
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", *str(handle.prefixes).splitlines()]
    show(lines, options.save)


if __name__ == "__main__":
    main()
