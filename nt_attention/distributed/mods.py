"""`score_mod` and `mask_mod` on a rank that has pieces of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layouts.cache import to_device


def has_mods(options: dict[str, Any]) -> bool:
    """Whether a call has `score_mod` or `mask_mod`."""
    return options.get("score_mod") is not None or options.get("mask_mod") is not None


def with_indices_of_batch(
    options: dict[str, Any], sequences: Sequence[tuple[int, int, int]], first_head: int, device: torch.device
) -> dict[str, Any]:
    """The options, in which `score_mod` and `mask_mod` get the indices of the whole batch.

    Args:
        options: those of a call.
        sequences: for each sequence of the call, its index in the batch, its first query and its first key.
        first_head: the first head of the call.
        device: the device of the call.
    """
    table = to_device(np.array(sequences, np.int32).reshape(-1, 3).T.copy(), device)
    batch, first_query, first_key = table.unbind()
    score_mod: Callable[..., Tensor] | None = options["score_mod"]
    mask_mod: Callable[..., Tensor] | None = options["mask_mod"]

    def shifted_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert score_mod is not None
        return score_mod(score, batch[b], h + first_head, q_idx + first_query[b], kv_idx + first_key[b])

    def shifted_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert mask_mod is not None
        return mask_mod(batch[b], h + first_head, q_idx + first_query[b], kv_idx + first_key[b])

    return {
        **options,
        "score_mod": None if score_mod is None else shifted_score,
        "mask_mod": None if mask_mod is None else shifted_mask,
    }
