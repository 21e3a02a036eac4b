"""The rate of dropout of an attention call."""

from __future__ import annotations

import threading

# The thread that runs a check, in a list, because a compiled graph can read no context variable.
thread: list[int | None] = [None]


def rate_of(dropout: float) -> float:
    """`dropout`, or 0 in a check, where a model in training is compared with itself."""
    return 0.0 if thread[0] is not None and thread[0] == threading.get_ident() else dropout
