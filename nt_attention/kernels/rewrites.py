"""Rewrites of a call that a kernel does not support into one that it supports, by moving rows only.

Dimensions: T query tokens, S key tokens, Lq queries and Lk keys of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.protocol import Layout
from ..layouts.sequence import SequenceLayout
from .backend import Backend
from .call import AttentionSpec, Call


class MovedRows(NamedTuple):
    """How the rows of queries or of keys are moved.

    Attributes:
        select: `select(x)` is the tensor with which the rewritten call runs.
        restore: `restore(y, rows, fill)` moves the rows of a result back, into `rows` rows. The others are `fill`.
    """

    select: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor, int, float], Tensor]


class Rewrite(NamedTuple):
    """A rewritten call, and how the rows of queries and of keys are moved for it."""

    queries: MovedRows
    keys: MovedRows
    call: Call


def rewrite(backend: Backend, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Rewrite | None:
    """The rewrite of this call for `backend`; None if it is not needed."""
    layout, key_layout, _, spec, *_ = call
    if "lower_right_only" in backend.traits and spec.is_upper_left:
        return _reversed(call)
    if "no_fully_masked_rows" in backend.traits and spec.may_have_fully_masked_rows:
        kept, narrowed = layout.cached(
            ("rows with keys", spec.window.is_open, spec.lower_right),
            lambda: _rows_with_keys(layout, key_layout, spec),
            key_layout,
        )
        if narrowed.total < layout.total:
            return _without_fully_masked_rows(call, kept, narrowed)
    if "reads_past_end" in backend.traits and (
        query.shape[0] > layout.total or key.shape[0] > key_layout.total or value.shape[0] > key_layout.total
    ):
        return _moved(_first_rows(layout.total), _first_rows(key_layout.total), call)
    return None


def _moved(queries: MovedRows, keys: MovedRows, call: Call) -> Rewrite:
    """The rewrite. The rows of a relative bias are moved as well."""
    if call.relative is not None:
        call = call._replace(relative=call.relative.map_rows(queries.select, keys.select))
    return Rewrite(queries, keys, call._replace(prepared=None, is_direct=False))  # these are of `call`


def _reversed(call: Call) -> Rewrite:
    """Upper left alignment for a kernel that only supports lower right: reverse all tokens and mirror the window.

    Counted from the end, query i is i' = Lq − 1 − i and key j is j' = Lk − 1 − j. Then i − left ≤ j ≤ i + right becomes
    i' + Lk − Lq − right ≤ j' ≤ i' + Lk − Lq + left. Distances change their sign. ALiBi uses absolute distances only.
    """
    layout, key_layout, slopes, spec, dims, relative, *_ = call
    left, right = spec.window_size
    mirrored = replace(
        spec, is_causal=False, window_size=(0 if spec.is_causal else right, left), causal_alignment="lower_right"
    )
    slopes = slopes.flip(0) if slopes is not None and slopes.dim() == 2 else slopes
    if relative is not None:
        relative = replace(relative, buckets=relative.buckets.flip(0))
    reversed_call = Call(layout.reversed, key_layout.reversed, slopes, mirrored, dims, relative)
    return _moved(_reversed_rows(layout.total), _reversed_rows(key_layout.total), reversed_call)


def _first_rows(total: int) -> MovedRows:
    """The rows before `total`, for a kernel that multiplies later rows by 0. These may hold NaN."""

    def restore(y: Tensor, rows: int, fill: float) -> Tensor:
        return y if rows == total else torch.cat([y, y.new_full((rows - total, *y.shape[1:]), fill)])

    return MovedRows(lambda x: x[:total], restore)


def _reversed_rows(total: int) -> MovedRows:
    first = _first_rows(total)
    return MovedRows(lambda x: first.select(x).flip(0), lambda y, rows, fill: first.restore(y.flip(0), rows, fill))


def _without_fully_masked_rows(call: Call, kept: Tensor, narrowed: Layout) -> Rewrite:
    """The queries that see a key, for a kernel that does not support others."""

    def restore(y: Tensor, rows: int, fill: float) -> Tensor:
        return y.new_full((rows, *y.shape[1:]), fill).index_copy_(0, kept, y)

    queries = MovedRows(lambda x: x.index_select(0, kept), restore)
    return _moved(queries, MovedRows(lambda x: x, lambda y, rows, fill: y), call._replace(layout=narrowed))


def _rows_with_keys(layout: Layout, key_layout: Layout, spec: AttentionSpec) -> tuple[Tensor, Layout]:
    """(N,) the rows of the N queries that see a key, and their layout."""
    queries, keys = layout.host.diff(), key_layout.host.diff()
    if spec.window.is_open or not spec.lower_right:
        kept = torch.where(keys > 0, queries, 0)
    else:
        kept = torch.minimum(queries, keys)  # the last queries of a sequence
    narrowed = SequenceLayout.from_lengths(kept, device=layout.device)
    # Rows are removed at the start of a sequence only, so a kept row moves by the number of rows removed before it.
    moved = layout.safe_offsets[1:] - narrowed.safe_offsets[1:]
    return narrowed.position_ids + (narrowed.safe_offsets[:-1] + moved)[narrowed.sequence_ids], narrowed
