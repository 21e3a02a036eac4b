"""Dropout, switched off where a model in training is compared with itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

# The thread in which our attention drops nothing, in a list, because a compiled graph can read no context variable.
_thread: list[int | None] = [None]


def rate_of(dropout: float) -> float:
    """`dropout`, or 0 where our attention drops nothing."""
    return 0.0 if _thread[0] is not None and _thread[0] == threading.get_ident() else dropout


@contextmanager
def without_attention_dropout() -> Iterator[None]:
    """A context in which our attention, which has a generator of its own, drops nothing in this thread."""
    _thread[0] = threading.get_ident()
    try:
        yield
    finally:
        _thread[0] = None


@contextmanager
def without_dropout() -> Iterator[None]:
    """A context in which nothing drops elements in this thread."""
    with without_attention_dropout(), _WithoutDropout():
        yield


_DROPOUT = {"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"}


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in _DROPOUT:
            return kwargs.get("input", args[0] if args else None)
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        if name == "multi_head_attention_forward":  # this mode does not see the functions that it calls
            args = (*args[:10], 0.0, *args[11:])
        return function(*args, **kwargs)
