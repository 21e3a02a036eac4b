"""What a layout that only knows bounds costs, against one that knows the lengths, on this GPU.

    python benchmarks/bounds.py [--backends NAME …] [--rounds N] [--save FILE]

Each workload runs with exact lengths, with bounds that are the exact size, and with bounds of twice the size, by turns.
Times are of the device alone, in ms: medians over the rounds. Plans are made once and reused, as by the layers of a
model. The last table has the time to make a plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

import torch
from by_turns import show
from workloads import WORKLOADS

from nt_attention.cli.calls import CaseInputs, attention
from nt_attention.cli.timing import device_ms
from nt_attention.functional import varlen_attention
from nt_attention.layouts.bounded import BoundedLayout

WAYS = {"exact": 0.0, "same size": 1.0, "twice": 2.0}  # → the bounds over the real size


def with_bounds(inputs: CaseInputs, bound: float) -> CaseInputs:
    """The inputs with a layout that only knows bounds, which are `bound` times the real sizes."""
    layout, rows = inputs.layout, round(bound * inputs.layout.total)
    bounded = BoundedLayout(layout.cu_seqlens.clone(), round(bound * layout.max_seqlen), rows)
    more = rows - layout.total
    query, key, value, grad = (torch.cat([x, x[:more]]) for x in (*inputs.qkv, inputs.grad))
    return dataclasses.replace(inputs, layout=bounded, key_layout=bounded, qkv=(query, key, value), grad=grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["token_tiled", "torch_flash"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: device time in ms, and over that of exact lengths",
        "",
        "| workload | backend | direction | exact | same size | twice |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("A", "D", "E"):
        exact = CaseInputs.random(WORKLOADS[name], torch.device("cuda"), torch.bfloat16)
        ways = {way: with_bounds(exact, bound) if bound else exact for way, bound in WAYS.items()}
        for backend in options.backends:
            calls = {way: attention(backend, inputs) for way, inputs in ways.items()}
            for direction in ("forward", "both"):
                runs: dict[str, list[float]] = {way: [] for way in calls}
                for _ in range(options.rounds):
                    for way, call in calls.items():
                        runs[way].append(device_ms(getattr(call, direction), repeats=3))
                ms = {way: statistics.median(times) for way, times in runs.items()}
                cells = " | ".join(f"{ms[way]:.3f} ({ms[way] / ms['exact']:.2f})" for way in list(ways)[1:])
                lines.append(f"| {name} | {backend} | {direction} | {ms['exact']:.3f} | {cells} |")
    lines += ["", "| workload | plan and first forward, µs | forward, µs |", "|---|---|---|"]
    for name in ("A", "D", "E"):
        inputs = with_bounds(CaseInputs.random(WORKLOADS[name], torch.device("cuda"), torch.bfloat16), 2.0)
        offsets, longest, total = inputs.layout.cu_seqlens, inputs.layout.max_seqlen, inputs.layout.total

        def first(
            inputs: CaseInputs = inputs, given: tuple[torch.Tensor, int, int] = (offsets, longest, total)
        ) -> None:
            varlen_attention(*inputs.qkv, BoundedLayout(*given), backend="token_tiled", **inputs.options)

        again = attention("token_tiled", inputs).forward
        us = [1e3 * statistics.median(device_ms(run) for _ in range(options.rounds)) for run in (first, again)]
        lines.append(f"| {name} | {us[0]:.0f} | {us[1]:.0f} |")
    show(lines, options.save)


if __name__ == "__main__":
    main()
