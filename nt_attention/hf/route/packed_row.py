"""What runs in this thread: the packed row, for modules to which a model passes neither lengths nor positions.

Only for modules outside of layers: when gradient checkpointing computes a layer again, no row is set. Attention modules
find the layout in their mask (`packed_mask.py`).

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...compiler import inline_only, is_compiling, outside_of_graphs
from ...layouts.protocol import Layout


class PackedRow(NamedTuple):
    """A packed row: its sequences, the positions of its tokens, (1, T) or (axes, 1, T), and L of the padded batch.

    `of_layer`: whether it is that of one layer, whose model runs padded (`pack/encoder_layers.py`).
    """

    layout: Layout
    position_ids: Tensor
    length: int
    of_layer: bool = False


class SmallCall:
    """A call of a small batch, whose host time counts. Its rows have one sequence each, and its masks are ours.

    Args:
        model: the model that runs.

    Attributes:
        modules: its modules when it ran first. Others run as in any call.
    """

    def __init__(self, model: nn.Module) -> None:
        if (modules := _modules.get(model)) is None:
            modules = _modules[model] = weakref.WeakSet(model.modules())
        self.modules = modules
        self._additive: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def additive(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """A bool mask as numbers to add to the scores. All layers get the same mask, so it is converted once."""
        if mask.dtype != torch.bool:
            return mask
        key = id(mask), dtype  # layers may compute in other dtypes
        if key not in self._additive:
            self._additive[key] = mask, torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        return self._additive[key][1]


_modules: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


class LayerCalls:
    """The layers of a call of a model whose layers pack.

    Args:
        fall_back: called once with the reason why layers run padded.

    Attributes:
        packed: the number of positions and tokens of the rows, if a layer ran packed; else None.
        reason: why layers ran padded, or None.
        is_small: whether layers ran padded because the batch is too small to gain.
        token: stands for this call.
        last: what the last layer gave, for the next one.
    """

    def __init__(self, fall_back: Callable[[str], None]) -> None:
        self._fall_back = fall_back
        self.packed: tuple[int, int] | None = None
        self.reason: str | None = None
        self.is_small = False
        self.token = object()
        self.last: Any = None

    def fall_back(self, reason: str) -> None:
        """Count and warn, once."""
        if self.reason is None:
            self.reason = reason
            self._fall_back(reason)


class _Thread(threading.local):
    """What runs in each thread. Graphs of torch.compile can read it; they can't read a context variable.

    Attributes:
        row: the packed row that runs now. None if the rows of the batch are not packed.
        padded: whether a call runs whose rows are not packed. If not, and there is no row, nothing is known.
        unpatched: models that run their original forward and count nothing, because the model around them runs so.
        rows_of_head: the base model of the head that runs, and the arguments of the head that say which sequences its
            rows have, which many heads do not pass on.
        packed: the patched models that run the packed row.
        layers: the layers of the model that runs, if they pack; None in other models, and if a checkpoint runs a layer
            again.
        small: a call that runs as in the unpatched model over sdpa, and whose rows have one sequence each; or None.
        compared: whether some rows of a batch run to be compared, so that they pack though they are few.
    """

    def __init__(self) -> None:  # runs in each thread; a graph would take defaults of the class for constants
        self.row: PackedRow | None = None
        self.padded = False
        self.unpatched: tuple[Any, ...] = ()
        self.rows_of_head: tuple[Any, dict[str, Any]] = (None, {})
        self.packed: tuple[Any, ...] = ()
        self.layers: LayerCalls | None = None
        self.small: SmallCall | None = None
        self.compared = False


_thread = _Thread()


def current_row() -> PackedRow | None:
    """The packed row that runs now in this thread, or None."""
    return _thread.row


def runs_padded() -> bool:
    """Whether a call runs in this thread whose rows are known to be not packed."""
    return _thread.row is None and _thread.padded


def is_compared() -> bool:
    """Whether some rows of a batch run to be compared."""
    return _thread.compared


def current_layers() -> LayerCalls | None:
    """The layers of the model that runs now in this thread, if they pack."""
    return _thread.layers


def small_call_of(module: nn.Module) -> SmallCall | None:
    """The call of a small batch that runs in this thread, if this module is a part of its model. None in a graph."""
    small = None if is_compiling() else _thread.small
    return small if small is not None and module in small.modules else None


def is_unpatched(model: Any) -> bool:
    """Whether the model around this one runs its original forward, and this one with it."""
    unpatched = _thread.unpatched
    return unpatched != () and any(other is model for other in unpatched)


def runs_packed(model: Any) -> bool:
    """Whether a patched model, or the model around it, runs a packed row that is in `current_row`."""
    return _thread.row is not None and any(other is model for other in _thread.packed)


def rows_of_head(model: Any) -> dict[str, Any]:
    """The arguments of the head that runs, if it is that of this base model, for `running`."""
    base, rows = _thread.rows_of_head
    return rows if base is model else {}


@outside_of_graphs
def _swap(attributes: dict[str, Any]) -> dict[str, Any]:
    before = {}
    for name, value in attributes.items():
        before[name] = getattr(_thread, name)
        setattr(_thread, name, value)
    return before


class running:
    """A context in which attributes of `_Thread` have these values.

    A class, because torch.compile would compile the functions of a generator on their own.
    """

    @inline_only
    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes

    @inline_only
    def __enter__(self) -> None:
        self.attributes = _swap(self.attributes)

    @inline_only
    def __exit__(self, *error: object) -> None:
        _swap(self.attributes)


def why_no_row(what: str, rows: int, tokens: int, total: int) -> str:
    """Why a tensor with these dimensions is not the packed row of `total` tokens any more."""
    if rows != 1:
        return (
            f"{what} has {rows} rows of {tokens} tokens, but the batch was packed as one row of {total}: a hook or a "
            "module has added values that have a row for each sequence"
        )
    return (
        f"{what} has {tokens} tokens, but the packed row has {total}: a hook or a module has cut the row or added "
        "tokens to it"
    )


def counts_positions(module: nn.Module) -> bool:
    """Whether a module embeds positions that it counts along the row, as in BART and M2M-100."""
    if "Positional" not in type(module).__name__:
        return False
    names = list(inspect.signature(type(module).forward).parameters)
    counted = {"past_key_values_length", "cache_length"} & set(names)  # the second since transformers 5.24
    return bool(counted) and names[1] != "position_ids"


@inline_only  # a graph that starts here would be compiled for each row
def embed_positions(module: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of such a module: in a packed row, with the positions of the row."""
    row = current_row()
    if row is None:
        return original(*args, **kwargs)
    parameters = inspect.signature(type(module).forward).parameters
    if "position_ids" in parameters:
        arguments = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
        return original(**{**arguments, "position_ids": row.position_ids[0]})
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
