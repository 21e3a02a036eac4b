"""The layouts of calls that pass `cu_seqlens`, or batches (B, L, …) in which every position is a token."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..compiler import is_captured, is_traced
from ..layouts.protocol import Layout
from ..layouts.sequence import SequenceLayout

# Layouts that were used while a CUDA graph was captured. They are kept, because replays of the graph read them.
_captured: set[Layout] = set()


def layout_of_offsets(cu_seqlens: Tensor, max_seqlen: int, rows: int) -> Layout:
    """The layout of packed tensors with `rows` rows.

    The host reads `cu_seqlens` (B+1,) at the first use of the tensor, but not while a CUDA graph is captured. In a
    graph, `max_seqlen` and `rows` are bounds, and each replay uses the offsets of that moment.
    """
    is_in_graph = isinstance(cu_seqlens, Tensor) and not is_traced(cu_seqlens) and is_captured(cu_seqlens)
    return SequenceLayout.from_offsets(cu_seqlens, max_seqlen=max_seqlen, max_tokens=rows if is_in_graph else None)


def equal_lengths(batch: int, length: int, like: Tensor) -> Layout:
    """The layout of B sequences of L tokens each, on the device of `like`. It is cached, and needs no sync."""
    if is_traced(like):
        return SequenceLayout.from_offsets(torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length)
    layout = _cached(batch, length, like.device)
    if is_captured(like):
        _captured.add(layout)
    return layout


@functools.lru_cache(maxsize=64)
def _cached(batch: int, length: int, device: torch.device) -> Layout:
    """The host copies the offsets to the device, so this raises an error while a CUDA graph is captured."""
    return SequenceLayout.from_lengths([length] * batch, device=device)
