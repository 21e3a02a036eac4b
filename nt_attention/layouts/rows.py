"""Moves rows between packed and padded tensors.

Dimensions: B rows of a padded batch, L positions in a row, N rows of a packed tensor, T tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..compiler import is_compiling
from ..torch_private import forward_ad_level, is_transformed


def scatter_rows(values: Tensor, index: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """A tensor of `shape` (B, L, …) with `values[t]` at position `index[t]` of the flattened B · L, else `value`.

    It has its own autograd function, because `index_copy_` would save the values and return a view.
    """
    if not is_compiling():
        is_derived = is_transformed() or forward_ad_level() >= 0
        if not (is_derived or (values.requires_grad and torch.is_grad_enabled())):
            return _Scatter.forward(values, index, shape, value)  # `apply` takes 50 µs
        return cast(Tensor, (_Scatter if is_derived else _EagerScatter).apply(values, index, shape, value))
    padded = values.new_full((shape[0] * shape[1], *shape[2:]), value)
    return padded.index_put((index,), values).unflatten(0, shape[:2])


def fill_rows_from(first: int | Tensor, values: Tensor, value: float) -> Tensor:
    """`values` (N, …) with `value` in the rows from row `first` on."""
    past = torch.arange(values.shape[0], device=values.device) >= first
    return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)


class _Scatter(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, index: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
        padded = values.new_full(shape, value)
        padded.view(shape[0] * shape[1], *shape[2:]).index_copy_(0, index, values)
        return padded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, ctx.shape, _ = inputs
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad.shape[0] * grad.shape[1]
        packed = grad.reshape(rows, *grad.shape[2:])  # `flatten` has no batching rule for is_grads_batched=True
        return packed.index_select(0, ctx.saved_tensors[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return cast(Tensor, _Scatter.apply(tangent, ctx.saved_tensors[0], ctx.shape, 0.0))


class _EagerScatter(_Scatter):
    """`_Scatter` without `setup_context`, which only transforms need. It takes half of the host time."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _Scatter.forward(*inputs)
        _Scatter.setup_context(ctx, inputs, output)
        return output
