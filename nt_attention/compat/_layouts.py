"""The layouts of calls that pass `cu_seqlens`, or batches (B, L, …) in which every position is a token.

Dimensions: B sequences, L tokens of each sequence.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..compiler import is_captured, is_traced
from ..layouts.known import SequenceLayout
from ..layouts.protocol import Layout

# Layouts that were used while a CUDA graph was captured. They are kept, because replays of the graph read them.
_captured: set[Layout] = set()


def layout_of_offsets(cu_seqlens: Tensor, max_seqlen: int, rows: int) -> Layout:
    """The layout of packed tensors with `rows` rows.

    The host reads `cu_seqlens` (B+1,) at the first use of the tensor, but not while a CUDA graph is captured. In a
    graph, `max_seqlen` and `rows` are bounds, and each replay uses the offsets of that moment.

    Raises:
        TypeError: `cu_seqlens` is not a tensor.
        ValueError: as `SequenceLayout.from_offsets`, such as for a `max_seqlen` below the longest sequence.
    """
    if isinstance(cu_seqlens, Tensor) and not is_traced(cu_seqlens) and is_captured(cu_seqlens):
        return SequenceLayout.from_offsets(cu_seqlens, max_seqlen=max_seqlen, max_tokens=rows)
    return SequenceLayout.from_offsets(cu_seqlens, max_seqlen=max_seqlen)


def equal_lengths(batch: int, length: int, like: Tensor) -> Layout:
    """The layout of B sequences of L tokens each, on the device of `like`. It is cached, and needs no sync."""
    return _equal_lengths(batch, length, like, with_positions=False)


def token_positions(batch: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(B·L,) int64 each: the sequence and the position of each token of such a layout."""
    return _equal_lengths(batch, length, like, with_positions=True).locate_rows(batch * length)


def _equal_lengths(batch: int, length: int, like: Tensor, *, with_positions: bool) -> Layout:
    if is_traced(like):
        return SequenceLayout.from_offsets(torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length)
    layout = _cached(batch, length, like.device, with_positions)
    if is_captured(like):
        _captured.add(layout)
    return layout


@functools.lru_cache(maxsize=64)
def _cached(batch: int, length: int, device: torch.device, with_positions: bool) -> Layout:
    """The host copies the offsets to the device, so this raises an error while a CUDA graph is captured."""
    layout = SequenceLayout.from_lengths([length] * batch, device=device)
    if with_positions:  # made now: tensors that are made in a capture have no values before the first replay
        _ = layout.sequence_ids, layout.position_ids
    return layout
