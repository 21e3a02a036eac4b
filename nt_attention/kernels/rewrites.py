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
    """Where one side's rows go, and how results come back: ``take(x)``, ``give(y, rows, fill)``."""

    take: Callable[[Tensor], Tensor]
    give: Callable[[Tensor, int, float], Tensor]


class Rewrite(NamedTuple):
    """The call that runs instead, and what is done to the rows of queries and of keys around it."""

    queries: Rows
    keys: Rows
    call: Call


def rewrite(backend: Backend, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Rewrite | None:
    """What ``backend`` is to run instead of this call; None if it can run it."""
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
    """Upper left alignment on a kernel that has lower right only: all tokens in reverse order, the window mirrored.

    Counted from their ends, i' = Lq − 1 − i and j' = Lk − 1 − j, so i − left ≤ j ≤ i + right is the same as
    i' + Lk − Lq − right ≤ j' ≤ i' + Lk − Lq + left. Distances, which ALiBi goes by, stay.
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
    """The rows up to the last offset alone, for a kernel that multiplies what is past it by 0: it may be NaN."""

    def give(y: Tensor, rows: int, fill: float) -> Tensor:
        return y if rows == total else torch.cat([y, y.new_full((rows - total, *y.shape[1:]), fill)])

    return Rows(lambda x: x[:total], give)


def _backwards(total: int) -> Rows:
    up_to = _up_to(total)
    return Rows(lambda x: up_to.take(x).flip(0), lambda y, rows, fill: up_to.give(y.flip(0), rows, fill))


def _without_fully_masked_rows(call: Call, kept: Tensor, narrowed: SequenceLayout) -> Rewrite:
    """The queries that see a key, for a kernel without windows that does not take the others."""

    def give(y: Tensor, rows: int, fill: float) -> Tensor:
        return y.new_full((rows, *y.shape[1:]), fill).index_copy_(0, kept, y)

    queries = Rows(lambda x: x.index_select(0, kept), give)
    return Rewrite(queries, Rows(lambda x: x, lambda y, rows, fill: y), call._replace(layout=narrowed))


def _rows_with_keys(
    layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec
) -> tuple[Tensor, SequenceLayout]:
    """(N,) the queries that see a key, and their layout: under lower right causality a sequence's last Lk at most."""
    queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
    if spec.window.is_open or not spec.lower_right:
        kept = torch.where(keys > 0, queries, 0)
    else:
        kept = torch.minimum(queries, keys)
    narrowed = SequenceLayout.from_lengths(kept, device=layout.device)
    # rows of a sequence are left out at its start alone, so each row left moves by as many as were left out until then
    moved = layout.offsets[1:] - narrowed.offsets[1:]
    return narrowed.position_ids + (narrowed.offsets[:-1] + moved)[narrowed.sequence_ids], narrowed
