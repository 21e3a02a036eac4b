"""Calls that a kernel does not take, said as calls that it takes, by moving rows and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .call import AttentionSpec, Backend, Problem


class Rows(NamedTuple):
    """Where one side's rows go, and how results come back: ``take(x)``, ``give(y, rows, fill)``."""

    take: Callable[[Tensor], Tensor]
    give: Callable[[Tensor, int, float], Tensor]


class Rephrased(NamedTuple):
    queries: Rows
    keys: Rows
    problem: Problem


def rephrased(backend: Backend, query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> Rephrased | None:
    """The call that ``backend`` is to run in the place of this one; None if it can run this one."""
    layout, key_layout, _, spec, _ = problem
    if backend.lower_right_only and spec.is_upper_left:
        return _reversed(problem)
    if not backend.bears_blind_rows and spec.may_be_blind:
        seeing, narrowed = layout.cached(
            ("seeing rows", spec.sees_all, spec.lower_right), lambda: _seeing(layout, key_layout, spec), key_layout
        )
        if narrowed.total < layout.total:
            return _without_blind_rows(problem, seeing, narrowed)
    if backend.reads_past_end and (
        query.shape[0] > layout.total or key.shape[0] > key_layout.total or value.shape[0] > key_layout.total
    ):
        return Rephrased(_within(layout.total), _within(key_layout.total), problem)
    return None


def _reversed(problem: Problem) -> Rephrased:
    """Upper left alignment on a kernel that has lower right only: all tokens in reverse order, the window mirrored.

    Counted from their ends, i' = Lq − 1 − i and j' = Lk − 1 − j, so i − left ≤ j ≤ i + right is the same as
    i' + Lk − Lq − right ≤ j' ≤ i' + Lk − Lq + left. Distances, which ALiBi goes by, stay.
    """
    layout, key_layout, slopes, spec, dims = problem
    left, right = spec.window_size
    mirrored = replace(
        spec, is_causal=False, window_size=(0 if spec.is_causal else right, left), causal_alignment="lower_right"
    )
    slopes = slopes.flip(0) if slopes is not None and slopes.dim() == 2 else slopes
    turned = Problem(layout.reversed, key_layout.reversed, slopes, mirrored, dims)
    return Rephrased(_backwards(layout.total), _backwards(key_layout.total), turned)


def _within(total: int) -> Rows:
    """The rows up to the last offset alone, for a kernel that multiplies what is past it by 0: it may be NaN."""

    def give(y: Tensor, rows: int, fill: float) -> Tensor:
        return y if rows == total else torch.cat([y, y.new_full((rows - total, *y.shape[1:]), fill)])

    return Rows(lambda x: x[:total], give)


def _backwards(total: int) -> Rows:
    within = _within(total)
    return Rows(lambda x: within.take(x).flip(0), lambda y, rows, fill: within.give(y.flip(0), rows, fill))


def _without_blind_rows(problem: Problem, seeing: Tensor, narrowed: SequenceLayout) -> Rephrased:
    """The queries that see a key, for a kernel without windows that can't bear the others."""

    def give(y: Tensor, rows: int, fill: float) -> Tensor:
        return y.new_full((rows, *y.shape[1:]), fill).index_copy_(0, seeing, y)

    queries = Rows(lambda x: x.index_select(0, seeing), give)
    return Rephrased(queries, Rows(lambda x: x, lambda y, rows, fill: y), problem._replace(layout=narrowed))


def _seeing(layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec) -> tuple[Tensor, SequenceLayout]:
    """(N,) the queries that see a key, and their layout: under lower right causality a sequence's last Lk at most."""
    queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
    if spec.sees_all or not spec.lower_right:
        seeing = torch.where(keys > 0, queries, 0)
    else:
        seeing = torch.minimum(queries, keys)
    narrowed = SequenceLayout.from_lengths(seeing, device=layout.device)
    # rows of a sequence are left out at its start alone, so each row left moves by as many as were left out until then
    moved = layout.offsets[1:] - narrowed.offsets[1:]
    return narrowed.position_ids + (narrowed.offsets[:-1] + moved)[narrowed.sequence_ids], narrowed
