"""Adapters around kernels, shared by all backends. They add what a kernel does not support:

- Rewrites of the call (`kernels/rewrites.py`).
- Alignment: inputs whose rows begin between multiples of 16 bytes are copied for kernels that can't read them.
- Head dims: inputs are padded with columns of zeros, which change no score, to a head dim that the kernel supports.
- The gradient of lse: a flash backward uses the output only in delta = rowsum(dout · out) (FlashAttention-2, Dao 2023,
  section 3.1.2), and a gradient of lse changes delta to delta − dlse. One more column with out = −dlse and dout = 1 has
  this effect.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import bounds
from .backend import Backend, BackwardInputs, Gradients
from .call import MOST_PREPARED, AttentionSpec, Call, geometry
from .rewrites import Rewrite, rewrite
from .support import head_dims


class Tensors(NamedTuple):
    """query (T, H, D), key (S, G, D), value (S, G, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor


def is_direct(backend: Backend, call: Call, dims: tuple[int, int] | None) -> bool:
    """The value of `Call.is_direct` of a call that runs with these head dims."""
    spec = call.spec
    return (
        dims == (spec.head_dim, spec.value_dim)
        and not (spec.paged or spec.tree or ("lower_right_only" in backend.traits and spec.is_upper_left))
        and ("no_fully_masked_rows" not in backend.traits or not spec.may_have_fully_masked_rows)
        and min(call.layout.total, call.key_layout.total) > 0
    )


def _runs_directly(call: Call, tensors: Tensors) -> bool:
    """Whether no adapter is needed for a call with these tensors."""
    query, key, value = tensors
    if not call.is_direct or query.shape[0] != call.layout.total or key.shape[0] != call.key_layout.total:
        return False
    return query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and value.shape[0] == key.shape[0]


def _keep(call: Call, key: tuple[Any, ...], run: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a prepared run for other tensors of this geometry."""
    assert call.prepared is not None
    if len(call.prepared) < MOST_PREPARED:
        call.prepared[key] = run
    return run


def forward(
    backend: Backend, inputs: Tensors, call: Call, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out (T, H, Dv), lse (T, H), and the random state, None without dropout.

    Rows past the layout's total are 0 and −inf. If the backend can write to `given` (T, H, Dv), that is `out`.
    """
    is_given = given is not None and "takes_outputs" in backend.traits
    if call.prepared and not is_given and (run := call.prepared.get(geometry(*inputs))) is not None:
        out, lse, *states = run(*inputs)
        return out, lse, states[0] if states else None
    if "aligned_rows" in backend.traits and not _are_aligned(*inputs):
        return forward(backend, Tensors(*_align(*inputs)), call, given)
    if not _runs_directly(call, inputs):
        return _adapted_forward(backend, inputs, call)
    if is_given:
        out, lse, *states = backend.forward(*inputs, call, out=given)
    elif call.prepared is not None and backend.hooks.prepare_forward is not None:
        run = _keep(call, geometry(*inputs), backend.hooks.prepare_forward(*inputs, call))
        out, lse, *states = run(*inputs)
    else:
        out, lse, *states = backend.forward(*inputs, call)
    if out is not given:
        out = out.contiguous()
    lse = lse if lse.T.is_contiguous() else lse.T.contiguous().T
    return out, lse, states[0] if states else None


def differentiable_forward(backend: Backend, inputs: Tensors, call: Call) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H) of a backend whose forward PyTorch differentiates. Head dims are padded."""
    dims = _head_dims(backend, call)
    if backend.name != "reference":  # the reference reads any strides
        inputs = Tensors(*contiguous_in_head_dim(*_pad_all(inputs, dims)))
    out, lse = backend.forward(*inputs, call)[:2]
    return out[..., : call.spec.value_dim] if out.shape[-1] != call.spec.value_dim else out, lse


def _adapted_forward(backend: Backend, inputs: Tensors, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    query, key, value = inputs
    rows = query.shape[0]
    if (rewritten := rewrite(backend, query, key, value, call)) is not None:
        queries, keys, call = rewritten
        rewritten_inputs = Tensors(queries.select(query), keys.select(key), keys.select(value))
        out, lse, state = forward(backend, rewritten_inputs, call)
        return queries.restore(out, rows, 0.0), queries.restore(lse, rows, -torch.inf).T.contiguous().T, state
    layout, key_layout, _, spec, *_ = call
    if layout.total == 0 or key_layout.total == 0:  # kernels can't be launched on empty tensors
        state = torch.zeros(2, dtype=torch.int64, device=query.device) if spec.dropout_p else None
        lse_dtype = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full((query.shape[1], rows), -torch.inf, dtype=lse_dtype).T
        out = query.new_zeros(rows, query.shape[1], value.shape[2])
        _fill_if_bounded(call, out, lse)
        return out, lse, state
    padded = contiguous_in_head_dim(*_pad_all(inputs, _head_dims(backend, call)))
    out, lse, *states = backend.forward(*padded, call)
    out = (out if out.shape[2] == spec.value_dim else out[..., : spec.value_dim]).contiguous()
    lse = lse if lse.T.is_contiguous() else lse.T.contiguous().T
    if rows > layout.total:  # kernels do not write these rows
        out[layout.total :] = 0
        lse[layout.total :] = -torch.inf
        _fill_if_bounded(call, out[layout.total :], lse[layout.total :])
    return out, lse, states[0] if states else None


def backward(
    backend: Backend, saved: BackwardInputs, inputs: Tensors, call: Call, dq: Tensor | None = None
) -> Gradients:
    """The gradients, 0 in rows past the layouts' totals.

    Those of query, key and value have the strides of `empty_like`. Those of a relative bias are contiguous, and in its
    dtype. If the backend can write to `dq` (T, H, D), that is the gradient of the query.
    """
    is_given = dq is not None and "takes_outputs" in backend.traits
    if not saved.grad.stride(-1) == saved.out.stride(-1) == 1:
        grad, out = contiguous_in_head_dim(saved.grad, saved.out)
        saved = saved._replace(grad=grad, out=out)
    if call.prepared and not is_given and (run := call.prepared.get(geometry(*saved, *inputs))) is not None:
        return run(saved, *inputs)
    if "aligned_rows" in backend.traits and not _are_aligned(saved.grad, saved.out, *inputs):
        grad, out, *aligned = _align(saved.grad, saved.out, *inputs)
        grads = backward(backend, saved._replace(grad=grad, out=out), Tensors(*aligned), call, dq)
        restored = zip(grads, contiguous_in_head_dim(*inputs), strict=False)
        return (*[grad if grad is dq else _with_strides_of(grad, x) for grad, x in restored], *grads[3:])
    if not (saved.grad_lse is None and call.relative is None and _runs_directly(call, inputs)):
        return _adapted_backward(backend, saved, inputs, call, dq)
    if call.prepared is not None and not is_given and backend.hooks.prepare_backward is not None:
        run = _keep(call, geometry(*saved, *inputs), backend.hooks.prepare_backward(saved, *inputs, call))
        return run(saved, *inputs)
    assert backend.backward is not None
    more = {"dq": dq} if is_given else {}
    grads = backend.backward(saved, *inputs, call, **more)
    return tuple([grad if grad is dq else _with_strides_of(grad, x) for grad, x in zip(grads, inputs, strict=True)])


def _adapted_backward(
    backend: Backend, saved: BackwardInputs, inputs: Tensors, call: Call, dq: Tensor | None
) -> Gradients:
    inputs = Tensors(*contiguous_in_head_dim(*inputs))
    if (rewritten := rewrite(backend, *inputs, call)) is not None:
        return _rewritten_backward(backend, saved, inputs, rewritten)
    layout, key_layout = call.layout, call.key_layout
    biases = call.relative.tensors if call.relative is not None and call.spec.relative_grad else ()
    if layout.total == 0 or key_layout.total == 0:
        zeros = (*map(torch.zeros_like, inputs), *[x.new_zeros(x.shape) for x in biases])
        _fill_if_bounded(call, *zeros)
        return zeros
    if saved.grad_lse is not None:
        # lse of a fully masked row depends on no input, so its gradient is dropped
        saved = saved._replace(grad_lse=saved.grad_lse.masked_fill(saved.lse == -torch.inf, 0.0))
    totals = (layout.total, key_layout.total, key_layout.total)
    dq = dq if len(inputs.query) == layout.total else None
    query, key, value, *of_biases = _kernel_backward(backend, saved, inputs, call, dq)
    grads = [
        grad if grad is dq else _without_padding(grad, total, x)
        for grad, total, x in zip((query, key, value), totals, inputs, strict=True)
    ]
    _fill_if_bounded(call, *[x[total:] for x, total in zip(grads, totals, strict=True) if len(x) > total])
    return (*grads, *[grad.to(x.dtype).contiguous() for grad, x in zip(of_biases, biases, strict=True)])


def _fill_if_bounded(call: Call, *results: Tensor) -> None:
    """Write NaN to results that no kernel writes, if only the device knows that offsets are invalid."""
    if call.spec.bounded and results:
        value = bounds.check(call.layout, call.key_layout).fill_value
        for x in results:
            x.add_(value)


def _rewritten_backward(backend: Backend, saved: BackwardInputs, inputs: Tensors, rewritten: Rewrite) -> Gradients:
    queries, keys, call = rewritten
    rewritten_inputs = Tensors(queries.select(inputs.query), keys.select(inputs.key), keys.select(inputs.value))
    grad, grad_lse, out, lse, state = saved
    grad_lse = None if grad_lse is None else queries.select(grad_lse)
    saved = BackwardInputs(queries.select(grad), grad_lse, queries.select(out), queries.select(lse), state)
    found = backward(backend, saved, rewritten_inputs, call)
    grads, of_biases = found[:3], found[3:]
    restored = [
        _with_strides_of(side.restore(grad, x.shape[0], 0.0), x)
        for side, grad, x in zip((queries, keys, keys), grads, inputs, strict=True)
    ]
    if call.relative is not None and of_biases:
        moved = call.relative.with_tensors(of_biases).map_rows(
            lambda grad: queries.restore(grad, inputs.query.shape[0], 0.0),
            lambda grad: keys.restore(grad, inputs.key.shape[0], 0.0),
        )
        of_biases = moved.tensors
    return (*restored, *of_biases)


def _kernel_backward(
    backend: Backend, saved: BackwardInputs, inputs: Tensors, call: Call, dq: Tensor | None
) -> Gradients:
    """The backward of the kernel, and the gradient of lse: by the kernel, by added columns, or by a second call."""
    assert backend.backward is not None
    dims = _head_dims(backend, call)
    grad_lse = saved.grad_lse
    if grad_lse is None or "lse_gradient" in backend.traits:
        takes_dq = dq is not None and "takes_outputs" in backend.traits and dq.shape[2] == dims[0]
        more = {"dq": dq} if takes_dq else {}
        return backend.backward(_pad_saved(saved, dims), *_pad_all(inputs, dims), call, **more)
    if (with_columns := _with_lse_columns(backend, saved, grad_lse, inputs, call.spec)) is not None:
        saved, wide = with_columns
        return backend.backward(saved, *wide, call)
    wide = _pad_all(inputs, dims)
    grads = backend.backward(_pad_saved(saved._replace(grad_lse=None), dims), *wide, call)
    _add_lse_share(backend, grads, saved, grad_lse, wide, call)
    return grads


def _with_lse_columns(
    backend: Backend, saved: BackwardInputs, grad_lse: Tensor, inputs: Tensors, spec: AttentionSpec
) -> tuple[BackwardInputs, Tensors] | None:
    """The inputs of the backward with columns that add −dlse to delta: v = 0, out = −dlse, dout = 1.

    In 16 bits there are two columns, for dlse and its rounding error. None if the kernel supports no larger head dim.
    """
    grad, _, out, lse, state = saved
    high = grad_lse.to(out.dtype)
    columns = [high] if out.dtype == grad_lse.dtype else [high, (grad_lse - high).to(out.dtype)]
    dims = head_dims(backend, replace(spec, value_dim=spec.value_dim + len(columns)))
    if dims is None:
        return None
    extra = torch.stack(columns, -1).neg()
    saved = BackwardInputs(torch.cat([grad, torch.ones_like(extra)], -1), None, torch.cat([out, extra], -1), lse, state)
    return _pad_saved(saved, dims), _pad_all(inputs, dims)


def _add_lse_share(
    backend: Backend, grads: Gradients, saved: BackwardInputs, grad_lse: Tensor, inputs: Tensors, call: Call
) -> None:
    """Add the gradient through lse in place, by a second call of the kernel.

    With weights P: dq += scale · dlse · P k and dk += scale · Pᵀ (dlse · q). P k is attention with the keys as values,
    and Pᵀ (dlse · q) is the gradient of these values. This needs scores that are linear in query · key.
    """
    assert backend.backward is not None
    query, key, _ = inputs
    spec = call.spec
    if blocking := [*spec.nonlinear, *(["relative"] if spec.relative_grad else [])]:
        raise NotImplementedError(
            f"{backend.name} does not support the gradient of lse at head dim {query.shape[-1]} with "
            f"{', '.join(blocking)}: do not differentiate lse, or pass backend='reference'."
        )
    call = call._replace(spec=replace(spec, dropout_p=0.0))
    weighted_keys = backend.forward(query, key, key, call)[0]
    weighted_queries = (query * grad_lse.unsqueeze(-1)).to(query.dtype)
    saved = BackwardInputs(weighted_queries, None, weighted_keys, saved.lse, saved.rng_state)
    share = backend.backward(saved, query, key, key, call)[2]
    grads[0].add_((weighted_keys * grad_lse.unsqueeze(-1)).to(query.dtype), alpha=spec.scale)
    grads[1].add_(share, alpha=spec.scale)


def contiguous_in_head_dim(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, made contiguous in the last dimension for kernels. A gradient may be an expanded scalar."""
    return tuple([x if x.stride(-1) == 1 else x.contiguous() for x in tensors])


def readable(backend: Backend, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied where this kernel can't read them."""
    return contiguous_in_head_dim(*(_align(*tensors) if "aligned_rows" in backend.traits else tensors))


def _are_aligned(*tensors: Tensor) -> bool:
    """Whether each row of a head begins at a multiple of 16 bytes, or is copied in any case to pad its head dim."""
    for x in tensors:
        row, head, _ = x.stride()
        if x.shape[2] * x.itemsize % 16 == 0 and (x.data_ptr() | row * x.itemsize | head * x.itemsize) % 16:
            return False
    return True


def _align(*tensors: Tensor) -> list[Tensor]:
    return [x if _are_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _head_dims(backend: Backend, call: Call) -> tuple[int, int]:
    dims = call.head_dims or head_dims(backend, call.spec)
    if dims is None:
        spec = call.spec
        raise ValueError(f"{backend.name} does not support head dim {spec.head_dim} with values of {spec.value_dim}.")
    return dims


def _pad(x: Tensor, head_dim: int) -> Tensor:
    """`x` padded with zeros to `head_dim`."""
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def _pad_all(inputs: Tensors, dims: tuple[int, int]) -> Tensors:
    return Tensors(_pad(inputs.query, dims[0]), _pad(inputs.key, dims[0]), _pad(inputs.value, dims[1]))


def _pad_saved(saved: BackwardInputs, dims: tuple[int, int]) -> BackwardInputs:
    return saved._replace(grad=_pad(saved.grad, dims[1]), out=_pad(saved.out, dims[1]))


def _without_padding(grad: Tensor, total: int, like: Tensor) -> Tensor:
    """A kernel's gradient without padded columns, and 0 in rows past `total`, which kernels do not write."""
    grad = _with_strides_of(grad if grad.shape[-1] == like.shape[-1] else grad[..., : like.shape[-1]], like)
    if grad.shape[0] > total:
        grad[total:] = 0
    return grad


def _with_strides_of(grad: Tensor, like: Tensor) -> Tensor:
    """`grad` with the strides of `empty_like(like)`, as in the fake implementations."""
    if like.is_contiguous():
        return grad.contiguous()
    if grad.stride() == torch.empty_like(like, device="meta").stride():
        return grad
    return torch.empty_like(like).copy_(grad)
