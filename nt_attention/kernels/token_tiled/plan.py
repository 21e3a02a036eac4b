"""A batch as the kernels need it: the rows of the other side that each token meets, and the tiles.

Dimensions: B sequences, T tokens of one side, R runs, N tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._offsets import to_device
from ...layout import SequenceLayout

T = TypeVar("T")
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Meeting:
    """The rows of the other side that each token of one side meets: one interval for each, whatever the mask.

    Attributes:
        lo, hi: (T,) int32; token t meets rows lo[t] … hi[t] − 1. Neither falls from one token to the next, so what the
            tokens of a tile meet together, and what all of them meet, is read off its first and last token.
        own: (T,) int32, the row that stands across from each token; out of its sequence where lengths differ.
    """

    lo: Tensor
    hi: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a batch on the host, and what its tokens meet on the other: all that tiles are made of.

    Attributes:
        offsets, other: (B+1,) of this side and of the other.
        shift: (B,) how far from the other sequence's begin the first token's place across from it is.
        before, after: how many places around the one across are met, inf where that is open.
    """

    offsets: Ints
    other: Ints
    shift: Ints
    before: float
    after: float

    def work(self, begins: Ints, ends: Ints, first: Ints, last: Ints) -> Ints:
        """(N,) how many rows of the other side each tile meets at most, which lies in sequences first … last."""
        lowest = self.other[first]
        if not math.isinf(self.before):
            lowest = (self._across(begins, first) - int(min(self.before, 2**31))).clip(lowest, self.other[first + 1])
        highest = self.other[last + 1]
        if not math.isinf(self.after):
            highest = (self._across(ends, last) + int(min(self.after, 2**31))).clip(self.other[last], highest)
        return highest - lowest

    def _across(self, token: Ints, sequence: Ints) -> Ints:
        return token - self.offsets[sequence] + self.other[sequence] + self.shift[sequence]


