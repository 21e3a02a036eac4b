"""Rewrites of a call that a kernel does not take into one that it takes, by moving rows and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .backend import Backend
from .call import AttentionSpec, Call


class Rows(NamedTuple):
    """How the rows of queries or keys change: ``take(x)`` moves them, ``give(y, rows, fill)`` moves results back."""

    take: Callable[[Tensor], Tensor]
    give: Callable[[Tensor, int, float], Tensor]


class Rewrite(NamedTuple):
    """The call that runs instead, and how the rows of queries and of keys are moved for it."""

    queries: Rows
    keys: Rows
    call: Call


def rewrite(backend: Backend, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Rewrite | None:
    """The rewrite of this call for ``backend``; None if it takes the call as it is."""
    layout, key_layout, _, spec, _ = call
    if backend.lower_right_only and spec.is_upper_left:
        return _reversed(call)
    if not backend.takes_fully_masked_rows and spec.may_have_fully_masked_rows:
        kept, narrowed = layout.cached(
            ("rows with keys", spec.window.is_open, spec.lower_right),
            lambda: _rows_with_keys(layout, key_layout, spec),
            key_layout,
        )
        if narrowed.total < layout.total:
            return _without_fully_masked_rows(call, kept, narrowed)
    if backend.reads_past_end and (
        query.shape[0] > layout.total or key.shape[0] > key_layout.total or value.shape[0] > key_layout.total
    ):
        return Rewrite(_up_to(layout.total), _up_to(key_layout.total), call)
    return None


def _reversed(call: Call) -> Rewrite:
    """Upper left alignment for a kernel that only has lower right: reverse all tokens and mirror the window.

    Counted from the end, query i is i' = Lq − 1 − i and key j is j' = Lk − 1 − j. Then i − left ≤ j ≤ i + right is
    i' + Lk − Lq − right ≤ j' ≤ i' + Lk − Lq + left. The absolute distances, which ALiBi uses, do not change.
    """
    layout, key_layout, slopes, spec, dims = call
    left, right = spec.window_size
    mirrored = replace(
        spec, is_causal=False, window_size=(0 if spec.is_causal else right, left), causal_alignment="lower_right"
    )
    slopes = slopes.flip(0) if slopes is not None and slopes.dim() == 2 else slopes
    reversed_call = Call(layout.reversed, key_layout.reversed, slopes, mirrored, dims)
    return Rewrite(_backwards(layout.total), _backwards(key_layout.total), reversed_call)


def _up_to(total: int) -> Rows:
    """Only the rows before ``total``, for a kernel that multiplies later rows by 0: these may hold NaN."""

    def give(y: Tensor, rows: int, fill: float) -> Tensor:
        return y if rows == total else torch.cat([y, y.new_full((rows - total, *y.shape[1:]), fill)])

    return Rows(lambda x: x[:total], give)


def _backwards(total: int) -> Rows:
    up_to = _up_to(total)
    return Rows(lambda x: up_to.take(x).flip(0), lambda y, rows, fill: up_to.give(y.flip(0), rows, fill))


def _without_fully_masked_rows(call: Call, kept: Tensor, narrowed: SequenceLayout) -> Rewrite:
    """Only the queries that see a key, for a kernel that takes no others."""

    def give(y: Tensor, rows: int, fill: float) -> Tensor:
        return y.new_full((rows, *y.shape[1:]), fill).index_copy_(0, kept, y)

    queries = Rows(lambda x: x.index_select(0, kept), give)
    return Rewrite(queries, Rows(lambda x: x, lambda y, rows, fill: y), call._replace(layout=narrowed))


def _rows_with_keys(
    layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec
) -> tuple[Tensor, SequenceLayout]:
    """(N,) the rows of queries that see a key, and their layout. Under lower right causality these are the last Lk."""
    queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
    if spec.window.is_open or not spec.lower_right:
        kept = torch.where(keys > 0, queries, 0)
    else:
        kept = torch.minimum(queries, keys)
    narrowed = SequenceLayout.from_lengths(kept, device=layout.device)
    # Rows are only left out at the start of a sequence, so a kept row moves by the number of rows left out before it.
    moved = layout.offsets[1:] - narrowed.offsets[1:]
    return narrowed.position_ids + (narrowed.offsets[:-1] + moved)[narrowed.sequence_ids], narrowed
