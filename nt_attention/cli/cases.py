"""One call of a backend against float64: the calls to verify, and the result of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional import varlen_attention
from ..kernels import support
from ..kernels.backend import Backend
from ..kernels.call import FEATURES
from ..kernels.masks import Window
from ..layout import SequenceLayout

LENGTHS = [1, 129, 0, 17, 300, 15, 31, 128, 33, 127, 16, 5]
KEY_LENGTHS = [4, 129, 0, 31, 290, 16, 257, 128, 33, 130, 19, 5]  # fewer and more than queries
KEYLESS = [4, 129, 3, 31, 0, 16, 257, 128, 33, 0, 19, 5]
LONGEST = 2049  # one more sequence on a GPU
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 256)
PAIRS = ((64, 128), (192, 128))
SLACK, SOFTCAP_SLACK = 2.0, 3.0
DETERMINISTIC_RUNS = 50


def tilt(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + 0.01 * (i - j) * (h + 1)


def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j + b) % 3 == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window_size": (70, 30)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": True},
    "score_mod": {"score_mod": tilt},
    "mask_mod": {"mask_mod": every_third},
    "dropout": {"dropout_p": 0.2},
    "deterministic": {"deterministic": True, "is_causal": True},
    "batch_invariant": {"batch_invariant": True},
    "grouped heads": {"kv_heads": 2, "is_causal": True},
    "cross": {"key_lengths": KEY_LENGTHS, "is_causal": True},
    "upper_left": {"key_lengths": KEY_LENGTHS, "is_causal": True, "causal_alignment": "upper_left"},
    "no keys": {"key_lengths": KEYLESS},
    "scale ≤ 0": {"scale": -0.2, "is_causal": True},
    "value dim": {"value_dim": 32},
}


@dataclass(frozen=True)
class Case:
    """One call, and what it verifies: kind "head dims" or "features", and which of them."""

    backend: str
    dtype: torch.dtype
    kind: str
    which: str
    head_dim: int = 64
    value_dim: int = 64
    heads: int = 4
    kv_heads: int = 4
    key_lengths: list[int] | None = None
    alibi: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """The result of a case, "both", "forward" or "no"; its worst error relative to PyTorch's own, or the reason."""

    case: Case
    result: str
    details: str


def cases_of(backend: Backend) -> Iterator[Case]:
    for dtype in backend.dtypes or ():
        if dtype == torch.float64:
            continue  # nothing is more accurate to compare it with
        for head_dim, value_dim in (*((d, d) for d in HEAD_DIMS), *PAIRS):
            if backend.head_dims.padded(head_dim, value_dim, ignore_only=True) == (head_dim, value_dim):
                which = str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"
                yield Case(backend.name, dtype, "head dims", which, head_dim, value_dim, options={"is_causal": True})
        for feature in FEATURES:
            if feature not in backend.features:
                continue
            for head_dim in (64, 128):
                fields = {"value_dim": head_dim, **OPTIONS[feature]}
                call = {name: fields.pop(name) for name in list(fields) if name not in Case.__dataclass_fields__}
                yield Case(backend.name, dtype, "features", feature, head_dim, **fields, options=call)


def run_case(case: Case, device: torch.device) -> Finding:
    """Run a case forward, then backward."""
    try:
        with support.by_documentation():
            return _Run(case, device).finding()
    except Exception as error:  # kernels of other libraries raise errors of any type: each is a result
        return Finding(case, "no", _message(error))


