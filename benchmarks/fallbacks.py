"""Calls of patched PyTorch modules that fall back to the padded forward, and the same calls before the patch.

    python benchmarks/fallbacks.py [--rounds 40] [--save FILE]

Both run by turns, on one thread of a CPU: 4 rows of 300, and 2 rows of 8, where host time counts. Times are medians in
ms, with gradients in training and without in evaluation. A ratio of 1 says that a fallback costs what it cost before.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import by_turns, show
from torch import nn

import nt_attention as nta


class Attention(nn.Module):
    """A module with one nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, **options)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.attention(*inputs, **options)[0]


def calls(rows: int, length: int, width: int, heads: int) -> dict[str, tuple[nn.Module, Callable[[Any], Any]]]:
    """Name → a module, and a call of it."""
    x, y = torch.randn(2, rows, length, width)
    padding = torch.arange(length) >= torch.linspace(length // 2, length, rows)[:, None]
    additive = torch.zeros(rows, length).masked_fill(padding, -torch.inf)
    band = ~torch.ones(length, length, dtype=torch.bool).triu(-2).tril(2)
    sizes: dict[str, Any] = {"dim_feedforward": 2 * width, "dropout": 0.0, "batch_first": True}
    attention, biased = Attention(width, heads), Attention(width, heads, add_bias_kv=True)
    encoder_layer = nn.TransformerEncoderLayer(width, heads, **sizes)
    encoder = nn.TransformerEncoder(encoder_layer, 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, **sizes), 2)
    no_weights: dict[str, Any] = {"need_weights": False}
    both = {"key_padding_mask": padding, "attn_mask": band, **no_weights}
    return {
        "attention, weights (DETR)": (attention, lambda m: m(x + y, x + y, x, key_padding_mask=padding)),
        "attention, weights": (attention, lambda m: m(x, x, x, key_padding_mask=padding)),
        "attention, weights, add_bias_kv": (biased, lambda m: m(x, x, x, key_padding_mask=padding)),
        "attention, attn_mask": (attention, lambda m: m(x, x, x, **both)),
        "attention, additive mask": (attention, lambda m: m(x, x, x, key_padding_mask=additive, **no_weights)),
        "attention, no padding": (attention, lambda m: m(x, x, x, **no_weights)),
        "encoder, band": (encoder, lambda m: m(x, mask=band, src_key_padding_mask=padding)),
        "encoder, no padding": (encoder, lambda m: m(x)),
        "decoder, band": (decoder, lambda m: m(x, y, tgt_mask=band, memory_key_padding_mask=padding)),
        "layer, band": (nn.ModuleList([encoder_layer]), lambda m: m[0](x, band, padding)),
        "transformer, memory sees padding": (
            nn.Transformer(width, heads, 1, 1, **sizes), lambda m: m(x, y, src_key_padding_mask=padding)
        ),
    }  # fmt: skip


def compare(model: nn.Module, call: Callable[[Any], Any], training: bool, rounds: int) -> dict[str, float]:
    models = {"stock": copy.deepcopy(model).train(training), "patched": copy.deepcopy(model).train(training)}
    handle = nta.patch(models["patched"])

    def run(model: nn.Module) -> None:
        with torch.set_grad_enabled(training):
            out = call(model)
            if training:
                out.sum().backward()

    times = by_turns({name: lambda model=model: run(model) for name, model in models.items()}, rounds)
    assert None not in handle.calls, "it ran packed"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [f"torch {torch.__version__}, one thread", ""]
    for sizes, factor in (((4, 300, 256, 8), 1), ((2, 8, 32, 2), 20)):
        lines += ["{} rows of {}, {} wide, {} heads".format(*sizes), ""]
        lines += [
            "| call | training: stock | patched | ratio | evaluation: stock | patched | ratio |",
            "|---" * 7 + "|",
        ]
        for name, (model, call) in calls(*sizes).items():
            cells = []
            for training in (True, False):
                times = compare(model, call, training, factor * arguments.rounds)
                stock, patched = times["stock"], times["patched"]
                cells += [f"{stock:.3f}", f"{patched:.3f}", f"{patched / stock:.2f}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    show(lines[:-1], arguments.save)


if __name__ == "__main__":
    main()
