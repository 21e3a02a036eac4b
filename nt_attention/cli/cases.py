"""The calls that ``check`` verifies, and the verification of one of them against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import registry, support
from ..kernels.backend import Backend
from ..kernels.call import FEATURES
from ..kernels.relative import RelativeBias
from ..layouts.bounded import BoundedLayout
from .implementations import CaseInputs, attention, padded
from .soak_tools import to_pages
from .workloads import CAUSAL, Workload

LENGTHS = (1, 129, 0, 17, 300, 15, 31, 128, 33, 127, 16, 5)
KEY_LENGTHS = (4, 129, 0, 31, 290, 16, 257, 128, 33, 130, 19, 5)  # fewer and more than queries
KEYLESS = (4, 129, 3, 31, 0, 16, 257, 128, 33, 0, 19, 5)
LONGEST = 2049  # one more sequence on a GPU
HEADS = 4
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 256, 320, 384, 512, 576)
PAIRS = ((64, 32), (128, 32), (64, 128), (192, 128), (576, 512))
DETERMINISTIC_RUNS = 50


def tilt(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + 0.01 * (i - j) * (h + 1)


def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j + b) % 3 == 0


# feature → the fields of its workload
FIELDS: dict[str, dict[str, Any]] = {
    "causal": {"options": CAUSAL},
    "window": {"options": {"window_size": (70, 30)}},
    "softcap": {"options": {"softcap": 5.0}},
    "alibi": {"options": {"alibi_slopes": (0.05, 0.2, 0.35, 0.5)}},
    "relative bias": {"options": {"relative": (64, 33)}},  # the largest distance, and the number of buckets
    "score_mod": {"options": {"score_mod": tilt}},
    "mask_mod": {"options": {"mask_mod": every_third}},
    "dropout": {"options": {"dropout_p": 0.2}},
    "deterministic": {"options": CAUSAL | {"deterministic": True}},
    "batch_invariant": {"options": {"batch_invariant": True}},
    "grouped heads": {"options": CAUSAL, "kv_heads": 2},
    "cross": {"options": CAUSAL, "key_lengths": KEY_LENGTHS},
    "upper_left": {"options": CAUSAL | {"causal_alignment": "upper_left"}, "key_lengths": KEY_LENGTHS},
    "no keys": {"key_lengths": KEYLESS},
    "scale ≤ 0": {"options": CAUSAL | {"scale": -0.2}},
    "bounds": {"options": CAUSAL},
    "paged": {"options": CAUSAL, "key_lengths": KEY_LENGTHS},
}
PAGE = 16  # rows


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


def cases_of(backend: Backend) -> Iterator[Case]:
    """All cases of a backend. float64 has none: there is nothing more accurate to compare it with."""
    for dtype in (each for each in backend.dtypes or () if each != torch.float64):
        for head_dim, value_dim in (*((d, d) for d in HEAD_DIMS), *PAIRS):
            if backend.head_dims.padded(head_dim, value_dim, ignore_only=True) == (head_dim, value_dim):
                which = str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"
                workload = Workload(which, "", LENGTHS, HEADS, HEADS, head_dim, CAUSAL, value_dim=value_dim)
                yield Case(backend.name, dtype, "head dims", workload)
        for feature in (each for each in FEATURES if each in backend.features - support.BY_HEAD_DIMS):
            for head_dim in (64, 128):
                workload = Workload(feature, "", LENGTHS, HEADS, HEADS, head_dim, value_dim=head_dim)
                workload = dataclasses.replace(workload, **FIELDS[feature])
                yield Case(backend.name, dtype, "features", workload)


def run_case(case: Case, device: torch.device) -> Finding:
    """Verify the forward, then the backward."""
    torch.manual_seed(3)
    result, slack = "no", 3.0 if case.which == "softcap" else 2.0
    try:
        with support.by_documentation():
            inputs = inputs_of(case, device)
            ratio = relative_error(case, inputs, backward=False)
            if ratio > slack:
                return Finding(case, result, f"output off by {ratio:.1f} of PyTorch's own error")
            result = "forward"
            inference_only = case.which == "paged" or registry.backends()[case.backend].inference_only
            if not inference_only:
                ratio = relative_error(case, inputs, backward=True)
                if ratio > slack:
                    return Finding(case, result, f"gradients off by {ratio:.1f} of PyTorch's own error")
            if case.which in ("deterministic", "batch_invariant"):
                check_bits(case, inputs, backward=not inference_only)
            result = "forward" if inference_only else "both"
    except Exception as error:  # kernels of other libraries raise errors of any type: each is a result
        return Finding(case, result, str(error).splitlines()[0][:120] if str(error) else type(error).__name__)
    return Finding(case, result, f"{ratio:.2f} of PyTorch's own error")


def inputs_of(case: Case, device: torch.device) -> CaseInputs:
    """The inputs of a case. Two rows of NaN follow the last sequence: no kernel may read them."""
    more, keys = (LONGEST,) if device.type == "cuda" else (), case.workload.key_lengths
    lengths, keys, options = (*case.workload.lengths, *more), keys and (*keys, *more), dict(case.workload.options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=device)
    workload = dataclasses.replace(case.workload, lengths=lengths, key_lengths=keys, options=options)
    inputs = CaseInputs.random(workload, device, case.dtype, past_end=2)
    if "relative" in options:
        radius, buckets = options["relative"]
        options["relative"] = _relative(radius, buckets, inputs)
    return inputs


def _relative(radius: int, buckets: int, inputs: CaseInputs) -> RelativeBias:
    """All three biases, standard normal, with NaN in the rows past the last sequence."""
    query, key, _ = inputs.qkv
    distance = torch.arange(-radius, radius + 1, device=query.device)

    def normal(*rows: int) -> Tensor:
        return torch.randn(*rows, query.shape[1], buckets, device=query.device).to(query.dtype)

    relative = RelativeBias(distance.abs() * buckets // (radius + 1), normal(), normal(len(query)), normal(len(key)))
    for x, layout in ((relative.query_bias, inputs.layout), (relative.key_bias, inputs.key_layout)):
        x[layout.total :] = torch.nan  # type: ignore[index]
    return relative


def with_bounds(inputs: CaseInputs) -> CaseInputs:
    """The inputs with a layout of self-attention that knows only bounds, which are the real sizes."""
    layout = BoundedLayout(inputs.layout.cu_seqlens.clone(), inputs.layout.max_seqlen, len(inputs.grad))
    return dataclasses.replace(inputs, layout=layout, key_layout=layout)


def in_pages(inputs: CaseInputs) -> CaseInputs:
    """The inputs with keys and values in pages, which are in a random order and else full of NaN."""
    query, *packed = inputs.qkv
    paged, key, value = to_pages(inputs.key_layout, PAGE, *packed)
    return dataclasses.replace(inputs, key_layout=paged, qkv=(query, key, value))


CHANGES = {"bounds": with_bounds, "paged": in_pages}


def results_of(backend: str, inputs: CaseInputs, backward: bool, which: str = "") -> dict[str, Tensor]:
    """out and, with ``backward``, all gradients, without the rows past the end."""
    results = attention(backend, CHANGES.get(which, lambda x: x)(inputs)).results(backward)
    queries, keys = inputs.layout.total, inputs.key_layout.total
    totals = {"out": queries, "dq": queries, "dk": keys, "dv": keys, "query_bias": queries, "key_bias": keys}
    for name in totals.keys() & results.keys():
        assert not results[name][totals[name] :].any(), "rows past the last offset are not 0"
        results[name] = results[name][: totals[name]]
    return results


def check_bits(case: Case, inputs: CaseInputs, backward: bool = True) -> None:
    """Check that repeated calls, or calls of each sequence alone, give the same bits."""
    first = results_of(case.backend, inputs, backward)
    for _ in range(DETERMINISTIC_RUNS if case.which == "deterministic" else 0):
        again = results_of(case.backend, inputs, backward=True)
        assert all(torch.equal(first[name], again[name]) for name in first), "the same call gave other bits"
    for b in range(inputs.layout.batch_size if case.which == "batch_invariant" else 0):
        rows, part = inputs.select([b])
        alone = results_of(case.backend, part, backward=False)["out"]
        assert torch.equal(alone, first["out"][rows]), "a sequence alone gave other bits than in the batch"


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
    exact, exact_plain = (results_of("reference", x.cast(torch.float64), backward) for x in (inputs, plain))
    reference = results_of("reference", inputs.cast(case.dtype), backward)
    sdpa = padded(plain, backward).results(backward)

    def error(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    def ratio(name: str) -> float:
        others = [error(reference[name], exact[name])]
        others += [error(sdpa[name], exact_plain[name])] if name in sdpa else []
        return error(got[name], exact[name]) / max(*others, torch.finfo(case.dtype).eps / 4)

    return max(map(ratio, got))


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
