"""Layouts in a graph of torch.compile or torch.export. They have offsets, but no lengths.

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..compiler import is_traced, outside_of_graphs
from .bounded import Valid
from .protocol import Layout, LengthsUnknownError


class TracedLayout(Layout):
    """A `SequenceLayout` in a graph.

    When the graph runs, its operators read and check the lengths, once for each offsets tensor. After a graph break,
    eager code may receive a `TracedLayout`. Its other attributes then read the offsets.
    """

    batch_size: int
    device: torch.device

    def __init__(self, offsets: Tensor, of: type, max_seqlen: int | None = None) -> None:
        """`of` is the class `SequenceLayout`; `max_seqlen` is the bound that was passed to `from_offsets`."""
        self._offsets, self._of = offsets, of
        self.batch_size, self.device = offsets.shape[0] - 1, offsets.device
        self.arguments: tuple[int | None, ...] = (max_seqlen,)  # of `from_offsets`, after the offsets

    @property
    def operator_offsets(self) -> Tensor:
        return self._offsets

    @property
    def offsets(self) -> Tensor:
        return self._offsets

    @property
    def cu_seqlens(self) -> Tensor:
        return self._offsets

    def __getattr__(self, name: str) -> Any:
        if name == "min_seqlen" and is_traced(self._offsets):
            return 0
        if name in ("total", "max_seqlen", "min_seqlen", "sum_of_squares"):
            return getattr(self.known(name), name)
        raise AttributeError(f"a layout has no attribute {name!r}.")

    def known(self, name: str) -> Any:
        if is_traced(self._offsets):
            raise LengthsUnknownError(
                f"{name} needs the lengths, which are not known in a graph: read it outside of the graph."
            )
        return self.read()

    @outside_of_graphs
    def read(self) -> Layout:
        """The layout of the offsets, outside of graphs."""
        layout: Layout = self._of.from_offsets(self._offsets, *self.arguments)  # type: ignore[attr-defined]
        return layout

    def check_rows(self, values: Tensor, name: str) -> None:
        self.check_device(values, name)  # the operator checks the number of rows

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        self.check_device(key, "key")
        self.check_device(value, "value")

    def extended(self, extra: int) -> Layout:
        longer = self._offsets + extra * torch.arange(self._offsets.shape[0], device=self.device)
        return TracedLayout(torch.ops.nt_attention.offsets.default(longer, None, 0), self._of)

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(rows, device=self.device)
        sequence = (torch.searchsorted(self._offsets, row, right=True) - 1).clamp(max=self._offsets.shape[0] - 2)
        return sequence, row - self._offsets[sequence]


class TracedBoundedLayout(TracedLayout):
    """A `BoundedLayout` in a graph.

    Attributes:
        bounds: `max_seqlen` and `total`.
    """

    knows_lengths: ClassVar[bool] = False
    min_seqlen = 0

    def __init__(self, offsets: Tensor, of: type, max_seqlen: int, max_tokens: int) -> None:
        super().__init__(offsets, of)
        self.arguments = self.max_seqlen, self.total = max_seqlen, max_tokens

    @property
    def bounds(self) -> tuple[int, int]:
        return self.max_seqlen, self.total

    @property
    def valid(self) -> Valid:
        """The offsets, if they are valid."""
        return Valid.of(self._offsets, self.max_seqlen, self.total)

    @property
    def safe_offsets(self) -> Tensor:
        return self.valid.offsets

    def extended(self, extra: int) -> Layout:
        longest, total = self.max_seqlen + extra, self.total + extra * self.batch_size
        return TracedBoundedLayout(self.valid.extended(extra), self._of, longest, total)

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.valid.locate(rows)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        return self.valid.fill_past_end(values, value)
