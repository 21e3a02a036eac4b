"""What ``bench``, ``check`` and ``tune`` run: workloads, and on them ``varlen_attention`` and padded SDPA.

Dimensions: B sequences, L the longest of them, T query tokens, S key tokens, H query heads and G key heads, D and Dv
the head dims of keys and of values.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional import explain, varlen_attention
from ..kernels.masks import Window, distances
from ..layouts.sequence import SequenceLayout

CAUSAL = {"is_causal": True}
DISTRIBUTIONS = ("lognormal", "uniform", "equal")
MAX_PADDING = 16  # padded tokens for each real one
MAX_SEQUENCES = 16384  # on a GPU, SDPA's backward in torch 2.11 reads invalid memory with 32768 padded sequences


class NotSupportedError(Exception):
    """A call can't run. The message says why."""


def draw_lengths(text: str, tokens: int = 32768, seed: int = 0) -> tuple[int, ...]:
    """The lengths that a text describes, the same each time.

    Args:
        text: lengths such as "5,0,900,17", or a distribution and its largest length N such as "lognormal:2048". The
            median of "lognormal" is 0.15 N.
        tokens: the sum of lengths that are drawn; equal lengths are as many as fit.

    Raises:
        ValueError: another text.
    """
    kind, colon, number = text.partition(":")
    if not colon and all(part.strip().isdecimal() for part in text.split(",")):
        return tuple(map(int, text.split(",")))
    if kind not in DISTRIBUTIONS or not number.isdecimal() or not int(number):
        names = ", ".join(f"{name}:N" for name in DISTRIBUTIONS)
        raise ValueError(f"lengths must be a list such as 5,0,900,17 or one of {names} with N ≥ 1, got {text!r}.")
    n, source, lengths = int(number), random.Random(seed), list[int]()
    if kind == "equal":
        return (n,) * (tokens // n)
    while tokens:
        drawn = source.randint(1, n) if kind == "uniform" else round(math.exp(source.gauss(math.log(n) - 1.9, 0.9)))
        lengths.append(min(max(1, drawn), n, tokens))
        tokens -= lengths[-1]
    return tuple(lengths)


@dataclass(frozen=True)
class Workload:
    """The lengths of the sequences, the heads of a model, and options of ``varlen_attention``."""

    name: str
    about: str  # a description of the lengths and the mask
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int  # divides ``heads``
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    key_lengths: tuple[int, ...] | None = None  # None for self-attention
    value_dim: int | None = None  # None for ``head_dim``

    def __str__(self) -> str:
        heads = "/".join(map(str, dict.fromkeys((self.heads, self.kv_heads))))
        return f"{self.name}: {len(self.lengths)} sequences, {self.about}, {heads} × {self.head_dim}"


@dataclass(frozen=True)
class CaseInputs:
    """The arguments of ``varlen_attention``, and the gradient of its output."""

    layout: Any
    key_layout: Any  # the same object for self-attention
    qkv: tuple[Tensor, Tensor, Tensor]  # (T, H, D), (S, G, D) and (S, G, Dv)
    grad: Tensor  # (T, H, Dv)
    options: dict[str, Any]

    @classmethod
    def random(cls, workload: Workload, device: torch.device, dtype: torch.dtype, past_end: int = 0) -> CaseInputs:
        """Standard normal tensors with a fixed seed, and ``past_end`` rows of NaN after the last sequence."""
        layout = SequenceLayout.from_lengths(workload.lengths, device=device)
        keys = workload.key_lengths
        key_layout = layout if keys is None else SequenceLayout.from_lengths(keys, device=device)
        generator = torch.Generator(device).manual_seed(7)

        def normal(rows: int, heads: int, width: int) -> Tensor:
            x = torch.randn(rows, heads, width, generator=generator, device=device).to(dtype)
            return torch.cat([x, x.new_full((past_end, heads, width), torch.nan)])

        heads, kv_heads, width = workload.heads, workload.kv_heads, workload.value_dim or workload.head_dim
        query = normal(layout.total, heads, workload.head_dim)
        key, value = (normal(key_layout.total, kv_heads, dim) for dim in (workload.head_dim, width))
        options = dict(workload.options)
        if "alibi_slopes" in options:
            options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=device)
        return cls(layout, key_layout, (query, key, value), normal(layout.total, heads, width), options)

    @property
    def window(self) -> Window:
        """The window of visible keys, causality included."""
        return Window.of(self.options.get("window_size", (-1, -1)), self.options.get("is_causal", False))

    def in_dtype(self, dtype: torch.dtype) -> CaseInputs:
        """In another dtype, without NaN, and without the options that do not change the result."""
        options = {name: x for name, x in self.options.items() if name not in ("deterministic", "batch_invariant")}
        q, k, v, grad = (x.to(dtype).nan_to_num() for x in (*self.qkv, self.grad))
        return CaseInputs(self.layout, self.key_layout, (q, k, v), grad, options)


