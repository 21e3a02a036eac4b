"""Runs some rows of a user's batch again, to compare them: the model stays as it is, and nothing is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...patching.handle import counting_nothing
from ..pack.routes import ModelCall
from ..pack.side_effects import ConstantNumbers
from ..route.dropout import without_dropout
from ..route.packed_row import running
from .rows import unchanged

LONGEST_ROW = 4096  # positions, of rows that run padded
FEWEST_TOKENS = 8  # of the shortest row, if another one has as many
LONGEST_WAIT = 60.0  # seconds, for a comparison in another thread


class _Comparing:
    """Whether a call is compared. Only the thread that holds the lock reads and writes it."""

    lock = threading.RLock()
    is_on = False


@contextmanager
def comparing() -> Iterator[bool]:
    """A context of one thread at a time, in which compiled parts run eagerly.

    It gives False inside of another one, and if another thread does not end: it may wait for this one.
    """
    if not _Comparing.lock.acquire(timeout=LONGEST_WAIT):
        yield False
        return
    is_outer, _Comparing.is_on = not _Comparing.is_on, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield is_outer
    finally:
        _Comparing.is_on = not is_outer
        _Comparing.lock.release()


@contextmanager
def comparing_model(call: ModelCall) -> Iterator[None]:
    """A context in which a model can run again: nothing changes, is random or is counted."""
    with unchanged(call.model), without_dropout(), ConstantNumbers(), counting_nothing(), running(compared=True):
        yield


def choose_rows(lengths: Sequence[int], longest: int = LONGEST_ROW, fewest: int = FEWEST_TOKENS) -> list[int]:
    """The longest row that is not too long, the shortest that is not too short, and one between. The longest is first.

    Args:
        lengths: the number of tokens of each row.
        longest: the most tokens of a row.
        fewest: the fewest, if a row has as many.
    """
    order = sorted((n, row) for row, n in enumerate(lengths) if 0 < n <= longest)
    if not order:
        return []
    enough = next((at for at, (n, _) in enumerate(order) if n >= fewest), len(order) - 1)
    chosen = {order[-1][1], order[enough][1], order[(enough + len(order) - 1) // 2][1]}
    return sorted(chosen, key=lambda row: -lengths[row])


def pick_rows(x: Any, rows: list[int], batch: int) -> Any:
    """The given rows of a tensor that has a row for each of the batch; another argument as it is."""
    return x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else x
