"""Compare the host time per call of this tree with that of another one, such as before a change, in one process.

    python benchmarks/compare_host_time.py OTHER_TREE [--device cpu|cuda] [--bursts 200] [--save FILE]

OTHER_TREE is the root of another checkout, such as a ``git worktree`` of an older commit. Its package is imported under
another name. Short bursts of calls of both trees alternate, so that noise affects both alike. On a CPU the time is that
of the calling thread, kernels included. On a GPU it is the host's time of a burst without a sync; the device time of
``"auto"`` on workloads A to E follows. Times are medians. "new / old" is the median of the ratios of neighboring
bursts, and the quartiles are those of the ratios.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from by_turns import show
from torch import Tensor
from workloads import WORKLOADS

import nt_attention
from nt_attention.cli.environment import device_name
from nt_attention.cli.timing import device_ms

LENGTHS, HEADS, HEAD_DIM = [30, 7, 64, 27], 4, 64
CALLS, WARMUP = 10, 30
THIS_TREE = Path(__file__).resolve().parent.parent
Functions = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_TREE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bursts", type=int, default=200, help=f"of {CALLS} calls each")
    parser.add_argument("--host-time-only", action="store_true", help="without the device time of the workloads")
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not (options.other / "nt_attention").is_dir():
        parser.error(f"{options.other} holds no nt_attention: pass the root of a checkout.")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trees = import_other(options.other, Path(folder)), nt_attention
        lines = list(report(trees, options))
    show(lines, options.save)


def import_other(tree: Path, folder: Path) -> ModuleType:
    """The package of another tree, with operators of its own, under the name ``nt_attention_other``."""
    package = folder / "nt_attention_other"
    shutil.copytree(tree / "nt_attention", package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in package.rglob("*.py"):
        file.write_text(file.read_text().replace("nt_attention", "nt_attention_other"))
    sys.path.insert(0, str(folder))
    return importlib.import_module(package.name)


def report(trees: tuple[ModuleType, ModuleType], options: argparse.Namespace) -> Iterator[str]:
    machine = device_name(torch.device(options.device))
    versions = f"old {commit(options.other)}, new {commit(THIS_TREE)}"
    yield f"{machine}, torch {torch.__version__}, Python {platform.python_version()}; {versions}."
    yield from ("", "| call | old | new | new / old | quartiles |", "|---|---|---|---|---|")
    for calls in (attention_calls, module_calls):
        old, new = (calls(tree, options.device) for tree in trees)
        for name in new:
            yield row(name, *alternate(old[name], new[name], options.device, options.bursts), "µs")
    if options.device == "cuda" and not options.host_time_only:
        old, new = map(workload_calls, trees)
        for name in new:
            pairs = [(device_ms(old[name]), device_ms(new[name])) for _ in range(5)]
            yield row(name, *map(list, zip(*pairs, strict=True)), "ms")


def alternate(
    old: Callable[[], object], new: Callable[[], object], device: str, bursts: int
) -> tuple[list[float], list[float]]:
    """The host time of a call in µs, for each burst of both trees."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.thread_time
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARMUP):
        old(), new()
    for i in range(bursts):
        for function, out in sorted(zip((old, new), times, strict=True), key=lambda x: x[0] is new, reverse=i % 2 == 0):
            finish()
            began = clock()
            for _ in range(CALLS):
                function()
            out.append(1e6 * (clock() - began) / CALLS)
    finish()
    return times


def row(name: str, old: list[float], new: list[float], unit: str) -> str:
    digits = 3 if unit == "ms" else 0
    cells = [f"{statistics.median(x):.{digits}f} {unit}" for x in (old, new)]
    low, middle, high = statistics.quantiles([b / a for a, b in zip(old, new, strict=True)], n=4)
    return f"| {name} | {' | '.join(cells)} | {middle:.3f} | {low:.2f} to {high:.2f} |"


def directions(name: str, function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Functions:
    """A function's forward without gradients and with them, and with its backward."""
    plain, leaves = [x.detach() for x in inputs], [x.detach().requires_grad_() for x in inputs]
    return {
        f"{name}, forward, no gradients": functools.partial(function, *plain),
        f"{name}, forward": functools.partial(function, *leaves),
        f"{name}, forward + backward": lambda: torch.autograd.grad(function(*leaves), leaves, grad),
    }


def attention_calls(nta: ModuleType, device: str) -> Functions:
    layout, dtype = nta.SequenceLayout.from_lengths(LENGTHS, device=device), host_dtype(device)
    packed = [torch.randn(layout.total, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(4)]
    nested = [layout.to_nested(x) for x in packed]
    attend_packed = functools.partial(nta.varlen_attention, layout=layout)
    causal = functools.partial(attend_packed, is_causal=True)
    return {
        **directions("varlen_attention, packed", attend_packed, packed[:3], packed[3]),
        **directions("varlen_attention, packed, causal", causal, packed[:3], packed[3]),
        **directions("varlen_attention, NestedTensor", nta.varlen_attention, nested[:3], nested[3]),
    }


def module_calls(nta: ModuleType, device: str) -> Functions:
    layout, dtype = nta.SequenceLayout.from_lengths(LENGTHS, device=device), host_dtype(device)
    module = nta.VarlenMultiheadAttention(HEADS * HEAD_DIM, HEADS, device=device, dtype=dtype)
    packed = [torch.randn(layout.total, HEADS * HEAD_DIM, device=device, dtype=dtype) for _ in range(2)]
    nested = [layout.to_nested(x) for x in packed]
    parameters = list(module.parameters())

    def calls(name: str, x: Tensor, grad: Tensor, **arguments: Any) -> Functions:
        def forward() -> Tensor:
            return module(x, x, x, **arguments)[0]

        return {
            f"{name}, forward, no gradients": torch.no_grad()(forward),
            f"{name}, forward": forward,
            f"{name}, forward + backward": lambda: torch.autograd.grad(forward(), parameters, grad),
        }

    of_packed = calls("VarlenMultiheadAttention, packed", *packed, layout=layout)
    return of_packed | calls("VarlenMultiheadAttention, NestedTensor", *nested)


def workload_calls(nta: ModuleType) -> Functions:
    """Workloads A to E of ``python -m nt_attention bench``."""
    functions: Functions = {}
    for name in "ABCDE":
        workload = WORKLOADS[name]
        layout = nta.SequenceLayout.from_lengths(workload.lengths, device="cuda")
        heads = (workload.heads, workload.kv_heads, workload.kv_heads, workload.heads)
        *inputs, grad = (
            torch.randn(layout.total, number, workload.head_dim, device="cuda", dtype=torch.bfloat16)
            for number in heads
        )
        attend = functools.partial(nta.varlen_attention, layout=layout, **workload.options)
        functions |= directions(f"workload {name}, device time", attend, inputs, grad)
    return {name: function for name, function in functions.items() if not name.endswith("forward")}


def host_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "without git"


if __name__ == "__main__":
    main()
