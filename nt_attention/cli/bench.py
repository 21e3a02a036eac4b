"""``python -m nt_attention bench``: the times of the backends and of padded SDPA on your lengths, in a table."""

from __future__ import annotations

import argparse
import ast
import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ..kernels.call import OPTIONS
from ..kernels.measurements import versions
from ..kernels.registry import backends
from ..kernels.select import SlowBackendWarning
from . import timing
from .calls import DISTRIBUTIONS, CaseInputs, NotSupportedError, Workload, attention, chosen, draw_lengths, padded
from .environment import backends_of, device_name, devices, positive

NAMES = ("is_causal", "window_size", "softcap", "deterministic", "batch_invariant")  # of options
SDPA = {"padded SDPA": padded}  # benchmarks/backends.py adds another
LEGEND = "ms: medians of device time on a GPU, of wall-clock time on a CPU."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = ", ".join(f"{kind}:N" for kind in DISTRIBUTIONS)
    about = f"lengths such as 5,0,900,17, or one of {kinds} with the largest length N; default: lognormal:2048"
    add("--lengths", default="lognormal:2048", help=about)
    add("--heads", type=positive, default=16, help="default: 16")
    add("--kv-heads", type=positive, help="default: --heads")
    add("--head-dim", type=positive, default=64, help="default: 64")
    add("--options", nargs="+", default=[], metavar="NAME=VALUE", help=f"of varlen_attention: {', '.join(NAMES)}")
    add_measure_arguments(parser)


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that do not describe a workload."""
    add = parser.add_argument
    add("--backends", nargs="+", choices=["auto", *backends()], help="default: auto and all available but reference")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--device", choices=devices(), default=devices()[0])
    add("--forward-only", action="store_true", help="without gradients")


def main(options: argparse.Namespace) -> int:
    """Print the table. The exit status is 1 if a call fails."""
    try:
        lengths = draw_lengths(options.lengths, 4096 if options.device == "cpu" else 32768)
        if not sum(lengths):
            raise ValueError(f"--lengths {options.lengths} has no tokens: pass a length ≥ 1, or a smaller N.")
        kv_heads = options.kv_heads or options.heads
        if options.heads % kv_heads:
            raise ValueError(f"--kv-heads must divide the {options.heads} heads, got {kv_heads}.")
        given, about = dict(map(parse_option, options.options)), ", ".join([options.lengths, *options.options])
    except ValueError as error:
        options.error(str(error))
    workload = Workload("given", about, lengths, options.heads, kv_heads, options.head_dim, given)
    return bench([workload], options, options.command_line)


def parse_option(text: str) -> tuple[str, Any]:
    """An option such as "softcap=30" or "window_size=128,0" → its name and value."""
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise ValueError(f"--options must be of {', '.join(NAMES)}, such as window_size=128,0, got {text!r}.")
    with contextlib.suppress(SyntaxError, ValueError):  # then the text itself is not valid either
        value = ast.literal_eval(value)
    return name, OPTIONS[name].parse(name, value)


def bench(workloads: Iterable[Workload], options: argparse.Namespace, command: str) -> int:
    """Print a table for each workload. The status is 1 if a call fails."""
    device, notes = torch.device(options.device), list[str]()
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if device.index is not None:
        torch.cuda.set_device(device)
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"`{command}`\n\n{device_name(device)}; {packages}; {dtype}. {LEGEND}")
    able = [name for name in backends_of(device) if name != "reference"]
    names = sorted(options.backends or ["auto", *able], key=lambda name: name != "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowBackendWarning)  # the table shows which backend "auto" selects
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        for workload in workloads:
            print(f"\n{workload}\n")
            inputs = CaseInputs.random(workload, device, dtype)
            of_workload = print_table([*names, *SDPA], inputs, (False,) if options.forward_only else (False, True))
            print("", *of_workload, sep="\n")
            notes += of_workload
    return int(any(": failed: " in note for note in notes))


def print_table(names: list[str], inputs: CaseInputs, passes: tuple[bool, ...]) -> list[str]:
    """Print each row when it was measured, and return notes about what did not run."""

    def show(*cells: str) -> None:
        print(f"| {cells[0]:<24} | {' | '.join(f'{cell:>13}' for cell in cells[1:])} |", flush=True)

    titles = ("forward, ms", "× auto", "fwd + bwd, ms", "× auto")[: 2 * len(passes)]
    show("implementation", *titles)
    show("---", *["---:"] * len(titles))
    of_auto, notes = dict[bool, float](), list[str]()
    for name in names:
        cells, ran = [], [name]
        for backward in passes:
            backend, ms, note = measure(name, inputs, backward)
            notes += [f"- {name}: {note}"] if note else []
            if name == "auto" and ms:
                of_auto[backward] = ms
                ran.append(f"({backend})")
            cells.append(f"{ms:.{3 if ms < 10 else 1}f}" if ms else "–")
            cells.append(f"{ms / of_auto[backward]:.2f}" if ms and backward in of_auto else "")
        show(" ".join(dict.fromkeys(ran)), *cells)
    return list(dict.fromkeys(notes))


def measure(name: str, inputs: CaseInputs, backward: bool) -> tuple[str, float | None, str]:
    """The backend that ran and its time in ms, or no time and why it did not run."""
    backend = name
    try:
        if name not in SDPA:
            backend = chosen(name, inputs, backward)
        call = SDPA[name](inputs) if name in SDPA else attention(name, inputs)
        function = call.both if backward else call.forward
        return backend, timing.device_ms(function) if inputs.grad.is_cuda else timing.wall_ms(function), ""
    except NotSupportedError as error:
        return backend, None, str(error)
    except torch.OutOfMemoryError:
        return backend, None, "out of memory"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return backend, None, f"failed: {(str(error).strip() or repr(error)).splitlines()[0]}"
