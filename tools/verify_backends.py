"""Verify every backend on this machine against float64, and write the verified support of this kind of GPU.

    python tools/verify_backends.py [--device D] [--backends NAME …] [--which DIM-OR-FEATURE …] [--jobs N] [--save]

Each head dim, and each feature at head dims 64 and 128, runs forward and backward on lengths around the edges of tiles.
A result is right if its error is at most twice that of PyTorch in the same dtype (three times with softcap). With
``--save`` the results become the verified support of the backends on this kind of GPU (``kernels/support.py``).
``python -m nt_attention check`` is a short form of this.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nt_attention.cli import check
from nt_attention.cli.calls import CaseInputs, PreparedCall, Workload, padded
from nt_attention.cli.check import CAUSAL, HEADS, KEY_LENGTHS, LENGTHS
from nt_attention.cli.environment import device_name, devices, output_file, positive
from nt_attention.functional import varlen_attention
from nt_attention.kernels import registry, support
from nt_attention.kernels.backend import Backend
from nt_attention.kernels.call import FEATURES, AttentionSpec
from nt_attention.kernels.measurements import versions
from nt_attention.kernels.relative import RelativeBias
from nt_attention.layouts.bounded import BoundedLayout
from nt_attention.layouts.paged import PagedLayout
from nt_attention.layouts.sequence import SequenceLayout

Results = dict[str, dict[str, dict[str, dict[str, str]]]]  # as in ``VerifiedSupport.results``
RESULTS = {"both": "right", "forward": "right without gradients", "no": "not right"}
LONGEST = 2049  # one more sequence on a GPU
PAGE = 16  # rows
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 256, 320, 384, 512, 576)
PAIRS = ((64, 32), (128, 32), (64, 128), (192, 128), (576, 512))
DETERMINISTIC_RUNS = 50


# feature → the fields of its workload
FIELDS: dict[str, dict[str, Any]] = check.FIELDS | {
    "causal": {"options": CAUSAL},
    "relative bias": {"options": {"relative": (64, 33)}},  # the largest distance, and the number of buckets
    "dropout": {"options": {"dropout_p": 0.2}},
    "bounds": {"options": CAUSAL},
    "paged": {"options": CAUSAL, "key_lengths": KEY_LENGTHS},
}


@dataclass(frozen=True)
class Case:
    """One call, and the kind of support that it verifies: "head dims" or "features", by the workload's name."""

    backend: str
    dtype: torch.dtype
    kind: str
    workload: Workload

    @property
    def which(self) -> str:
        return self.workload.name

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.kind} {self.which} at {self.workload.head_dim}/{self.workload.value_dim}"


