"""An encoder layer on NestedTensors on this CPU, compiled and not.

    python benchmarks/compiled_layer_cpu.py [--width 256] [--rounds 15] [--save FILE]

nn.TransformerEncoderLayer with VarlenMultiheadAttention inside, 8 heads, feed-forward 4 × width, no dropout, float32,
4096 tokens of lognormal lengths up to 512; torch.compile(fullgraph=True). The median over rounds by turns.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

import nt_attention as nta
from nt_attention.cli.lengths import Lengths
from nt_attention.cli.timing import once

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    layout = nta.SequenceLayout.from_lengths(Lengths(kind="lognormal", number=512).up_to(4096, seed=1))
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
        f"sequences, {layout.total} tokens; ms by the clock",
        "",
        "| | compiled | eager | ratio |",
        "|---|---|---|---|",
    ]
    for what in ("training", "eval"):
        layer.train(what == "training")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(options.rounds + 3):
            for name, run in runs.items():
                seconds = once(functools.partial(call, run, what), CPU)
                if i >= 3:
                    times[name].append(1e3 * seconds)
        compiled, eager = (statistics.median(times[name]) for name in ("compiled", "eager"))
        lines.append(f"| {what} | {compiled:.2f} | {eager:.2f} | {eager / compiled:.2f} |")
    print("\n".join(lines))
    if options.save:
        command = " ".join(["python benchmarks/compiled_layer_cpu.py", *sys.argv[1:]])
        options.save.write_text("\n".join([f"`{command}`", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
