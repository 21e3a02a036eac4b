"""The ``forward`` that a patched instance has, in copies and replicas of it as well."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from ._tracing import outside_of_graphs as outside_of_graphs

if TYPE_CHECKING:
    from .patching.patch import PatchHandle

Forward = Callable[..., Any]  # forward(module, original, *args, **kwargs)


class PatchedForward:
    """The ``forward`` of a patched instance. A copy of the module gets one that runs the copy's own weights."""

    def __init__(
        self, module: nn.Module, forward: Forward, before: Callable[..., Any] | None, handle: PatchHandle
    ) -> None:
        self.module, self.forward, self.before, self.handle = module, forward, before, handle

    @property
    def original(self) -> Callable[..., Any]:
        return functools.partial(type(self.module).forward, self.module) if self.before is None else self.before

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # somebody has bound it once more, as accelerate does
            return self._on(args[0])(*args[1:], **kwargs)
        if not self.handle.active:
            return self.original(*args, **kwargs)
        return self.forward(self.module, self.original, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """As a bound method has one: what wraps it and binds it again, accelerate say, can be copied with its model."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._on(module)(*args, **kwargs)

        forward.__wrapped__ = self  # type: ignore[attr-defined]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = self.__signature__.replace(parameters=[own, *self.__signature__.parameters.values()])  # type: ignore[attr-defined]
        return forward

    def _on(self, module: nn.Module) -> PatchedForward:
        if module is self.module:
            return self
        return PatchedForward(module, self.forward, _rebind(self.before, module), self.handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        before = copy.deepcopy(self.before, memo)  # as a bound method goes with its module
        # of the same handle: what undoes it holds the whole model, of which this may be a part
        return PatchedForward(copy.deepcopy(self.module, memo), self.forward, before, self.handle)


def _rebind(before: Callable[..., Any] | None, module: nn.Module) -> Callable[..., Any] | None:
    return MethodType(before.__func__, module) if isinstance(before, MethodType) else before


class Replicate:
    """``_replicate_for_data_parallel`` of a patched instance: DataParallel's replica runs its own weights."""

    def __init__(self, patched: PatchedForward) -> None:
        self.patched = patched

    def __call__(self) -> nn.Module:
        patched = self.patched
        replica: Any = type(patched.module)._replicate_for_data_parallel(patched.module)
        replica.forward = patched._on(replica)
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicate:
        return Replicate(copy.deepcopy(self.patched, memo))


# Packages whose wrappers around a ``forward`` change no shapes: casts, devices, hooks, autocast and compilation.
_WRAPPERS = {"accelerate", "nt_attention", "torch", "transformers"}


def replacement_of(forward: Callable[..., Any], kind: type[nn.Module]) -> str | None:
    """The name of what stands in the place of a class's own ``forward``; None if it is that, or only wraps it.

    ``functools.wraps`` proves nothing: a function may declare that it wraps the class's forward, and not call it.
    So each link of the chain has to be defined in a package that is known to wrap.
    """
    own = _links(kind.forward)[-1]
    for link in _links(forward):
        package, _, _ = _module_of(link).partition(".")
        if package not in _WRAPPERS:
            return _name_of(link)
    return None if link is own else _name_of(link)


def ours_beneath(forward: Callable[..., Any] | None, module: nn.Module) -> PatchedForward | None:
    """The ``forward`` of a patch of this module that has been removed, which somebody's wrapper still calls."""
    links = [] if forward is None else _links(forward)
    return next((x for x in links if isinstance(x, PatchedForward) and x.module is module), None)


def _links(forward: Callable[..., Any]) -> list[Any]:
    """What a forward wraps, from the outside in: itself, what is beneath it, and so on."""
    links: list[Any] = []
    link: Any = forward
    while link is not None and all(link is not other for other in links):
        if isinstance(link, MethodType):
            link = link.__func__
            continue
        links.append(link)
        if isinstance(link, PatchedForward):
            link = link.original
        elif isinstance(link, functools.partial):
            links.append(link.func)
            link = getattr(link, "__wrapped__", getattr(link.func, "__wrapped__", None))
        else:
            link = getattr(link, "__wrapped__", None)
    return [link for link in links if not isinstance(link, functools.partial)]


def _module_of(link: Any) -> str:
    """Where a function is defined; functools.wraps copies ``__module__``, and ``__qualname__``."""
    return getattr(link, "__globals__", {}).get("__name__") or type(link).__module__


def _name_of(link: Any) -> str:
    code = getattr(link, "__code__", None)
    return f"{_module_of(link)}.{type(link).__qualname__ if code is None else code.co_qualname}"
