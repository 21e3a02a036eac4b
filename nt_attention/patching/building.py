"""Which models a program builds, and when each is complete. Does not import transformers.

A model is one of Hugging Face, or an `nn.Transformer`, an encoder, a decoder or a layer of `torch.nn`. It is complete
when the outermost of these calls returns: its constructor, `from_pretrained`, or `from_config`. So a model that another
one builds for itself is a part of that one.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn

# File → the classes in it. The last one reads states at padding for ColBERT, so it has to be patched together with the
# model that it builds.
_CLASSES = {
    "torch.nn.modules.transformer": (
        *("Transformer", "TransformerEncoder", "TransformerDecoder"),
        *("TransformerEncoderLayer", "TransformerDecoderLayer"),
    ),
    "transformers.modeling_utils": ("PreTrainedModel",),
    "sentence_transformers.base.modules.transformer": ("Transformer",),
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
    """End `add_listener`. What it has put around the functions of torch and transformers stays, and only calls them."""
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
    for class_name in _CLASSES[file.__name__]:
        base: Any = getattr(file, class_name, None)
        if base is None or "__new__" in vars(base):
            continue
        for name in _CLASS_METHODS:
            if (method := vars(base).get(name)) is not None:
                setattr(base, name, classmethod(_reporting(method.__func__)))
        base.__new__ = _New(base)


class _New:
    """The `__new__` of a base class of models: it lets the constructor that runs next report the model."""

    def __init__(self, base: Any, kind: type | None = None) -> None:
        self.base, self.kind = base, kind

    def __get__(self, instance: object, kind: type) -> _New:
        return _New(self.base, kind)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the constructor, which is the signature of a class without a `__new__`."""
        return inspect.signature(self.kind.__init__)  # type: ignore[misc]

    def __call__(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        if _listeners and not _thread.is_building:
            _let_constructor_report(kind, self.base)
        make: Any = super(self.base, kind).__new__
        others = (vars(each).get("__new__") for each in kind.__mro__[:-1])
        if all(isinstance(other, _New | None) for other in others):
            return make(kind)  # as `object.__new__`, which ignores arguments if no class of the model has its own
        return make(kind, *args, **kwargs)


_MARK = "reports_to_nt_attention"


def _let_constructor_report(kind: Any, base: type) -> None:
    """Replace the constructor of a class until it runs. The program sees the original one before and after that."""
    owner = next(each for each in kind.__mro__ if "__init__" in vars(each))
    original = vars(owner)["__init__"]
    if hasattr(original, _MARK):  # an object was made without its constructor, such as a copy
        return

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        if vars(owner)["__init__"] is constructor:
            owner.__init__ = original
        build = original.__get__(self, type(self))
        if isinstance(self, base):
            _report(self, build, *args, **kwargs)
        else:
            build(*args, **kwargs)

    setattr(constructor, _MARK, True)
    owner.__init__ = constructor


def _reporting(build: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a class that makes a model, and reports it."""

    @functools.wraps(build)
    def function(kind: type, *args: Any, **kwargs: Any) -> Any:
        return _report(None, functools.partial(build, kind), *args, **kwargs)

    return function


def _report(model: Any, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model, and report it if no other one is being built: `model`, or what `build` returns."""
    if _thread.is_building or not _listeners:
        return build(*args, **kwargs)
    _thread.is_building = True
    try:
        result = build(*args, **kwargs)
        if model is None:
            model = result[0] if isinstance(result, tuple) else result  # from_pretrained with output_loading_info
        if isinstance(model, nn.Module):
            _listeners[-1](model)
    finally:
        _thread.is_building = False
    return result
