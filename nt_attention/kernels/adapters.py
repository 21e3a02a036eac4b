"""A backend's forward and backward with what its kernel lacks: written once here, for all of them.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.

Zero columns change no score, so a head dim that a kernel refuses is padded to one it takes. And a flash backward needs
the output only as delta = rowsum(dout · out) (FlashAttention-2, Dao 2023, section 3.1.2), while a gradient that arrives
through the log-sum-exp turns delta into delta − dlse; so one more column with out = −dlse and dout = 1 carries it
through the kernel's own backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .call import AttentionSpec, Backend, Gradients, Known, Problem
from .rewrites import rephrased
from .support import head_dims


class Inputs(NamedTuple):
    """query (T, H, D), key (S, G, D), value (S, G, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor


def forward(backend: Backend, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """out (T, H, Dv), lse (T, H), and the state of the random numbers, None where none were drawn.

    Rows past the layout's total are 0 and −inf.
    """
    query, key, value = inputs
    rows = query.shape[0]
    if (said := rephrased(backend, query, key, value, problem)) is not None:
        moved = Inputs(said.queries.take(query), said.keys.take(key), said.keys.take(value))
        out, lse, state = forward(backend, moved, said.problem)
        lse = said.queries.give(lse, rows, -torch.inf)
        return said.queries.give(out, rows, 0.0), lse.T.contiguous().T, state
    layout, key_layout, _, spec, _ = problem
    if layout.total == 0 or key_layout.total == 0:  # kernels do not launch for nothing
        at = "cpu" if backend.rng_on_host else query.device
        state = torch.zeros(2, dtype=torch.int64, device=at) if spec.dropout_p else None
        lse_dtype = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full((query.shape[1], rows), -torch.inf, dtype=lse_dtype).T
        return query.new_zeros(rows, query.shape[1], value.shape[2]), lse, state
    wide = Inputs(*readable(*_widened(inputs, _dims(backend, problem))))
    out, lse, *drawn = backend.forward(*wide, problem)
    out = (out if out.shape[2] == value.shape[2] else out[..., : value.shape[2]]).contiguous()
    lse = lse if lse.T.is_contiguous() else lse.T.contiguous().T
    if rows > layout.total:  # kernels leave these unwritten
        out[layout.total :] = 0
        lse[layout.total :] = -torch.inf
    return out, lse, drawn[0] if drawn else None


def backward(backend: Backend, known: Known, inputs: Inputs, problem: Problem) -> Gradients:
    """The gradients of query, key and value, laid out as these; 0 in rows past the layouts' totals."""
    assert backend.backward is not None
    known = known._replace(grad=readable(known.grad)[0], out=readable(known.out)[0])
    query, key, value = inputs = Inputs(*readable(*inputs))
    if (said := rephrased(backend, query, key, value, problem)) is not None:
        take, give = said.queries.take, said.keys.give
        grad, grad_lse, out, lse, state = known
        moved = Inputs(take(query), said.keys.take(key), said.keys.take(value))
        known = Known(take(grad), None if grad_lse is None else take(grad_lse), take(out), take(lse), state)
        parts = backward(backend, known, moved, said.problem)
        return (
            _laid_out(said.queries.give(parts[0], query.shape[0], 0.0), query),
            _laid_out(give(parts[1], key.shape[0], 0.0), key),
            _laid_out(give(parts[2], value.shape[0], 0.0), value),
        )
    layout, key_layout, _, spec, _ = problem
    if layout.total == 0 or key_layout.total == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    dims = _dims(backend, problem)
    grad_lse = known.grad_lse
    if grad_lse is not None:
        # a row that sees nothing has no weights to pass a gradient to
        grad_lse = grad_lse.masked_fill(known.lse == -torch.inf, 0.0)
        known = known._replace(grad_lse=grad_lse)
    if grad_lse is None or backend.lse_gradient:
        grads = backend.backward(_widened_to(known, dims), *_widened(inputs, dims), problem)
    elif (with_columns := _with_lse_columns(backend, known, grad_lse, inputs, spec)) is not None:
        known, wide = with_columns
        grads = backend.backward(known, *wide, problem)
    else:
        wide = _widened(inputs, dims)
        grads = backend.backward(_widened_to(known._replace(grad_lse=None), dims), *wide, problem)
        _add_lse_pass(backend, grads, known, grad_lse, wide, problem)
    totals = (layout.total, key_layout.total, key_layout.total)
    grad_query, grad_key, grad_value = map(_cleared, grads, totals, inputs)
    return grad_query, grad_key, grad_value


def _dims(backend: Backend, problem: Problem) -> tuple[int, int]:
    dims = problem.dims or head_dims(backend, problem.spec)
    if dims is None:
        spec = problem.spec
        raise ValueError(f"{backend.name} has no head dim for {spec.head_dim} with values of {spec.value_dim}.")
    return dims


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Kernels read the last dimension as contiguous; a gradient may be an expanded number."""
    return tuple([x if x.stride(-1) == 1 else x.contiguous() for x in tensors])


def _widen(x: Tensor, head_dim: int) -> Tensor:
    """``x`` with zeros up to ``head_dim``."""
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def _widened(inputs: Inputs, dims: tuple[int, int]) -> Inputs:
    return Inputs(_widen(inputs.query, dims[0]), _widen(inputs.key, dims[0]), _widen(inputs.value, dims[1]))


def _cleared(grad: Tensor, total: int, like: Tensor) -> Tensor:
    """A kernel's gradient without added columns, and 0 in the rows that it leaves unwritten."""
    grad = _laid_out(grad if grad.shape[-1] == like.shape[-1] else grad[..., : like.shape[-1]], like)
    if grad.shape[0] > total:
        grad[total:] = 0
    return grad


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    """In memory as ``empty_like`` would be, which is what operators say of their results."""
    if like.is_contiguous():
        return grad.contiguous()
    if grad.stride() == torch.empty_like(like, device="meta").stride():
        return grad
    return torch.empty_like(like).copy_(grad)


def _widened_to(known: Known, dims: tuple[int, int]) -> Known:
    return known._replace(grad=_widen(known.grad, dims[1]), out=_widen(known.out, dims[1]))


def _with_lse_columns(
    backend: Backend, known: Known, grad_lse: Tensor, inputs: Inputs, spec: AttentionSpec
) -> tuple[Known, Inputs] | None:
    """The backward's inputs with columns that add −dlse to delta: q = k = v = 0, out = −dlse, dout = 1.

    In 16 bits dlse goes in two columns, its rounding and what that left over. None where the head dim has no room.
    """
    grad, _, out, lse, state = known
    high = grad_lse.to(out.dtype)
    columns = [high] if out.dtype == grad_lse.dtype else [high, (grad_lse - high).to(out.dtype)]
    room = head_dims(backend, replace(spec, value_dim=spec.value_dim + len(columns)))
    if room is None:
        return None
    extra = torch.stack(columns, -1).neg()
    out = torch.cat([out, extra], -1)
    grad = torch.cat([grad, torch.ones_like(extra)], -1)
    return _widened_to(Known(grad, None, out, lse, state), room), _widened(inputs, room)


def _add_lse_pass(
    backend: Backend, grads: Gradients, known: Known, grad_lse: Tensor, inputs: Inputs, problem: Problem
) -> None:
    """Add lse's share in a pass of its own: with weights P, dq += scale · dlse · P k and dk += scale · Pᵀ (dlse · q).

    P k is attention with the keys as values, and Pᵀ (dlse · q) is the gradient of those values. Not under softcap,
    whose derivative P does not hold.
    """
    assert backend.backward is not None
    query, key, _ = inputs
    spec = problem.spec
    if spec.softcap:
        raise NotImplementedError(
            f"{backend.name} has no room at head dim {query.shape[-1]} for the gradient of lse under softcap: "
            "do not differentiate lse, or pass backend='reference'."
        )
    problem = problem._replace(spec=replace(spec, dropout_p=0.0))
    weighted_keys = backend.forward(query, key, key, problem)[0]
    weighted_queries = (query * grad_lse.unsqueeze(-1)).to(query.dtype)
    known = Known(weighted_queries, None, weighted_keys, known.lse, known.rng_state)
    share = backend.backward(known, query, key, key, problem)[2]
    grads[0].add_((weighted_keys * grad_lse.unsqueeze(-1)).to(query.dtype), alpha=spec.scale)
    grads[1].add_(share, alpha=spec.scale)
