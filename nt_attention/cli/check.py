"""``python -m nt_attention check``: run every backend on this machine against float64, and print what holds.

Each head dim, and each feature at head dims 64 and 128, goes through a backend forward and backward on lengths around
every tile's edge. What holds has an error within twice that of PyTorch's own attention in the same precision (three
times under softcap), both against the reference backend in float64. With ``--save`` the table becomes what backends
claim on this kind of card (``kernels/support.py``).
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
from .cases import Case, Finding, cases_of, look_at
from .progress import Progress
from .support_table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), help="those that are here, if left out")
    parser.add_argument("--which", nargs="+", help="these head dims and features alone: 64 192/128 causal ...")
    parser.add_argument("--jobs", type=int, default=0, help="processes; each compiles kernels (8 on a GPU, else 1)")
    parser.add_argument(
        *("--save",),
        type=Path,
        nargs="?",
        const=Path(),
        help="make what holds what is claimed on this kind of card; with a file, write it there",
    )


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if options.save == Path() and device.type != "cuda":
        options.refuse("--save without a file is for a CUDA device: claims are kept for cards alone.")
    if device.type == "cuda" and not torch.cuda.is_available():
        options.refuse("torch sees no CUDA device: pass --device cpu.")
    for name in options.backends or ():
        if not _can_run(BACKENDS[name], device):
            plain = _plain(BACKENDS[name], device)
            why = BACKENDS[name].missing() or " ".join(BACKENDS[name].unsupported(plain)) or "it is the reference."
            options.refuse(f"{name} can't be run on {device}: {why}")
    names = options.backends or [name for name, backend in BACKENDS.items() if _can_run(backend, device)]
    todo = [case for name in names for case in cases_of(BACKENDS[name])]
    if options.which:
        todo = [case for case in todo if case.which in options.which]
    if not todo:
        known = dict.fromkeys(case.which for name in names for case in cases_of(BACKENDS[name]))
        options.refuse(f"nothing to run: --which takes some of {', '.join(map(repr, known))}.")
    jobs = options.jobs or (min(8, os.cpu_count() or 1) if device.type == "cuda" else 1)
    findings = list(_all(todo, device, jobs))
    table = Table.of(findings, device)
    print(table)
    if options.save is not None:
        table.write(options.save, options.command_line)
    return 0


def _can_run(backend: Backend, device: torch.device) -> bool:
    """The reference is what others are held against."""
    return not backend.is_reference and backend.missing() is None and not backend.unsupported(_plain(backend, device))


def _plain(backend: Backend, device: torch.device) -> AttentionSpec:
    return AttentionSpec(device, (backend.dtypes or (torch.float32,))[0], 1, 1, 64, 64, 0.125)


def _all(todo: list[Case], device: torch.device, jobs: int) -> Iterator[Finding]:
    progress = Progress(sys.stderr)

    findings = _in_processes(todo, device, jobs) if jobs > 1 else (look_at(case, device) for case in todo)
    for done, found in enumerate(findings, 1):
        case = found.case
        progress.say(
            f"{done} of {len(todo)}: {case.backend}, {case.dtype}, {case.kind} {case.which}: {found.held}, {found.told}"
        )
        yield found
    progress.clear()


def _in_processes(todo: list[Case], device: torch.device, jobs: int) -> Iterator[Finding]:
    """In no order. A kernel may end its process; then those that were under way get one of their own each."""
    lost = []
    with _processes(jobs) as pool:
        waiting = {pool.submit(look_at, case, device): case for case in todo}
        for future in as_completed(waiting):
            try:
                yield future.result()
            except BrokenProcessPool:
                lost.append(waiting[future])
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(functools.partial(_alone, device=device), lost)


def _alone(case: Case, device: torch.device) -> Finding:
    with _processes(1) as pool:
        try:
            return pool.submit(look_at, case, device).result()
        except BrokenProcessPool:
            return Finding(case, "no", "it took its process with it")


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _compile_alone)


def _compile_alone() -> None:
    """A process of its own needs no further ones to compile in, which would outlive it."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
