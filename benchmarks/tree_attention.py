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
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from by_turns import show
from torch import Tensor

import nt_attention as nta
from nt_attention.cli.environment import device_name
from nt_attention.functional import plan
from nt_attention.kernels import tree as ways
from nt_attention.kernels.call_size import CallSize
from nt_attention.kernels.registry import BACKENDS

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

# More shapes for the fit of costs.
MORE = {
    "D 64: 1024 + 512, 4 × 8": ([(1024, 4), (512, 0)], 8, 32, 8, 64),
    "D 64: 512 + 256, 2 × 32": ([(512, 2), (256, 0)], 32, 16, 4, 64),
    "D 64: 4096 + 128, 16 × 1": ([(4096, 16), (128, 0)], 1, 16, 8, 64),
    "D 64: 700 + 60, 64 × 1": ([(700, 64), (60, 0)], 1, 12, 12, 64),
    "D 64: 1024 + 256 + 128, 4 × 4 × 2": ([(1024, 4), (256, 4), (128, 0)], 2, 32, 8, 64),
    "nothing shared, 64 × 512": ([(512, 0)], 64, 32, 8, 128),
    "300 + 40, 8 × 16": ([(300, 8), (40, 0)], 16, 32, 8, 128),
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
    times: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(rounds + 3):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP)  # the host is ahead when the device begins
            begin.record()
            call()
            end.record()
            end.synchronize()
            if at >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}


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


class Measured(NamedTuple):
    """A line of the table, the times (forward, both) of each way in ms, and the sizes of each way of a backend."""

    line: str
    times: dict[str, tuple[float, float]]
    sizes: dict[tuple[str, str], list[float]]
    head_dim: int


def measure(name: str, backends: list[str], rounds: int, every_way: bool) -> Measured:
    levels, roots, heads, groups, dim = (SHAPES | MORE)[name]
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
    sizes: dict[tuple[str, str], list[float]] = {}
    for backend in backends:
        run = functools.partial(attend, q, k, v, tree, is_causal=True, backend=backend)
        spec = plan(q, k, v, tree, is_causal=True, backend=backend).spec
        expected = ways.expected_us(BACKENDS[backend], spec, tree)
        calls[f"tree {backend}"] = (run, inputs, "")
        for way in expected if every_way else ():
            sizes[backend, way] = ways.sizes(spec, tree, way)
            calls[f"{way} {backend}"] = (run, inputs, way)
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
    spec_pairs = CallSize.of(plan(q, k, v, tree, is_causal=True)).pairs
    flops = 4 * spec_pairs * heads * dim
    bound = flops / 600e9, 3.5 * flops / 500e9
    cells = [name, f"{tree.total} of {tree.sequences.total}", f"{bound[0]:.2f} / {bound[1]:.2f}"]
    cells += [f"{forward[way]:.3f} / {both[way]:.3f} ({peaks[way]:.0f})" for way in calls]
    return Measured(" | ".join(cells), {way: (forward[way], both[way]) for way in calls}, sizes, dim)


def fit(rows: list[tuple[list[float], float]]) -> list[float]:
    """Costs ≥ 0 of each size, with the least relative squared error: those that would be negative are left out."""
    sizes, times = np.array([x for x, _ in rows]), 1e3 * np.array([ms for _, ms in rows])
    used = [at for at in range(sizes.shape[1]) if sizes[:, at].any()]
    while True:
        costs = np.linalg.lstsq(sizes[:, used] / times[:, None], np.ones(len(times)), rcond=None)[0]
        if (costs >= 0).all():
            break
        del used[int(costs.argmin())]
    by_size = dict(zip(used, costs.tolist(), strict=True))
    return [float(f"{by_size.get(at, 0.0):.4g}") for at in range(sizes.shape[1])]


def save_costs(measured: list[Measured], file: Path) -> None:
    """Fit the costs of each way and write those of `kernels/measured/trees_sm90.json`."""
    costs: dict[str, Any] = {}
    for backend, way in measured[0].sizes:
        for at, direction in enumerate(("forward", "both")):
            for dim in sorted({one.head_dim for one in measured}):
                some = [one for one in measured if one.head_dim == dim]
                rows = [(one.sizes[backend, way], one.times[f"{way} {backend}"][at]) for one in some]
                costs.setdefault(backend, {}).setdefault(direction, {}).setdefault(way, {})[dim] = fit(rows)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    file.write_text(json.dumps({**about, "costs": costs}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backends", default="flash_attn_4,torch_flash,token_tiled")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--every-way", action="store_true", help="also each way of every backend, to fit its cost")
    parser.add_argument("--save-costs", type=Path, metavar="FILE", help="with --every-way: the fitted costs")
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    backends = [name for name in options.backends.split(",") if nta.available_backends()[name] is None]
    lines, measured = [device_name(torch.device("cuda")) + f", torch {torch.__version__}, bf16", ""], []
    for name in [*list(SHAPES)[: options.shapes], *(MORE if options.save_costs else ())]:
        measured.append(measure(name, backends, options.rounds, options.every_way))
        if len(measured) == 1:
            lines.append(f"| shape | rows | bound | {' | '.join(measured[0].times)} |")
            lines.append("|---" * (len(measured[0].times) + 3) + "|")
        lines.append(f"| {measured[-1].line} |")
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", f"Speed relative to gather with {backends[0]}: geometric mean and least, forward; both.", ""]
    base = f"gather {backends[0]}"
    for way in measured[0].times:
        each = [[one.times[base][at] / one.times[way][at] for one in measured] for at in (0, 1)]
        mean = [math.exp(statistics.fmean(map(math.log, x))) for x in each]
        lines.append(f"- {way}: {mean[0]:.2f} ({min(each[0]):.2f}); {mean[1]:.2f} ({min(each[1]):.2f})")
    show(lines, options.save)
    if options.save_costs is not None:
        save_costs(measured, options.save_costs)


if __name__ == "__main__":
    main()
