"""Which keys a query sees, and ALiBi's bias: the one place that knows how windows and causality are aligned."""

from __future__ import annotations

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
