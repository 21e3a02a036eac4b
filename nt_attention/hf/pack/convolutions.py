"""Causal convolutions of packed rows: zeros between sequences keep them apart.

Without the package causal-conv1d, transformers' `causal_conv1d_fn` is PyTorch's code, which knows no sequences. A
convolution of width K sees K - 1 tokens before its own. With K - 1 zeros between them, sequences do not see each other,
and each begins with zeros, as it would alone.

Dimensions: T tokens of the packed row, B sequences, C channels, K the width.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compiler import is_compiling
from ...layouts.protocol import Layout
from ...layouts.tree import TreeLayout

_FUNCTION = "causal_conv1d_fn"


def classes_with_convolutions(base: nn.Module) -> tuple[str, ...]:
    """The classes of modules whose forward calls transformers' `causal_conv1d_fn`, if that is PyTorch's code."""
    if importlib.util.find_spec("causal_conv1d") is not None:
        return ()
    return tuple(sorted({type(module).__name__ for module in base.modules() if _calls_it(module)}))


def _calls_it(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and _FUNCTION in forward.__code__.co_names and _FUNCTION in forward.__globals__


class _Call:
    """A call of a module with a convolution: the layout of its row, and whether the convolution has run."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.has_run = layout, False


class _Thread(threading.local):
    call: _Call | None = None


_thread = _Thread()
_functions: list[Any] = []  # that `keep_apart` has made, one for each file


@contextmanager
def convolving(module: nn.Module, layout: Layout) -> Iterator[None]:
    """Run the forward of a module whose convolution keeps the sequences of a layout apart.

    Raises:
        RuntimeError: the convolution was replaced after the patch.
    """
    before, call = _thread.call, _Call(layout)
    _thread.call = call
    try:
        yield
    finally:
        _thread.call = before
    if not call.has_run:
        raise RuntimeError(
            f"{_FUNCTION} of {type(module).__module__} was replaced after the patch, so that {type(module).__name__} "
            "would mix the sequences of a packed row: patch the model again, after remove()."
        )


def keep_apart(module: nn.Module) -> None:
    """Let the `causal_conv1d_fn` that a module calls keep sequences apart inside of `convolving`.

    Other calls of it, such as those of models that are not patched, stay as they are.
    """
    file = inspect.unwrap(type(module).forward).__globals__
    original = file[_FUNCTION]
    if any(original is function for function in _functions):
        return

    @functools.wraps(original)
    def function(hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = None if is_compiling() else _thread.call  # packed rows run outside of graphs
        if call is None or hidden_states.shape[::2] != (1, call.layout.total):
            return cast(Tensor, original(hidden_states, weight, *args, **kwargs))
        call.has_run = True
        kwargs.pop("seq_idx", None)
        return _convolve(call.layout, functools.partial(original, **kwargs), hidden_states, weight, *args)

    _functions.append(function)
    file[_FUNCTION] = function


def _convolve(
    layout: Layout, convolution: Callable[..., Tensor], hidden_states: Tensor, weight: Tensor, *args: Any
) -> Tensor:
    """A convolution with weights (C, K) of a packed row (1, C, T)."""
    tree = layout if isinstance(layout, TreeLayout) else None
    tokens = hidden_states[0].transpose(0, 1)
    if tree is not None:  # a segment sees the tokens before it on its path
        layout, tokens = tree.sequences, tree.expand(tokens)
    places, total = _with_gaps(layout, weight.shape[-1] - 1)
    spread = tokens.new_zeros(total, tokens.shape[1]).index_copy(0, places, tokens)
    out = convolution(spread.transpose(0, 1).unsqueeze(0), weight, *args)
    tokens = out[0].transpose(0, 1).index_select(0, places)
    tokens = tokens if tree is None else tree.collapse(tokens)
    return tokens.transpose(0, 1).unsqueeze(0)


def _with_gaps(layout: Layout, gap: int) -> tuple[Tensor, int]:
    """Where each token is in a row with gaps between the sequences (T,), and the length of that row."""

    def make() -> tuple[Tensor, int]:
        places = torch.arange(layout.total, device=layout.device)
        return places + gap * layout.sequence_ids, layout.total + gap * (layout.batch_size - 1)

    return layout.cached(("gaps", gap), make)
