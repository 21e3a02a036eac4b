"""The ``forward`` that a patched instance has, in copies and replicas of it as well."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

from torch import nn

Forward = Callable[..., Any]  # forward(module, original, *args, **kwargs)


class Handle(Protocol):
    """What the code that changes a model needs of the ``PatchHandle`` of its patch, which describes the methods."""

    active: bool

    def change(self, name: str, description: str) -> None: ...
    def change_layers(self, name: str, layers: dict[str, str]) -> None: ...
    def leave(self, name: str, reason: str) -> None: ...
    def on_remove(self, undo: Callable[[], None]) -> None: ...
    def count(self, reason: str | None) -> None: ...
    def fall_back(self, reason: str, what: str = "this call") -> None: ...


class PatchedForward:
    """The ``forward`` of a patched instance. A copy of the module gets one that runs the copy's own weights.

    Attributes:
        forward: ``forward(module, original, *args, **kwargs)``, which runs while the patch is active.
        before: the ``forward`` that the instance had before the patch; None if it had that of its class.
    """

    def __init__(self, module: nn.Module, forward: Forward, before: Callable[..., Any] | None, handle: Handle) -> None:
        self.module, self.forward, self.before, self.handle = module, forward, before, handle

    @property
    def original(self) -> Callable[..., Any]:
        return functools.partial(type(self.module).forward, self.module) if self.before is None else self.before

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # bound once more, as accelerate does
            return self._on(args[0])(*args[1:], **kwargs)
        if not self.handle.active:
            return self.original(*args, **kwargs)
        return self.forward(self.module, self.original, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """As a bound method has one: a wrapper that binds it again, as accelerate's, can be copied with its model."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._on(module)(*args, **kwargs)

        forward.__wrapped__ = self  # type: ignore[attr-defined]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = self.__signature__.replace(parameters=[own, *self.__signature__.parameters.values()])  # type: ignore[attr-defined]
        return forward

    def _on(self, module: nn.Module) -> PatchedForward:
        if module is self.module:
            return self
        before = MethodType(self.before.__func__, module) if isinstance(self.before, MethodType) else self.before
        return PatchedForward(module, self.forward, before, self.handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        before = copy.deepcopy(self.before, memo)  # as a bound method goes with its module
        # of the same handle: it refers to the whole model, of which this may be a part
        return PatchedForward(copy.deepcopy(self.module, memo), self.forward, before, self.handle)


def override_forward(module: nn.Module, forward: Forward, handle: Handle) -> None:
    """Let this one instance run ``forward(module, original, *args, **kwargs)``, ``original`` what it ran before.

    After the handle's ``remove`` it runs that again, also where our forward has been wrapped since and is still called.

    Raises:
        ValueError: the module is patched already.
    """
    before = module.__dict__.get("forward")
    if isinstance(before, PatchedForward):
        if before.handle is handle:
            return  # two models share this module
        if before.handle.active:
            raise ValueError(f"{type(module).__name__} is patched already: remove() the handle of that patch first.")
        before = before.before  # a copy of a model whose patch has been removed since
    links = [] if before is None else _links(before)
    removed = next((x for x in links if isinstance(x, PatchedForward) and x.module is module), None)
    if removed is not None:  # a wrapper still calls the forward of a removed patch: the new patch runs there
        removed.forward, removed.handle = forward, handle
        return
    patched = PatchedForward(module, forward, before, handle)
    module.forward = patched
    module._replicate_for_data_parallel = functools.partial(_replicate, patched)  # type: ignore[method-assign]
    handle.on_remove(functools.partial(_restore_forward, module, patched))


def _replicate(patched: PatchedForward) -> nn.Module:
    """``_replicate_for_data_parallel`` of a patched instance: DataParallel's replica runs its own weights."""
    replica: Any = type(patched.module)._replicate_for_data_parallel(patched.module)
    replica.forward = patched._on(replica)
    return replica


def _restore_forward(module: nn.Module, patched: PatchedForward) -> None:
    module.__dict__.pop("_replicate_for_data_parallel", None)
    if module.__dict__.get("forward") is not patched:
        return  # a wrapper calls ours, which from now on runs the original
    if patched.before is not None:
        module.forward = patched.before
    else:
        del module.__dict__["forward"]


# Packages whose wrappers around a ``forward`` change no shapes: casts, devices, hooks, autocast and compilation.
_WRAPPERS = {"accelerate", "nt_attention", "torch", "transformers"}


def replacement_of(forward: Callable[..., Any], kind: type[nn.Module]) -> str | None:
    """What replaces a class's own ``forward``, as a reason to fall back; None if it is that, or only wraps it.

    ``functools.wraps`` proves nothing: a function may declare that it wraps the class's forward, and not call it.
    So each link of the chain has to be defined in a package that is known to wrap.
    """
    links = _links(forward)
    foreign = (link for link in links if _module_of(link).partition(".")[0] not in _WRAPPERS)
    own = _links(kind.forward)[-1]
    replacement = next(foreign, None if links[-1] is own else links[-1])
    if replacement is None:
        return None
    return f"{_name_of(replacement)} stands in the place of {kind.__name__}.forward, and may read rows"


def _links(forward: Callable[..., Any]) -> list[Any]:
    """What a forward wraps, from the outside in: itself, what it calls, and so on."""
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
