"""A padded batch as one packed row, and back.

Dimensions: B rows, L positions in a padded row, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._offsets import to_device
from ..layout import SequenceLayout, layout_where, scatter_rows
from .positions import previous_token, starts


@dataclass(frozen=True)
class Packing:
    """Which positions of a batch (B, L) hold tokens, and which tokens form a sequence.

    Attributes:
        layout: the sequences, of which a row may hold several.
        index: (T,) int64, each token's position in the flattened batch; None if there is a token at every position.
        rows, length: B and L.
        has_holes: whether there is padding between the tokens of some sequence.
    """

    layout: SequenceLayout
    index: Tensor | None
    rows: int
    length: int
    has_holes: bool = False

    @classmethod
    def of(cls, mask: Tensor | None, position_ids: Tensor | None, rows: int, length: int) -> Packing:
        """From a mask (B, L) with 1 at tokens, and positions (B, L) or (1, L). Reads the device once.

        Sequences are the rows, divided where the positions of their tokens begin anew (``hf/positions.py``).

        Raises:
            ValueError: values other than 0 and 1 in the mask.
        """
        if position_ids is None:
            assert mask is not None
            layout = SequenceLayout.from_attention_mask(mask)
            index = layout.padded_index if layout.total < mask.numel() else None
            return cls(layout, index, rows, length, layout.has_holes)
        if mask is None:
            return cls(SequenceLayout.from_position_ids(position_ids.expand(rows, -1)), None, rows, length)
        tokens = mask != 0
        before = previous_token(tokens)
        first = tokens & (starts(position_ids, tokens) | (before < 0))
        hole = tokens & ~first & (torch.arange(length, device=mask.device) - before > 1)
        bits = tokens.to(torch.uint8) + 2 * first + 4 * hole + 8 * (tokens & (mask != 1))
        on_host = bits.to(torch.uint8).flatten().cpu().numpy()  # one copy for all four
        if (on_host >= 8).any():
            raise ValueError("attention_mask holds values other than 0 (padding) and 1 (a token).")
        of_tokens = on_host[on_host > 0]
        layout = layout_where(of_tokens & 2, mask.device)
        index = to_device(on_host.nonzero()[0], mask.device) if layout.total < mask.numel() else None
        return cls(layout, index, rows, length, bool((of_tokens & 4).any()))

    @property
    def saves_nothing(self) -> bool:
        """Whether every row is one sequence as long as the batch, or there is no token at all."""
        full = self.index is None and self.layout.batch_size == self.rows
        return full or self.layout.total == 0

    @property
    def padded_positions(self) -> Tensor:
        """(T,) int64, the position of each token in its padded row."""
        if self.index is None:
            return torch.arange(self.length, device=self.layout.device).repeat(self.rows)
        return self.index % self.length

    def first_tokens(self, packed: Tensor) -> Tensor:
        """(1, T, …) to (B, …): the first token of each row, 0 for a row without any."""
        return self._nearest(packed, torch.zeros(1, dtype=torch.int64, device=packed.device)).squeeze(1)

    def pad_with_nearest(self, packed: Tensor) -> Tensor:
        """(1, T, …) to (B, L, …) as ``pad``, but padding repeats the last token before it, else its row's first."""
        if self.index is None:
            return self.pad(packed)
        return self._nearest(packed, torch.arange(self.length, device=packed.device))

    def _nearest(self, packed: Tensor, positions: Tensor) -> Tensor:
        tokens, found = self.tokens_at(positions, nearest=True)
        values = packed[0].index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        return values.masked_fill(~found.view(*found.shape, *[1] * (packed.dim() - 2)), 0)

    def tokens_at(self, positions: Tensor, *, nearest: bool = False) -> tuple[Tensor, Tensor]:
        """The tokens at positions (K,) or (B, K) of the padded rows, (B, K) int64, 0 if there is none; and which exist.

        With ``nearest``, a position of padding has the last token before it, else the row's first.
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
        found = at.div(self.length, rounding_mode="floor") == row if nearest else at == flat
        return token.where(found, 0), found

    def pack(self, padded: Tensor) -> Tensor:
        """(B, L, …) or (1, L, …) to (1, T, …)."""
        flat = padded.expand(self.rows, *padded.shape[1:]).flatten(0, 1)
        return (flat if self.index is None else flat.index_select(0, self.index)).unsqueeze(0)

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """(1, T, …) to (B, L, …), with ``value`` at padding."""
        packed = packed.squeeze(0)
        if self.index is None:
            return packed.unflatten(0, (self.rows, self.length))
        return scatter_rows(packed, self.index, (self.rows, self.length, *packed.shape[1:]), value)
