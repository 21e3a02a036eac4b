"""Attention of sequences that share prefixes, on a GPU in bf16: prefixes repeated, keys gathered, and a `TreeLayout`.

    python benchmarks/tree_attention.py [--rounds 30] [--backends flash_attn_4,torch_flash,token_tiled] [--save FILE]

Ways, by turns in one process:

    repeat   the prefixes are repeated: sequences of their own, with the backend that is fastest
    gather   the keys of each path are copied with an index, which is how trainers do it, on the first backend
    tree     `varlen_attention` with a `TreeLayout`, on each backend and on the one that is chosen

Times are those of the device in ms, without waits for the host: forward / forward and backward. The bound is that of
all visible pairs at 600 TFLOP/s in the forward and 500 in both. Memory, in brackets, is the peak of both in MB, without
the inputs. Lengths are lognormal, at most those named; roots have exactly those.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import show
from torch import Tensor

import nt_attention as nta
from nt_attention.cli.environment import device_name
from nt_attention.functional import plan
from nt_attention.kernels import tree as ways
from nt_attention.kernels.call_size import CallSize
from nt_attention.kernels.select import BACKENDS

# name → the most tokens of a segment and the number of its continuations at each depth, roots, heads, key heads, D
SHAPES: dict[str, tuple[list[tuple[int, int]], int, int, int, int]] = {
    "1024 + 1024, 8 × 4": ([(1024, 8), (1024, 0)], 4, 32, 8, 128),
    "4096 + 512, 8 × 2": ([(4096, 8), (512, 0)], 2, 32, 8, 128),
    "2048 + 128, 16 × 4": ([(2048, 16), (128, 0)], 4, 32, 8, 128),
    "512 + 256, 2 × 32": ([(512, 2), (256, 0)], 32, 32, 8, 128),
    "8192 + 256, 16 × 1": ([(8192, 16), (256, 0)], 1, 16, 8, 128),
    "700 + 60, 64 × 1": ([(700, 64), (60, 0)], 1, 32, 8, 128),
    "pairs 1024 + 256, 2 × 16": ([(1024, 2), (256, 0)], 16, 32, 8, 128),
    "evaluation 1500 + 16, 64 × 1": ([(1500, 64), (16, 0)], 1, 32, 8, 128),
    "few-shot 1200 + 80 + 8, 4 × 16 × 1": ([(1200, 16), (80, 4), (8, 0)], 1, 32, 8, 128),
    "system 2048 + 512 + 256, 8 × 8 × 1": ([(2048, 8), (512, 8), (256, 0)], 1, 32, 8, 128),
    "D 64: 2048 + 256, 8 × 4": ([(2048, 8), (256, 0)], 4, 16, 16, 64),
    "agents 1024 + 512 + 512 + 256": ([(1024, 4), (512, 2), (512, 2), (256, 0)], 2, 32, 4, 128),
}

SLEEP = 8_000_000  # cycles, about 4 ms: longer than the host takes for a call


def lognormal(most: int) -> int:
    return max(4, min(most, int(torch.empty(()).log_normal_(0.0, 0.6) * most * 0.7)))


def tree_of(levels: list[tuple[int, int]], roots: int) -> nta.TreeLayout:
    lengths, parents = [], []

    def add(depth: int, parent: int) -> None:
        most, children = levels[depth]
        lengths.append(lognormal(most) if depth else most)
        parents.append(parent)
        own = len(lengths) - 1
        for _ in range(children):
            add(depth + 1, own)

    for _ in range(roots):
        add(0, -1)
    return nta.TreeLayout(lengths, parents, device="cuda")


def times_of(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The device time of each call in ms: medians, by turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(rounds + 3):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP)  # the host is ahead when the device begins
            begin.record()
            call()
            end.record()
            end.synchronize()
            if at >= 3:
                found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in found.items()}


def peak_of(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def forced(way: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` with this way of `kernels/tree.py`."""

    def with_way() -> Any:
        before, ways.way_of = ways.way_of, lambda *_: way
        try:
            return run()
        finally:
            ways.way_of = before

    return with_way


