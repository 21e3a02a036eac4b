"""The plan of a batch whose lengths only the device knows: intervals and tiles that the device computes.

The host chooses the number of programs from the bounds of the lengths. Only the device knows how many tiles there are.
So each program runs its share of the tiles, and then fills its share of the rows past the last offset. There are four
kinds of tiles:

- Fixed tiles have the same number of rows, wherever sequences begin. They are used if sequences are short.
- Aligned tiles do not cross the border of a sequence.
- Fused tiles are runs of whole sequences, for `fused_kernel`.
- Long tiles are aligned tiles of the sequences that are too long for a fused tile.

Dimensions: B sequences, N rows of one side, R tiles at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...layouts.protocol import Layout
from .. import bounds, device
from ..launch import Launch, launch
from .plan import Intervals, Tiles, intervals

_BLOCK = 256
_SCAN = 1024  # sequences of a step of a kernel that runs as one program
_FEW_PROGRAMS = (
    44  # programs of each head for tiles of which there may be none: with 12 heads, four for each processor of an H200
)


@dataclass(frozen=True, eq=False)
class BoundedPlan:
    """The intervals and tiles of a batch under a mask. The methods are those of `plan.Plan`.

    Attributes:
        queries: the keys that each query sees. Undefined past the last offset.
        keys: the queries that see each key.
        offsets: the checked offsets of both sides.
        rows: the bound N of the tokens of each side.
        longest: the bound of the longest sequence of both sides.
        only_aligned: whether tiles are never fixed.
    """

    queries: Intervals
    keys: Intervals
    offsets: bounds.Checked
    rows: tuple[int, int]
    longest: int
    only_aligned: bool
    _cache: dict[object, Tiles] = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls, layout: Layout, key_layout: Layout, window: tuple[float, float], upper_left: bool, only_aligned: bool
    ) -> BoundedPlan:
        """The plan of these layouts and this window, (left, right) with inf for no limit. Does not sync."""
        left, right = window
        offsets = bounds.check(layout, key_layout)
        rows = layout.total, key_layout.total
        longest = max(min(x.max_seqlen, x.total) for x in (layout, key_layout))
        batch = layout.batch_size  # checked offsets have a further element, which may be read
        queries = intervals(offsets.queries, offsets.keys, batch, rows[0], (left, right), upper_left)
        if layout is key_layout and left == right:
            keys = queries
        else:
            keys = intervals(offsets.keys, offsets.queries, batch, rows[1], (right, left), upper_left)
        return cls(queries, keys, offsets, rows, longest, only_aligned)

    @property
    def batch_size(self) -> int:
        return len(self.offsets.queries) - 2

    @property
    def fill_value(self) -> Tensor:
        """() float32, see `bounds.Checked`."""
        return self.offsets.fill_value

    def query_tiles(self, rows: int, shared: int, *, without_fused: bool = False) -> Tiles:
        """Begin and end of tiles of up to `rows` queries.

        Args:
            rows: the rows of a tile.
            shared: the most tokens of a fused tile on each side; 0 if there are none.
            without_fused: leave out the queries of `fused_tiles`.
        """
        return self._tiles(0, rows, shared if without_fused else 0)

    def key_tiles(self, rows: int, shared: int) -> Tiles:
        """Begin and end of tiles of up to `rows` keys, without the keys of `fused_tiles`."""
        return self._tiles(1, rows, shared)

    def fused_tiles(self, shared: int) -> Tiles:
        """Begin and end of the queries, begin and end of the keys. A tile has up to `shared` tokens on each side."""
        from . import plan_kernels as kernels

        def build() -> Tiles:
            queries, keys = self.offsets
            batch, is_self = self.batch_size, keys is queries
            ends, is_first = queries.new_empty(batch), queries.new_empty(batch + 1)
            tensors = (queries, keys, ends, queries.new_empty(2, batch + 1), is_first)
            self._launch(kernels.runs_kernel, 1, tensors, (batch, batch.bit_length()), (is_self, shared, _SCAN))
            # Two neighboring runs have more than `shared` tokens on one side.
            most = min(batch, 2 * sum(self.rows[: 1 if is_self else 2]) // shared + 1)
            programs = -(-max(self.rows) // shared)
            return self._make(0, most, programs, shared, shared, kernels.FUSED, ends, is_first)

        return self._cached(("fused", shared), build)

    def _tiles(self, side: int, rows: int, shared: int) -> Tiles:
        """Tiles of one side; with `shared`, only of the sequences that no fused tile can have."""
        from . import plan_kernels as kernels

        def build() -> Tiles:
            offsets, most = self.offsets[side], self.rows[side]
            programs = -(-most // rows)
            if shared:
                if self.longest <= shared:
                    return Tiles(offsets.new_empty(0), 0, 0)
                number = most // rows + min(self.batch_size, sum(self.rows) // (shared + 1)) + 1
                if most <= shared * self.batch_size:  # most sequences are short
                    programs = min(programs, _FEW_PROGRAMS)
                return self._make(side, number, programs, rows, shared, kernels.LONG, offsets, offsets)
            if not self.only_aligned and most < 2 * rows * self.batch_size:
                return self._make(side, programs, programs, rows, 0, kernels.FIXED, offsets, offsets)
            number = most // rows + self.batch_size
            return self._make(side, number, min(number, 2 * programs), rows, 0, kernels.ALIGNED, offsets, offsets)

        return self._cached((side, rows, shared), build)

    def _make(
        self, side: int, most: int, programs: int, rows: int, shared: int, kind: Any, ends: Tensor, is_first: Tensor
    ) -> Tiles:
        """At most `most` tiles of a kind, after the integers of `plan_kernels.HEADER`."""
        from . import plan_kernels as kernels

        offsets, other, batch = self.offsets[side], self.offsets[1 - side], self.batch_size
        before = offsets.new_empty(batch + 1)
        if kind != kernels.FIXED:
            tensors = (offsets, other, ends, is_first, before)
            self._launch(kernels.count_kernel, 1, tensors, (batch,), (rows, shared, kind.value, _SCAN))
        tiles = offsets.new_empty(kernels.HEADER.value + most * (4 if kind == kernels.FUSED else 2))
        tensors = (offsets, self.offsets.keys, ends, before, tiles)
        integers = (batch, most, self.rows[side], self.rows[1])
        self._launch(kernels.tile_kernel, -(-most // _BLOCK), tensors, integers, (rows, kind.value, _BLOCK))
        return Tiles(tiles, most, programs)

    def _launch(
        self, kernel: Any, programs: int, tensors: tuple[Tensor, ...], integers: tuple[int, ...], constants: Any
    ) -> None:
        with device.current(tensors[0].device):
            launch(Launch(kernel, (programs, 1), tensors, integers, (), constants, 4, 1))

    def _cached(self, key: object, build: Callable[[], Tiles]) -> Tiles:
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]
