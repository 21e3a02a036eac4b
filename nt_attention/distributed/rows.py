"""Copies and adds rows of keys and values that are stored in several tensors.

On a GPU this is one launch of a Triton kernel.

Dimensions: R rows that are written, S rows that are read, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import device
from ..kernels.launch import Launch, Launches, launch_cached
from ..kernels.triton_support import block_size, missing

_TILE = 4096  # elements of a program

# (S, G, D) and (S, G, Dv), or one tensor (S, G · (D + Dv)), of which each row has a key and then a value
KeyRows = tuple[Tensor, Tensor] | Tensor


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

    def gather(self, out: KeyRows, key: Tensor, value: Tensor, second: Tensor | None = None) -> None:
        """Write to each row of `out` the sum of the rows in `index`.

        Rows are added in the order of the table, in float32 or float64.

        Args:
            out: R rows. Rows may be apart, and elements of a row may not.
            key, value: (S, G, D) and (S, G, Dv), the rows 0 to S − 1. They are copied if elements of a row are apart.
            second: (M, ·) the rows from S on, a key and its value in each. Its dtype may be another.
        """
        if self._is_empty:
            return
        if self._has_kernel:
            self.launch(out, _with_contiguous_rows(key), _with_contiguous_rows(value), second)
        else:
            self._gather_on_cpu(out, key, value, second)

    def launch(self, out: KeyRows, key: Tensor, value: Tensor, second: Tensor | None = None) -> None:
        """`gather` by the Triton kernel. Elements of a row must not be apart."""
        out_key, out_value = (out, out) if isinstance(out, Tensor) else out
        shapes = key.shape, value.shape
        strides = out_key.stride(), out_value.stride(), key.stride(), value.stride()

        def make() -> Launch:
            from . import row_kernels

            widths = _widths(key, value)
            of_second = 0 if second is None else second.stride(0)
            integers = (self._rows, len(key), *widths, widths[0] if isinstance(out, Tensor) else 0)
            columns = min(1024, block_size(max(widths)))
            rows = _TILE // columns
            return Launch(
                row_kernels.gather_kernel,
                (-(-self._rows // rows), -(-max(widths) // columns)),
                (self.index,),
                (*integers, *[each[0] for each in strides], of_second),
                (),
                (self.index.shape[1], second is not None, rows, columns),
                4,
                1,
            )

        with device.current(self.index.device):
            launch_cached(self._launches, (shapes, strides), (out_key, out_value, key, value, second), make)

    def _gather_on_cpu(self, out: KeyRows, key: Tensor, value: Tensor, second: Tensor | None) -> None:
        dtype = torch.promote_types(key.dtype, torch.float32)
        rows = torch.cat([key.flatten(1), value.flatten(1)], 1)
        if second is not None:
            rows = torch.cat([rows.to(dtype), second.to(dtype)])
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # row −1
        total = rows[self.index[:, 0]]
        for column in self.index[:, 1:].unbind(1):
            total = total.to(dtype) + rows[column].to(dtype)
        if isinstance(out, Tensor):
            out.copy_(total)
            return
        for x, part in zip(out, total.split(_widths(key, value), 1), strict=True):
            x.copy_(part.view(x.shape))


def joined_width(key: Tensor, value: Tensor) -> int:
    """The number of elements of a key and its value."""
    return sum(_widths(key, value))


def _widths(key: Tensor, value: Tensor) -> Sequence[int]:
    return [x.shape[1] * x.shape[2] for x in (key, value)]


def _with_contiguous_rows(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    _, heads, dim = x.shape
    return x if x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) else x.contiguous()
