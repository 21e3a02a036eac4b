"""The ``forward`` that a patched instance has, in copies and replicas of it as well."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .patch import PatchHandle

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
