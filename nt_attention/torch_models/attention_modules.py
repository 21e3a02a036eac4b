"""Replaces an `nn.MultiheadAttention` by a `VarlenMultiheadAttention` with the same parameters, and puts it back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary, ref

from torch import nn

from .._warnings import warn
from ..compiler import is_compiling
from ..modules.multihead import NEEDS_WEIGHTS, Patched, VarlenMultiheadAttention
from ..patching.forwards import CALL_REMOVE_FIRST
from ..patching.handle import PatchHandle
from ..torch_private import SAME_DIMS, buffers_of, children_of, parameters_of, set_parameters


def attention_not_supported(attention: nn.Module) -> str | None:
    """Why an attention module can't be replaced by one with the same parameters, or None."""
    kind = type(attention).__name__
    if type(attention) is not nn.MultiheadAttention:
        return f"{kind} is not nn.MultiheadAttention."
    if "forward" in attention.__dict__:
        return f"{kind} overrides forward."
    if buffers_of(attention) or children_of(attention).keys() != {"out_proj"}:
        more = [*buffers_of(attention), *(children_of(attention).keys() - {"out_proj"})]
        return f"{kind} has {', '.join(more)}, which would be lost."
    try:
        VarlenMultiheadAttention.from_torch(attention)
    except ValueError as error:
        return str(error)
    return None


# Attention module → the handle of the patch that put it into a model.
_swapped_by: WeakKeyDictionary[nn.Module, ref[PatchHandle]] = WeakKeyDictionary()


def swap_attention(
    parent: nn.Module, name: str, handle: PatchHandle, *, padded_because: str | None = None, counts: bool = False
) -> str | None:
    """Replace the child `name` of `parent` by a `VarlenMultiheadAttention` with the same parameters and hooks.

    Args:
        parent: the module that has it.
        name: its name in `parent`.
        handle: the handle of the patch.
        padded_because: why it does not pack padded batches by itself, or None.
        counts: whether the handle counts the padded batches that it gets.

    Returns:
        The reason if this is not possible, else None.

    Raises:
        ValueError: another patch has already replaced it.
    """
    stock = cast(nn.MultiheadAttention, getattr(parent, name))
    if isinstance(stock, VarlenMultiheadAttention):
        reference = _swapped_by.get(stock)
        other = None if reference is None else reference()
        if other is not None and other is not handle and other.active:
            raise ValueError(f"{type(parent).__name__} is already patched: {CALL_REMOVE_FIRST}")
        return "it is already a VarlenMultiheadAttention."
    ragged, before = handle.replacements.get(stock, (None, {}))
    if ragged is None:
        if (reason := attention_not_supported(stock)) is not None:
            return reason
        ragged, before = VarlenMultiheadAttention.from_torch(stock), _names(stock)
        handle.replacements[stock] = ragged, before
        _share_parameters(stock, ragged)
        _share(_HOOKS, stock, ragged)
        _share(stock.__dict__.keys() - ragged.__dict__.keys() - {SAME_DIMS}, stock, ragged)
    ragged.patched = Patched(handle.need_weights, padded_because, Report(handle) if counts else None)
    _swapped_by[ragged] = ref(handle)
    parent.register_module(name, ragged)
    handle.on_remove(parent, _restore_attention, name, ragged, stock, before)
    return None


_ADVICE = (
    "If nobody reads the weights, pass need_weights=False: in the call, or to nt_attention.patch if calls leave it at "
    "its default."
)


class Report:
    """Counts the padded batches that a replaced attention module gets. A copy of the module has the same `Report`."""

    def __init__(self, handle: PatchHandle) -> None:
        self.handle = handle

    def __call__(self, reason: str | None) -> None:
        if not self.handle.active or is_compiling():
            return
        if reason is None:
            self.handle.count(None)
        else:
            advice = _ADVICE if reason == NEEDS_WEIGHTS else ""
            self.handle.fall_back(reason, "this call of an nn.MultiheadAttention", advice)

    def __deepcopy__(self, memo: dict[int, object]) -> Report:
        return self


# Both modules share the dictionaries of hooks, so that the handle of a hook removes it from both.
_HOOKS = {name for name in vars(nn.Module()) if "_hook" in name}
_SETTINGS = {"dropout", "batch_first", *(name for name in _HOOKS if not name.endswith("hooks"))}


def _share(names: Iterable[str], of: nn.Module, to: nn.Module) -> None:
    to.__dict__.update({name: of.__dict__[name] for name in names if name in of.__dict__})


def _share_parameters(stock: nn.MultiheadAttention, ragged: VarlenMultiheadAttention) -> None:
    """Let both modules have one table of parameters: FSDP goes on writing to that of the module that it was applied to.

    So `stock` keeps the names of parameters that only `ragged` can have, with the value None.
    """
    table = parameters_of(stock)
    table.update({name: None for name in parameters_of(ragged) if name not in table})
    set_parameters(ragged, table)


def _names(module: nn.Module) -> dict[str, bool]:
    """The names in a module's table of parameters, and whether each has one."""
    return {name: x is not None for name, x in parameters_of(module).items()}


def _restore_attention(
    parent: nn.Module, name: str, ragged: VarlenMultiheadAttention, stock: nn.MultiheadAttention, names: dict[str, bool]
) -> None:
    """Put `stock` back, with the current parameters, if they have the `names` that they had before the patch."""
    if children_of(parent).get(name) is not ragged:
        return
    is_plain = type(ragged) is VarlenMultiheadAttention and children_of(ragged).keys() == {"out_proj"}
    has_same_names = all(names.get(name, False) == is_used for name, is_used in _names(ragged).items())
    if not is_plain or buffers_of(ragged) or not has_same_names:
        warn(
            f"{name} of {type(parent).__name__} was parametrized or extended while it was patched, so it remains a "
            "VarlenMultiheadAttention."
        )
        return
    stock.out_proj = ragged.out_proj
    _share(_SETTINGS, ragged, stock)
    parent.register_module(name, stock.train(ragged.training))
