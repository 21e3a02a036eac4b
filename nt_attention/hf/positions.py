"""Finds the beginnings of packed sequences in `position_ids`.

Dimensions: B rows, L positions in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..layout import SequenceLayout, layout_where


def starts(position_ids: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """Find the tokens that begin a sequence, except for the first token of each row. Needs no sync.

    Without a mask, a sequence begins at each position that is not the previous position plus 1, as in transformers.

    With a mask, each token is compared with the previous token of its row. It continues the sequence if its position is
    greater by 1, or greater by their distance in the padded row, because some models count padding in positions. If all
    positions of a row are the same, the row is one sequence.

    Args:
        position_ids: (B, L) or (1, L).
        token_mask: (B, L) bool, True at tokens. None if there is no padding.

    Returns:
        (B or 1, L) bool, True at the tokens that begin a sequence.
    """
    if token_mask is None:
        found = torch.zeros_like(position_ids, dtype=torch.bool)
        found[:, 1:] = position_ids.diff(dim=1) != 1
        return found
    if not token_mask.numel():
        return torch.zeros_like(token_mask)
    before = previous_token(token_mask)
    positions = position_ids.expand_as(token_mask)
    step = positions - positions.gather(1, before.clamp(min=0))
    distance = torch.arange(token_mask.shape[1], device=token_mask.device) - before
    varies = (position_ids != position_ids[:, :1]).any(1, keepdim=True)
    return token_mask & (before >= 0) & varies & (step != 1) & (step != distance)


def previous_token(token_mask: Tensor) -> Tensor:
    """(B, L) int64, the index in the row of the last token before each position, or −1 if there is none."""
    index = torch.arange(token_mask.shape[1], device=token_mask.device).expand_as(token_mask)
    index = index.masked_fill(~token_mask, -1)
    return torch.cat([index.new_full((len(token_mask), 1), -1), index.cummax(1).values[:, :-1]], 1)


def same_sequence(position_ids: Tensor, rows: int) -> Tensor:
    """(B, 1, L, L) bool, True if query and key are in one sequence. Needs no sync."""
    ids = starts(position_ids).cumsum(1)
    return (ids[:, None, :, None] == ids[:, None, None, :]).expand(rows, -1, -1, -1)


class _Entry(NamedTuple):
    """A cached layout, the version of the positions it was read from, and the layer that read it."""

    version: int | None
    rows: int
    layer: int | None
    layout: SequenceLayout | None


# position_ids, which a model passes to all of its layers → token mask → entry.
_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NO_MASK = torch.empty(0)


def read_layout(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> SequenceLayout | None:
    """The layout of all B · L positions, or None if each row is one sequence. Read once for all layers of a model.

    Padding is part of the sequence before it, or of the first sequence of the row.
    """
    version = None if position_ids.is_inference() else position_ids._version
    by_mask = _cache.setdefault(position_ids, WeakIdKeyDictionary())
    key = _NO_MASK if token_mask is None else token_mask
    entry = by_mask.get(key)
    # Inference tensors have no version, so the first layer reads them again in each forward.
    stale = version is None and (layer is None or entry is None or layer == entry.layer)
    if entry is not None and (entry.version, entry.rows) == (version, rows) and not stale:
        return entry.layout
    if token_mask is None:
        layout = SequenceLayout.from_position_ids(position_ids.expand(rows, -1))
    else:
        first = starts(position_ids, token_mask)
        first[:, :1] = True
        layout = layout_where(first.flatten().cpu().numpy(), position_ids.device)
    found = layout if layout.batch_size > rows else None
    by_mask[key] = _Entry(version, rows, layer, found)
    return found
