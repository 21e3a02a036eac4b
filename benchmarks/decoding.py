"""Tokens per second of ``generate`` on a Hugging Face model: sdpa, the registered "nt_attention", and a patched model.

    python benchmarks/decoding.py [--layers 16] [--hidden-size 1024] [--tokens 64] [--save FILE]

A Llama with random weights, bf16 on a GPU and float32 on a CPU; 8 prompts of 5 to 40 tokens, padded on the left; greedy
decoding with a dynamic cache. All three must generate the same tokens. They alternate, and times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path

import torch
import transformers
from by_turns import show
from transformers import LlamaConfig, LlamaForCausalLM

import nt_attention as nta

PROMPTS = (5, 40, 17, 23, 9, 31, 12, 28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size, num_attention_heads=16,
        num_hidden_layers=options.layers, num_key_value_heads=4, vocab_size=32000, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    mask = (torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]).long().to(device)
    ids = torch.randint(3, 32000, mask.shape, device=device).masked_fill(mask == 0, 0)

    def run() -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False
        ).cpu()
        return time.perf_counter() - began, out

    seconds: dict[str, list[float]] = {}
    want = None
    for round_ in range(options.rounds + 1):
        for way in ("sdpa", "nt_attention", "nta.patch"):
            model.set_attn_implementation(nta.hf.register() if way == "nt_attention" else "sdpa")
            handle = nta.patch(model) if way == "nta.patch" else None
            taken, out = run()
            if handle is not None:
                handle.remove()
            want = out if want is None else want
            if not torch.equal(out, want):
                raise SystemExit(f"{way} gives other tokens than sdpa")
            if round_:
                seconds.setdefault(way, []).append(taken)
    new = len(PROMPTS) * options.tokens
    base = statistics.median(seconds["sdpa"])
    lines = [
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; a Llama of {options.layers} layers, {options.hidden_size} wide",
        "",
        "| way | tokens/s | × sdpa |",
        "|---|---|---|",
        *(
            f"| {way} | {new / statistics.median(each):.0f} | {base / statistics.median(each):.3f} |"
            for way, each in seconds.items()
        ),
    ]
    show(lines, options.save)


if __name__ == "__main__":
    main()
