"""`CallSize`: the size of a call, from which expected times are computed.

Dimensions: B sequences, T query tokens, S key tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ..layouts.tree import TreeLayout
from .call import Call


class CallSize(NamedTuple):
    """The size of a call, computed on the host from the lengths.

    Attributes:
        sequences: B.
        tokens: The mean of query tokens and key tokens, (T + S) / 2.
        pairs: The number of visible (query, key) pairs of one head.
        most_queries: The most query tokens of a sequence, or an upper bound.
        tree: The layout of a call whose sequences share prefixes. Its time depends on the way in which it runs.
    """

    sequences: int
    tokens: float
    pairs: float
    most_queries: float = math.inf
    tree: TreeLayout | None = None

    @classmethod
    def of(cls, call: Call) -> CallSize:
        """The size of `call`. Pairs that take time to count are cached with the layouts."""
        layout, key_layout, _, spec, *_ = call
        if isinstance(layout, TreeLayout):  # a token sees the keys of its path; keys are not counted again
            spec = replace(spec, tree=False, equal_lengths=False, causal_alignment="lower_right")
            paths = cls.of(call._replace(layout=layout.segments, key_layout=layout.paths, spec=spec))
            return paths._replace(tokens=layout.total, tree=layout)
        tokens, most_queries = (layout.total + key_layout.total) / 2, layout.max_seqlen
        if spec.bounded or spec.paged:  # as if each query saw as many keys as the bounds allow
            pairs = layout.total * min(key_layout.max_seqlen, sum(spec.window) + 1)
            return cls(layout.batch_size, tokens, pairs, most_queries)
        if spec.equal_lengths and (spec.window.is_open or spec.window.is_causal):
            squares = layout.sum_of_squares
            pairs = squares if spec.window.is_open else (squares + layout.total) / 2
            return cls(layout.batch_size, tokens, pairs, most_queries)

        def count() -> int:
            queries, keys = layout.host.diff(), key_layout.host.diff()
            return int(spec.window.pairs(queries, keys, spec.lower_right).sum())

        pairs = layout.cached(("pairs", spec.window, spec.lower_right), count, key_layout)
        return cls(layout.batch_size, tokens, pairs, most_queries)
