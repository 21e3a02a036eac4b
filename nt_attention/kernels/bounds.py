"""What kernels need for layouts whose lengths only the device knows (`BoundedLayout`).

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.protocol import Layout
from . import device
from .launch import Launch, launch

_BLOCK = 1024


class Checked(NamedTuple):
    """Offsets that kernels can rely on: they are valid and do not exceed the bounds.

    Attributes:
        queries, keys: (B+2,) int32 each, the offsets, then the bits of the float32 to write past the last offset: 0, or
            NaN if the given offsets are not valid. All offsets are then 0.
    """

    queries: Tensor
    keys: Tensor

    @property
    def cu_seqlens(self) -> Tensor:
        return self.queries[:-1]

    @property
    def fill_value(self) -> Tensor:
        """() float32, what is written past the last offset."""
        return self.queries[-1:].view(torch.float32).squeeze(0)

    @property
    def key_cu_seqlens(self) -> Tensor:
        return self.cu_seqlens if self.keys is self.queries else self.keys[:-1]


def check(layout: Layout, key_layout: Layout) -> Checked:
    """The checked offsets of both sides, computed by one kernel and cached with the layouts.

    One side may know its lengths.
    """
    return layout.cached("checked", lambda: _check(layout, key_layout), key_layout)


def _check(layout: Layout, key_layout: Layout) -> Checked:
    from . import bounds_kernels as kernels

    same = layout is key_layout
    queries = torch.empty(layout.batch_size + 2, dtype=torch.int32, device=layout.device)
    keys = queries if same else torch.empty_like(queries)
    tensors = (layout.operator_offsets.contiguous(), key_layout.operator_offsets.contiguous(), queries, keys)
    bounds = (layout.max_seqlen, layout.total, key_layout.max_seqlen, key_layout.total)
    with device.current(layout.device):
        made = Launch(kernels.check_kernel, (1, 1), tensors, (layout.batch_size, *bounds), (), (same, _BLOCK), 4, 1)
        launch(made)
    return Checked(queries, keys)


def fill_past_end(values: Tensor, checked: Tensor) -> Tensor:
    """Write 0 to the rows of `values` (N, …) past the last offset, or NaN if the offsets in `checked` are not valid.

    Returns `values`, or a contiguous copy.
    """
    from . import bounds_kernels as kernels

    values = values.contiguous()
    rows, columns = values.shape[0], values[0].numel()
    grid = (max(1, min(1024, rows * columns // (4 * _BLOCK))), 1)
    integers = (checked.shape[0] - 2, rows, columns)
    with device.current(values.device):
        launch(Launch(kernels.fill_kernel, grid, (values, checked), integers, (), (_BLOCK,), 4, 1))
    return values


def lse_past_end(lse: Tensor, checked: Tensor) -> Tensor:
    """`lse` (H, N) with −inf, or NaN if the offsets are not valid, past the last offset."""
    past = torch.arange(lse.shape[1], device=lse.device) >= checked[-2]
    return torch.where(past, checked[-1:].view(torch.float32) - torch.inf, lse)
