"""Run a chosen backend, and give it what kernels lack: written once here, for all of them.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.

Three identities do it. Zero columns change no score, so a head dim that a kernel refuses is padded to one it takes.
A flash backward needs the output only as delta = rowsum(dout · out) (FlashAttention-2, Dao 2023, section 3.1.2), and a
gradient that arrives through the log-sum-exp turns delta into delta − dlse; so one more column with out = −dlse and
dout = 1 carries it through the kernel's own backward. And a sink, a key of value 0 whose score is
learnt (Xiao et al. 2023; gpt-oss), only rescales: out · sigmoid(lse − sink), and logaddexp(lse, sink).
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..layout import SequenceLayout
from .spec import AttentionSpec, Backend


def run(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H), both differentiable. Rows outside of the layout are 0 and −inf."""
    head_dim, value_dim = backend.head_dims(spec.head_dim, spec.value_dim)
    query, key = (_widen(x, head_dim) for x in (query, key))
    value = _widen(value, value_dim)
    if layout.total == 0 or key_layout.total == 0:
        backend = _NOTHING
    problem = (layout, key_layout, spec)
    if backend.backward is None:
        out, lse = backend.forward(query, key, value, alibi_slopes, *problem)[:2]
    elif spec.needs_grad or forward_ad._current_level >= 0:
        out, lse = _Kernel.apply(query, key, value, alibi_slopes, (*problem, backend))[:2]
    else:  # 40 µs of host time less
        out, lse = _Kernel.forward(query, key, value, alibi_slopes, (*problem, backend))[:2]
    if value_dim != spec.value_dim:
        out = out[..., : spec.value_dim]
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks.to(lse.dtype), layout)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    blind = lse == -torch.inf  # all of such a row's weight is the sink's
    lse = lse.masked_fill(blind, 0.0)
    share = torch.sigmoid(lse - sinks).masked_fill(blind, 0.0)
    out = (out * share.unsqueeze(-1)).to(out.dtype)
    lse = torch.where(blind, sinks, torch.logaddexp(lse, sinks))
    return out, layout.fill_past_end(lse, -torch.inf)


def _widen(x: Tensor, head_dim: int) -> Tensor:
    """``x`` with zeros up to ``head_dim``, and its last dimension contiguous: kernels read it as if it were."""
    x = x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


class _Kernel(torch.autograd.Function):
    """A kernel's forward and backward as one node, with the gradient of lse."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alibi_slopes: Tensor | None,
        rest: tuple[SequenceLayout, SequenceLayout, AttentionSpec, Backend],
    ) -> tuple[Tensor, ...]:
        layout, key_layout, spec, backend = rest
        out, lse, *saved = backend.forward(query, key, value, alibi_slopes, layout, key_layout, spec)
        if out.shape[0] > layout.total:  # kernels leave these rows unwritten
            out[layout.total :] = 0
            lse[layout.total :] = -torch.inf
        return out, lse, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        query, key, value, alibi_slopes, ctx.rest = inputs
        out, lse, *saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)  # most calls have no gradient for lse, and then no column is added
        ctx.save_for_backward(query, key, value, alibi_slopes, out, lse, *saved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        query, key, value, alibi_slopes, out, lse, *saved = ctx.saved_tensors
        layout, key_layout, spec, backend = ctx.rest
        if grad is None and grad_lse is None:
            return (None,) * 5
        if grad is None:
            grad = torch.zeros_like(out)
        problem = (alibi_slopes, layout, key_layout, spec)
        tensors = (grad, query, key, value, out)
        if grad_lse is None:
            grads = backend.backward(*tensors, lse, tuple(saved), *problem)
        else:
            # a row that sees nothing has no weights to pass a gradient to
            grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
            if backend.lse_gradient:
                grads = backend.backward(*tensors, lse, tuple(saved), *problem, grad_lse)
            elif (widened := _with_lse_columns(backend, grad_lse, *tensors)) is not None:
                grads = backend.backward(*widened, lse, tuple(saved), *problem)
            else:
                grads = backend.backward(*tensors, lse, tuple(saved), *problem)
                _add_lse_pass(backend, grads, grad_lse, query, key, lse, *problem)
        grad_query, grad_key, grad_value = (
            _cleared(g, rows.total, like.shape[-1])
            for g, rows, like in zip(grads, (layout, key_layout, key_layout), (query, key, value), strict=True)
        )
        return grad_query, grad_key, grad_value, None, None


# autograd binds each call's arguments to this, and would work it out anew every time (40 µs of host time)
_Kernel.forward.__signature__ = inspect.signature(_Kernel.forward)  # type: ignore[attr-defined]


def _cleared(grad: Tensor, total: int, head_dim: int) -> Tensor:
    """A kernel's gradient without added columns, and 0 in the rows that it leaves unwritten."""
    if grad.shape[0] > total:
        grad[total:] = 0
    return grad if grad.shape[-1] == head_dim else grad[..., :head_dim]


def _with_lse_columns(
    backend: Backend, grad_lse: Tensor, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> tuple[Tensor, ...] | None:
    """The backward's inputs with columns that add −dlse to delta: q = k = v = 0, out = −dlse, dout = 1.

    In 16 bits dlse goes in two columns, its rounding and what that left over. None where the head dim has no room.
    """
    high = grad_lse.to(out.dtype)
    columns = [high] if out.dtype == grad_lse.dtype else [high, (grad_lse - high).to(out.dtype)]
    head_dim, value_dim = backend.head_dims(query.shape[-1], value.shape[-1] + len(columns))
    if max(head_dim, value_dim) > backend.max_head_dim:
        return None
    extra = torch.stack(columns, -1).neg()
    out = _widen(torch.cat([out, extra], -1), value_dim)
    grad = _widen(torch.cat([grad, torch.ones_like(extra)], -1), value_dim)
    return grad, _widen(query, head_dim), _widen(key, head_dim), _widen(value, value_dim), out


def _add_lse_pass(
    backend: Backend,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    spec: AttentionSpec,
) -> None:
    """Add lse's share in a pass of its own: with weights P, dq += scale · dlse · P k and dk += scale · Pᵀ (dlse · q).

    P k is attention with the keys as values, and Pᵀ (dlse · q) is the gradient of those values. Not under softcap,
    whose derivative P does not hold.
    """
    if spec.softcap:
        raise NotImplementedError(
            f"{backend.name} has no room at head dim {query.shape[-1]} for the gradient of lse under softcap: "
            "do not differentiate lse, or pass backend='reference'."
        )
    problem = (alibi_slopes, layout, key_layout, replace(spec, dropout_p=0.0))
    weighted_keys, _, *saved = backend.forward(query, key, key, *problem)
    weighted_queries = (query * grad_lse.unsqueeze(-1)).to(query.dtype)
    share = backend.backward(weighted_queries, query, key, key, weighted_keys, lse, tuple(saved), *problem)[2]  # type: ignore[misc]
    grads[0].add_((weighted_keys * grad_lse.unsqueeze(-1)).to(query.dtype), alpha=spec.scale)
    grads[1].add_(share, alpha=spec.scale)


def _attend_to_nothing(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    return out, query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))


def _pass_nothing_back(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


# Runs where there are no queries or no keys at all, for which kernels do not launch.
_NOTHING = Backend(
    name="nothing",
    about="no tokens on one side",
    missing=lambda: None,
    unsupported=lambda spec: [],
    forward=_attend_to_nothing,
    backward=_pass_nothing_back,
)
