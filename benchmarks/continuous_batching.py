"""Continuous batching of transformers (`generate_batch`) with its own attention implementation and with ours.

    python benchmarks/continuous_batching.py [--prompts 64] [--longest 1024] [--new-tokens 64] [--save FILE]

Qwen3 of 0.6B's shape with random weights, in bf16 on a GPU; two small layers in float32 on a CPU. Prompts have
lognormal lengths. The ways run by turns, and each makes the same number of tokens. Figures are new tokens in a second:
the median of rounds, after one to warm up. With transformers 5.17, our implementation needs the package `kernels` on a
GPU.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
from pathlib import Path

import torch
from by_turns import show, wall_clock_ms
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import nt_attention.hf  # noqa: F401  # registers the last of the names
from nt_attention.cli.environment import device_name

WAYS = ("sdpa", "nt_attention/flash")


def make(way: str, device: str) -> PreTrainedModel:
    """The model with an attention implementation. The weights are the same for all."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32}
    if device == "cuda":
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        sizes |= {"num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(**sizes, vocab_size=32000, attn_implementation=way)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def prompts_of(count: int, longest: int) -> list[list[int]]:
    """Random tokens of lognormal lengths, whose median is a quarter of the longest."""
    draw = torch.Generator().manual_seed(0)
    lengths = (longest / 4 * torch.empty(count).log_normal_(0, 0.8, generator=draw)).long().clamp(1, longest)
    return [torch.randint(32000, (int(length),), generator=draw).tolist() for length in lengths]


def generate(model: PreTrainedModel, prompts: list[list[int]], options: GenerationConfig) -> None:
    blocks = 2 * (sum(map(len, prompts)) + len(prompts) * options.max_new_tokens) // 256 + 8
    results = model.generate_batch(prompts, options, ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=2048))
    assert [len(each.generated_tokens) for each in results.values()] == [options.max_new_tokens] * len(prompts)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--longest", type=int, default=1024 if on_gpu else 64)
    parser.add_argument("--new-tokens", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = "cuda" if on_gpu else "cpu"
    options = GenerationConfig(max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = prompts_of(args.prompts, args.longest)
    calls = {way: functools.partial(generate, make(way, device), prompts, options) for way in WAYS}
    rounds = [{way: wall_clock_ms(call) for way, call in calls.items()} for _ in range(args.rounds + 1)]
    times = {way: statistics.median(each[way] for each in rounds[1:]) for way in WAYS}
    rates = {way: 1e3 * args.new_tokens * args.prompts / ms for way, ms in times.items()}
    lines = [
        f"{device_name(torch.device(device))}, torch {torch.__version__}, {args.prompts} prompts with "
        f"{sum(map(len, prompts)):,} tokens ≤ {args.longest}, {args.new_tokens} new tokens each",
        "",
        "| attention implementation | new tokens/s | / sdpa |",
        "|---|---|---|",
        *(f"| {way} | {rate:,.0f} | {rate / rates['sdpa']:.2f} |" for way, rate in rates.items()),
    ]
    show(lines, args.save)


if __name__ == "__main__":
    main()