@dataclass(frozen=True, eq=False)
class Plan:
    """A batch under a mask, as the kernels see it. Holds no reference to the layouts' own tensors.

    Attributes:
        queries: the keys that each query meets.
        keys: the queries that each key meets.
        sides: queries and keys on the host.
    """

    queries: Meeting
    keys: Meeting
    sides: tuple[Side, Side]
    _made: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        window: tuple[float, float],
        upper_left: bool,
    ) -> Plan:
        """The plan where a query sees (left, right) of its own place, inf where that is open. No sync.

        What each token meets is worked out on the device, tiles on the host and in NumPy: a batch's first call waits
        for its plan, and there are some forty operations on a few hundred numbers, on which torch takes several times
        as long, and hundreds of µs where one of them wakes threads.
        """
        left, right = window
        offsets = layout.host_offsets.numpy()
        key_offsets = offsets if layout is key_layout else key_layout.host_offsets.numpy()
        shift = np.zeros_like(offsets[1:]) if upper_left else np.diff(key_offsets) - np.diff(offsets)
        sides = Side(offsets, key_offsets, shift, left, right), Side(key_offsets, offsets, -shift, right, left)
        if layout is key_layout:
            queries = _meeting(layout, layout, None, left, right)
            keys = queries if left == right else _meeting(layout, layout, None, right, left)
            return cls(queries, keys, sides)
        on_device = to_device(shift, layout.device)
        queries = _meeting(layout, key_layout, on_device, left, right)
        return cls(queries, _meeting(key_layout, layout, -on_device, right, left), sides)

    def query_tiles(self, rows: int, shared: int, *, without_closed: bool = False) -> Tensor:
        """(N, 2) int32, begin and end of tiles of up to ``rows`` queries; where any sequence is cut, the longest first.

        Sequences of up to ``shared`` tokens share tiles, whole; with 0 each begins one of its own.
        """
        return self._tiles(0, rows, shared, without_closed)

    def key_tiles(self, rows: int, shared: int) -> Tensor:
        """(N, 2) int32, begin and end of tiles of up to ``rows`` keys that no closed tile holds."""
        return self._tiles(1, rows, shared, True)

    def closed_tiles(self, shared: int) -> Tensor:
        """(N, 4) int32, begin and end among the queries, then among the keys, of runs of whole sequences.

        A run has up to ``shared`` tokens on either side; a longer sequence is in none.
        """

        def build() -> Tensor:
            ends = self._runs(shared)
            closed = self._closed(ends, shared)
            bounds = [x for side in self.sides for x in (side.offsets[ends[:-1]], side.offsets[ends[1:]])]
            return self._to_device([x[closed] for x in bounds])

        return self._cached(("closed", shared), build)

    def _tiles(self, side: int, rows: int, shared: int, without_closed: bool) -> Tensor:
        def build() -> Tensor:
            ends = self._runs(shared)
            first, last = ends[:-1], ends[1:]
            if without_closed:
                open_ = ~self._closed(ends, shared)
                first, last = first[open_], last[open_]
            mine = self.sides[side]
            begins, stops, run = _split(mine.offsets[first], mine.offsets[last], rows)
            if len(run) > len(first):  # where all are about as long, their order is as good
                order = (-mine.work(begins, stops, first[run], last[run] - 1)).argsort(kind="stable")
                begins, stops = begins[order], stops[order]
            return self._to_device([begins, stops])

        return self._cached((side, rows, shared, without_closed), build)

    def _runs(self, shared: int) -> Ints:
        """(R+1,) where runs begin and end: as many neighbours as fit into ``shared`` tokens, or one sequence."""

        def build() -> Ints:
            sequences = np.arange(len(self.sides[0].offsets))
            if not shared:
                return sequences
            queries, keys = (side.offsets for side in self.sides)
            fits = queries.searchsorted(queries[:-1] + shared, "right") - 1
            if keys is not queries:
                fits = np.minimum(fits, keys.searchsorted(keys[:-1] + shared, "right") - 1)
            following = np.maximum(fits, sequences[1:]).tolist()
            ends = [0]
            while ends[-1] < len(following):
                ends.append(following[ends[-1]])
            return np.array(ends)

        return self._cached(("runs", shared), build)

    def _closed(self, ends: Ints, shared: int) -> NDArray[np.bool_]:
        """(R,) whether a run fits into a tile with both sides, and so takes one kernel for all its gradients."""
        lengths = [np.diff(side.offsets[ends]) for side in self.sides]
        return np.maximum(*lengths) <= shared

    def _cached(self, key: object, build: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = build()
        return self._made[key]

    def _to_device(self, columns: list[Ints]) -> Tensor:
        return to_device(np.stack(columns, 1).astype(np.int32), self.queries.lo.device)


def _meeting(mine: SequenceLayout, other: SequenceLayout, shift: Tensor | None, before: float, after: float) -> Meeting:
    """``mine`` meet from ``before`` to ``after`` rows around the one that stands across, which is ``shift`` (B,) on."""
    of_token = mine.sequence_ids
    begins, ends = (x.index_select(0, of_token) for x in (other.cu_seqlens[:-1], other.cu_seqlens[1:]))
    if shift is None:
        own = torch.arange(mine.total, dtype=torch.int32, device=mine.device)
    else:
        own = (mine.position_ids + begins + shift[of_token]).int()
    # no sequence is longer than 2^31, so neither is what a window of more can see
    lo = begins if math.isinf(before) else (own.long() - int(min(before, 2**31))).clamp(begins, ends).int()
    hi = ends if math.isinf(after) else (own.long() + int(min(after, 2**31)) + 1).clamp(begins, ends).int()
    return Meeting(lo, hi, own)


def _split(begins: Ints, ends: Ints, rows: int) -> tuple[Ints, Ints, Ints]:
    """Begins and ends (N,) of pieces of ``rows``, each run (R,) cut from its begin; and (N,) the run of each."""
    pieces = (ends - begins + rows - 1) // rows
    run = np.arange(len(pieces)).repeat(pieces)
    number = np.arange(len(run)) - (pieces.cumsum() - pieces)[run]
    starts = begins[run] + rows * number
    return starts, np.minimum(starts + rows, ends[run]), run