def measure(name: str, backends: list[str], rounds: int, every_way: bool) -> tuple[str, dict[str, tuple[float, float]]]:
    levels, roots, heads, groups, dim = SHAPES[name]
    tree = tree_of(levels, roots)
    inputs = [
        torch.randn(tree.total, h, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads, groups, groups)
    ]
    q, k, v = inputs
    repeated = [tree.expand(x.detach()).requires_grad_() for x in inputs]
    rows = tree.keys.index
    attend = nta.varlen_attention

    def gather() -> Tensor:
        return attend(q, k[rows], v[rows], tree.segments, tree.paths, is_causal=True, backend=backends[0])

    # run, the tensors whose gradients it computes, and the way that is forced
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor], str]] = {
        "repeat": (lambda: attend(*repeated, tree.sequences, is_causal=True), repeated, ""),
        f"gather {backends[0]}": (gather, inputs, ""),
    }
    for backend in backends:
        run = functools.partial(attend, q, k, v, tree, is_causal=True, backend=backend)
        spec = plan(q, k, v, tree, is_causal=True, backend=backend).call.spec
        expected = ways.expected_us(BACKENDS[backend], spec, tree)
        calls[f"tree {backend}"] = (run, inputs, "")
        for way in expected if every_way else ():
            calls[f"{way} {backend}"] = (run, inputs, way)
            print(f"  expected: {way} {backend} {expected[way] / 1e3:.3f} ms", flush=True)
    calls["tree auto"] = (functools.partial(attend, q, k, v, tree, is_causal=True), inputs, "")
    forwards, both, peaks = {}, {}, {}
    for name_of_way, (run, leaves, way) in calls.items():
        grad = torch.randn(leaves[0].shape[0], heads, dim, device="cuda", dtype=torch.bfloat16)

        def step(run: Any = run, leaves: Any = leaves, grad: Any = grad) -> Any:
            return torch.autograd.grad(run(), leaves, grad)

        both[name_of_way] = forced(way, step) if way else step
        peaks[name_of_way] = peak_of(both[name_of_way])
        forwards[name_of_way] = torch.no_grad()(forced(way, run) if way else run)
    forward, both = times_of(forwards, rounds), times_of(both, rounds)
    spec_pairs = CallSize.of(plan(q, k, v, tree, is_causal=True).call).pairs
    flops = 4 * spec_pairs * heads * dim
    bound = flops / 600e9, 3.5 * flops / 500e9
    cells = [name, f"{tree.total} of {tree.sequences.total}", f"{bound[0]:.2f} / {bound[1]:.2f}"]
    cells += [f"{forward[way]:.3f} / {both[way]:.3f} ({peaks[way]:.0f})" for way in calls]
    return " | ".join(cells), {way: (forward[way], both[way]) for way in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backends", default="flash_attn_4,torch_flash,token_tiled")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--every-way", action="store_true", help="also each way of every backend, to fit its cost")
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    backends = [name for name in options.backends.split(",") if nta.available_backends()[name] is None]
    lines, ratios = [device_name(torch.device("cuda")) + f", torch {torch.__version__}, bf16", ""], []
    for name in list(SHAPES)[: options.shapes]:
        line, times = measure(name, backends, options.rounds, options.every_way)
        if not ratios:
            lines.append(f"| shape | rows | bound | {' | '.join(times)} |")
            lines.append("|---" * (len(times) + 3) + "|")
        lines.append(f"| {line} |")
        base = times[f"gather {backends[0]}"]
        ratios.append({way: tuple(a / b for a, b in zip(base, each, strict=True)) for way, each in times.items()})
        print(lines[-1], flush=True)
    lines += ["", f"Speed relative to gather with {backends[0]}: geometric mean and least, forward; both.", ""]
    for way in ratios[0]:
        each = [[one[way][at] for one in ratios] for at in (0, 1)]
        mean = [math.exp(statistics.fmean(map(math.log, x))) for x in each]
        lines.append(f"- {way}: {mean[0]:.2f} ({min(each[0]):.2f}); {mean[1]:.2f} ({min(each[1]):.2f})")
    show(lines, options.save)


if __name__ == "__main__":
    main()
