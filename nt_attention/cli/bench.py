"""``python -m nt_attention bench``: every backend beside padded SDPA and NestedTensor SDPA, compared and timed.

Prints a Markdown table on stdout and progress on stderr. The exit status is 1 if the results of an implementation are
wrong, or if it fails where it should run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import sys
import warnings
from pathlib import Path

import torch

from ..kernels.select import SlowBackendWarning, available_backends
from . import plot
from .accuracy import expected_results
from .arguments import add_workload_arguments, requested_workloads
from .environment import device_name, versions
from .implementations import all_implementations
from .inputs import WorkloadTensors
from .measure import Result, host_us, measure
from .progress import Progress
from .table import Report
from .workloads import Workload

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PATIENCE = {"cpu": 2.0, "cuda": 0.2}  # seconds; a median on a GPU takes some twenty calls and more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    how.add_argument("--device", help="cpu, cuda or cuda:N; the GPU if there is one")
    how.add_argument(
        "--backends", nargs="+", metavar="NAME", help="auto or backends by name; auto and all that can run here"
    )
    how.add_argument("--deterministic", action="store_true", help="ask our backends for the same bits each time")
    how.add_argument("--batch-invariant", action="store_true", help="ask our backends for the same bits in any batch")
    how.add_argument("--forward-only", action="store_true", help="no gradients")
    how.add_argument(
        "--patience",
        type=float,
        metavar="S",
        help="a call of more than S seconds is timed once; 2, on a GPU 0.2",
    )
    where = parser.add_argument_group("results")
    where.add_argument("--save", type=Path, metavar="DIR", help="write table.md, table.json and picture.svg there")
    where.add_argument("--picture", type=Path, metavar="FILE", help="draw the results to a .svg, .png or .pdf file")


def main(options: argparse.Namespace) -> int:
    try:
        device = _device(options.device)
        workloads = requested_workloads(options, device)
        backends = _backends(options.backends)
        _check_files(options)
    except ValueError as error:
        options.refuse(str(error))
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", SlowBackendWarning)  # the table shows what "auto" selected
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        report = _run(options, workloads, backends, device)
    return int(report.is_bad)


def _run(options: argparse.Namespace, workloads: list[Workload], backends: list[str], device: torch.device) -> Report:
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    implementations = all_implementations(backends)
    guarantees = {"deterministic": options.deterministic, "batch_invariant": options.batch_invariant}
    report = Report(_about(options, device), _unit(device, dtype, options), dtype, [x.name for x in implementations])
    patience = PATIENCE[device.type] if options.patience is None else options.patience
    how = {"forward_only": options.forward_only, "patience": patience}
    progress = Progress(sys.stderr)
    try:
        for i, workload in enumerate(workloads, 1):
            step = f"batch {i} of {len(workloads)}, {workload.name}"
            progress.say(f"{step}: float64, to compare with")
            tensors = WorkloadTensors(workload, device, dtype, **guarantees)
            expected = expected_results(tensors, not options.forward_only)
            results: dict[str, Result] = {}
            for implementation in implementations:
                progress.say(f"{step}: {implementation.name}")
                results[implementation.name] = measure(implementation, tensors, expected, **how)
            report.results.append((workload, results))
            _save_tables(report, options)
        if device.type == "cuda" and not options.forward_only:
            tiny = WorkloadTensors(Workload("tiny", "", (17, 5, 11, 29), 4, 4, 64), device, dtype, **guarantees)
            for implementation in implementations:
                progress.say(f"host time of a call: {implementation.name}")
                report.host[implementation.name] = host_us(implementation, tiny)
    finally:  # an interrupted run shows what it has measured
        progress.clear()
        if options.backends is None:
            report.leave_out_idle(backends)
        print(report.markdown(), end="", flush=True)
    _save_tables(report, options)
    _save_plots(report, options)
    return report


def _save_tables(report: Report, options: argparse.Namespace) -> None:
    if options.save is not None:
        (options.save / "table.md").write_text(report.markdown(), encoding="utf-8")
        numbers = json.dumps(report.numbers(), indent=1, ensure_ascii=False)
        (options.save / "table.json").write_text(numbers + "\n", encoding="utf-8")


def _save_plots(report: Report, options: argparse.Namespace) -> None:
    if options.save is not None:
        reason = plot.missing()
        if reason is None:
            plot.draw(report, options.save / "picture.svg")
        else:
            print(f"no picture.svg: {reason}", file=sys.stderr)
    if options.picture is not None:
        plot.draw(report, options.picture)


def _check_files(options: argparse.Namespace) -> None:
    if options.picture is not None:
        reason = plot.reason_against(options.picture)
        if reason is not None:
            raise ValueError(f"--picture: {reason}")
    if options.save is not None and options.save.exists() and not options.save.is_dir():
        raise ValueError(f"--save takes a folder, and {str(options.save)!r} is a file.")


def _device(text: str | None) -> torch.device:
    text = ("cuda" if torch.cuda.is_available() else "cpu") if text is None else text
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {text!r}.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"torch sees {torch.cuda.device_count()} CUDA devices, and no {text!r}: pass --device cpu.")
    return torch.device(text) if kind == "cpu" or index else torch.device("cuda", torch.cuda.current_device())


def _backends(names: list[str] | None) -> list[str]:
    available = available_backends()
    if names is None:
        return ["auto", *(name for name, missing in available.items() if missing is None)]
    unknown = [name for name in names if name not in available and name != "auto"]
    if unknown:
        raise ValueError(f"there is no backend {unknown[0]!r}: pass auto, or some of {', '.join(available)}.")
    return list(dict.fromkeys(names))


def _about(options: argparse.Namespace, device: torch.device) -> dict[str, str]:
    return {
        "command": options.command_line,
        "device": device_name(device),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "python": f"Python {platform.python_version()}",
        "date": str(datetime.date.today()),
    }


def _unit(device: torch.device, dtype: torch.dtype, options: argparse.Namespace) -> str:
    what = "ms of device time, medians of bursts of calls" if device.type == "cuda" else "ms by the clock, medians"
    directions = "forward" if options.forward_only else "forward / forward + backward"
    return f"{str(dtype)[6:]}, {directions}: {what}; in brackets the time over that of auto."