def _message(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


class _Run:
    """A case's tensors, and its attention by the backend, by PyTorch in the same precision and in float64."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        more = [LONGEST] if device.type == "cuda" else []
        self.lengths = LENGTHS + more
        self.key_lengths = self.lengths if case.key_lengths is None else case.key_lengths + more
        self.layout, key_layout = (
            SequenceLayout.from_lengths(x, device=device) for x in (self.lengths, self.key_lengths)
        )
        self.key_layout = self.layout if case.key_lengths is None else key_layout
        draw = torch.Generator(device).manual_seed(7)

        def random(rows: int, heads: int, width: int) -> Tensor:
            x = torch.randn(rows, heads, width, generator=draw, device=device).to(case.dtype)
            return torch.cat([x, x.new_full((2, heads, width), torch.nan)])  # past the end, which no kernel may read

        self.inputs = [
            random(self.layout.total, case.heads, case.head_dim),
            random(self.key_layout.total, case.kv_heads, case.head_dim),
            random(self.key_layout.total, case.kv_heads, case.value_dim),
        ]
        self.grad = random(self.layout.total, case.heads, case.value_dim)
        self.slopes = torch.linspace(0.05, 0.5, case.heads, device=device) if case.alibi else None

    def finding(self) -> Finding:
        forward_worst = self._compare(self._results(self.case.backend, backward=False))
        slack = SOFTCAP_SLACK if self.case.which == "softcap" else SLACK
        if forward_worst > slack:
            return Finding(self.case, "no", f"output off by {forward_worst:.1f} of PyTorch's own error")
        try:
            results = self._results(self.case.backend, backward=True)
            worst = self._compare(results)
            if worst > slack:
                return Finding(self.case, "forward", f"gradients off by {worst:.1f} of PyTorch's own error")
            if self.case.which == "deterministic":
                self._check_determinism(results)
            if self.case.which == "batch_invariant":
                self._check_batch_invariance(results[0])
        except Exception as error:  # as above; the forward is right
            return Finding(self.case, "forward", _message(error))
        return Finding(self.case, "both", f"{worst:.2f} of PyTorch's own error")

    def _results(self, backend: str, backward: bool, double: bool = False) -> list[Tensor]:
        """out, then dq, dk and dv if asked for; without the rows past the end, which must be 0."""
        options = self.case.options
        if double:
            options = {name: x for name, x in options.items() if name not in ("deterministic", "batch_invariant")}
        leaves = [(x.double() if double else x).clone().requires_grad_(backward) for x in self.inputs]
        torch.manual_seed(3)
        q, k, v = leaves
        out = varlen_attention(
            q, k, v, self.layout, self.key_layout, **options, alibi_slopes=self.slopes, backend=backend
        )
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, leaves, self.grad.to(out.dtype).nan_to_num()) if backward else ()
        totals = (self.layout.total, self.layout.total, self.key_layout.total, self.key_layout.total)
        results = []
        for x, total in zip((out.detach(), *grads), totals, strict=False):
            assert not x[total:].any(), "rows past the last offset are not 0"
            results.append(x[:total])
        return results

    def _check_determinism(self, first: list[Tensor]) -> None:
        for _ in range(DETERMINISTIC_RUNS):
            again = self._results(self.case.backend, backward=True)
            assert all(map(torch.equal, first, again)), "the same call gave other bits"

    def _check_batch_invariance(self, out: Tensor) -> None:
        for b, n in enumerate(self.lengths):
            rows = slice(start := self.layout.host_offsets[b].item(), start + n)
            alone = SequenceLayout.from_lengths([n], device=self.device)
            q, k, v = (x[rows] for x in self.inputs)
            again = varlen_attention(q, k, v, alone, backend=self.case.backend, **self.case.options)
            assert isinstance(again, Tensor)
            assert torch.equal(again, out[rows]), "a sequence alone gave other bits than in the batch"

    def _compare(self, got: list[Tensor]) -> float:
        """The worst error of a result over that of PyTorch's attention."""
        if self.case.which == "dropout":
            return self._compare_dropped(got)
        backward = len(got) > 1
        expected, baseline = self._results("reference", backward, double=True), self._pytorch(backward)
        ratios = [0.0]
        for result, theirs, true in zip(got, baseline, expected, strict=True):
            if not result.isfinite().all():
                return torch.inf
            own, other = ((x.double() - true).norm().item() for x in (result, theirs))
            tiny = torch.finfo(self.case.dtype).eps * true.norm().item() / 4
            ratios.append(own / max(other, tiny, 1e-30))
        return max(ratios)

    def _compare_dropped(self, got: list[Tensor]) -> float:
        """Dropped weights can't be compared with another implementation's, but their share can, and dv with out.

        With values of 1 a row's output is the sum of its weights that were kept, and the sum of dv under a gradient of
        1 is the sum of all outputs.
        """
        query, key, value = (x.nan_to_num() for x in self.inputs)
        value = torch.ones_like(value).requires_grad_()
        out = varlen_attention(query, key, value, self.layout, backend=self.case.backend, **self.case.options)
        assert isinstance(out, Tensor)
        rows = out[: self.layout.total].detach().float()
        assert rows.std() > 0.01, "nothing was dropped"
        off = abs(rows.mean().item() - 1) / 0.02
        if len(got) > 1:
            (dv,) = torch.autograd.grad(out.sum(), value)
            off = max(off, abs(dv.float().sum().item() / rows.sum().item() - 1) / 0.01)
        return off if all(x.isfinite().all() for x in got) else torch.inf

    def _pytorch(self, backward: bool) -> list[Tensor]:
        """scaled_dot_product_attention in the same precision, one sequence at a time, under the same mask."""
        case, options = self.case, self.case.options
        leaves = [x.nan_to_num().requires_grad_(backward) for x in self.inputs]
        group = case.heads // case.kv_heads
        starts, key_starts = self.layout.host_offsets.tolist(), self.key_layout.host_offsets.tolist()
        scale = options.get("scale", case.head_dim**-0.5)
        window = Window.of(options.get("window_size", (-1, -1)), options.get("is_causal", False))
        outs = []
        for b, (n, m) in enumerate(zip(self.lengths, self.key_lengths, strict=True)):
            q, k, v = (
                x[a : a + count].transpose(0, 1)
                for x, a, count in zip(leaves, (starts[b], key_starts[b], key_starts[b]), (n, m, m), strict=True)
            )
            if not n or not m:
                outs.append(q.new_zeros(n, case.heads, case.value_dim))
                continue
            k, v = (x.repeat_interleave(group, 0) for x in (k, v))
            diagonal = 0 if options.get("causal_alignment") == "upper_left" else m - n
            mask = window.mask(n, m, diagonal, self.device)
            if mask is None:
                q, positive = (q, scale) if scale > 0 else (-q, -scale)  # it gives NaN for the other
                out = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=positive)
                outs.append(out[0].transpose(0, 1))
                continue
            fully_masked = ~mask.any(1)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask | fully_masked[:, None])[0]
            outs.append(out.masked_fill(fully_masked[:, None], 0.0).transpose(0, 1))
        out = torch.cat(outs)
        results = [out.detach()]
        if backward:
            grads = torch.autograd.grad(out, leaves, self.grad[: len(out)])
            totals = (self.layout.total, self.key_layout.total, self.key_layout.total)
            results += [g[:total] for g, total in zip(grads, totals, strict=True)]
        return results
