"""Copies and adds rows of keys and values that are stored in several tensors.

On a GPU this is one launch of a Triton kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import device
from ..kernels.launch import Launch, Launches, launch_cached
from ..kernels.triton_support import block_size, missing

_TILE = 4096  # elements of a program


class Pair(NamedTuple):
    """Keys (S, ·) and values (S, ·), or their gradients. Rows may be apart, and elements of a row may not."""

    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Pair:
        """From (S, G, D) and (S, G, Dv), as views if possible."""
        rows = (key.flatten(1), value.flatten(1))
        return cls(*[x if x.stride(1) == 1 else x.contiguous() for x in rows])

    @classmethod
    def columns(cls, rows: Tensor, width: int) -> Pair:
        """Views of rows (S, ·), whose first `width` elements are a key."""
        return cls(rows[:, :width], rows[:, width:])


class RowTable:
    """Which rows to add up.

    Attributes:
        index: (R, K) int32, the rows of each sum; −1 is no row.
    """

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self._rows = len(index)
        self._is_empty = not index.numel()
        self._has_kernel = index.device.type != "cpu" and missing() is None
        self._launches: Launches = {}

    def __len__(self) -> int:
        return self._rows

    def gather(self, out: Pair, first: Pair, second: Tensor | None = None) -> None:
        """Write to each row of `out` the sum of the rows in `index`.

        Rows are added in the order of the table, in float32 or float64.

        Args:
            out: (R, ·) each.
            first: (S, ·) each, the rows 0 to S − 1.
            second: (M, ·) the rows from S on, a key and its value in each. Its dtype may be another.
        """
        if self._is_empty:
            return
        if self._has_kernel:
            self.launch(out, first, second)
        else:
            self._gather_on_cpu(out, first, second)

    def launch(self, out: Pair, first: Pair, second: Tensor | None = None) -> None:
        """`gather` by the Triton kernel."""
        (out_key, out_value), (key, value) = out, first
        widths = key.shape[1], value.shape[1]
        second_stride = 0 if second is None else second.stride(0)
        strides = (out_key.stride(0), out_value.stride(0), key.stride(0), value.stride(0), second_stride)
        integers = (self._rows, key.shape[0], *widths, *strides)

        def make() -> Launch:
            from . import row_kernels

            columns = min(1024, block_size(max(widths)))
            rows = _TILE // columns
            grid = (-(-self._rows // rows), -(-max(widths) // columns))
            constants = (self.index.shape[1], second is not None, rows, columns)
            return Launch(row_kernels.gather_kernel, grid, (self.index,), integers, (), constants, 4, 1)

        with device.current(self.index.device):
            launch_cached(self._launches, (integers, second is None), (*out, *first, second), make)

    def _gather_on_cpu(self, out: Pair, first: Pair, second: Tensor | None) -> None:
        dtype = torch.promote_types(first.key.dtype, torch.float32)
        rows = torch.cat(first, 1)
        if second is not None:
            rows = torch.cat([rows.to(dtype), second.to(dtype)])
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # row −1
        total = rows[self.index[:, 0]]
        for column in self.index[:, 1:].unbind(1):
            total = total.to(dtype) + rows[column].to(dtype)
        for x, part in zip(out, total.split([x.shape[1] for x in first], 1), strict=True):
            x.copy_(part)
