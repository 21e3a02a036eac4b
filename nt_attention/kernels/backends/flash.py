"""What the flash kernels share: their dtypes, bounds, and the log-sum-exp of fully masked rows.

They follow FlashAttention-2 (Dao 2023). torch's and flash-attn's mark such a row with lse +inf, which no other lse can
be, and with which their backward gives it weights of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import SequenceLayout
from ..call import AttentionSpec

HALVES = (torch.float16, torch.bfloat16)


def longest(layout: SequenceLayout) -> int:
    """The bound that kernels launch by. Not 1, for which they fold grouped heads and take no empty sequence."""
    return max(2, layout.max_seqlen)


def tokens_first(lse: Tensor, spec: AttentionSpec) -> Tensor:
    """The kernel's (H, T) as ours (T, H), −inf in fully masked rows; a view unless there may be such rows."""
    return (lse.masked_fill(lse == torch.inf, -torch.inf) if spec.may_have_fully_masked_rows else lse).transpose(0, 1)


def heads_first(lse: Tensor, spec: AttentionSpec) -> Tensor:
    """Ours (T, H) as the kernel's (H, T), contiguous."""
    if spec.may_have_fully_masked_rows:
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return lse.transpose(0, 1).contiguous()
