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
        most_keys: The most keys that a query sees, or an upper bound.
        tree: The layout of a call whose sequences share prefixes. Its time depends on the way in which it runs.
    """

    sequences: int
    tokens: float
    pairs: float
    most_queries: float = math.inf
    most_keys: float = 0.0
    tree: TreeLayout | None = None

    @classmethod
    def of(cls, call: Call) -> CallSize:
        """The size of `call`. Pairs that take time to count are cached with the layouts."""
        layout, key_layout, _, spec, *_ = call
        if isinstance(layout, TreeLayout):  # a token sees the keys of its path; keys are not counted again
            spec = replace(spec, tree=False, equal_lengths=False, causal_alignment="lower_right")
            paths = cls.of(call._replace(layout=layout.segments, key_layout=layout.paths, spec=spec))
            return paths._replace(tokens=layout.total, tree=layout)
        window, tokens = spec.window, (layout.total + key_layout.total) / 2
        most_keys = min(float(key_layout.max_seqlen), window.left + window.right + 1)
        if spec.bounded or spec.paged:  # as if each query saw as many keys as the bounds allow
            return cls(layout.batch_size, tokens, layout.total * most_keys, layout.max_seqlen, most_keys)
        if spec.equal_lengths and (window.is_causal or window.is_open):
            squares = layout.sum_of_squares
            pairs = (squares + layout.total) / 2 if window.is_causal else squares
            return cls(layout.batch_size, tokens, pairs, layout.max_seqlen, most_keys)

        def count() -> int:
            queries, keys = layout.host.diff(), key_layout.host.diff()
            return int(window.pairs(queries, keys, spec.lower_right).sum())

        pairs = layout.cached(("pairs", window, spec.lower_right), count, key_layout)
        return cls(layout.batch_size, tokens, pairs, layout.max_seqlen, most_keys)
