"""``python -m nt_attention check``: verify every backend on this machine against float64.

Each head dim, and each feature at head dims 64 and 128, goes through a backend forward and backward on lengths around
the edges of tiles. A result is right if its error is within twice that of PyTorch's own attention in the same precision
(three times under softcap), both against the reference backend in float64. With ``--save`` the table becomes the
verified support of the backends on this kind of GPU (``kernels/support.py``).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from ..kernels.backend import Backend
from ..kernels.call import AttentionSpec
from ..kernels.select import BACKENDS
from .cases import Case, Finding, cases_of, run_case
from .progress import Progress
from .support_table import SupportTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), help="all that are available, if left out")
    parser.add_argument("--which", nargs="+", help="these head dims and features alone: 64 192/128 causal ...")
    parser.add_argument("--jobs", type=int, default=0, help="processes; each compiles kernels (8 on a GPU, else 1)")
    parser.add_argument(
        *("--save",),
        type=Path,
        nargs="?",
        const=Path(),
        help="save the results as the verified support on this kind of GPU; with a file, write them there",
    )


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if options.save == Path() and device.type != "cuda":
        options.refuse("--save without a file is for a CUDA device: verified support is kept for GPUs alone.")
    if device.type == "cuda" and not torch.cuda.is_available():
        options.refuse("torch sees no CUDA device: pass --device cpu.")
    for name in options.backends or ():
        if not _can_run(BACKENDS[name], device):
            unsupported = " ".join(BACKENDS[name].unsupported(_plain_call(BACKENDS[name], device)))
            reason = BACKENDS[name].missing() or unsupported or "it is the reference."
            options.refuse(f"{name} can't be run on {device}: {reason}")
    names = options.backends or [name for name, backend in BACKENDS.items() if _can_run(backend, device)]
    selected = [case for name in names for case in cases_of(BACKENDS[name])]
    if options.which:
        selected = [case for case in selected if case.which in options.which]
    if not selected:
        known = dict.fromkeys(case.which for name in names for case in cases_of(BACKENDS[name]))
        options.refuse(f"nothing to run: --which takes some of {', '.join(map(repr, known))}.")
    jobs = options.jobs or (min(8, os.cpu_count() or 1) if device.type == "cuda" else 1)
    findings = list(_run_all(selected, device, jobs))
    table = SupportTable.of(findings, device)
    print(table)
    if options.save is not None:
        table.write(options.save, options.command_line)
    return 0


def _can_run(backend: Backend, device: torch.device) -> bool:
    """Whether to verify it; the reference is what others are compared with."""
    return (
        not backend.is_reference and backend.missing() is None and not backend.unsupported(_plain_call(backend, device))
    )


def _plain_call(backend: Backend, device: torch.device) -> AttentionSpec:
    return AttentionSpec(device, (backend.dtypes or (torch.float32,))[0], 1, 1, 64, 64, 0.125)


def _run_all(selected: list[Case], device: torch.device, jobs: int) -> Iterator[Finding]:
    progress = Progress(sys.stderr)
    findings = _in_processes(selected, device, jobs) if jobs > 1 else (run_case(case, device) for case in selected)
    for done, finding in enumerate(findings, 1):
        case = finding.case
        which = f"{case.backend}, {case.dtype}, {case.kind} {case.which}"
        progress.say(f"{done} of {len(selected)}: {which}: {finding.result}, {finding.details}")
        yield finding
    progress.clear()


def _in_processes(selected: list[Case], device: torch.device, jobs: int) -> Iterator[Finding]:
    """In no order. A kernel may end its process; then the cases that were running get a process of their own each."""
    lost = []
    with _processes(jobs) as pool:
        waiting = {pool.submit(run_case, case, device): case for case in selected}
        for future in as_completed(waiting):
            try:
                yield future.result()
            except BrokenProcessPool:
                lost.append(waiting[future])
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(functools.partial(_in_own_process, device=device), lost)


def _in_own_process(case: Case, device: torch.device) -> Finding:
    with _processes(1) as pool:
        try:
            return pool.submit(run_case, case, device).result()
        except BrokenProcessPool:
            return Finding(case, "no", "it took its process with it")


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _compile_in_this_process)


def _compile_in_this_process() -> None:
    """A process of its own needs no further ones to compile in, which would outlive it."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
