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
class Plan:
    """A batch under a mask, as the kernels see it. Holds no reference to the layouts' own tensors.

    Attributes:
        queries: the keys that each query meets.
        keys: the queries that each key meets.
        offsets, key_offsets: B + 1 ints each, where sequences begin on either side.
    """

    queries: Meeting
    keys: Meeting
    offsets: list[int]
    key_offsets: list[int]
    _made: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        window: tuple[float, float],
        upper_left: bool,
    ) -> Plan:
        """The plan where a query sees (left, right) of its own place, inf where that is open. No sync."""
        left, right = window
        shift = key_layout.lengths - layout.lengths
        if upper_left:
            shift = torch.zeros_like(shift)
        queries = _meeting(layout, key_layout, shift, left, right)
        alike = layout is key_layout and left == right  # then what a query meets is what meets it as a key
        return cls(
            queries=queries,
            keys=queries if alike else _meeting(key_layout, layout, -shift, right, left),
            offsets=layout.host_offsets.tolist(),
            key_offsets=key_layout.host_offsets.tolist(),
        )

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
            return self._to_device(runs[_is_closed(runs, shared)])

        return self._remember(("closed", shared), build)

    def _tiles(self, side: int, rows: int, shared: int, without_closed: bool) -> Tensor:
        def build() -> Tensor:
            runs = self._runs(shared)
            if without_closed:
                runs = runs[~_is_closed(runs, shared)]
            tiles = self._to_device(_split(runs[:, 2 * side], runs[:, 2 * side + 1], rows))
            if len(tiles) > len(runs):  # where all are about as long, their order is as good
                met = (self.queries, self.keys)[side]
                work = met.hi[tiles[:, 1] - 1] - met.lo[tiles[:, 0]]
                tiles = tiles[work.argsort(descending=True, stable=True)]
            return tiles

        return self._remember((side, rows, shared, without_closed), build)

    def _runs(self, shared: int) -> Tensor:
        """(R, 4) on the host, as closed tiles: as many neighbours as fit into ``shared`` tokens, or one sequence."""

        def build() -> Tensor:
            sides = (self.offsets, self.key_offsets)
            ends = [0]
            while ends[-1] < len(self.offsets) - 1:
                at = ends[-1]
                fit = min(bisect.bisect_right(side, side[at] + shared) - 1 for side in sides) if shared else at
                ends.append(max(fit, at + 1))
            bounds = torch.tensor([[side[end] for end in ends] for side in sides], device="cpu")
            return torch.stack([bounds[0, :-1], bounds[0, 1:], bounds[1, :-1], bounds[1, 1:]], 1)

        return self._remember(("runs", shared), build)

    def _remember(self, key: object, build: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            self._made[key] = build()
        return self._made[key]

    def _to_device(self, tiles: Tensor) -> Tensor:
        # a pageable copy to the device is staged by the driver, so the host need not wait for it
        return tiles.to(self.queries.lo.device, torch.int32, non_blocking=True)


def _meeting(mine: SequenceLayout, other: SequenceLayout, shift: Tensor, before: float, after: float) -> Meeting:
    """``mine`` meet from ``before`` to ``after`` rows around the one that stands across, which is ``shift`` (B,) on."""
    begins, ends = other.offsets[:-1], other.offsets[1:]
    of_token = mine.sequence_ids
    own = mine.position_ids + (begins + shift)[of_token]
    begins, ends = begins[of_token], ends[of_token]
    # no sequence is longer than 2^31, so neither is what a window of more can see
    lo = begins if math.isinf(before) else (own - int(min(before, 2**31))).clamp(begins, ends)
    hi = ends if math.isinf(after) else (own + int(min(after, 2**31)) + 1).clamp(begins, ends)
    return Meeting(lo.int(), hi.int(), own.int())


def _split(begins: Tensor, ends: Tensor, rows: int) -> Tensor:
    """(N, 2): each run (R,) from its begin in pieces of ``rows``."""
    pieces = (ends - begins + rows - 1).div(rows, rounding_mode="floor")
    run = torch.arange(len(begins), device="cpu").repeat_interleave(pieces)
    piece = torch.arange(len(run), device="cpu") - (pieces.cumsum(0) - pieces)[run]
    starts = begins[run] + rows * piece
    return torch.stack([starts, torch.minimum(starts + rows, ends[run])], 1)


def _is_closed(runs: Tensor, shared: int) -> Tensor:
    """(R,) whether a run fits into a tile with both sides, and so takes one kernel for all its gradients."""
    return torch.maximum(runs[:, 1] - runs[:, 0], runs[:, 3] - runs[:, 2]) <= shared
