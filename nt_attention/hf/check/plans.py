"""Keeps the plans of models in the process, by what the check depends on, so that equal models are checked once."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...torch_private import forward_hooks_of
from .. import families
from ..plan import Plan
from .find import NotPackableError, find_plan

_MOST = 256


@dataclass(frozen=True)
class Checked:
    """What the check of a model has found.

    Attributes:
        plan: how it is packed, or None.
        reason: why it can't be packed, or None.
        how: how it was checked, for `print(handle)`.
    """

    plan: Plan | None
    reason: str | None
    how: str


_lock = threading.RLock()  # two checks at a time would draw random numbers in turn
_kept: dict[Hashable, Plan | str] = {}  # key → the plan, or why there is none


def checked(model: PreTrainedModel, inside: bool = False) -> Checked:
    """The plan of a model, or why there is none. `inside` is that of `find_plan`."""
    with _lock:
        key, how = key_of(model), "checked before, on an equal model"
        found = None if key is None else _kept.get(key)
        if found is None:
            begin = time.perf_counter()
            try:
                found = find_plan(model, inside)
            except NotPackableError as error:
                found = str(error)
            how = f"checked on this model in {time.perf_counter() - begin:.1f} s"
            base = families.base_model(model)
            for each in [key, key_of(base)] if isinstance(found, str) and base is not model else [key]:
                if len(_kept) >= _MOST:
                    _kept.clear()
                if each is not None:
                    _kept[each] = found
    return Checked(found, None, how) if isinstance(found, Plan) else Checked(None, found, how)


def key_of(model: Any) -> Hashable | None:
    """What the check of a model depends on, but for the values of its weights.

    None if a module has hooks, or functions of its own that no key describes.
    """
    of_modules = []
    for path, module in model.named_modules():
        if any(forward_hooks_of(module)):
            return None
        fields = {name: _described(x) for name, x in vars(module).items() if name not in _NOT_COMPARED}
        if None in fields.values():
            return None
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = tuple((name, x.shape, x.dtype, x.device.type) for name, x in tensors)
        of_modules.append((path, type(module), type(module).forward, tuple(sorted(fields.items())), shapes))
    config = repr(families.config_of(model).to_dict())
    return config, families.family_of(model), getattr(model, "loss_function", None), tuple(of_modules)


_NOT_COMPARED = {*vars(nn.Module()), "config"}  # the config is a part of the key as a whole


def _described(value: Any) -> str | None:
    """A text for the value of an attribute; None if it may compute something that no text describes."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, dict | list | tuple | set | frozenset):
        parts = [_described(x) for x in ([*value, *value.values()] if isinstance(value, dict) else value)]
        if None in parts:
            return None
        return f"{type(value).__name__}{sorted(parts, key=str) if isinstance(value, set | frozenset) else parts}"
    if isinstance(value, functools.partial):
        return _described((value.func, value.args, value.keywords))
    is_function = callable(value) and not isinstance(value, nn.Module | type)
    if is_function and not _is_of_a_module(value):
        return None
    return getattr(value, "__qualname__", type(value).__qualname__)


def _is_of_a_module(function: Any) -> bool:
    """Whether a function is one of a Python module of torch or transformers."""
    where = getattr(function, "__module__", None) or ""
    return where.partition(".")[0] in ("torch", "transformers") and "<locals>" not in getattr(
        function, "__qualname__", "<"
    )
