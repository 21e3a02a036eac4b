"""Layouts inside a graph.

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ._tracing import is_traced
from .layout import SequenceLayout


class TracedLayout:
    """What stands for a layout inside a graph of torch.compile or torch.export: offsets, and no lengths.

    The operators below read and check the lengths when the graph runs, once for each offsets tensor. Where a graph
    breaks and eager code finds one of these in its hands, it is read there, and is as good as any layout.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or is_traced(self.offsets):
            raise AttributeError(f"{name} wants lengths, which a graph does not know: ask for it outside of the graph.")
        return getattr(self._read(), name)

    def _read(self) -> SequenceLayout:
        from .breaks import read_offsets

        return cast(SequenceLayout, read_offsets(self.offsets))

    @property
    def cu_seqlens(self) -> Tensor:
        return self.offsets  # operators take both widths

    @property
    def min_seqlen(self) -> int:
        return 0 if is_traced(self.offsets) else self._read().min_seqlen

    @property
    def batch_size(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def cached(self, key: object, build: Any, other: object = None) -> Any:
        return build()

    def same_lengths(self, other: object) -> bool:
        return self is other

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key", key), ("value", value)):
            self.check_rows(x, name)  # the operator looks at how many there are

    def check_saved(self) -> None:
        """The operator of the backward looks whether the offsets were changed."""

    def extended(self, extra: int) -> TracedLayout:
        return TracedLayout(self.offsets + extra * torch.arange(self.offsets.shape[0], device=self.device))

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(rows, device=self.device)
        found = torch.searchsorted(self.offsets, row, right=True) - 1
        sequence = found.clamp(max=self.offsets.shape[0] - 2)
        return sequence, row - self.offsets[sequence]

    def check_rows(self, values: Tensor, name: str) -> None:
        if values.device != self.device:
            raise ValueError(f"{name} is on {values.device} and the layout on {self.device}.")

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        past = torch.arange(values.shape[0], device=values.device) >= self.offsets[-1]
        return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)
