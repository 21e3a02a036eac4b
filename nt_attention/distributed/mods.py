"""`score_mod` and `mask_mod` on a rank that has some of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def shift_heads(mod: Callable[..., Tensor], is_mask: bool, first: int) -> Callable[..., Tensor]:
    """A mod for the heads of a rank, which calls `mod` with the index of the head among all heads.

    Args:
        mod: `mask_mod(b, h, q_idx, kv_idx)` or `score_mod(score, b, h, q_idx, kv_idx)`.
        is_mask: whether it is a `mask_mod`.
        first: the index of the rank's first head among all heads.
    """
    if is_mask:

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mod(b, h + first, q_idx, kv_idx)

        return mask_mod

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(score, b, h + first, q_idx, kv_idx)

    return score_mod


def has_mods(options: dict[str, Any]) -> bool:
    """Whether a call has `score_mod` or `mask_mod`."""
    return options.get("score_mod") is not None or options.get("mask_mod") is not None