@dataclass(frozen=True)
class PreparedCall:
    """A call on some inputs, with tensors in its own form."""

    attention: Callable[[], Tensor]  # the timed part
    leaves: tuple[Tensor, ...]  # query, key and value, which require gradients
    grad: Tensor  # of the output
    pack: Callable[[Tensor], Tensor] = lambda x: x  # from its own form to packed rows

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.attention()

    def both(self) -> tuple[Tensor, ...]:
        """out and the gradients of the leaves."""
        out = self.attention()
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)

    def results(self, backward: bool) -> dict[str, Tensor]:
        """Packed rows: out and, with ``backward``, the gradients dq, dk and dv."""
        found = self.both() if backward else (self.forward(),)
        return dict(zip(("out", "dq", "dk", "dv"), map(self.pack, found), strict=False))


def chosen(name: str, inputs: CaseInputs, backward: bool) -> str:
    """The backend that ``varlen_attention(backend=name)`` runs. If it can't run, a `NotSupportedError` says why."""
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs.qkv)
    found = explain(q, k, v, inputs.layout, inputs.key_layout, backend=name, **inputs.options)
    if found.chosen is None:
        reasons = found.reasons if name == "auto" else {name: found.reasons[name]}
        raise NotSupportedError(" ".join(f"{other}: {' '.join(each)}" for other, each in reasons.items() if each))
    return found.chosen


def attention(name: str, inputs: CaseInputs) -> PreparedCall:
    """``varlen_attention(backend=name)``."""
    q, k, v = leaves = tuple(x.detach().clone().requires_grad_() for x in inputs.qkv)
    layouts, options = (inputs.layout, inputs.key_layout), inputs.options
    attend = functools.partial(varlen_attention, q, k, v, *layouts, backend=name, **options)
    return PreparedCall(attend, leaves, inputs.grad.nan_to_num())


def padded(inputs: CaseInputs) -> PreparedCall:
    """SDPA on padded query (B, H, L, D), key (B, G, L, D) and value (B, G, L, Dv), with a mask if one is needed.

    It is exact without a mask if nothing is padded, or if it is causal, since padding follows the real tokens. Key
    heads are repeated with a mask, as transformers does it, and passed with ``enable_gqa`` without one.
    """
    layout, window, (q, k, _) = inputs.layout, inputs.window, inputs.qkv
    tokens, group = layout.batch_size * layout.max_seqlen, q.shape[1] // k.shape[1]
    if inputs.options.get("softcap"):
        raise NotSupportedError("SDPA has no softcap.")
    if tokens > MAX_PADDING * layout.total:
        raise NotSupportedError(f"{tokens} padded tokens for {layout.total} real ones.")
    if inputs.grad.is_cuda and layout.batch_size > MAX_SEQUENCES:
        raise NotSupportedError(f"SDPA reads invalid memory with {layout.batch_size} padded sequences.")
    has_mask = not (window.is_causal or (window.is_open and layout.min_seqlen == layout.max_seqlen))
    mask = None
    if has_mask:  # the visible keys: (B, 1, 1, L), or (B, 1, L, L) with a window, where padding sees all real keys
        real = torch.arange(layout.max_seqlen, device=q.device) < layout.lengths[:, None, None]
        visible = window.visible(distances(layout.max_seqlen, layout.max_seqlen, 0, q.device))
        mask = (real if visible is None else real & (visible | ~real.mT)).unsqueeze(1)
    q, k, v, grad = (layout.pad(x.detach()).transpose(1, 2) for x in (*inputs.qkv, inputs.grad))
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    options: dict[str, Any] = {"attn_mask": mask, "scale": inputs.options.get("scale")}
    options |= {"is_causal": not has_mask and window.is_causal, "enable_gqa": not has_mask and group > 1}

    def attend() -> Tensor:
        key, value = (x.repeat_interleave(group, 1) if has_mask and group > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q, key, value, **options)

    return PreparedCall(attend, leaves, grad, lambda x: layout.pack(x.transpose(1, 2)))
