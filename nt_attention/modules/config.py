"""The options of a `VarlenMultiheadAttention`, as arguments of the attention functions.

Dimensions: G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AttentionConfig(NamedTuple):
    """The options of one call.

    Attributes:
        options: keyword arguments of `varlen_attention`, except that `dropout_p` may be 1.
        bias_k, bias_v: (1, 1, G·D), a key that is added to every sequence, and its value.
        add_zero_attn: whether a key of zeros, with a value of zeros, is added to every sequence.
    """

    options: Mapping[str, Any]
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool

    @property
    def num_added_keys(self) -> int:
        return (self.bias_k is not None) + self.add_zero_attn

    def added_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that are added to every sequence, and their values: (1 or 2, G, D) each."""
        return self._added(self.bias_k, k), self._added(self.bias_v, v)

    def _added(self, bias: Tensor | None, x: Tensor) -> Tensor:
        rows = [] if bias is None else [bias.to(x.dtype).view(1, *x.shape[-2:])]
        return torch.cat([*rows, x.new_zeros(1, *x.shape[-2:])] if self.add_zero_attn else rows)
