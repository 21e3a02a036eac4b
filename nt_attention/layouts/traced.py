"""Layouts in a graph of torch.compile or torch.export. They have offsets, but no lengths.

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..compiler import is_traced, outside_of_graphs
from .bounded import Valid
from .protocol import Layout, LengthsUnknownError


class TracedLayout(Layout):
    """A `SequenceLayout` in a graph; with both bounds, a `BoundedLayout` in a graph.

    Without bounds, the operators read and check the lengths when the graph runs, once for each offsets tensor. After a
    graph break, eager code may receive a `TracedLayout`. Its other attributes then read the offsets.
    """

    make: ClassVar[Callable[..., Layout]]  # SequenceLayout.from_offsets
    min_seqlen = 0

    def __init__(self, offsets: Tensor, max_seqlen: int | None = None, max_tokens: int | None = None) -> None:
        """The bounds are those that were passed to `from_offsets`."""
        self._offsets, self._arguments = offsets, (max_seqlen, max_tokens)
        self.batch_size, self.device = offsets.shape[0] - 1, offsets.device
        self.knows_lengths = max_tokens is None
        if max_seqlen is not None and max_tokens is not None:
            self.bounds = self.max_seqlen, self.total = max_seqlen, max_tokens

    @property
    def operator_offsets(self) -> Tensor:
        return self._offsets

    offsets = cu_seqlens = operator_offsets

    @property
    def valid(self) -> Valid:
        """The offsets, if they are valid."""
        return Valid.of(self._offsets, self.max_seqlen, self.total)

    @property
    def safe_offsets(self) -> Tensor:
        return self._offsets if self.knows_lengths else self.valid.offsets

    def with_lengths(self, name: str) -> Any:
        if is_traced(self._offsets):
            raise LengthsUnknownError(
                f"{name} needs the lengths, which are not known in a graph: read it outside of the graph."
            )
        return self.read()

    @outside_of_graphs
    def read(self) -> Layout:
        """The layout of the offsets, outside of graphs."""
        return self.make(self._offsets, *self._arguments)

    def check_rows(self, values: Tensor, name: str) -> None:
        self.check_device(values, name)  # the operator checks the number of rows

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        self.check_device(key, "key")
        self.check_device(value, "value")

    def extended(self, extra: int) -> Layout:
        if not self.knows_lengths:
            longest, total = self.max_seqlen + extra, self.total + extra * self.batch_size
            return TracedLayout(self.valid.extended(extra), longest, total)
        longer = self._offsets + extra * torch.arange(self._offsets.shape[0], device=self.device)
        return TracedLayout(torch.ops.nt_attention.offsets.default(longer, None, 0))

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        if not self.knows_lengths:
            return self.valid.locate(rows)
        row = torch.arange(rows, device=self.device)
        sequence = (torch.searchsorted(self._offsets, row, right=True) - 1).clamp(max=self._offsets.shape[0] - 2)
        return sequence, row - self._offsets[sequence]

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        return super().fill_past_end(values, value) if self.knows_lengths else self.valid.fill_past_end(values, value)
