"""What the kernels are told of a batch: which rows each token meets on the other side, and the tiles.

Dimensions: B sequences, T tokens of one side, R runs, N tiles.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...layout import SequenceLayout


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
        offsets, other: (B+1,) int64 on the CPU, of this side and of the other.
        shift: (B,) int64, how far from the other sequence's begin the first token's place across from it is.
        before, after: how many places around the one across are met, inf where that is open.
    """

    offsets: Tensor
    other: Tensor
    shift: Tensor
    before: float
    after: float

    def work(self, tiles: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """(N,) how many rows of the other side each tile (N, 2) meets at most, which lies in sequences first … last."""
        return self._interval(tiles[:, 1] - 1, last)[1] - self._interval(tiles[:, 0], first)[0]

    def _interval(self, token: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        begins, ends = self.other[sequence], self.other[sequence + 1]
        own = token - self.offsets[sequence] + begins + self.shift[sequence]
        return _interval(own, begins, ends, self.before, self.after)


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
    _made: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        window: tuple[float, float],
        upper_left: bool,
    ) -> Plan:
        """The plan where a query sees (left, right) of its own place, inf where that is open. No sync.

        What each token meets is worked out on the device, tiles on the host: a batch's first call waits for its plan,
        and a launch costs the host more than a hundred numbers. So does an operation that wakes threads, as torch's
        searchsorted and repeat_interleave do on a CPU.
        """
        left, right = window
        offsets, key_offsets = layout.host_offsets, key_layout.host_offsets
        shift = torch.zeros_like(offsets[1:]) if upper_left else key_offsets.diff() - offsets.diff()
        sides = Side(offsets, key_offsets, shift, left, right), Side(key_offsets, offsets, -shift, right, left)
        if layout is key_layout:
            queries = _meeting(layout, layout, None, left, right)
            keys = queries if left == right else _meeting(layout, layout, None, right, left)
            return cls(queries, keys, sides)
        shift = shift.to(layout.device, non_blocking=True)
        queries = _meeting(layout, key_layout, shift, left, right)
        return cls(queries, _meeting(key_layout, layout, -shift, right, left), sides)

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
            runs = self._runs(shared)
            return self._to_device(runs[_is_closed(runs, shared), :4])

        return self._remember(("closed", shared), build)

    def _tiles(self, side: int, rows: int, shared: int, without_closed: bool) -> Tensor:
        def build() -> Tensor:
            runs = self._runs(shared)
            if without_closed:
                runs = runs[~_is_closed(runs, shared)]
            tiles, run = _split(runs[:, 2 * side], runs[:, 2 * side + 1], rows)
            if len(tiles) > len(runs):  # where all are about as long, their order is as good
                work = self.sides[side].work(tiles, *runs[run, 4:].unbind(1))
                tiles = tiles[work.argsort(descending=True, stable=True)]
            return self._to_device(tiles)

        return self._remember((side, rows, shared, without_closed), build)

    def _runs(self, shared: int) -> Tensor:
        """(R, 6) on the host: as many neighbours as fit into ``shared`` tokens, or one sequence.

        Begin and end among the queries, then among the keys, as closed tiles; then the first and the last sequence.
        """

        def build() -> Tensor:
            offsets, key_offsets = (side.offsets for side in self.sides)
            ends = torch.arange(len(offsets), device="cpu")
            if shared:
                sides = [offsets.tolist()] if key_offsets is offsets else [offsets.tolist(), key_offsets.tolist()]
                ends = torch.tensor(_neighbours(sides, shared), device="cpu")
            bounds = [x[ends] for x in (offsets, key_offsets)]
            columns = [column for bound in bounds for column in (bound[:-1], bound[1:])]
            return torch.stack([*columns, ends[:-1], ends[1:] - 1], 1)

        return self._remember(("runs", shared), build)

    def _remember(self, key: object, build: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            self._made[key] = build()
        return self._made[key]

    def _to_device(self, tiles: Tensor) -> Tensor:
        # a pageable copy to the device is staged by the driver, so the host need not wait for it
        return tiles.to(torch.int32).to(self.queries.lo.device, non_blocking=True)


def _meeting(mine: SequenceLayout, other: SequenceLayout, shift: Tensor | None, before: float, after: float) -> Meeting:
    """``mine`` meet from ``before`` to ``after`` rows around the one that stands across, which is ``shift`` (B,) on."""
    begins, ends = other.offsets[:-1], other.offsets[1:]
    of_token = mine.sequence_ids
    if shift is None:
        own = torch.arange(mine.total, device=mine.device)
    else:
        own = mine.position_ids + (begins + shift)[of_token]
    lo, hi = _interval(own, begins[of_token], ends[of_token], before, after)
    return Meeting(lo.int(), hi.int(), own.int())


def _interval(own: Tensor, begins: Tensor, ends: Tensor, before: float, after: float) -> tuple[Tensor, Tensor]:
    """What tokens meet that stand across from ``own``, of a sequence from ``begins`` to ``ends``."""
    # no sequence is longer than 2^31, so neither is what a window of more can see
    lo = begins if math.isinf(before) else (own - int(min(before, 2**31))).clamp(begins, ends)
    hi = ends if math.isinf(after) else (own + int(min(after, 2**31)) + 1).clamp(begins, ends)
    return lo, hi


def _neighbours(sides: list[list[int]], shared: int) -> list[int]:
    """Where runs end, by the offsets of either side: with the last sequence that fits, or with the first."""
    ends, sequences = [0], len(sides[0]) - 1
    while ends[-1] < sequences:
        at = ends[-1]
        fit = min([bisect.bisect_right(side, side[at] + shared, at) - 1 for side in sides])
        ends.append(max(fit, at + 1))
    return ends


def _split(begins: Tensor, ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(N, 2), each run (R,) from its begin in pieces of ``rows``; and (N,), the run that each is of."""
    pieces = (ends - begins + rows - 1).div(rows, rounding_mode="floor")
    upto = pieces.cumsum(0)
    number = torch.arange(int(upto[-1]) if len(upto) else 0, device="cpu")
    run = upto[:-1].bincount(minlength=len(number))[: len(number)].cumsum(0)
    starts = begins[run] + rows * (number - (upto - pieces)[run])
    return torch.stack([starts, torch.minimum(starts + rows, ends[run])], 1), run


def _is_closed(runs: Tensor, shared: int) -> Tensor:
    """(R,) whether a run fits into a tile with both sides, and so takes one kernel for all its gradients."""
    return torch.maximum(runs[:, 1] - runs[:, 0], runs[:, 3] - runs[:, 2]) <= shared
