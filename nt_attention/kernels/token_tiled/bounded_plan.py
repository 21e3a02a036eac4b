"""The plan of a batch whose lengths only the device knows: intervals and tiles that the device computes.

The host chooses the number of tiles from the bounds of the lengths. There are three kinds of tiles:

- Fixed tiles have the same number of rows, wherever sequences begin. They are used if sequences are short.
- Aligned tiles do not cross the border of a sequence.
- Fused tiles are runs of whole sequences, for `fused_kernel`. They are used if every sequence fits into a run.

Rows past the last offset are in tiles too. They see no rows, so their results are 0.

Dimensions: B sequences, N rows of one side, R tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...layout import SequenceLayout
from .. import bounds, device
from ..launch import Launch, launch
from .plan import Intervals

_BLOCK = 256
_SCAN = 1024  # sequences of a step of a kernel that runs as one program


@dataclass(frozen=True, eq=False)
class BoundedPlan:
    """The intervals and tiles of a batch under a mask. The methods are those of `plan.Plan`.

    Attributes:
        queries: the keys that each query sees.
        keys: the queries that see each key.
        offsets: the checked offsets of both sides.
        rows: the bound N of the tokens of each side.
        only_aligned: whether tiles are never fixed.
    """

    queries: Intervals
    keys: Intervals
    offsets: bounds.Checked
    rows: tuple[int, int]
    only_aligned: bool
    _cache: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        window: tuple[float, float],
        upper_left: bool,
        only_aligned: bool,
    ) -> BoundedPlan:
        """The plan of these layouts and this window, (left, right) with inf for no limit. Does not sync."""
        left, right = window
        offsets = bounds.check(layout, key_layout)
        rows = layout.total, key_layout.total
        queries = _intervals(offsets.queries, offsets.keys, rows[0], left, right, upper_left)
        if layout is key_layout and left == right:
            keys = queries
        else:
            keys = _intervals(offsets.keys, offsets.queries, rows[1], right, left, upper_left)
        return cls(queries, keys, offsets, rows, only_aligned)

    @property
    def batch_size(self) -> int:
        return len(self.offsets.queries) - 2

    @property
    def fill_value(self) -> Tensor:
        """() float32, see `bounds.fill_value`."""
        return self.offsets.fill_value

    def query_tiles(self, rows: int, shared: int, *, without_fused: bool = False) -> Tensor:
        """(R, 2) int32, begin and end of tiles of up to `rows` queries. There are none without those of fused tiles."""
        return self._tiles(0, rows, bool(shared) and without_fused)

    def key_tiles(self, rows: int, shared: int) -> Tensor:
        """(R, 2) int32, begin and end of tiles of up to `rows` keys. There are none if there are fused tiles."""
        return self._tiles(1, rows, bool(shared))

    def fused_tiles(self, shared: int) -> Tensor:
        """(R, 4) int32, begin and end of the queries, begin and end of the keys. Every sequence is in one tile."""
        from . import plan_kernels as kernels

        def build() -> Tensor:
            queries, keys = self.offsets
            batch, most = self.batch_size, max(self.rows)
            ends, is_first = queries.new_empty(batch), queries.new_empty(batch + 1)
            tensors = (queries, keys, ends, queries.new_empty(2, batch + 1), is_first)
            constants = (keys is queries, shared, _SCAN)
            self._launch(kernels.runs_kernel, 1, tensors, (batch, batch.bit_length()), constants)
            # Two neighboring runs have more than `shared` tokens on one side.
            runs = min(batch, 2 * sum(self.rows[: 1 if keys is queries else 2]) // shared + 1)
            return self._make(0, runs + most // shared + 1, shared, kernels.FUSED, ends, is_first)

        return self._cached(("fused", shared), build)

    def _tiles(self, side: int, rows: int, are_fused: bool) -> Tensor:
        from . import plan_kernels as kernels

        def build() -> Tensor:
            offsets, most = self.offsets[side], self.rows[side]
            if are_fused:
                return offsets.new_empty(0, 2)
            if not self.only_aligned and most < 2 * rows * self.batch_size:
                return self._make(side, -(-most // rows), rows, kernels.FIXED, offsets, offsets)
            return self._make(side, most // rows + self.batch_size + 1, rows, kernels.ALIGNED, offsets, offsets)

        return self._cached((side, rows, are_fused), build)

    def _make(self, side: int, number: int, rows: int, kind: Any, ends: Tensor, is_first: Tensor) -> Tensor:
        """(R, 2) or (R, 4) int32, `number` tiles of a kind. One more row follows them, see `tile_kernel`."""
        from . import plan_kernels as kernels

        offsets, batch = self.offsets[side], self.batch_size
        columns = 4 if kind == kernels.FUSED else 2
        before = offsets.new_empty(batch + 1)
        if kind != kernels.FIXED:
            constants = (rows, kind.value, _SCAN)
            self._launch(kernels.count_kernel, 1, (offsets, is_first, before), (batch,), constants)
        tiles = offsets.new_empty(number + 1, columns)
        tensors = (offsets, self.offsets.keys, ends, before, tiles)
        integers = (batch, number, self.rows[side], self.rows[1])
        self._launch(kernels.tile_kernel, -(-number // _BLOCK), tensors, integers, (rows, kind.value, _BLOCK))
        return tiles[:number]

    def _launch(
        self, kernel: Any, programs: int, tensors: tuple[Tensor, ...], integers: tuple[int, ...], constants: Any
    ) -> None:
        with device.current(tensors[0].device):
            launch(Launch(kernel, (programs, 1), tensors, integers, (), constants, 4, 1))

    def _cached(self, key: object, build: Any) -> Tensor:
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]


def _intervals(mine: Tensor, other: Tensor, rows: int, before: float, after: float, upper_left: bool) -> Intervals:
    """The visible rows of each of `rows` rows and of one more, which the empty tiles read."""
    from . import triton_kernels as kernels

    lo, hi, own = (mine.new_empty(rows + 1) for _ in range(3))
    # sequences have less than 2^31 rows, so a larger window changes nothing
    window = [int(min(side, 2**31 - 1)) for side in (before, after)]
    integers = (len(mine) - 2, rows + 1, *window)
    grid = (-(-(rows + 1) // _BLOCK), 1)
    with device.current(mine.device):
        tensors = (mine, other, lo, hi, own)
        launch(Launch(kernels.interval_kernel, grid, tensors, integers, (), (upper_left, True, _BLOCK), 4, 1))
    return Intervals(lo, hi, own)
