"""Shared by the flash backends: dtypes, the longest sequence, and the log-sum-exp of fully masked rows.

The kernels follow FlashAttention-2 (Dao 2023). Those of torch and flash-attn return lse = +inf for fully masked rows,
and their backward then computes weights of 0.

Dimensions: T query tokens, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layouts.protocol import Layout
from ..call import AttentionSpec, Call

HALVES = (torch.float16, torch.bfloat16)


def longest(layout: Layout) -> int:
    """The `max_seqlen` for kernels, at least 2: with 1 they take another path, which fails on empty sequences."""
    return max(2, min(layout.max_seqlen, layout.total))


def longest_keys(call: Call) -> int:
    """`longest` of the keys; of the queries, if they are more and the right side of the window is no shorter than keys.

    The kernels take it for such a side, or take that side as open. The first of many queries are further from the keys.
    """
    most, (left, right) = longest(call.key_layout), call.spec.window.sizes
    return max(most, longest(call.layout)) if left >= 0 > right or right >= most else most


def tokens_first(lse: Tensor, spec: AttentionSpec) -> Tensor:
    """(H, T) of a kernel to (T, H) with −inf in fully masked rows; a view if there can be none."""
    return (lse.masked_fill(lse == torch.inf, -torch.inf) if spec.may_have_fully_masked_rows else lse).transpose(0, 1)


def heads_first(lse: Tensor, spec: AttentionSpec) -> Tensor:
    """(T, H) to (H, T) for a kernel, contiguous, with +inf in fully masked rows."""
    if spec.may_have_fully_masked_rows:
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return lse.transpose(0, 1).contiguous()
