"""Replaces an `nn.MultiheadAttention` by a `VarlenMultiheadAttention` with the same parameters, and puts it back."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary, ref

from torch import nn

from .._forwards import CALL_REMOVE_FIRST
from .._tracing import is_compiling
from .._warnings import warn
from ..modules.multihead import VarlenMultiheadAttention
from .handle import PatchHandle


def attention_not_supported(attention: nn.Module) -> str | None:
    """Why an attention module can't be replaced by one with the same parameters, or None."""
    kind = type(attention).__name__
    if type(attention) is not nn.MultiheadAttention:
        return f"{kind} is not nn.MultiheadAttention."
    if "forward" in attention.__dict__:
        return f"{kind} overrides forward."
    if attention._buffers or attention._modules.keys() != {"out_proj"}:
        more = [*attention._buffers, *(attention._modules.keys() - {"out_proj"})]
        return f"{kind} has {', '.join(more)}, which would be lost."
    try:
        VarlenMultiheadAttention.from_torch(attention)
    except ValueError as error:
        return str(error)
    return None


# Attention module → the handle of the patch that put it into a model.
_swapped_by: WeakKeyDictionary[nn.Module, ref[PatchHandle]] = WeakKeyDictionary()


def swap_attention(parent: nn.Module, name: str, handle: PatchHandle) -> str | None:
    """Replace the child `name` of `parent` by a `VarlenMultiheadAttention` with the same parameters and hooks.

    Returns:
        The reason if this is not possible, else None.

    Raises:
        ValueError: another patch has already replaced it.
    """
    stock = cast(nn.MultiheadAttention, parent._modules[name])
    if isinstance(stock, VarlenMultiheadAttention):
        reference = _swapped_by.get(stock)
        other = None if reference is None else reference()
        if other is not None and other is not handle and other.active:
            raise ValueError(f"{type(parent).__name__} is already patched: {CALL_REMOVE_FIRST}")
        return "it is already a VarlenMultiheadAttention."
    ragged = handle.replacements.get(stock)
    if ragged is None:
        if (reason := attention_not_supported(stock)) is not None:
            return reason
        ragged = handle.replacements[stock] = VarlenMultiheadAttention.from_torch(stock)
        _share(_HOOKS, stock, ragged)
        _share(stock.__dict__.keys() - ragged.__dict__.keys() - _NOT_COPIED, stock, ragged)
    _swapped_by[ragged] = ref(handle)
    parent._modules[name] = ragged
    handle.on_remove(functools.partial(_restore_attention, parent, name, ragged, stock))
    return None


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
            self.handle.fall_back(reason, "this call of an nn.MultiheadAttention")

    def __deepcopy__(self, memo: dict[int, object]) -> Report:
        return self


# Both modules share the dictionaries of hooks, so that the handle of a hook removes it from both.
_HOOKS = {name for name in vars(nn.Module()) if "_hook" in name}
_NOT_COPIED = {"_qkv_same_embed_dim"}  # a property of VarlenMultiheadAttention
_SETTINGS = {"dropout", "batch_first", "_is_full_backward_hook"}


def _share(names: Iterable[str], of: nn.Module, to: nn.Module) -> None:
    to.__dict__.update({name: of.__dict__[name] for name in names if name in of.__dict__})


def _restore_attention(
    parent: nn.Module, name: str, ragged: VarlenMultiheadAttention, stock: nn.MultiheadAttention
) -> None:
    """Put `stock` back, with the current parameters, because load_state_dict(assign=True) may have replaced them."""
    if parent._modules.get(name) is not ragged:
        return
    names = [{key for key, x in module._parameters.items() if x is not None} for module in (ragged, stock)]
    is_plain = type(ragged) is VarlenMultiheadAttention and ragged._modules.keys() == {"out_proj"}
    if not is_plain or ragged._buffers or names[0] != names[1]:
        warn(
            f"{name} of {type(parent).__name__} was parametrized or extended while it was patched, so it remains a "
            "VarlenMultiheadAttention."
        )
        return
    VarlenMultiheadAttention.share_parameters(ragged, stock)
    _share(_SETTINGS, ragged, stock)
    parent._modules[name] = stock.train(ragged.training)
