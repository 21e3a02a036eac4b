"""Where packed sequences begin, by their ``position_ids``.

Dimensions: B rows, L positions in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..layout import SequenceLayout, layout_where


def starts(position_ids: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """(B, L) bool, the tokens that begin a sequence inside their row, after the row's first; without a sync.

    Without a mask that is wherever a position is not the one before it plus one, as in transformers. With one, a token
    is compared with the token before it: it goes on where its position is one more, or more by their distance in the
    padded row (some count padding, others do not), and where all of a row's positions are the same.

    Args:
        position_ids: (B, L) or (1, L).
        token_mask: (B, L) bool, True at tokens; None for everywhere.
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
    """(B, L) int64, the padded position of the last token before each one, −1 where there is none."""
    index = torch.arange(token_mask.shape[1], device=token_mask.device).expand_as(token_mask)
    index = index.masked_fill(~token_mask, -1)
    return torch.cat([index.new_full((len(token_mask), 1), -1), index.cummax(1).values[:, :-1]], 1)


def same_sequence(position_ids: Tensor, rows: int) -> Tensor:
    """(B, 1, L, L) bool, where the query's sequence is the key's; without a sync."""
    ids = starts(position_ids).cumsum(1)
    return (ids[:, None, :, None] == ids[:, None, None, :]).expand(rows, -1, -1, -1)


class _Entry(NamedTuple):
    """The layout that was read, from which version of the positions, and by which layer."""

    version: int | None
    rows: int
    layer: int | None
    layout: SequenceLayout | None


# By the position_ids that a model passes to all of its layers, then by the token mask.
_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NO_MASK = torch.empty(0)


def read_layout(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> SequenceLayout | None:
    """The layout of all B · L positions where some row holds several sequences; read once for all layers of a model.

    Padding belongs to the sequence before it, or to the first.
    """
    version = None if position_ids.is_inference() else position_ids._version
    by_mask = _cache.setdefault(position_ids, WeakIdKeyDictionary())
    key = _NO_MASK if token_mask is None else token_mask
    entry = by_mask.get(key)
    # inference tensors have no version: the layer that read them, the first of a model, reads them again
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
