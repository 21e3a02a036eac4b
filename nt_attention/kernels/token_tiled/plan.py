"""The plan of a batch: the interval of visible rows of each token, and the tiles.

Queries and keys are the two sides of a batch. The visible rows of a query are the keys that it sees, and those of a key
are the queries that see it.

Dimensions: B sequences, T tokens of one side, R runs of sequences, N tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...layouts.cache import to_device
from ...layouts.protocol import Layout
from .. import device
from ..launch import Launch, launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

T = TypeVar("T")
_BLOCK = 256  # tokens of a program of `interval_kernel`


class Tiles(NamedTuple):
    """The tiles of a kernel on the device.

    Attributes:
        tensor: their begins and ends, int32.
        most: their number; the largest one if only the device knows it.
        programs: how many programs run them, for each head.
    """

    tensor: Tensor
    most: int
    programs: int

    @classmethod
    def of(cls, tiles: Tensor | Tiles) -> Tiles:
        """A tensor of tiles, each of which has a program."""
        return tiles if isinstance(tiles, Tiles) else cls(tiles, len(tiles), len(tiles))


@dataclass(frozen=True)
class Intervals:
    """The visible rows of each token of one side. They are one interval for any sequences and window.

    Attributes:
        lo, hi: (T,) int32. Token t sees rows lo[t] … hi[t] − 1. Both are non-decreasing in t, so the union and the
            intersection of a tile's intervals follow from its first and last token.
        own: (T,) int32, the row of the other side at the token's own position. If lengths differ, it may be outside
            of the sequence.
    """

    lo: Tensor
    hi: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a batch on the host: everything from which tiles are made.

    Attributes:
        offsets, other: (B+1,) the offsets of this side and of the other side.
        shift: (B,) the position of token 0 of each sequence, counted on the other side.
        before, after: how many rows before and after its own position a token sees; inf is no limit.
    """

    offsets: Ints
    other: Ints
    shift: Ints
    before: float
    after: float

    def num_visible(self, begins: Ints, ends: Ints, first: Ints, last: Ints) -> Ints:
        """(N,) an upper bound of the number of visible rows of each tile.

        Args:
            begins, ends: (N,) the first token of each tile, and the token after its last.
            first, last: (N,) the sequence of the first token, and of the last token, of each tile.
        """
        lowest = self.other[first]
        if not math.isinf(self.before):
            lowest = (self._own(begins, first) - int(min(self.before, 2**31))).clip(lowest, self.other[first + 1])
        highest = self.other[last + 1]
        if not math.isinf(self.after):
            highest = (self._own(ends, last) + int(min(self.after, 2**31))).clip(self.other[last], highest)
        return highest - lowest

    def _own(self, token: Ints, sequence: Ints) -> Ints:
        return token - self.offsets[sequence] + self.other[sequence] + self.shift[sequence]


