"""Checks of what a registered backend returns. Our own backends return what is promised, so they run without.

Dimensions: T query tokens, H query heads, D and Dv head dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backend import Backend, BackwardInputs
from .call import Call


def checked(backend: Backend) -> Backend:
    """The backend, with functions that raise a ValueError if what they return has another shape, dtype or device."""
    functions: dict[str, Any] = {"forward": _forward(backend.name, backend.forward)}
    if backend.paged_forward is not None:
        functions["paged_forward"] = _forward(backend.name, backend.paged_forward)
    if backend.prepare_forward is not None:
        functions["prepare_forward"] = _prepare_forward(backend.name, backend.prepare_forward)
    if backend.backward is not None:
        functions["backward"] = _backward(backend.name, backend.backward)
    if backend.prepare_backward is not None:
        functions["prepare_backward"] = _prepare_backward(backend.name, backend.prepare_backward)
    return dataclasses.replace(backend, **functions)


def _forward(name: str, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call, **more: Any) -> tuple[Tensor, ...]:
        return _check_results(name, function(query, key, value, call, **more), query, value, call)

    return forward


def _prepare_forward(name: str, prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Callable[..., tuple[Tensor, ...]]:
        run = prepare(query, key, value, call)
        return lambda query, key, value: _check_results(name, run(query, key, value), query, value, call)

    return prepare_forward


def _backward(name: str, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def backward(saved: BackwardInputs, *inputs: Any, **more: Any) -> tuple[Tensor, ...]:
        return _check_gradients(name, function(saved, *inputs, **more), inputs[:3], inputs[3])

    return backward


def _prepare_backward(name: str, prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_backward(saved: BackwardInputs, *inputs: Any) -> Callable[..., tuple[Tensor, ...]]:
        run, call = prepare(saved, *inputs), inputs[3]
        return lambda saved, *inputs: _check_gradients(name, run(saved, *inputs), inputs, call)

    return prepare_backward


def _check_results(name: str, results: Any, query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """`results` of a forward: out (T, H, Dv), lse (T, H), and with dropout the random state."""
    wanted = 3 if call.spec.dropout_p else 2
    if not isinstance(results, (tuple, list)) or len(results) < wanted:
        raise ValueError(
            f"forward of the backend {name!r} must return {'out, lse and rng_state' if wanted == 3 else 'out and lse'}"
            f", got {_describe(results)}."
        )
    rows, heads, _ = query.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    _check(f"out of the backend {name!r}", results[0], (rows, heads, value.shape[-1]), query, (query.dtype,))
    _check(f"lse of the backend {name!r}", results[1], (rows, heads), query, (precise,))
    return tuple(results)


def _check_gradients(name: str, grads: Any, inputs: Any, call: Call) -> tuple[Tensor, ...]:
    """`grads` of a backward, of `inputs` and of a relative bias. They may be more precise than these."""
    biases = call.relative.tensors if call.relative is not None and call.spec.relative_grad else ()
    tensors = (*inputs, *biases)
    if not isinstance(grads, (tuple, list)) or len(grads) != len(tensors):
        raise ValueError(
            f"backward of the backend {name!r} must return {len(tensors)} gradients, got {_describe(grads)}."
        )
    for index, (grad, x) in enumerate(zip(grads, tensors, strict=True)):
        dtypes = (x.dtype, torch.promote_types(x.dtype, torch.float32), torch.float64)
        _check(f"gradient {index} of the backend {name!r}", grad, tuple(x.shape), x, dtypes)
    return tuple(grads)


def _check(what: str, x: Any, shape: tuple[int, ...], like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype not in dtypes or x.device != like.device:
        raise ValueError(f"{what} must be {shape} {dtypes[0]} on {like.device}, got {_describe(x)}.")


def _describe(x: object) -> str:
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    return f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)
