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


class KeyRows(NamedTuple):
    """Rows of keys and values, or of their gradients. Rows may be apart, and elements of a row may not.

    Attributes:
        key, value: (S, …) each. They may be one tensor, whose rows have a key and then a value.
        widths: the numbers of elements of a key and of a value.
        value_start: the element of a row of `value` at which the value begins.
    """

    key: Tensor
    value: Tensor
    widths: tuple[int, int]
    value_start: int

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> KeyRows:
        """From (S, G, D) and (S, G, Dv)."""
        widths = (key.shape[1] * key.shape[2], value.shape[1] * value.shape[2])
        return cls(_with_contiguous_rows(key), _with_contiguous_rows(value), widths, 0)

    @classmethod
    def joined(cls, rows: Tensor, widths: tuple[int, int]) -> KeyRows:
        """From (S, ·), of which each row has a key and then a value, with these numbers of elements."""
        return cls(rows, rows, widths, widths[0])

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Views of the keys and values as (S, ·) each."""
        of_value = slice(self.value_start, self.value_start + self.widths[1])
        return self.key.flatten(1)[:, : self.widths[0]], self.value.flatten(1)[:, of_value]


def _with_contiguous_rows(x: Tensor) -> Tensor:
    _, heads, dim = x.shape
    return x if x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) else x.contiguous()


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

    def gather(self, out: KeyRows, first: KeyRows, second: Tensor | None = None) -> None:
        """Write to each row of `out` the sum of the rows in `index`.

        Rows are added in the order of the table, in float32 or float64.

        Args:
            out: R rows.
            first: the rows 0 to S − 1. They are not joined.
            second: (M, ·) the rows from S on, a key and its value in each. Its dtype may be another.
        """
        if self._is_empty:
            return
        if self._has_kernel:
            self.launch(out, first, second)
        else:
            self._gather_on_cpu(out, first, second)

    def launch(self, out: KeyRows, first: KeyRows, second: Tensor | None = None) -> None:
        """`gather` by the Triton kernel."""
        out_key, out_value, widths, value_start = out
        key, value, *_ = first
        second_stride = 0 if second is None else second.stride(0)
        strides = (out_key.stride(0), out_value.stride(0), key.stride(0), value.stride(0), second_stride)
        integers = (self._rows, key.shape[0], *widths, value_start, *strides)

        def make() -> Launch:
            from . import row_kernels

            columns = min(1024, block_size(max(widths)))
            rows = _TILE // columns
            grid = (-(-self._rows // rows), -(-max(widths) // columns))
            constants = (self.index.shape[1], second is not None, rows, columns)
            return Launch(row_kernels.gather_kernel, grid, (self.index,), integers, (), constants, 4, 1)

        with device.current(self.index.device):
            launch_cached(self._launches, (integers, second is None), (out_key, out_value, key, value, second), make)

    def _gather_on_cpu(self, out: KeyRows, first: KeyRows, second: Tensor | None) -> None:
        dtype = torch.promote_types(first.key.dtype, torch.float32)
        rows = torch.cat(first.flat, 1)
        if second is not None:
            rows = torch.cat([rows.to(dtype), second.to(dtype)])
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # row −1
        total = rows[self.index[:, 0]]
        for column in self.index[:, 1:].unbind(1):
            total = total.to(dtype) + rows[column].to(dtype)
        for x, part in zip(out.flat, total.split(first.widths, 1), strict=True):
            x.copy_(part)
