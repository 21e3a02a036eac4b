"""Finds the beginnings of packed sequences in `position_ids`.

Dimensions: B rows, L positions in a row.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...compiler import TracedLayout, is_captured, is_replayed
from ...layouts.known import SequenceLayout, layout_where
from ...layouts.reading import WeakTensorDict, snapshot
from ...operators import define


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
        begins = torch.zeros_like(position_ids, dtype=torch.bool)
        begins[:, 1:] = position_ids.diff(dim=1) != 1
        return begins
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
    return (ids[:, None, :, None] == ids[:, None, None, :]).expand(rows, -1, -1, -1)


class _Entry(NamedTuple):
    """A cached layout, the state of what it was read from, see `_state`, and the layer that read it."""

    state: tuple[object, ...]
    layer: int | None
    layout: SequenceLayout | None


# position_ids, which a model passes to all of its layers → token mask → entry.
_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NO_MASK = torch.empty(0)


def read_layout(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> SequenceLayout | None:
    """The layout of all B · L positions, or None if each row is one sequence. Read once for all layers of a model.

    Padding is part of the sequence before it, or of the first sequence of the row.
    """
    state = _state(position_ids, rows, token_mask)
    entry = _find(position_ids, state, layer, token_mask)
    if entry is not None:
        return entry.layout
    if token_mask is None:
        layout = SequenceLayout.from_position_ids(position_ids.expand(rows, -1))
    else:
        first = starts(position_ids, token_mask)
        first[:, :1] = True
        layout = layout_where(first.flatten().cpu().numpy(), position_ids.device)
    packed = layout if layout.batch_size > rows else None
    by_mask = _cache.setdefault(position_ids, WeakIdKeyDictionary())
    by_mask[_NO_MASK if token_mask is None else token_mask] = _Entry(state, layer, packed)
    return packed


def can_read_layout(position_ids: Tensor, rows: int, layer: int | None, token_mask: Tensor | None) -> bool:
    """Whether `read_layout` can be called: a captured CUDA graph can't read positions that were not read before."""
    if not is_captured(position_ids):
        return True
    return _find(position_ids, _state(position_ids, rows, token_mask), layer, token_mask) is not None


def _find(
    position_ids: Tensor, state: tuple[object, ...], layer: int | None, token_mask: Tensor | None
) -> _Entry | None:
    by_mask = _cache.get(position_ids)
    entry: _Entry | None = None if by_mask is None else by_mask.get(_NO_MASK if token_mask is None else token_mask)
    if entry is None or entry.state != state:
        return None
    # If they may change unnoticed, the first layer reads them again in each forward.
    return None if None in state and (layer is None or layer == entry.layer) else entry


def _state(position_ids: Tensor, rows: int, token_mask: Tensor | None) -> tuple[object, ...]:
    """What a layout is read from, on a CPU with all values. It has None if that may change without a new version."""
    tensors = [position_ids] if token_mask is None else [position_ids, token_mask]
    return (rows, position_ids.shape, *[None if is_replayed(x) else snapshot(x) for x in tensors])


def layout_in_graph(position_ids: Tensor, rows: int, forward_token: Tensor | None) -> SequenceLayout:
    """The layout of all B · L positions, in a graph. They are read when it runs, once for each `new_forward_token`."""
    offsets = torch.ops.nt_attention.offsets_of_positions.default(position_ids, rows, forward_token)
    return cast(SequenceLayout, TracedLayout(offsets))


def new_forward_token(device: torch.device) -> Tensor:
    """A tensor of a graph that is another object in each forward of a model; see `reading.read_in_operator`."""
    return torch.ops.nt_attention.forward_token.default(device)


def is_forward_token(tensor: Tensor | None) -> bool:
    """Whether `new_forward_token` made this tensor."""
    return tensor is not None and tensor.dtype == torch.int8 and tensor.shape == _FORWARD_TOKEN


_FORWARD_TOKEN = (1, 1, 0, 0)  # as a mask, it raises an error in all attention functions but ours


class _ReadInGraph(NamedTuple):
    """The layout of positions that an operator has read, the forward token, the positions' snapshot, and B."""

    forward_token: weakref.ref[Tensor]
    snapshot: object
    rows: int
    layout: SequenceLayout


_read_in: WeakTensorDict[_ReadInGraph] = WeakTensorDict()


def _offsets_of_positions(position_ids: Tensor, rows: int, forward_token: Tensor | None) -> Tensor:
    """(B·L+1,) int32, see `copy_for_graph`."""
    now, entry = snapshot(position_ids), _read_in.get(position_ids)
    if (
        entry is not None
        and entry.forward_token() is forward_token is not None
        and (entry.snapshot, entry.rows) == (now, rows)
    ):
        layout = entry.layout
    else:
        layout = SequenceLayout.from_position_ids(position_ids.expand(rows, -1))
        if forward_token is not None:
            _read_in[position_ids] = _ReadInGraph(weakref.ref(forward_token), now, rows, layout)
    return layout.offsets_for_graph(rows * position_ids.shape[1] + 1)


def _fake_offsets(position_ids: Tensor, rows: int, forward_token: Tensor | None) -> Tensor:
    return position_ids.new_empty(rows * position_ids.shape[1] + 1, dtype=torch.int32)


def _make_forward_token(device: torch.device) -> Tensor:
    return torch.empty(_FORWARD_TOKEN, dtype=torch.int8, device=device)


define(
    "offsets_of_positions(Tensor position_ids, SymInt rows, Tensor? forward_token) -> Tensor",
    _offsets_of_positions,
    _fake_offsets,
)
# As an operator with random results, so that compilers do not replace it by a constant.
define("forward_token(Device device) -> Tensor", _make_forward_token, _make_forward_token, random=True)


@functools.lru_cache(maxsize=64)
def one_sequence_per_row(rows: int, length: int, device: torch.device) -> SequenceLayout:
    """The layout of rows without padding, in which each row is one sequence."""
    return SequenceLayout.from_lengths([length] * rows, device=device)
