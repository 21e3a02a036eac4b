"""Conversion of a padded batch to one packed row and back.

Dimensions: B rows, L positions in a padded row, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...compiler import check_readable
from ...layouts.cache import on_host, to_device
from ...layouts.protocol import Layout
from ...layouts.rows import scatter_rows
from ...layouts.sequence import SequenceLayout, layout_of_mask, layout_where
from ..route.positions import previous_token, starts
from .padded_on_read import Padding


def read_bits(masks: Sequence[Tensor]) -> list[NDArray[np.bool_]]:
    """Bool tensors of one shape on the host. Syncs with the device once for all of them."""
    if len(masks) == 1:
        return [on_host(masks[0])]
    bits = masks[0].to(torch.uint8)
    for i, mask in enumerate(masks[1:], 1):
        bits = torch.add(bits, mask, alpha=1 << i)
    read = on_host(bits)
    return [(read & (1 << i)) > 0 for i in range(len(masks))]


def begin_padded(is_token: NDArray[np.bool_]) -> bool:
    """Whether a row of a mask (B, L) begins with padding. Rows without tokens do not count."""
    if not is_token.size or is_token[:, 0].all():
        return False
    return bool((is_token.any(1) > is_token[:, 0]).any())


@dataclass(frozen=True)
class Packing(Padding):
    """The tokens and the sequences of a batch (B, L).

    Attributes:
        layout: the sequences. A row may have several.
        index: (T,) int64, the position of each token in the flattened batch. None if there is no padding.
        rows, length: B and L.
        has_holes: whether a sequence has padding between its tokens.
        shares_rows: whether a row has several sequences.
        begins_padded: whether a row begins with padding.
        ignores_labels: whether the padded run counts labels that the packed one does not, see `uncounted_labels`.
    """

    layout: Layout
    index: Tensor | None
    rows: int
    length: int
    has_holes: bool = False
    shares_rows: bool = False
    begins_padded: bool = False
    ignores_labels: bool = False

    @classmethod
    def of(
        cls, mask: Tensor | None, position_ids: Tensor | None, rows: int, length: int, uncounted: Tensor | None = None
    ) -> Packing:
        """Find the tokens and sequences of a batch. Each row is one sequence, or several if its positions restart.

        Syncs with the device once. For positions that restart, see `positions.starts`.

        Args:
            mask: (B, L), 0 at padding. None if there is no padding.
            position_ids: (B, L) or (1, L). None if each row is one sequence.
            rows, length: B and L.
            uncounted: (B, L) bool, labels that the padded run counts and the packed one does not, or None.
        """
        if mask is None:
            assert position_ids is not None
            layout = SequenceLayout.from_position_ids(position_ids.expand(rows, -1))
            return cls(layout, None, rows, length, shares_rows=layout.batch_size > rows)
        check_readable(mask, "attention_mask")
        tokens = mask if mask.dtype == torch.bool else mask != 0
        bits = [tokens] if uncounted is None else [tokens, uncounted]
        if position_ids is None:
            is_token, *others = read_bits(bits)
            layout = layout_of_mask(is_token, mask.device)
            has_holes, shares_rows = layout.has_holes, False
        else:
            before = previous_token(tokens)
            first = tokens & (starts(position_ids, tokens) | (before < 0))
            hole = tokens & ~first & (torch.arange(length, device=mask.device) - before > 1)
            is_first, is_hole, is_token, *others = read_bits([first, hole, *bits])
            layout = layout_where(is_first[is_token], mask.device)
            has_holes, shares_rows = bool(is_hole.any()), bool(is_first.sum(1).max(initial=0) > 1)
        flags = has_holes, shares_rows, begin_padded(is_token), bool(others and others[0].any())
        if layout.total == is_token.size:
            return cls(layout, None, rows, length, *flags)
        if position_ids is None:  # the layout was made of the mask, and has it
            index = layout.index_of_tokens(length)
        else:
            index = to_device(np.flatnonzero(is_token), mask.device)
        return cls(layout, index, rows, length, *flags)

    @classmethod
    def of_packed_rows(cls, layout: Layout, mask: Tensor | None, rows: int, length: int) -> Packing:
        """The packing of rows that the caller packed. Syncs with the device once if there is a mask.

        Args:
            layout: the sequences of all B · L positions. No sequence is in two rows.
            mask: as in `of`. A sequence has the tokens that the mask leaves of it.
            rows, length: B and L.
        """
        if mask is None:
            return cls(layout, None, rows, length, shares_rows=layout.batch_size > rows)
        tokens = mask.flatten().cpu().numpy()
        if tokens.all():
            return cls.of_packed_rows(layout, None, rows, length)
        index, ends = tokens.nonzero()[0], layout.host.numpy()[1:]
        sequence = np.searchsorted(ends, index, side="right")
        lengths = np.bincount(sequence)
        lengths = lengths[lengths > 0]
        in_row = np.bincount(index[np.diff(sequence, prepend=-1) > 0] // length)
        has_holes = bool(((np.diff(index) > 1) & (np.diff(sequence) == 0)).any())
        layout = SequenceLayout.from_lengths(lengths.tolist(), device=mask.device)
        return cls(layout, to_device(index, mask.device), rows, length, has_holes, in_row.max(initial=0) > 1)

    @property
    def token_shape(self) -> tuple[int, int]:
        """(1, T), the first two dimensions of outputs with a value for each token."""
        return 1, self.layout.total

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.rows, self.length

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of positions in the padded batch, and of tokens."""
        return self.rows * self.length, self.layout.total

    @property
    def saves_nothing(self) -> bool:
        """Whether every row is one sequence without padding, or the batch has no tokens."""
        full = self.index is None and self.layout.batch_size == self.rows
        return full or self.layout.total == 0

    @property
    def padded_positions(self) -> Tensor:
        """(T,) int64, the position of each token in its padded row."""
        if self.index is None:
            return torch.arange(self.length, device=self.layout.device).repeat(self.rows)
        return self.index % self.length

    @cached_property
    def own_positions(self) -> Tensor:
        """(T,) int64, the position of each token in its padded row, or in its sequence if rows have several."""
        return self.layout.position_ids if self.shares_rows else self.padded_positions

    @property
    def is_row_per_sequence(self) -> bool:
        """Whether the sequences are the rows of the batch, in their order."""
        return self.layout.batch_size == self.rows and not self.shares_rows

    def tokens_of_row(self, row: int) -> range:
        """The tokens of a row, if each row is a sequence."""
        begin, end = self.layout.host[row : row + 2].tolist()
        return range(begin, end)

    def positions_of_row(self, row: int) -> Tensor:
        """(n,), the positions of the tokens of a row, if each row is a sequence."""
        tokens = self.tokens_of_row(row)
        return self.padded_positions[tokens.start : tokens.stop]

    def first_tokens(self, packed: Tensor) -> Tensor:
        """The first token of each row, (1, T, …) → (B, …). It is 0 for a row without tokens."""
        layout = self.layout
        if self.is_row_per_sequence and layout.min_seqlen:
            return packed[0].index_select(0, layout.safe_offsets[:-1])
        return self._nearest(packed, torch.zeros(1, dtype=torch.int64, device=packed.device)).squeeze(1)

    def pad_with_nearest(self, packed: Tensor) -> Tensor:
        """As `pad`, but padding repeats the last token before it, or else the first token of its row."""
        if self.index is None:
            return self.pad(packed)
        return self._nearest(packed, torch.arange(self.length, device=packed.device))

    def _nearest(self, packed: Tensor, positions: Tensor) -> Tensor:
        tokens, is_token = self.tokens_at(positions, nearest=True)
        values = packed[0].index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        return values.masked_fill(~is_token.view(*is_token.shape, *[1] * (packed.dim() - 2)), 0)

    def tokens_at(self, positions: Tensor, *, nearest: bool = False) -> tuple[Tensor, Tensor]:
        """Find the tokens at some positions of the padded rows.

        Args:
            positions: (K,) or (B, K).
            nearest: for padding, use the last token before it, or else the first token of the row.

        Returns:
            The indices of the tokens, (B, K) int64, 0 where there is none; and (B, K) bool, where there is a token.
        """
        row = torch.arange(self.rows, device=positions.device)[:, None]
        flat = row * self.length + positions
        if self.index is None:
            return flat, torch.ones_like(flat, dtype=torch.bool)
        if not self.layout.total:
            return torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.bool)
        token = torch.searchsorted(self.index, flat, right=nearest)
        if nearest:
            token = torch.maximum(token - 1, torch.searchsorted(self.index, row * self.length))
        token = token.clamp(max=self.layout.total - 1)
        at = self.index[token]
        is_token = at.div(self.length, rounding_mode="floor") == row if nearest else at == flat
        return token.where(is_token, 0), is_token

    def pack(self, padded: Tensor) -> Tensor:
        """Remove the padding: (B, L, …) or (1, L, …) → (1, T, …)."""
        flat = padded.expand(self.rows, *padded.shape[1:]).flatten(0, 1)
        return (flat if self.index is None else flat.index_select(0, self.index)).unsqueeze(0)

    def unpad(self, gradient: Tensor) -> Tensor:
        return self.pack(gradient)

    def tokens_of(self, packed: Tensor) -> tuple[Tensor, Any]:
        return packed[0], self.layout

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """Restore the padding: (1, T, …) → (B, L, …), with `value` at padding."""
        packed = packed.squeeze(0)
        if self.index is None:
            return packed.unflatten(0, (self.rows, self.length))
        return scatter_rows(packed, self.index, (self.rows, self.length, *packed.shape[1:]), value)
