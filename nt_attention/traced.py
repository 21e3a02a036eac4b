"""Layouts inside a graph.

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .layout import SequenceLayout

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class TracedLayout(SequenceLayout):
    """What stands for a layout that is made in a graph of torch.compile or torch.export: offsets, and no lengths.

    The operators below read and check the lengths when the graph runs, once for each offsets tensor.
    """

    @classmethod
    def of(cls, offsets: Tensor) -> TracedLayout:
        unknown: Any = None
        # operators take offsets of both widths
        return cls(offsets, offsets, unknown, unknown, 0, unknown, unknown, unknown, None, None, False)

    @property
    def batch_size(self) -> int:
        return self.offsets.shape[0] - 1

    def remember(self, key: object, build: Callable[[], _T], other: SequenceLayout | None = None) -> _T:
        return build()

    def same_lengths(self, other: SequenceLayout) -> bool:
        return self is other

    def extended(self, extra: int) -> SequenceLayout:
        return TracedLayout.of(self.offsets + extra * torch.arange(self.batch_size + 1, device=self.device))

    def whereabouts(self, rows: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(rows, device=self.device)
        sequence = torch.searchsorted(self.offsets[1:], row, right=True).clamp(max=self.batch_size - 1)
        return sequence, row - self.offsets[sequence]

    def check_rows(self, values: Tensor, name: str) -> None:
        self._check_device(values, name)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        past = torch.arange(values.shape[0], device=values.device) >= self.offsets[-1]
        return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)
