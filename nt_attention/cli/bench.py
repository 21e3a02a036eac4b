"""``python -m nt_attention bench``: compare and time every backend, padded SDPA and NestedTensor SDPA.

Prints a Markdown table for each workload. The exit status is 1 if results are wrong or if a call fails.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ..kernels.call import OPTIONS
from ..kernels.measurements import versions
from ..kernels.registry import backends
from ..kernels.select import SlowBackendWarning, available_backends
from . import timing
from .environment import device_name, devices, positive
from .implementations import CaseInputs, Implementation, NotSupportedError, attention, implementations
from .plot import picture_file, save_bars
from .workloads import DISTRIBUTIONS, TOKENS, WORKLOADS, Workload, draw_lengths

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
DEFAULT = {"cuda": ["A", "B", "C", "D", "E"], "cpu": ["small", "small causal"]}
DEFAULT_TOKENS = {"cuda": TOKENS, "cpu": 4096}
NAMES = ("is_causal", "window_size", "softcap", "deterministic", "batch_invariant")  # of options
FIRST_TOKENS = 2000  # of the sequences that are compared with float64
LEGEND = "ms: medians of device time on a GPU, of wall-clock time on a CPU; error: relative L2 error against float64."
BYTES_PER_SCORE = 128  # in float64, with all copies that autograd keeps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = f"{', '.join(map(repr, WORKLOADS))}; default: A to E, on a CPU 'small' and 'small causal'"
    add("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help=about)
    kinds = ", ".join(f"{kind}:N" for kind in DISTRIBUTIONS)
    add("--lengths", help=f"your own workload: lengths such as 5,0,900,17, or one of {kinds} with the largest length N")
    add("--tokens", type=positive, help="the sum of lengths that are drawn; default: 32768, on a CPU 4096")
    add("--heads", type=positive, help="default: of the workload; 12 with --lengths")
    add("--kv-heads", type=positive, help="default: --heads, or of the workload")
    add("--head-dim", type=positive, help="default: of the workload; 64 with --lengths")
    add("--options", nargs="+", default=[], metavar="NAME=VALUE", help=f"of varlen_attention: {', '.join(NAMES)}")
    add("--backends", nargs="+", choices=["auto", *backends()], help="default: auto and all available but reference")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--device", choices=devices(), default=devices()[0])
    add("--forward-only", action="store_true", help="without gradients")
    add("--plot", type=picture_file, metavar="FILE", help="also draw the times: a .png, .svg or .pdf")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    try:
        workloads = requested_workloads(options, device)
    except ValueError as error:
        options.error(str(error))
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    width = None if sys.stdout.isatty() else 10_000  # lines in a file are not wrapped
    out = Console(width=width, markup=False, highlight=False, emoji=False)
    if device.index is not None:
        torch.cuda.set_device(device)
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    out.print(f"`{options.command_line}`\n\n{device_name(device)}; {packages}; {dtype}. {LEGEND}")
    is_bad, panels = False, dict[str, dict[str, float]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowBackendWarning)  # the table shows which backend "auto" selects
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        for workload in workloads:
            results = run_workload(workload, options, device, dtype)
            out.print(f"\n{workload}", table(results, device.type == "cuda"))
            notes = dict.fromkeys(f"- {name}: {x.note}" for name, found in results.items() for x in found if x.note)
            out.print(*notes, sep="\n")
            is_bad |= any(each.is_bad for measurements in results.values() for each in measurements)
            panels[f"ms; {workload}"] = {name: x[-1].ms for name, x in results.items() if x[-1].ms is not None}
    if options.plot:
        direction = "forward" if options.forward_only else "forward + backward"
        save_bars(options.plot, f"{direction}, {dtype}, {device_name(device)}", panels)
    return int(is_bad)


def requested_workloads(options: argparse.Namespace, device: torch.device) -> list[Workload]:
    """The workloads that the arguments describe. If they do not fit each other, a ValueError is raised."""
    if options.lengths is not None and options.workloads is not None:
        raise ValueError("--lengths describes a workload and --workloads names some: pass one of them.")
    if options.tokens is not None and ":" not in (options.lengths or ""):
        raise ValueError("--tokens is for lengths that are drawn: pass for example --lengths lognormal:2048 with it.")
    workloads = [WORKLOADS[name] for name in dict.fromkeys(options.workloads or DEFAULT[device.type])]
    if options.lengths is not None:
        lengths = draw_lengths(options.lengths, options.tokens or DEFAULT_TOKENS[device.type])
        if not sum(lengths):
            raise ValueError(f"--lengths {options.lengths} has no tokens: pass a length ≥ 1, or more --tokens.")
        workloads = [Workload("given", options.lengths, lengths, 12, 12, 64)]
    return [with_options(workload, options) for workload in workloads]


def with_options(workload: Workload, options: argparse.Namespace) -> Workload:
    heads, head_dim = options.heads or workload.heads, options.head_dim or workload.head_dim
    kv_heads = options.kv_heads or options.heads or workload.kv_heads
    if heads % kv_heads:
        raise ValueError(f"--kv-heads must divide the {heads} heads of {workload.name}, got {kv_heads}.")
    about, given = ", ".join([workload.about, *options.options]), dict(map(parse_option, options.options))
    return Workload(workload.name, about, workload.lengths, heads, kv_heads, head_dim, workload.options | given)


def parse_option(text: str) -> tuple[str, Any]:
    """An option such as "softcap=30" or "window_size=128,0" → its name and value."""
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise ValueError(f"--options must be of {', '.join(NAMES)}, such as window_size=128,0, got {text!r}.")
    with contextlib.suppress(SyntaxError, ValueError):  # then the text itself is not valid either
        value = ast.literal_eval(value)
    return name, OPTIONS[name].parse(name, value)


@dataclass
class Measurement:
    """A forward, or a forward and backward."""

    ms: float | None = None  # None if it did not run
    host_us: float | None = None  # on a GPU
    errors: dict[str, float] = field(default_factory=dict)  # relative L2 errors of out, dq, dk and dv
    chosen: str | None = None  # the backend that ran
    note: str = ""  # why it did not run, or which results are wrong
    is_bad: bool = False  # whether results are wrong, or the call failed


def run_workload(
    workload: Workload, options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, list[Measurement]]:
    """Compare and time all implementations: the forward, then the forward and backward."""
    inputs = CaseInputs.random(workload, device, dtype)
    passes = (False,) if options.forward_only else (False, True)
    rows, expected = None, {}
    if sample := sample_of(inputs):
        rows, part = inputs.select(sample)
        expected = attention("reference", part.cast(torch.float64)).results(passes[-1])
    found = implementations(options.backends or ["auto", *available(device)])
    names = track(found, f"workload {workload.name}", console=Console(stderr=True), transient=True)
    return {name: [measure(found[name], inputs, rows, expected, backward) for backward in passes] for name in names}


def available(device: torch.device) -> list[str]:
    """The backends that can run on the device, without the slow reference."""
    found = [backends()[name] for name, reason in available_backends().items() if reason is None]
    return [each.name for each in found if each.device_type in (None, device.type) and not each.is_reference]


def measure(
    implementation: Implementation, inputs: CaseInputs, rows: Tensor | None, expected: dict[str, Tensor], backward: bool
) -> Measurement:
    """Compare some rows of an implementation's results with the expected ones, then time it."""
    try:
        call = implementation(inputs, backward)
        found = Measurement(chosen=call.chosen)
        if rows is not None:
            results = {name: x[rows] for name, x in call.results(backward).items()}
            found.errors = relative_errors(results, expected)
            wrong = [name for name, x in found.errors.items() if not x <= TOLERANCE[inputs.grad.dtype]]  # NaN is wrong
            found.is_bad, found.note = bool(wrong), f"wrong: {', '.join(wrong)}" if wrong else ""
        function = call.both if backward else call.forward
        found.ms = timing.device_ms(function) if inputs.grad.is_cuda else timing.wall_ms(function)
        found.host_us = timing.host_us(function) if inputs.grad.is_cuda else None
        return found
    except NotSupportedError as error:
        return Measurement(note=str(error))
    except torch.OutOfMemoryError:
        return Measurement(note="out of memory")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Measurement(note=f"failed: {(str(error).strip() or repr(error)).splitlines()[0]}", is_bad=True)


