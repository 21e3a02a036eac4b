"""The `forward` of a patched module, which also works in copies and replicas of the module."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from ..compiler import inline_only, is_compiling, is_exporting, is_in_jit_trace
from ..graphs.cache import CapturedCalls
from ..torch_private import PREPARE_SCRIPT, REPLICATE, hooks_of

Forward = Callable[..., Any]  # forward(module, original, *args, **kwargs)
SET_WITH_FORWARD = (REPLICATE, PREPARE_SCRIPT)  # attributes of a patched module
CALL_REMOVE_FIRST = "call remove() on the handle of that patch first."
CONTINUES_FROM_CACHE = "it continues from a cache"
GRADIENTS_PER_SAMPLE = (
    "Opacus computes gradients for each sample of the batch, and would take a packed row for one sample"
)
CONTEXT_PARALLEL = "PyTorch's context_parallel has divided its rows over ranks: patch the model with mesh= instead"


class Handle(Protocol):
    """The part of `PatchHandle` that the code which changes models uses. See there for the methods."""

    active: bool
    is_automatic: bool
    graphs: CapturedCalls | None
    mesh: Any
    prefixes: Any
    check: Any
    counts: Any

    def change(self, name: str, description: str) -> None: ...
    def change_layers(self, name: str, layers: dict[str, str]) -> None: ...
    def skip(self, name: str, reason: str) -> None: ...
    def on_remove(self, changed: Any, undo: Callable[..., None], *args: Any) -> None: ...
    def remove(self) -> None: ...
    def is_patch_of(self, model: nn.Module, options: tuple[Any, ...] | None = None) -> bool: ...
    def count(self, reason: str | None, positions: int = 0, tokens: int = 0) -> None: ...
    def fall_back(self, reason: str, what: str = "this call") -> None: ...
    def differ(self, difference: str) -> None: ...
    def note(self, note: str) -> None: ...
    def advise(self) -> None: ...


class WeakReference(weakref.ref[Any]):
    """A weak reference that can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakReference, (self(),)


