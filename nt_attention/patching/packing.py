"""A padded batch as one packed row, and back.

Dimensions: B rows, L places in a row, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import SequenceLayout, places_of


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

        Sequences are the rows; with ``position_ids``, one also begins where a token's position does not go on by one.

        Raises:
            ValueError: values other than 0 and 1 in the mask.
        """
        if position_ids is None:
            assert mask is not None
            layout = SequenceLayout.from_attention_mask(mask)
            index = layout.padded_index if layout.total < mask.numel() else None
            return cls(layout, index, rows, length, layout.has_holes)
        positions = position_ids.expand(rows, -1).flatten()
        if mask is None:
            return cls(SequenceLayout.from_position_ids(positions.view(rows, length)), None, rows, length)
        here = mask.flatten() != 0
        index = places_of(here, here.numel())
        there = index < here.numel()
        places = index.where(there, 0)
        begins, steps = torch.ones_like(here), places.diff() != 1
        begins[1:] = (positions[places].diff() != 1) | (places.div(length, rounding_mode="floor").diff() != 0)
        told = torch.where(there, 1 + begins.to(torch.uint8), 0)
        told[1:] += 4 * (steps & (told[1:] == 1))
        told += 8 * (here & (mask.flatten() != 1))
        on_host = told.to(torch.uint8).cpu()  # one copy tells it all
        if bool((on_host >= 8).any()):
            raise ValueError("attention_mask holds values other than 0 (padding) and 1 (a token).")
        total = int((on_host > 0).sum())
        starts = (on_host == 2).nonzero().squeeze(1)
        lengths = torch.cat([starts, torch.tensor([total])]).diff()
        layout = SequenceLayout.from_lengths(lengths, device=mask.device)
        holes = bool((on_host == 5).any())
        return cls(layout, index[:total] if total < here.numel() else None, rows, length, holes)

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
        begin = torch.arange(self.rows, device=packed.device) * self.length
        if self.index is None:
            return packed[0].index_select(0, begin)
        found = torch.searchsorted(self.index, begin).clamp(max=self.layout.total - 1)
        there = self.index[found].div(self.length, rounding_mode="floor") == torch.arange(
            self.rows, device=packed.device
        )
        return packed[0].index_select(0, found).masked_fill(~there.view(-1, *[1] * (packed.dim() - 2)), 0)

    def tokens_at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens stand at these places (K,) of each row, (B, K) int64, 0 if none does; and whether one does."""
        flat = torch.arange(self.rows, device=places.device)[:, None] * self.length + places
        if self.index is None:
            return flat, torch.ones_like(flat, dtype=torch.bool)
        token = torch.full((self.rows * self.length,), -1, device=places.device, dtype=torch.int64)
        token[self.index] = torch.arange(self.layout.total, device=places.device)
        token = token[flat]
        return token.clamp(min=0), token >= 0

    def pack(self, padded: Tensor) -> Tensor:
        """(B, L, …) or (1, L, …) to (1, T, …)."""
        if padded.shape[0] == 1 != self.rows:
            padded = padded.expand(self.rows, *padded.shape[1:])
        flat = padded.flatten(0, 1)
        return (flat if self.index is None else flat.index_select(0, self.index)).unsqueeze(0)

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """(1, T, …) to (B, L, …), with ``value`` where there is no token."""
        packed = packed.squeeze(0)
        if self.index is not None:
            padded = packed.new_full((self.rows * self.length, *packed.shape[1:]), value)
            packed = padded.index_copy_(0, self.index, packed)
        return packed.unflatten(0, (self.rows, self.length))
