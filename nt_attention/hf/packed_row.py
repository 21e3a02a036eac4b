"""The packed row that runs now, for modules to which the model passes neither lengths nor positions.

Only for modules outside of layers: when gradient checkpointing computes a layer again, no row is set. Attention modules
find the layout in their mask (`packed_mask.py`).

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._tracing import inline_only, is_compiling, outside_of_graphs
from ..layout import SequenceLayout


class PackedRow(NamedTuple):
    """A packed row: its sequences, the positions of its tokens, (1, T) or (axes, 1, T), and L of the padded batch."""

    layout: SequenceLayout
    position_ids: Tensor
    length: int


class _Thread(threading.local):
    """The row of each thread, and the modules and the config of the model of `running_padded`.

    Graphs of torch.compile can read them; they can't read a context variable.
    """

    row: PackedRow | None = None
    padded_modules: weakref.WeakSet[nn.Module] | tuple[()] = ()
    padded_config: Any = None


_thread = _Thread()


def current_row() -> PackedRow | None:
    """The packed row that runs now in this thread, or None."""
    return _thread.row


@outside_of_graphs
def _replace_row(row: PackedRow | None) -> PackedRow | None:
    before, _thread.row = _thread.row, row
    return before


class running_row:
    """A context in which this row runs. None: the rows of the batch are not packed.

    A class, because torch.compile would compile the functions of a generator on their own.
    """

    @inline_only
    def __init__(self, row: PackedRow | None) -> None:
        self.row = row

    @inline_only
    def __enter__(self) -> None:
        self.before = _replace_row(self.row)

    @inline_only
    def __exit__(self, *error: object) -> None:
        _replace_row(self.before)


@contextmanager
def running_padded(model: Any) -> Iterator[None]:
    """A context in which this model runs transformers' own attention, because it gets no packed rows.

    Layers that are compiled on their own run our attention, which gives the same.
    """
    before = _thread.padded_modules, _thread.padded_config
    _thread.padded_modules, _thread.padded_config = _modules_of(model), model.config
    try:
        yield
    finally:
        _thread.padded_modules, _thread.padded_config = before


def is_running_padded(module: nn.Module) -> bool:
    """Whether `running_padded` is on in this thread for the model of an attention module. Not known in a graph.

    A graph that read the set would take weights from the modules in it, and use those of one layer in all layers.
    """
    return not is_compiling() and module in _thread.padded_modules


def config_running_padded() -> Any:
    """The config of the model for which `running_padded` is on in this thread, or None. Not known in a graph."""
    return None if is_compiling() else _thread.padded_config


_modules: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def _modules_of(model: nn.Module) -> weakref.WeakSet[nn.Module]:
    """The modules of a model when it ran first. Those that came later run our attention, which gives the same."""
    found = _modules.get(model)
    if found is None:
        found = _modules[model] = weakref.WeakSet(model.modules())
    return found


def counts_positions(module: nn.Module) -> bool:
    """Whether a module embeds positions that it counts along the row, as in BART and M2M-100."""
    if "Positional" not in type(module).__name__:
        return False
    names = list(inspect.signature(type(module).forward).parameters)
    return "past_key_values_length" in names and names[1] != "position_ids"


@inline_only  # a graph that starts here would be compiled for each row
def embed_positions(module: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of such a module: in a packed row, with the positions of the row."""
    row = current_row()
    if row is None:
        return original(*args, **kwargs)
    parameters = inspect.signature(type(module).forward).parameters
    if "position_ids" in parameters:
        given = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
        return original(**{**given, "position_ids": row.position_ids[0]})
    if not is_compiling():  # in a graph, the length would become a constant
        _extend_table(module, row.length)
    return module.weights[row.position_ids].detach()


def extend_tables(model: nn.Module, length: int) -> None:
    """Extend the tables of positions of a model for rows of this length, as a graph can't do."""
    tables = _tables.get(model)
    if tables is None:
        tables = _tables[model] = [x for x in model.modules() if counts_positions(x) and hasattr(x, "make_weights")]
    for module in tables:
        _extend_table(module, length)


_tables: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _extend_table(module: Any, length: int) -> None:
    needed = module.padding_idx + 1 + length
    if needed > module.weights.shape[0]:
        module.make_weights(needed + module.offset, module.embedding_dim, module.padding_idx)