class PatchedForward:
    """The `forward` of a patched module. In a copy of the module it runs with the weights of the copy.

    Attributes:
        forward: `forward(module, original, *args, **kwargs)`, which runs while the patch is active.
        before: the `forward` attribute that the module had before the patch; None if it only had its class's method.
    """

    __name__ = "forward"

    def __init__(self, module: nn.Module, forward: Forward, before: Callable[..., Any] | None, handle: Handle) -> None:
        self._reference = weakref.ref(module)  # a strong one would be a cycle, which only the gc frees
        self.forward, self.before, self.handle = forward, before, handle

    @property
    @inline_only
    def module(self) -> nn.Module:
        """The module.

        Raises:
            ReferenceError: it does not exist any more, and somebody has kept its `forward`.
        """
        module = self._reference()
        if module is None:
            raise ReferenceError("the model of this forward does not exist any more: keep the model, not its forward.")
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reference=weakref.ref(state["_reference"]))

    @property
    @inline_only
    def original(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        module = self.module
        return functools.partial(type(module).forward, module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward as a method, in which `inspect` and `typing` find its source and its variables."""
        return MethodType(type(self.module).forward, self.module) if self.before is None else self.before

    def __getattr__(self, name: str) -> Any:
        """The special attributes of the original forward, such as `__annotations__` and `__qualname__`."""
        if not name.startswith("__") or name == "__wrapped__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    @inline_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # accelerate binds the forward again and passes the module
            return self._for(args[0])(*args[1:], **kwargs)
        if not self.handle.active:
            return self.original(*args, **kwargs)
        return self.forward(self.module, self.original, *args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        """The module, as in a bound method, so that accelerate can bind the forward to a shallow copy."""
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function, as in a bound method, so that accelerate can bind it again and models can still be copied."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._for(module)(*args, **kwargs)

        forward.__wrapped__ = self  # type: ignore[attr-defined]
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [first, *self.__signature__.parameters.values()]
        forward.__signature__ = self.__signature__.replace(parameters=parameters)  # type: ignore[attr-defined]
        return forward

    @property
    def __code__(self) -> CodeType:
        return inspect.unwrap(type(self.module).forward).__code__  # torch.export asks for it

    def _for(self, module: nn.Module) -> PatchedForward:
        """The same patch for a copy of the module."""
        if module is self.module:
            return self
        before = MethodType(self.before.__func__, module) if isinstance(self.before, MethodType) else self.before
        return PatchedForward(module, self.forward, before, self.handle)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        before = copy.deepcopy(self.before, memo)  # a bound method is copied together with its module
        # The handle is not copied: it refers to the whole model, and the copied module may be a part of it.
        copied = PatchedForward(copy.deepcopy(self.module, memo), self.forward, before, self.handle)
        _copies.setdefault(self.handle, weakref.WeakSet()).add(copied.module)
        return copied


# Handle → copies of modules that it has patched, which `remove` also ends.
_copies: weakref.WeakKeyDictionary[Handle, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def copies_of(handle: Handle) -> list[nn.Module]:
    """The deep copies of modules that this handle has patched."""
    return list(_copies.get(handle, ()))


def restore_copies(handle: Handle) -> None:
    """Take the `forward` of a patch that was removed out of the deep copies too. They run the original one already."""
    for module in copies_of(handle):
        forward = module.__dict__.get("forward")
        if isinstance(forward, PatchedForward) and forward.handle is handle:
            _restore_forward(module, forward)


@inline_only
def is_recorded() -> bool:
    """Whether torch.export or torch.jit.trace records the call: its graph would keep the lengths of this batch."""
    return (is_compiling() and is_exporting()) or is_in_jit_trace()


def is_context_parallel() -> bool:
    """Whether PyTorch's `context_parallel` is on: each rank has some positions of each row. False in a graph.

    It replaces `scaled_dot_product_attention`, and no other attention sees the keys of other ranks.
    """
    if is_compiling():
        return False
    module = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    return module.startswith("torch.distributed.tensor.experimental")


def has_gradients_per_sample(module: nn.Module) -> bool:
    """Whether Opacus computes gradients for each sample in this call. Its hooks take the first dimension for samples.

    Its `GradSampleModule` gives each parameter that is trained an attribute `grad_sample`.
    """
    if "opacus" not in sys.modules or not torch.is_grad_enabled():
        return False
    return any(hasattr(parameter, "grad_sample") for parameter in module.parameters())


def override_forward(module: nn.Module, forward: Forward, handle: Handle) -> None:
    """Make this module run `forward(module, original, *args, **kwargs)`, where `original` is the forward it had.

    After `handle.remove()` the module runs `original` again, even if a wrapper was put around the patched forward and
    still calls it.

    Raises:
        ValueError: the module is already patched.
    """
    before = module.__dict__.get("forward")
    if isinstance(before, PatchedForward):
        if before.handle is handle:
            return  # two models share this module
        if before.handle.active:
            raise ValueError(f"{type(module).__name__} is already patched: {CALL_REMOVE_FIRST}")
        before = before.before  # the module is a copy, made before the patch of the original was removed
    links = [] if before is None else _links(before)
    removed = next((x for x in links if isinstance(x, PatchedForward) and x.module is module), None)
    if removed is not None:  # a wrapper still calls the forward of a removed patch: reuse it for the new patch
        removed.forward, removed.handle = forward, handle
        return
    patched = PatchedForward(module, forward, before, handle)
    module.forward = patched
    setattr(module, REPLICATE, functools.partial(_replicate, patched))
    if handle.is_automatic:
        setattr(module, PREPARE_SCRIPT, functools.partial(_without_patch, patched))
    handle.on_remove(module, _restore_forward, patched)


def _replicate(patched: PatchedForward) -> nn.Module:
    """The replica of a patched module, so that replicas of DataParallel run their own weights."""
    replica: Any = getattr(type(patched.module), REPLICATE)(patched.module)
    replica.forward = patched._for(replica)
    return replica


def _without_patch(patched: PatchedForward) -> nn.Module:
    """The module for TorchScript, which can't compile packed calls. The patch of the whole model is removed."""
    patched.handle.remove()
    restore_copies(patched.handle)
    return patched.module


def _restore_forward(module: nn.Module, patched: PatchedForward) -> None:
    for name in SET_WITH_FORWARD:
        module.__dict__.pop(name, None)
    if module.__dict__.get("forward") is not patched:
        return  # a wrapper calls the patched forward, which now runs the original
    if patched.before is not None:
        module.forward = patched.before
    else:
        del module.__dict__["forward"]


def restore_forward(module: nn.Module) -> None:
    """Restore the forward that a module had before it was overridden, unless a wrapper calls the patched one."""
    patched = module.__dict__.get("forward")
    if isinstance(patched, PatchedForward):
        _restore_forward(module, patched)


def active_handles(model: nn.Module) -> Iterator[Handle]:
    """The handles of the patches of a model and its parts, also under wrappers around a patched forward."""
    for module in model.modules():
        for patched in active_forwards(module):
            yield patched.handle


def active_forwards(module: nn.Module) -> list[PatchedForward]:
    """The patched forwards of this module whose patches are active, also under wrappers around them."""
    links = _links(module.__dict__.get("forward"))
    return [link for link in links if isinstance(link, PatchedForward) and link.handle.active]


def is_patched(module: nn.Module) -> bool:
    """Whether an active patch has changed this module, also under wrappers around the patched forward."""
    return bool(active_forwards(module))


def have_foreign_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether modules have hooks, but for those of PyTorch: these, such as FSDP's, take inputs of any shape."""
    if not any(map(any, map(hooks_of, modules))):  # a hot path, without Python code
        return False
    hooks = [hook for module in modules for table in hooks_of(module) for hook in table.values()]
    return any(_module_of(getattr(hook, "func", hook)).partition(".")[0] != "torch" for hook in hooks)


# Packages whose wrappers around a `forward` keep shapes: they cast, move, compile, or call hooks.
_WRAPPERS = {"accelerate", "nt_attention", "torch", "transformers"}


def replacement_of(forward: Callable[..., Any], cls: type[nn.Module]) -> str | None:
    """Why a model can't be packed: its `forward` replaces that of its class. None if it is or wraps that forward.

    `__wrapped__` alone is not enough, because a function with this attribute may not call the function it names. So
    every function in the chain of wrappers must come from a package in `_WRAPPERS`.
    """
    if isinstance(forward, PatchedForward):
        forward = forward.original
    if isinstance(forward, functools.partial) and forward.func is cls.forward:  # a hot path: `PatchedForward.original`
        if "<locals>" in cls.__qualname__:  # a cache would keep the class
            return _replacement_of(_links(cls.forward), cls)
        return _class_replacement_of(cls, cls.forward)  # type: ignore[arg-type]  # classes are hashable
    return _replacement_of(_links(forward), cls)


@functools.lru_cache(256)
def _class_replacement_of(cls: type[nn.Module], forward: Callable[..., Any]) -> str | None:
    return _replacement_of(_links(forward), cls)


def _replacement_of(links: list[Any], cls: type[nn.Module]) -> str | None:
    of_class = _links(cls.forward)[-1]
    known = {*_WRAPPERS, *(base.__module__.partition(".")[0] for base in cls.__mro__)}
    foreign = (link for link in links if _module_of(link).partition(".")[0] not in known)
    replacement = next(foreign, None if links[-1] is of_class else links[-1])
    if replacement is None:
        return None
    return f"{_name_of(replacement)} replaces {cls.__name__}.forward, and may need padded rows"


def _links(forward: Callable[..., Any] | None) -> list[Any]:
    """The chain of wrappers around a forward, from the outermost function to the innermost."""
    links: list[Any] = []
    link: Any = forward
    while link is not None and all(link is not other for other in links):
        if isinstance(link, MethodType):
            link = link.__func__
            continue
        links.append(link)
        if isinstance(link, PatchedForward):
            link = link.original
        elif (inner := _forward_in_style(link)) is not None:
            link = inner
        elif isinstance(link, functools.partial):
            links.append(link.func)
            link = getattr(link, "__wrapped__", getattr(link.func, "__wrapped__", None))
        else:
            link = getattr(link, "__wrapped__", None)
    return [link for link in links if not isinstance(link, functools.partial)]


STYLES_OF_TRANSFORMERS = "transformers.distributed.tensor_parallel"


def _forward_in_style(link: Any) -> Callable[..., Any] | None:
    """The forward that a layer had before transformers divided it over ranks, or None for any other function.

    The parallel styles of transformers put a function without `__wrapped__` in its place. Styles of other packages are
    not followed: they may need padded rows.
    """
    if not inspect.isfunction(link) or _module_of(link) != STYLES_OF_TRANSFORMERS:
        return None
    variables = variables_around(link)
    style = variables.get("self")
    if style is not None and type(style).__module__ != STYLES_OF_TRANSFORMERS:
        return None
    return variables.get("original_forward")


def variables_around(function: Any) -> dict[str, Any]:
    """The variables that a function uses from the function around it. Other callables have none."""
    variables: dict[str, Any] = {}
    if inspect.isfunction(function):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # the variable has no value
                variables[name] = cell.cell_contents
    return variables


def _module_of(link: Any) -> str:
    """The module that defines a function. Not `__module__`, because functools.wraps copies it."""
    return getattr(link, "__globals__", {}).get("__name__") or type(link).__module__


def _name_of(link: Any) -> str:
    code = getattr(link, "__code__", None)
    return f"{_module_of(link)}.{type(link).__qualname__ if code is None else code.co_qualname}"
