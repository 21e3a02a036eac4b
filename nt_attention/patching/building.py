"""Which Hugging Face models a program builds, and when each is complete. Does not import transformers.

A model is complete when the outermost of these calls returns: its constructor, `from_pretrained`, or `from_config`. So
a model that another one builds for itself is a part of that one.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn

# The second one reads states at padding for ColBERT, so it has to be patched with the model that it builds.
_CLASSES = {
    "transformers.modeling_utils": "PreTrainedModel",
    "sentence_transformers.base.modules.transformer": "Transformer",
}
# `from_config` of the Auto classes calls the second one. It is not in hf/transformers_private.py, whose import takes
# transformers: programs set environment variables before they import that.
_CLASS_METHODS = ("from_pretrained", "_from_config")

_listeners: list[Callable[[nn.Module], None]] = []


class _Thread(threading.local):
    is_building = False


_thread = _Thread()


def add_listener(listener: Callable[[nn.Module], None]) -> None:
    """Call `listener(model)` with each model that is built from now on. Of several listeners, the last one is called.

    Models that the listener builds are not passed to it.
    """
    _listeners.append(listener)
    for file in _CLASSES:
        after_import(file, _watch)


def remove_listener(listener: Callable[[nn.Module], None]) -> None:
    """End `add_listener`. The functions that it has put around those of transformers stay, and only call them."""
    _listeners.remove(listener)


def has_listeners() -> bool:
    """Whether there is a listener."""
    return bool(_listeners)


def after_import(name: str, function: Callable[[Any], None]) -> None:
    """Call `function(module)` when the program has imported a module, or now if it has."""
    if (module := sys.modules.get(name)) is not None:
        function(module)
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    """Calls a function with a module, once it is imported."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: Any) -> None:
                run(module)
                self.function(module)

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def _watch(file: Any) -> None:
    base: Any = getattr(file, _CLASSES[file.__name__], object)
    if "__new__" in vars(base):
        return
    for name in _CLASS_METHODS:
        if (method := vars(base).get(name)) is not None:
            setattr(base, name, classmethod(_reporting(method.__func__)))
    base.__new__ = staticmethod(_new)


def _new(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Make an instance, after its class got a constructor that reports. Classes that are not used stay as they are."""
    owner = next(each for each in kind.__mro__ if "__init__" in vars(each))
    if _listeners and not hasattr(owner.__init__, _MARK):
        owner.__init__ = _reporting(owner.__init__)
    return object.__new__(kind)


_MARK = "reports_to_nt_attention"


def _reporting(build: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor or a function that returns a model, which reports the model if it is the outermost."""

    @functools.wraps(build)
    def function(self_or_class: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.is_building or not _listeners:
            return build(self_or_class, *args, **kwargs)
        _thread.is_building = True
        try:
            result = build(self_or_class, *args, **kwargs)
            # A constructor returns None, and from_pretrained with output_loading_info a tuple.
            model = self_or_class if result is None else result[0] if isinstance(result, tuple) else result
            if isinstance(model, nn.Module):
                _listeners[-1](model)
        finally:
            _thread.is_building = False
        return result

    setattr(function, _MARK, True)
    return function
