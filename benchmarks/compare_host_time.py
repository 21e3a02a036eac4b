"""Host time per call of this tree and of another one, before and after a change, in one run on one machine.

    python benchmarks/compare_host_time.py OTHER_TREE [--device cpu|cuda] [--rounds 7] [--host-time-only] [--save FILE]

OTHER_TREE is the root of another checkout, such as a ``git worktree`` of the commit to compare with. Fresh processes of
both trees alternate. Each measures every call on four short sequences, as the median over bursts: on a CPU the time of
the calling thread, the kernel's part included; on a GPU the host's time while the device keeps up. On a GPU the device
time of ``"auto"`` on batches A to E follows. A number is the median over rounds, and "new / old" the ratio of two of
them. On a busy machine the ratio of the fastest rounds is steadier. The last column has the lowest and the highest
ratio of a round, which show the noise.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import nt_attention as nta

LENGTHS, HEADS, HEAD_DIM = [17, 5, 11, 29], 4, 64
CALLS, BURSTS = 50, 15
THIS_TREE = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_TREE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--host-time-only", action="store_true", help="leave out the batches")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # measure OTHER_TREE alone, as JSON
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.other, options.device, options.host_time_only)))
        return
    trees = {"old": options.other.resolve(), "new": THIS_TREE}
    if not (trees["old"] / "nt_attention").is_dir():
        parser.error(f"{options.other} holds no nt_attention: pass the root of a checkout.")
    times: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for i in range(options.rounds):
        for name in sorted(trees, reverse=i % 2 == 0):
            print(f"round {i + 1} of {options.rounds}: {name}", file=sys.stderr)
            times[name].append(run_worker(trees[name], options.device, options.host_time_only))
    text = "\n".join([*header(trees, options.device), "", *table(times)]) + "\n"
    print(text, end="")
    if options.save:
        options.save.write_text(f"`python benchmarks/compare_host_time.py {' '.join(sys.argv[1:])}`\n\n{text}")


def run_worker(tree: Path, device: str, host_time_only: bool) -> dict[str, float]:
    """Measure a tree in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, str(tree), "--device", device, "--worker"]
    command += ["--host-time-only"] if host_time_only else []
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(tree: Path, device: str, host_time_only: bool) -> dict[str, float]:
    """µs of host time by call, then ms of device time by batch."""
    assert Path(nta.__file__).is_relative_to(tree.resolve()), f"{nta.__file__} is not of {tree}"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {}
    for name, functions in (*attention_calls(device), *module_calls(device)):
        for direction, function in functions.items():
            found[f"{name}, {direction}"] = host_us(function, device)
    if device == "cuda" and not host_time_only:
        for name, functions in batch_calls():
            for direction, function in functions.items():
                found[f"batch {name}, {direction}"] = commands_module("timing").device_ms(function)
    return found


def directions(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> dict[str, Callable[[], object]]:
    """A function's forward without gradients and with them, and with its backward."""
    plain, leaves = [x.detach() for x in inputs], [x.detach().requires_grad_() for x in inputs]
    return {
        "forward, no gradients": functools.partial(function, *plain),
        "forward": functools.partial(function, *leaves),
        "forward + backward": lambda: torch.autograd.grad(function(*leaves), leaves, grad),
    }


def attention_calls(device: str) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    layout, dtype = nta.SequenceLayout.from_lengths(LENGTHS, device=device), host_dtype(device)
    packed = [torch.randn(layout.total, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(4)]
    nested = [layout.to_nested(x) for x in packed]

    def attend_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nta.varlen_attention(query, key, value, layout)

    yield "varlen_attention, packed", directions(attend_packed, packed[:3], packed[3])
    yield "varlen_attention, NestedTensor", directions(nta.varlen_attention, nested[:3], nested[3])


def module_calls(device: str) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    layout, dtype = nta.SequenceLayout.from_lengths(LENGTHS, device=device), host_dtype(device)
    module = nta.VarlenMultiheadAttention(HEADS * HEAD_DIM, HEADS, device=device, dtype=dtype)
    packed = [torch.randn(layout.total, HEADS * HEAD_DIM, device=device, dtype=dtype) for _ in range(2)]
    nested = [layout.to_nested(x) for x in packed]
    parameters = list(module.parameters())

    def calls(x: Tensor, grad: Tensor, **arguments: Any) -> dict[str, Callable[[], object]]:
        def forward() -> Tensor:
            return module(x, x, x, **arguments)[0]

        return {
            "forward, no gradients": torch.no_grad()(forward),
            "forward": forward,
            "forward + backward": lambda: torch.autograd.grad(forward(), parameters, grad),
        }

    yield "VarlenMultiheadAttention, packed", calls(*packed, layout=layout)
    yield "VarlenMultiheadAttention, NestedTensor", calls(*nested)


def batch_calls() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Batches A to E of ``python -m nt_attention bench``."""
    workloads = commands_module("workloads", "batches")
    by_name = getattr(workloads, "WORKLOADS", None) or workloads.BATCHES
    for name in "ABCDE":
        batch = by_name[name]
        layout = nta.SequenceLayout.from_lengths(batch.lengths, device="cuda")
        heads = (batch.heads, batch.kv_heads, batch.kv_heads, batch.heads)
        *inputs, grad = (
            torch.randn(layout.total, number, batch.head_dim, device="cuda", dtype=torch.bfloat16) for number in heads
        )
        attend = functools.partial(nta.varlen_attention, layout=layout, is_causal=batch.is_causal)
        yield name, {key: function for key, function in directions(attend, inputs, grad).items() if key != "forward"}


def commands_module(*names: str) -> ModuleType:
    """A module of the command line by its name, or by an older one."""
    for package in ("cli", "commands"):
        for name in names:
            if (Path(nta.__file__).parent / package / f"{name}.py").exists():
                return importlib.import_module(f"nt_attention.{package}.{name}")
    raise ModuleNotFoundError(f"{nta.__file__} has no {' or '.join(names)} in cli or commands.")


def host_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def host_us(function: Callable[[], object], device: str) -> float:
    """The host's time for a call in µs: the median over bursts. On a GPU without a sync inside of a burst."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.thread_time
    for _ in range(CALLS):
        function()
    times = []
    for _ in range(BURSTS):
        finish()
        began = clock()
        for _ in range(CALLS):
            function()
        times.append((clock() - began) / CALLS)
    finish()
    return 1e6 * statistics.median(times)


def header(trees: dict[str, Path], device: str) -> list[str]:
    machine = torch.cuda.get_device_name() if device == "cuda" else commands_module("environment").cpu_name()
    versions = ", ".join(f"{name} {commit(tree)}" for name, tree in trees.items())
    return [f"{machine}, torch {torch.__version__}, Python {platform.python_version()}; {versions}."]


def commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "without git"


def table(times: dict[str, list[dict[str, float]]]) -> list[str]:
    lines = ["| call | old | new | new / old | of the fastest rounds | of a round |", "|---|---|---|---|---|---|"]
    for call in times["new"][0]:
        old, new = ([each[call] for each in times[name]] for name in ("old", "new"))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        unit = "ms" if call.startswith("batch") else "µs"
        cells = [f"{statistics.median(x):.{3 if unit == 'ms' else 0}f} {unit}" for x in (old, new)]
        cells += [f"{statistics.median(new) / statistics.median(old):.3f}", f"{min(new) / min(old):.3f}"]
        lines.append(f"| {call} | {' | '.join(cells)} | {min(ratios):.2f} to {max(ratios):.2f} |")
    return lines


if __name__ == "__main__":
    main()