@dataclass(frozen=True, eq=False)
class Plan:
    """The intervals and tiles of a batch under a mask. Holds no reference to the tensors of the layouts.

    Attributes:
        queries: the keys that each query sees.
        keys: the queries that see each key.
        sides: queries and keys on the host.
    """

    queries: Intervals
    keys: Intervals
    sides: tuple[Side, Side]
    _cache: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, layout: Layout, key_layout: Layout, window: tuple[float, float], upper_left: bool) -> Plan:
        """The plan for these lengths and this window, (left, right) with inf for no limit. Does not sync.

        Intervals are computed on the device, by one kernel for each side. Tiles are computed on the host in NumPy:
        there are about forty operations on a few hundred numbers, for which torch takes several times as long.
        """
        left, right = window
        offsets = layout.host.numpy()
        key_offsets = offsets if layout is key_layout else key_layout.host.numpy()
        shift = np.zeros_like(offsets[1:]) if upper_left else np.diff(key_offsets) - np.diff(offsets)
        sides = Side(offsets, key_offsets, shift, left, right), Side(key_offsets, offsets, -shift, right, left)
        mine, other, batch = layout.device_offsets, key_layout.device_offsets, layout.batch_size
        queries = intervals(mine, other, batch, layout.total, (left, right), upper_left)
        if layout is key_layout and left == right:
            return cls(queries, queries, sides)
        keys = intervals(other, mine, batch, key_layout.total, (right, left), upper_left)
        return cls(queries, keys, sides)

    @property
    def fill_value(self) -> Tensor | None:
        """None: the offsets are valid. See `bounds.Checked`."""
        return None

    def query_tiles(self, rows: int, shared: int, *, without_fused: bool = False) -> Tensor:
        """(N, 2) int32, begin and end of tiles of up to `rows` queries.

        Tiles are sorted by the number of visible rows, the largest first, if any sequence is split.

        Args:
            shared: see `Config`. If 0, no sequences share a tile.
            without_fused: leave out the queries of `fused_tiles`.
        """
        return self._tiles(0, rows, shared, without_fused)

    def key_tiles(self, rows: int, shared: int) -> Tensor:
        """(N, 2) int32, begin and end of tiles of up to `rows` keys, without the keys of `fused_tiles`."""
        return self._tiles(1, rows, shared, True)

    def fused_tiles(self, shared: int) -> Tensor:
        """(N, 4) int32, the tiles of `fused_kernel`: begin and end of their queries, begin and end of their keys.

        A tile is a run of whole sequences with up to `shared` tokens on each side. Longer sequences are in no tile.
        """

        def build() -> Tensor:
            ends = self._runs(shared)
            fused = self._is_fused(ends, shared)
            bounds = [x for side in self.sides for x in (side.offsets[ends[:-1]], side.offsets[ends[1:]])]
            return self._to_device([x[fused] for x in bounds])

        return self._cached(("fused", shared), build)

    def _tiles(self, side: int, rows: int, shared: int, without_fused: bool) -> Tensor:
        def build() -> Tensor:
            ends = self._runs(shared)
            first, last = ends[:-1], ends[1:]
            if without_fused:
                rest = ~self._is_fused(ends, shared)
                first, last = first[rest], last[rest]
            mine = self.sides[side]
            begins, stops, run = _split(mine.offsets[first], mine.offsets[last], rows)
            if len(run) > len(first):  # some sequence is split; otherwise all tiles take about as long
                order = (-mine.num_visible(begins, stops, first[run], last[run] - 1)).argsort(kind="stable")
                begins, stops = begins[order], stops[order]
            return self._to_device([begins, stops])

        return self._cached((side, rows, shared, without_fused), build)

    def _runs(self, shared: int) -> Ints:
        """(R+1,) the first sequence of each run, then B.

        A run is as many neighboring sequences as fit into `shared` tokens on each side, or one longer sequence.
        """

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

    def _is_fused(self, ends: Ints, shared: int) -> NDArray[np.bool_]:
        """(R,) True for runs with at most `shared` tokens on each side, which take `fused_kernel`."""
        lengths = [np.diff(side.offsets[ends]) for side in self.sides]
        return np.maximum(*lengths) <= shared

    def _cached(self, key: object, build: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def _to_device(self, columns: list[Ints]) -> Tensor:
        return to_device(np.stack(columns, 1).astype(np.int32), self.queries.lo.device)


def intervals(
    mine: Tensor, other: Tensor, batch_size: int, rows: int, window: tuple[float, float], upper_left: bool
) -> Intervals:
    """The visible rows of each of `rows` rows, from the offsets of both sides. `window`: (before, after) of `Side`."""
    from . import triton_kernels as kernels

    lo, hi, own = (torch.empty(rows, dtype=mine.dtype, device=mine.device) for _ in range(3))
    if rows:
        # sequences have less than 2^31 rows, so a larger window changes nothing
        integers = (batch_size, rows, *[int(min(side, 2**31 - 1)) for side in window])
        tensors, grid = (mine, other, lo, hi, own), (-(-rows // _BLOCK), 1)
        with device.current(mine.device):
            launch(Launch(kernels.interval_kernel, grid, tensors, integers, (), (upper_left, _BLOCK), 4, 1))
    return Intervals(lo, hi, own)


def _split(begins: Ints, ends: Ints, rows: int) -> tuple[Ints, Ints, Ints]:
    """Split runs (R,) into pieces of up to `rows`: begins and ends (N,) of pieces, and the run (N,) of each."""
    pieces = (ends - begins + rows - 1) // rows
    run = np.arange(len(pieces)).repeat(pieces)
    number = np.arange(len(run)) - (pieces.cumsum() - pieces)[run]
    starts = begins[run] + rows * number
    return starts, np.minimum(starts + rows, ends[run]), run
