"""How much a call asks of a kernel, counted on the host from the lengths alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .spec import AttentionSpec


class Work(NamedTuple):
    """What the time of every kernel goes by.

    Attributes:
        sequences: B.
        tokens: of queries and keys in the mean, (T + S) / 2.
        pairs: (query, key) pairs that causality and the window leave, of one head.
    """

    sequences: int
    tokens: float
    pairs: float


def work(layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec) -> Work:
    """Without a window from what the layouts know; else kept with them, so that a second layer counts nothing."""
    tokens = (layout.total + key_layout.total) / 2
    if spec.equal_lengths and spec.window[0] == math.inf and spec.window[1] in (0, math.inf):
        squares = layout.sum_of_squares
        return Work(layout.batch_size, tokens, squares if spec.sees_all else (squares + layout.total) / 2)

    def count() -> int:
        queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
        return int(visible_pairs(queries, keys, spec.window, spec.lower_right).sum())

    pairs = layout.remember(("pairs", spec.window, spec.lower_right), count, key_layout)
    return Work(layout.batch_size, tokens, pairs)


def visible_pairs(queries: Tensor, keys: Tensor, window: tuple[float, float], lower_right: bool) -> Tensor:
    """(B,) pairs of each sequence with Lq ``queries`` and Lk ``keys``.

    Query i sees keys from i + shift − left up to i + shift + right, cut to 0 … Lk; the sum over i of a line that is cut
    at both ends has a closed form.
    """
    shift = keys - queries if lower_right else torch.zeros_like(keys)
    left, right = window
    before = 0 * keys if left == math.inf else _sum_of_cut_line(shift - int(left), queries, keys)
    upto = queries * keys if right == math.inf else _sum_of_cut_line(shift + int(right) + 1, queries, keys)
    return upto - before


def _sum_of_cut_line(start: Tensor, count: Tensor, top: Tensor) -> Tensor:
    """The sum of min(max(start + i, 0), top) over i < count."""
    return _sum_below(start + count, top) - _sum_below(start, top)


def _sum_below(end: Tensor, top: Tensor) -> Tensor:
    """The sum of min(j, top) over 0 ≤ j < end."""
    end = end.clamp(min=0)
    rising = torch.minimum(end, top)
    return rising * (rising - 1) // 2 + (end - rising) * top