def sample_of(inputs: CaseInputs) -> list[int]:
    """The first few sequences and the longest one that fits into memory in float64."""
    lengths, ends = inputs.layout.host_offsets.diff().tolist(), inputs.layout.host_offsets[1:].tolist()
    scores = (torch.cuda.mem_get_info()[0] if inputs.grad.is_cuda else 2**31) // BYTES_PER_SCORE
    fitting = [b for b, n in enumerate(lengths) if 0 < inputs.qkv[0].shape[1] * n * n <= scores]
    return sorted({*sorted(fitting, key=lengths.__getitem__)[-1:], *(b for b in fitting if ends[b] <= FIRST_TOKENS)})


def relative_errors(results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The L2 error of each result, relative to its norm, or to the magnitude of out if that is larger.

    The gradients of query and key are as large as out, but 0 if a query sees one key, where rounding errors remain.
    """
    magnitude = expected["out"].square().mean().sqrt()
    norms = {name: torch.maximum(x.norm(), magnitude * x.numel() ** 0.5) for name, x in expected.items()}
    return {name: float((x - expected[name]).norm() / norms[name]) for name, x in results.items()}


def table(results: dict[str, list[Measurement]], is_cuda: bool) -> Table:
    """A row for each implementation; "auto" with the backend that it selected."""
    passes = ("forward, ms", "fwd + bwd, ms")[: len(next(iter(results.values())))]
    columns = [column for each in passes for column in (each, *(["host, µs"] if is_cuda else []), "× auto")]
    found = Table("implementation", *columns, "error", box=box.MARKDOWN)
    for name, measurements in results.items():
        chosen = dict.fromkeys(each.chosen for each in measurements if each.chosen) if name == "auto" else {}
        cells = [f"{name} ({', '.join(chosen)})" if chosen else name]
        for each, auto in zip(measurements, results.get("auto", [Measurement()] * 2), strict=False):
            cells.append("–" if each.ms is None else f"{each.ms:.{3 if each.ms < 10 else 1}f}")
            if is_cuda:
                cells.append("" if each.host_us is None else f"{each.host_us:.0f}")
            cells.append(f"{each.ms / auto.ms:.2f}" if each.ms and auto.ms else "")
        errors = torch.tensor([error for each in measurements for error in each.errors.values()])
        mark = " ✗" if any(each.is_bad for each in measurements) else ""
        found.add_row(*cells, f"{errors.max():.1e}{mark}" if len(errors) else mark.strip())
    return found
