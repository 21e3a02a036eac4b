"""An encoder layer on NestedTensors on this CPU, compiled and eager.

    python benchmarks/compiled_layer_cpu.py [--width 256] [--rounds 15] [--save FILE]

The layer is nn.TransformerEncoderLayer with VarlenMultiheadAttention as its attention: 8 heads, feed-forward 4 × width,
no dropout, float32. The batch has 4096 tokens in sequences of lognormal lengths up to 512. The compiled layer is
torch.compile(fullgraph=True). Compiled and eager calls alternate. Times are medians over rounds.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
from by_turns import by_turns, show
from torch import nn
from workloads import draw_lengths

import nt_attention as nta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    layout = nta.SequenceLayout.from_lengths(draw_lengths("lognormal:512", 4096, seed=1))
    layer = nn.TransformerEncoderLayer(options.width, 8, 4 * options.width, dropout=0.0, batch_first=True)
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    runs = {"eager": layer, "compiled": torch.compile(layer, fullgraph=True)}
    x, grad = (layout.to_nested(torch.randn(layout.total, options.width)) for _ in range(2))
    x.requires_grad_()
    inputs = [x, *layer.parameters()]

    def call(run: nn.Module, what: str) -> None:
        with torch.set_grad_enabled(what == "training"):
            out = run(x)
            if what == "training":
                torch.autograd.grad(out, inputs, grad)

    lines = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, width {options.width}, {layout.batch_size} "
        f"sequences, {layout.total} tokens; ms of wall-clock time",
        "",
        "| | compiled | eager | ratio |",
        "|---|---|---|---|",
    ]
    for what in ("training", "eval"):
        layer.train(what == "training")
        times = by_turns({name: functools.partial(call, run, what) for name, run in runs.items()}, options.rounds)
        compiled, eager = times["compiled"], times["eager"]
        lines.append(f"| {what} | {compiled:.2f} | {eager:.2f} | {eager / compiled:.2f} |")
    show(lines, options.save)


if __name__ == "__main__":
    main()
