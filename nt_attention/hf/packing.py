"""A padded batch as one packed row, and back.

Dimensions: B rows, L places in a row, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._offsets import to_device
from ..layout import SequenceLayout, layout_where, scatter_rows
from .positions import begins, previous


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch (B, L) stand, and which of them belong together.

    Attributes:
        layout: the sequences, of which a row may hold several.
        index: (T,) int64, each token's place in the flattened batch; None if every place holds one.
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
        """From a mask (B, L) with 1 where a token is, and positions (B, L) or (1, L). Reads the device once.

        Sequences are the rows, cut where the positions of their tokens tell of more (``hf/positions.py``).

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
        here = mask != 0
        before = previous(here)
        first = here & (begins(position_ids, here) | (before < 0))
        hole = here & ~first & (torch.arange(length, device=mask.device) - before > 1)
        told = here.to(torch.uint8) + 2 * first + 4 * hole + 8 * (here & (mask != 1))
        on_host = told.to(torch.uint8).flatten().cpu().numpy()  # one copy tells it all
        if (on_host >= 8).any():
            raise ValueError("attention_mask holds values other than 0 (padding) and 1 (a token).")
        tokens = on_host[on_host > 0]
        layout = layout_where(tokens & 2, mask.device)
        index = to_device((on_host > 0).nonzero()[0], mask.device) if layout.total < mask.numel() else None
        return cls(layout, index, rows, length, bool((tokens & 4).any()))

    @property
    def saves_nothing(self) -> bool:
        """Whether every row is one sequence as long as the batch, or there is no token at all."""
        full = self.index is None and self.layout.batch_size == self.rows
        return full or self.layout.total == 0

    @property
    def places(self) -> Tensor:
        """(T,) int64, where in its row each token stands."""
        if self.index is None:
            return torch.arange(self.length, device=self.layout.device).repeat(self.rows)
        return self.index % self.length

    def first_tokens(self, packed: Tensor) -> Tensor:
        """(1, T, …) to (B, …): what the token says with which each row begins, 0 for a row without any."""
        return self._nearest(packed, torch.zeros(1, dtype=torch.int64, device=packed.device)).squeeze(1)

    def spread(self, packed: Tensor) -> Tensor:
        """(1, T, …) to (B, L, …) as ``pad``, but padding shows the last token before it, else its row's first."""
        if self.index is None:
            return self.pad(packed)
        return self._nearest(packed, torch.arange(self.length, device=packed.device))

    def _nearest(self, packed: Tensor, places: Tensor) -> Tensor:
        token, there = self.tokens_at(places, nearest=True)
        if not self.layout.total:
            return packed.new_zeros(*token.shape, *packed.shape[2:])
        found = packed[0].index_select(0, token.flatten()).unflatten(0, token.shape)
        return found.masked_fill(~there.view(*there.shape, *[1] * (packed.dim() - 2)), 0)

    def tokens_at(self, places: Tensor, *, nearest: bool = False) -> tuple[Tensor, Tensor]:
        """Which tokens stand at these places (K,) of each row, (B, K) int64, 0 if none does; and whether one does.

        With ``nearest``, at a place of padding stands the last token before it, else the row's first.
        """
        row = torch.arange(self.rows, device=places.device)[:, None]
        flat = row * self.length + places
        if self.index is None:
            return flat, torch.ones_like(flat, dtype=torch.bool)
        if not self.layout.total:
            return torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.bool)
        token = torch.searchsorted(self.index, flat, right=nearest)
        if nearest:
            first = torch.searchsorted(self.index, row * self.length)
            token = torch.maximum(token - 1, first)
        token = token.clamp(max=self.layout.total - 1)
        at = self.index[token]
        there = at.div(self.length, rounding_mode="floor") == row if nearest else at == flat
        return token.where(there, 0), there

    def pack(self, padded: Tensor) -> Tensor:
        """(B, L, …) or (1, L, …) to (1, T, …)."""
        if padded.shape[0] == 1 != self.rows:
            padded = padded.expand(self.rows, *padded.shape[1:])
        flat = padded.flatten(0, 1)
        return (flat if self.index is None else flat.index_select(0, self.index)).unsqueeze(0)

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """(1, T, …) to (B, L, …), with ``value`` where there is no token."""
        packed = packed.squeeze(0)
        if self.index is None:
            return packed.unflatten(0, (self.rows, self.length))
        return scatter_rows(packed, self.index, (self.rows, self.length, *packed.shape[1:]), value)