@dataclass(frozen=True)
class Finding:
    """The result of a case, "both", "forward" or "no"; its largest error relative to PyTorch's own, or the reason."""

    case: Case
    result: str
    details: str


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=devices(), default=devices()[0])
    add("--backends", nargs="+", choices=list(registry.backends()), help="default: all that are available")
    add("--which", nargs="+", help="only these head dims and features, such as 64 192/128 causal")
    add("--jobs", type=positive, help="processes, which compile kernels in parallel; default: 8 on a GPU, else 1")
    about = "save the results as the verified support on this kind of GPU, or in a file"
    add("--save", type=output_file, nargs="?", const=Path(), metavar="FILE", help=about)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    try:
        if options.save == Path() and device.type != "cuda":
            raise ValueError("--save without a file is for a CUDA device: verified support is kept for GPUs only.")
        cases = requested_cases(options.backends, options.which, device)
    except ValueError as error:
        parser.error(str(error))
    jobs = options.jobs or (min(8, os.cpu_count() or 1) if device.type == "cuda" else 1)
    jobs = jobs if all(case.backend in registry.BACKENDS for case in cases) else 1  # others are in this process only
    findings = []
    for found in run_in_processes(cases, device, jobs) if jobs > 1 else (run_case(case, device) for case in cases):
        findings.append(found)
        print(f"\r{len(findings)} of {len(cases)} cases", end="", file=sys.stderr)
    print(file=sys.stderr)
    findings.sort(key=lambda each: cases.index(each.case))  # processes end in any order
    print(f"{device_name(device)}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    results = summarize(findings)
    print_results(results, findings)
    if options.save is not None:
        command = shlex.join(
            ["python", "tools/verify_backends.py", *(sys.argv[1:] if arguments is None else arguments)]
        )
        save(results, device, options.save, command)


def requested_cases(names: list[str] | None, which: list[str] | None, device: torch.device) -> list[Case]:
    """The cases of the named backends, or of all that can run on the device. A ValueError if there are none."""
    cases = [case for name in able_backends(names, device) for case in cases_of(registry.backends()[name])]
    selected = [case for case in cases if which is None or case.which in which]
    if not selected:
        raise ValueError(f"no case is left: pass --which some of {list(dict.fromkeys(case.which for case in cases))}.")
    return selected


def able_backends(names: list[str] | None, device: torch.device) -> list[str]:
    """The named backends, or all that can run on the device. A ValueError if one can't be verified there."""
    reasons = {}
    for name, backend in registry.backends().items():
        spec = AttentionSpec(device, (backend.dtypes or (torch.float32,))[0], 1, 1, 64, 64, 0.125)
        reasons[name] = backend.missing() or " ".join(backend.unsupported(spec))
    reasons["reference"] = "the others are compared with it."
    names = names or [name for name, reason in reasons.items() if not reason]
    for name in names:
        if reasons[name]:
            raise ValueError(f"{name} can't be verified on {device}: {reasons[name]}")
    return names


def cases_of(backend: Backend) -> Iterator[Case]:
    """All cases of a backend. float64 has none: there is nothing more accurate to compare it with."""
    for dtype in (each for each in backend.dtypes or () if each != torch.float64):
        for head_dim, value_dim in (*((d, d) for d in HEAD_DIMS), *PAIRS):
            if backend.head_dims.padded(head_dim, value_dim, ignore_only=True) == (head_dim, value_dim):
                which = str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"
                workload = Workload(which, "", LENGTHS, HEADS, HEADS, head_dim, CAUSAL, value_dim=value_dim)
                yield Case(backend.name, dtype, "head dims", workload)
        features = [each for each in FEATURES if each in backend.features - support.BY_HEAD_DIMS]
        for feature, head_dim in itertools.product(features, (64, 128)):
            workload = Workload(feature, "", LENGTHS, HEADS, HEADS, head_dim, value_dim=head_dim)
            yield Case(backend.name, dtype, "features", dataclasses.replace(workload, **FIELDS[feature]))


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


def run_case(case: Case, device: torch.device) -> Finding:
    """Verify the forward, then the backward."""
    torch.manual_seed(3)
    result, ratio = "no", 0.0
    forward_only = case.which == "paged" or registry.backends()[case.backend].inference_only
    try:
        with support.by_documentation():
            inputs = inputs_of(case, device)
            for backward in (False,) if forward_only else (False, True):
                ratio = relative_error(case, inputs, backward)
                if ratio > (3.0 if case.which == "softcap" else 2.0):
                    what = "gradients" if backward else "output"
                    return Finding(case, result, f"{what} off by {ratio:.1f} of PyTorch's own error")
                result = "forward"
            if case.which in ("deterministic", "batch_invariant"):
                check_bits(case, inputs, not forward_only)
            result = "forward" if forward_only else "both"
    except Exception as error:  # kernels of other libraries raise errors of any type: each is a result
        return Finding(case, result, str(error).splitlines()[0][:120] if str(error) else type(error).__name__)
    return Finding(case, result, f"{ratio:.2f} of PyTorch's own error")


def inputs_of(case: Case, device: torch.device) -> CaseInputs:
    """The inputs of a case. Two rows of NaN follow the last sequence: no kernel may read them."""
    more, keys = (LONGEST,) if device.type == "cuda" else (), case.workload.key_lengths
    lengths, keys = (*case.workload.lengths, *more), keys and (*keys, *more)
    workload = dataclasses.replace(case.workload, lengths=lengths, key_lengths=keys)
    inputs = CaseInputs.random(workload, device, case.dtype, past_end=2)
    if "relative" in inputs.options:
        inputs.options["relative"] = _relative(*inputs.options["relative"], inputs)
    return inputs


def _relative(radius: int, buckets: int, inputs: CaseInputs) -> RelativeBias:
    """All three biases, standard normal, with NaN in the rows past the last sequence."""
    query, key, _ = inputs.qkv
    sizes = ((), (len(query),), (len(key),))
    bias, *of_rows = (torch.randn(*n, HEADS, buckets, device=query.device).to(query.dtype) for n in sizes)
    for x, layout in zip(of_rows, (inputs.layout, inputs.key_layout), strict=True):
        x[layout.total :] = torch.nan
    distance = torch.arange(-radius, radius + 1, device=query.device)
    return RelativeBias(distance.abs() * buckets // (radius + 1), bias, *of_rows)


def with_bounds(inputs: CaseInputs) -> CaseInputs:
    """The inputs with a layout of self-attention that knows only bounds, which are the real sizes."""
    layout = BoundedLayout(inputs.layout.cu_seqlens.clone(), inputs.layout.max_seqlen, len(inputs.grad))
    return dataclasses.replace(inputs, layout=layout, key_layout=layout)


def in_pages(inputs: CaseInputs) -> CaseInputs:
    """The inputs with keys and values in pages, which are in a random order and else full of NaN."""
    (query, *packed), keys = inputs.qkv, inputs.key_layout
    count = -(-keys.max_seqlen // PAGE) + 1
    table = torch.randperm(keys.batch_size * count, device=keys.device).view(-1, count)
    unused = torch.arange(count, device=keys.device) * PAGE >= keys.lengths[:, None]
    paged = PagedLayout(table.masked_fill(unused, 2**30), keys.lengths, PAGE)
    key, value = (x.new_full((table.numel() * PAGE, *x.shape[1:]), torch.nan) for x in packed)
    for pool, x in zip((key, value), packed, strict=True):
        pool[paged.rows(keys.sequence_ids, keys.position_ids)] = x[: keys.total]
    pools = (query, key.unflatten(0, (-1, PAGE)), value.unflatten(0, (-1, PAGE)))
    return dataclasses.replace(inputs, key_layout=paged, qkv=pools)


CHANGES = {"bounds": with_bounds, "paged": in_pages}


def attention(name: str, inputs: CaseInputs) -> tuple[PreparedCall, tuple[str, ...]]:
    """``varlen_attention(backend=name)``, and the names of its results."""
    options, relative = dict(inputs.options), inputs.options.get("relative")
    given = (*inputs.qkv, *(relative.tensors if relative else ()))
    leaves = q, k, v, *biases = tuple(x.detach().clone().requires_grad_() for x in given)
    if relative:
        options["relative"] = relative.with_tensors(biases)
    attend = functools.partial(varlen_attention, q, k, v, inputs.layout, inputs.key_layout, backend=name, **options)
    names = ("out", "dq", "dk", "dv", *(relative.terms if relative else ()))
    return PreparedCall(attend, leaves, inputs.grad.nan_to_num()), names


def results_of(backend: str, inputs: CaseInputs, backward: bool, which: str = "") -> dict[str, Tensor]:
    """out and, with ``backward``, all gradients, without the rows past the end."""
    call, names = attention(backend, CHANGES.get(which, lambda x: x)(inputs))
    results = dict(zip(names, call.both() if backward else (call.forward(),), strict=False))
    queries, keys = inputs.layout.total, inputs.key_layout.total
    totals = {"out": queries, "dq": queries, "dk": keys, "dv": keys, "query_bias": queries, "key_bias": keys}
    for name in totals.keys() & results.keys():
        assert not results[name][totals[name] :].any(), "rows past the last offset are not 0"
        results[name] = results[name][: totals[name]]
    return results


def check_bits(case: Case, inputs: CaseInputs, backward: bool) -> None:
    """Check that repeated calls, or calls of each sequence alone, give the same bits."""
    first = results_of(case.backend, inputs, backward)
    for _ in range(DETERMINISTIC_RUNS if case.which == "deterministic" else 0):
        again = results_of(case.backend, inputs, backward)
        assert all(torch.equal(first[name], again[name]) for name in first), "the same call gave other bits"
    parts = itertools.pairwise(inputs.layout.host_offsets.tolist()) if case.which == "batch_invariant" else ()
    for rows in itertools.starmap(slice, parts):
        alone, (q, k, v) = SequenceLayout.from_lengths([rows.stop - rows.start], device=inputs.grad.device), inputs.qkv
        part = CaseInputs(alone, alone, (q[rows], k[rows], v[rows]), inputs.grad[rows], inputs.options)
        out = results_of(case.backend, part, backward=False)["out"]
        assert torch.equal(out, first["out"][rows]), "a sequence alone gave other bits than in the batch"


def _in_dtype(inputs: CaseInputs, dtype: torch.dtype) -> CaseInputs:
    """`CaseInputs.in_dtype`, with the relative bias."""
    changed = inputs.in_dtype(dtype)
    if relative := inputs.options.get("relative"):
        changed.options["relative"] = relative.with_tensors([x.to(dtype).nan_to_num() for x in relative.tensors])
    return changed


def relative_error(case: Case, inputs: CaseInputs, backward: bool) -> float:
    """The largest error of out and all gradients over that of PyTorch in the same dtype, all against float64.

    PyTorch's error is that of the reference backend or of padded self-attention with SDPA, whichever is larger.
    """
    got = results_of(case.backend, inputs, backward, case.which)
    if not all(x.isfinite().all() for x in got.values()):
        return torch.inf
    if case.which == "dropout":
        return max(_dropout_error(case, inputs), _mismatch(inputs, got) if backward else 0.0)
    options = {name: x for name, x in inputs.options.items() if name in ("is_causal", "window_size")}
    if "scale" in inputs.options:
        options["scale"] = abs(inputs.options["scale"])  # SDPA returns NaN for a negative scale
    workload = dataclasses.replace(case.workload, key_lengths=None, options=options)
    plain = inputs_of(dataclasses.replace(case, workload=workload), inputs.grad.device)
    exact, of_plain = (results_of("reference", _in_dtype(x, torch.float64), backward) for x in (inputs, plain))
    reference = results_of("reference", _in_dtype(inputs, case.dtype), backward)
    sdpa = padded(plain).results(backward)

    def error(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    least = {name: max(error(x, exact[name]), torch.finfo(case.dtype).eps / 4) for name, x in reference.items()}
    return max(error(x, exact[name]) / max(least[name], error(sdpa[name], of_plain[name]) if name in sdpa else 0.0)
               for name, x in got.items())  # fmt: skip


def _dropout_error(case: Case, inputs: CaseInputs) -> float:
    """The error of the share of dropped weights, over a tolerance. Two implementations drop different weights.

    With values of 1, a row of out is the sum of the weights that were kept.
    """
    q, k, v = (x.nan_to_num() for x in inputs.qkv)
    ones = dataclasses.replace(inputs, qkv=(q, k, torch.ones_like(v)))
    out = results_of(case.backend, ones, backward=False)["out"].float()
    assert out.std() > 0.01, "nothing was dropped"
    return abs(float(out.mean()) - 1) / 0.02


def _mismatch(inputs: CaseInputs, got: dict[str, Tensor]) -> float:
    """How much the weights in the backward of self-attention differ from those in the forward, over a tolerance.

    If they are the same weights W, then ⟨out, dout⟩ = ⟨W v, dout⟩ = ⟨v, Wᵀ dout⟩ = ⟨v, dv⟩ in each sequence and head.
    """
    layout, (_, _, value) = inputs.layout, inputs.qkv

    def product(x: Tensor, y: Tensor) -> Tensor:
        of_rows = (x.double() * y.double()).sum(-1)
        return of_rows.new_zeros(layout.batch_size, of_rows.shape[1]).index_add_(0, layout.sequence_ids, of_rows)

    forward, backward = product(got["out"], inputs.grad[: layout.total]), product(value[: layout.total], got["dv"])
    return float((backward - forward).norm() / forward.norm()) / 0.05


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


if __name__ == "__main__":
    main()
