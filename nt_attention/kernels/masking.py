"""Which keys a query sees, and ALiBi's bias: the one place that knows how windows and causality are aligned. And what
a caller's own functions make of scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def visible(rows: int, keys: int, diagonal: int, window: tuple[float, float], device: torch.device) -> Tensor | None:
    """Which keys j query i sees: (rows, keys) bool, i + diagonal − left ≤ j ≤ i + diagonal + right. None if all."""
    left, right = window
    if diagonal + right >= keys - 1 and rows - 1 + diagonal - left <= 0:
        return None
    ahead = _ahead(rows, keys, diagonal, device)
    return (ahead >= -left) & (ahead <= right)


def alibi_bias(rows: int, keys: int, diagonal: int, slopes: Tensor) -> Tensor:
    """(…, H, rows, keys), −slope · |i + diagonal − j| for slopes (…, H) (Press et al. 2022, made symmetric)."""
    distance = _ahead(rows, keys, diagonal, slopes.device).abs()
    return -slopes[..., None, None] * distance


def _ahead(rows: int, keys: int, diagonal: int, device: torch.device) -> Tensor:
    """(rows, keys) how far key j lies ahead of query i's own place."""
    return torch.arange(keys, device=device) - (torch.arange(rows, device=device) + diagonal)[:, None]


def for_each_score(mod: Callable[..., Tensor], scores: Tensor, b: int) -> Tensor:
    """Call ``mod(score, b, h, q_idx, kv_idx)`` on scalars, as flex_attention does, for every score (H, Lq, Lk)."""
    heads, queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape)
    over_keys = torch.vmap(mod, in_dims=(0, None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(0, None, None, 0, None))
    over_heads = torch.vmap(over_queries, in_dims=(0, None, 0, None, None))
    return over_heads(scores, torch.tensor(b, device=scores.device), heads, queries, keys)
