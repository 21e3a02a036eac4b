"""Runs the `forward` of `nn.MultiheadAttention` with the parameters of a `VarlenMultiheadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..torch_private import SAME_DIMS, forward_hooks_of


def reads_weight_only(linear: nn.Module) -> bool:
    """Whether a call of `linear` gives what its weight and bias say, so that code may read them and not call it."""
    is_linear = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
    return is_linear and not (any(forward_hooks_of(linear)) or "forward" in linear.__dict__)


def stock_attention(attention: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward(attention, *args, **kwargs)`, for a subclass with the same parameters.

    It runs on an `nn.MultiheadAttention` with the attributes of `attention`, because the property
    `SAME_DIMS` of the subclass has another meaning.
    """
    stock = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
    has_one_weight = attention.in_proj_weight is not None
    stock.__dict__.update(attention.__dict__, **{SAME_DIMS: has_one_weight})
    return nn.MultiheadAttention.forward(stock, *args, **kwargs)
