"""How much a call asks of a kernel, counted on the host from the lengths alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..layout import SequenceLayout
from .call import AttentionSpec


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
        return int(spec.window.pairs(queries, keys, spec.lower_right).sum())

    pairs = layout.cached(("pairs", spec.window, spec.lower_right), count, key_layout)
    return Work(layout.batch_size, tokens, pairs)
