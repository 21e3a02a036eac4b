"""``python -m nt_attention check``: verify every backend on this machine against float64.

Each head dim, and each feature at head dims 64 and 128, runs forward and backward on lengths around the edges of tiles.
A result is right if its error is at most twice that of PyTorch in the same dtype (three times with softcap). With
``--save`` the results become the verified support of the backends on this kind of GPU (``kernels/support.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from ..kernels import registry, support
from ..kernels.call import AttentionSpec
from ..kernels.measurements import versions
from . import soak
from .cases import Case, Finding, cases_of, run_case
from .environment import device_name, devices, minutes, output_file, positive

Results = dict[str, dict[str, dict[str, dict[str, str]]]]  # as in ``VerifiedSupport.results``
RESULTS = {"both": "right", "forward": "right without gradients", "no": "not right"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=devices(), default=devices()[0])
    add("--backends", nargs="+", choices=list(registry.backends()), help="default: all that are available")
    add("--which", nargs="+", help="only these head dims and features, such as 64 192/128 causal")
    add("--jobs", type=positive, help="processes, which compile kernels in parallel; default: 8 on a GPU, else 1")
    add("--soak", type=minutes, metavar="MINUTES", help="run random calls for this time, and verify nothing else")
    add("--draws", type=positive, metavar="N", help="run N random calls of each backend, or fewer with --soak")
    add("--seed", type=int, default=0, help="the seed of the random calls; default: 0")
    about = "save the results as the verified support on this kind of GPU, or in a file"
    add("--save", type=output_file, nargs="?", const=Path(), metavar="FILE", help=about)


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    try:
        if options.save == Path() and device.type != "cuda":
            raise ValueError("--save without a file is for a CUDA device: verified support is kept for GPUs only.")
        if options.soak or options.draws:
            if options.which or options.jobs or options.save:
                raise ValueError("--which, --jobs and --save are not for random calls: leave out --soak and --draws.")
            return soak.main(options, able_backends(options.backends, device, "reference" in (options.backends or ())))
        cases = requested_cases(options.backends, options.which, device)
    except ValueError as error:
        options.error(str(error))
    jobs = options.jobs or (min(8, os.cpu_count() or 1) if device.type == "cuda" else 1)
    jobs = jobs if all(case.backend in registry.BACKENDS for case in cases) else 1  # others are in this process only
    found = run_in_processes(cases, device, jobs) if jobs > 1 else (run_case(case, device) for case in cases)
    bar = track(found, "cases", total=len(cases), console=Console(stderr=True), transient=True)
    findings = sorted(bar, key=lambda each: cases.index(each.case))  # processes end in any order
    print(f"{device_name(device)}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    results = summarize(findings)
    print_results(results, findings)
    if options.save is not None:
        save(results, device, options.save, options.command_line)
    return 0


def requested_cases(names: list[str] | None, which: list[str] | None, device: torch.device) -> list[Case]:
    """The cases of the named backends, or of all that can run on the device. A ValueError if there are none."""
    known = registry.backends()
    cases = [case for name in able_backends(names, device) for case in cases_of(known[name])]
    selected = [case for case in cases if which is None or case.which in which]
    if not selected:
        raise ValueError(f"no case is left: pass --which some of {list(dict.fromkeys(case.which for case in cases))}.")
    return selected


def able_backends(names: list[str] | None, device: torch.device, reference: bool = False) -> list[str]:
    """The named backends, or all that can run on the device; with `reference` this one too. Others: a ValueError."""
    reasons = {}
    for name, backend in registry.backends().items():
        spec = AttentionSpec(device, (backend.dtypes or (torch.float32,))[0], 1, 1, 64, 64, 0.125)
        reasons[name] = backend.missing() or " ".join(backend.unsupported(spec))
    if not reference:
        reasons["reference"] = "the others are compared with it."
    names = names or [name for name, reason in reasons.items() if not reason]
    for name in names:
        if reasons[name]:
            raise ValueError(f"{name} can't be verified on {device}: {reasons[name]}")
    return names


def run_in_processes(cases: list[Case], device: torch.device, jobs: int) -> Iterator[Finding]:
    """In no order. Cases without a result, because a kernel ended their process, are run in a process of their own.

    So are those that raised an error because another kernel had left the device unusable in their process.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no further processes, which would continue after these ended
    lost: list[Finding] = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run_case, case, device): case for case in cases}
        for future in as_completed(waiting):
            try:
                yield future.result()
            except BrokenProcessPool:
                lost.append(Finding(waiting[future], "no", "it ended its process"))
            except RuntimeError as error:
                lost.append(Finding(waiting[future], "no", str(error).partition("\n")[0]))
    if len(cases) == 1:
        yield from lost
        return
    with ThreadPoolExecutor(jobs) as threads:
        alone = threads.map(lambda each: list(run_in_processes([each.case], device, 1)), lost)
        yield from itertools.chain.from_iterable(alone)


def summarize(findings: Iterable[Finding]) -> Results:
    """The worst result of each head dim and each feature, by backend and dtype."""
    results: Results = {}
    for finding in findings:
        case = finding.case
        by_dtype = results.setdefault(case.backend, {})
        row = by_dtype.setdefault(str(case.dtype).removeprefix("torch."), {}).setdefault(case.kind, {})
        row[case.which] = max(row.get(case.which, "both"), finding.result, key=list(RESULTS).index)
    return results


def print_results(results: Results, findings: Iterable[Finding]) -> None:
    for name, by_dtype in results.items():
        print(f"\n{name}: {registry.backends()[name].about}")
        for dtype, kinds in by_dtype.items():
            for kind, row in kinds.items():
                for result, description in RESULTS.items():
                    if which := [one for one in row if row[one] == result]:
                        print(f"  {dtype:<9} {kind:<10} {description}: {', '.join(which)}")
        for finding in findings:
            if finding.case.backend == name and finding.result != "both":
                print(f"    {finding.case}: {finding.details}")


def save(results: Results, device: torch.device, file: Path, command: str) -> None:
    """Write the results for ``kernels/support.py``. Results and versions of other runs are kept."""
    if file == Path():
        capability = torch.cuda.get_device_capability(device)
        file = Path(support.__file__).parent / "verified" / "sm{}{}.json".format(*capability)
    before = json.loads(file.read_text()) if file.exists() else {"versions": {}, "results": {}}
    saved = before["results"]
    for name, by_dtype in results.items():
        for dtype, kinds in by_dtype.items():
            for kind, row in kinds.items():
                saved.setdefault(name, {}).setdefault(dtype, {}).setdefault(kind, {}).update(row)
    header = {"command": command, "date": str(date.today()), "gpu": device_name(device)}
    header["versions"] = before["versions"] | versions()
    file.write_text(json.dumps(header | {"results": saved}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"\nsaved in {file}")
