"""Finds the beginnings of packed sequences in `position_ids`.

Dimensions: B rows, L positions in a row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ...compiler import is_captured, is_replayed
from ...layouts.cache import cache_with, find_cached, forget
from ...layouts.protocol import Layout
from ...layouts.sequence import TOKEN_SHAPE, SequenceLayout, layout_where


def may_show_sequences(position_ids: Tensor, module: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether positions can show an attention module where sequences begin: in self-attention without a cache.

    `query` and `key` are (B, H, L, D) and (B, G, S, D). With three dimensions (M-RoPE), positions need not increase by
    one.
    """
    rows, length = query.shape[0], query.shape[2]
    is_self = not is_cross_attention(module) and key.shape[2] == length > 1
    return is_self and not position_ids.is_meta and position_ids.shape in ((rows, length), (1, length))


def is_cross_attention(module: nn.Module) -> bool:
    """Whether an attention module says that its keys are those of another model."""
    return bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__


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


def same_sequence(position_ids: Tensor, rows: int, token_mask: Tensor | None) -> Tensor:
    """(B, 1, L, L) bool, True if query and key are in one sequence. Needs no sync."""
    ids = starts(position_ids, token_mask).cumsum(1)
    same = rearrange(ids, "b l -> b 1 l 1") == rearrange(ids, "b l -> b 1 1 l")
    return same.expand(rows, -1, -1, -1)


class _Entry(NamedTuple):
    """The layout of positions, None if each row is one sequence, and the layer that has read it."""

    layer: int | None
    layout: Layout | None


def read_layout(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> Layout | None:
    """The layout of all B · L positions, or None if each row is one sequence. Read once for all layers of a model.

    Padding is part of the sequence before it, or of the first sequence of the row.
    """

    def read() -> _Entry:
        if token_mask is None:
            layout: Layout = SequenceLayout.from_position_ids(position_ids.expand(rows, -1))
        else:
            first = starts(position_ids, token_mask)
            first[:, :1] = True
            layout = layout_where(first.flatten().cpu().numpy(), position_ids.device)
        return _Entry(layer, layout if layout.batch_size > rows else None)

    entry, key = _find(position_ids, rows, layer, token_mask), ("positions", rows, id(token_mask))
    if entry is not None:
        return entry.layout
    forget(position_ids, key)
    return cache_with(position_ids, key, read, token_mask, follows=True).layout


def _find(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> _Entry | None:
    entry: _Entry | None = find_cached(position_ids, ("positions", rows, id(token_mask)), token_mask)
    # If they may change unnoticed, the first layer reads them again in each forward.
    may_change = any(x is not None and (x.is_inference() or is_replayed(x)) for x in (position_ids, token_mask))
    return None if entry is None or (may_change and layer in (None, entry.layer)) else entry


def can_read_layout(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> bool:
    """Whether `read_layout` can be called: a captured CUDA graph can't read positions that were not read before."""
    return not is_captured(position_ids) or _find(position_ids, rows, layer, token_mask) is not None


def is_forward_token(tensor: Tensor | None) -> bool:
    """Whether `sequence.new_forward_token` made this tensor."""
    return tensor is not None and tensor.dtype == torch.int8 and tensor.shape == TOKEN_SHAPE


@functools.lru_cache(maxsize=64)
def one_sequence_per_row(rows: int, length: int, device: torch.device) -> Layout:
    """The layout of rows without padding, in which each row is one sequence."""
    return SequenceLayout.from_lengths([length] * rows, device=device)
