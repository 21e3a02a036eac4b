"""The packed row that runs now, for modules to which the model passes neither lengths nor positions.

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
from transformers import PreTrainedModel

from ...compiler import inline_only, is_compiling, outside_of_graphs
from ...layouts.protocol import Layout
from ...torch_private import version_of


class PackedRow(NamedTuple):
    """A packed row: its sequences, the positions of its tokens, (1, T) or (axes, 1, T), and L of the padded batch."""

    layout: Layout
    position_ids: Tensor
    length: int


class PaddedRun:
    """A call of a model whose rows are not packed, so it runs transformers' own attention. See `running_padded`.

    Attributes:
        modules: the modules of the model.
        configs: the configs of the model and its parts, which the mask function gets.
        made_none: whether the mask function has found that a mask is not needed. If not, None is no mask of this call.
    """

    def __init__(self, modules: weakref.WeakSet[nn.Module], configs: list[Any]) -> None:
        self.modules, self.configs = modules, configs
        self.made_none = False
        self._additive: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def additive(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """A bool mask (B, 1, L, L) as numbers to add to the scores, 0 or −inf, which the layers share.

        `scaled_dot_product_attention` would convert a bool mask in each layer, and copy it in each layer if a row does
        not begin at a multiple of 16 numbers.
        """
        if mask.is_inference():  # it has no version, so in-place changes would not be noticed
            return mask
        key = mask.data_ptr(), mask.shape, mask.stride(), version_of(mask), dtype  # checkpoints detach the mask
        found = self._additive.get(key)
        if found is None:
            *sizes, length = mask.shape
            numbers = torch.zeros((*sizes, -(-length // 16) * 16), dtype=dtype, device=mask.device)[..., :length]
            found = self._additive[key] = mask, numbers.masked_fill_(mask.logical_not(), -torch.inf)
        return found[1]  # the mask is kept, so no other one gets its memory


class _Thread(threading.local):
    """The row of each thread, and the call of `running_padded`.

    Graphs of torch.compile can read them; they can't read a context variable.
    """

    row: PackedRow | None = None
    padded: PaddedRun | None = None


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


class running_padded:
    """A context in which this model runs transformers' own attention, because it gets no packed rows.

    With None, no model does: for a call in the forward of another model, which may be by a hook.

    Layers that are compiled on their own run our attention, which gives the same.
    """

    def __init__(self, model: Any) -> None:
        self.run: PaddedRun | None = None
        if model is not None:
            parts = _parts_of(model)
            models = [part for reference in parts.models if (part := reference()) is not None]
            self.run = PaddedRun(parts.modules, [x.config for x in models])

    def __enter__(self) -> None:
        self.before, _thread.padded = _thread.padded, self.run

    def __exit__(self, *error: object) -> None:
        _thread.padded = self.before


def is_running_padded() -> bool:
    """Whether `running_padded` is on in this thread. Not known in a graph."""
    return not is_compiling() and _thread.padded is not None


def padded_run_of(module: nn.Module) -> PaddedRun | None:
    """The call in this thread that `running_padded` runs, if this attention module is a part of it. None in a graph.

    A graph that read the set would take weights from the modules in it, and use those of one layer in all layers.
    """
    if is_compiling():
        return None
    run = _thread.padded
    return run if run is not None and module in run.modules else None


def padded_run_with(config: Any) -> PaddedRun | None:
    """The same for a model with this config."""
    if is_compiling():
        return None
    run = _thread.padded
    return run if run is not None and any(x is config for x in run.configs) else None


class _Parts(NamedTuple):
    """The modules of a model when it ran first, and those that are models. Later ones run our attention instead."""

    modules: weakref.WeakSet[nn.Module]
    models: list[weakref.ref[PreTrainedModel]]


_parts: weakref.WeakKeyDictionary[nn.Module, _Parts] = weakref.WeakKeyDictionary()


def _parts_of(model: nn.Module) -> _Parts:
    found = _parts.get(model)
    if found is None:
        modules = list(model.modules())
        models = [weakref.ref(x) for x in modules if isinstance(x, PreTrainedModel)]
        found = _parts[model] = _Parts(weakref.WeakSet(modules), models)
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
