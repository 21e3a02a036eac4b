"""Checks of what a registered backend returns. Our own backends return what is promised, so they run without.

Dimensions: T query tokens, H query heads, D and Dv head dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backend import Backend
from .call import Call


def checked(backend: Backend) -> Backend:
    """The backend, with functions that raise a ValueError if what they return has another shape, dtype or device."""
    name = backend.name

    def forward(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, call, **more: _check_results(name, function(q, k, v, call, **more), q, v, call)

    def backward(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda saved, q, k, v, call, **more: _check_gradients(
            name, function(saved, q, k, v, call, **more), (q, k, v), call
        )

    def prepare_forward(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*given: Any) -> Callable[..., Any]:
            run, call = prepare(*given), given[-1]
            return lambda q, k, v: _check_results(name, run(q, k, v), q, v, call)

        return prepared

    def prepare_backward(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*given: Any) -> Callable[..., Any]:
            run, call = prepare(*given), given[-1]
            return lambda saved, *inputs: _check_gradients(name, run(saved, *inputs), inputs, call)

        return prepared

    checks: dict[str, Any] = {"forward": forward, "paged_forward": forward, "backward": backward}
    checks |= {"prepare_forward": prepare_forward, "prepare_backward": prepare_backward}
    functions: Any = {field: check(x) for field, check in checks.items() if (x := getattr(backend, field)) is not None}
    return dataclasses.replace(backend, **functions)


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
