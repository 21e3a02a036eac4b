"""What a captured CUDA graph of a module depends on (`ModuleState`), and what a forward changes (`Snapshot`)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import torch_private
from ..torch_private import (
    REPLICATE,
    backward_hooks_of,
    buffers_of,
    children_of,
    forward_hooks_of,
    parameters_of,
)

# Modules whose forward hooks may run while a graph is captured: they only collect tensors that are then returned.
_HOOKS = {"transformers.utils.output_capturing"}
# Attributes of a patched module that refer to the module, so they are not kept: it would never be freed.
_OF_PATCH = ("forward", REPLICATE)


class ModuleState:
    """What a captured graph of a module depends on, compared in about 0.3 µs for each module and parameter.

    This is every attribute of every module in it, by identity: parameters, buffers, child modules, hooks, options, the
    training mode and replaced forwards. Changes inside of other objects, such as a config, are not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._patched = [weakref.ref(x) for x in modules if "forward" in vars(x)]
        self._attributes = [vars(x) for x in modules if "forward" not in vars(x)]
        self._children = [children_of(x) for x in modules]
        self._tables: list[dict[str, Any]] = [table for x in modules for table in (parameters_of(x), buffers_of(x))]
        self._hooks = [table for x in modules for table in forward_hooks_of(x)]
        self._backward_hooks = [table for x in modules for table in backward_hooks_of(x)]
        self._adapters: list[Any] = [x for x in modules if hasattr(x, "merged_adapters")]
        # tensors that are neither parameters nor buffers
        self._others = [(weakref.ref(x), name) for x in modules for name, y in vars(x).items() if isinstance(y, Tensor)]
        tensors = self.tensors()
        self._objects, self._values = list(self._read_objects()), self._read_values()
        self._of_patch = [_weak(x) for x in self._read_of_patch()]
        # what is compared before a replay, without empty dictionaries, which take half of the time
        self._parents = [x for x in self._children if x]
        self._owners = [x for x in self._tables if x]
        self._before_replay = self._read_before_replay()
        named = [(owner, name, x) for owner in self._owners for name, x in owner.items()]
        self._differentiable = [(owner, name) for owner, name, x in named if x is not None and x.requires_grad]
        kinds = set(map(type, tensors))
        other = next((kind for kind in kinds if kind not in (Tensor, nn.Parameter)), None)
        self._kind = None if other is None else f"its parameters are {other.__name__}s"
        if len({x.device for x in tensors if x.is_cuda}) > 1:
            self._kind = "its parameters are on several devices"
        self._storages = [] if other else [StorageWeakRef(x.untyped_storage()) for x in tensors]

    def tensors(self) -> list[Tensor]:
        """All parameters, buffers and other tensors of the module."""
        registered = [x for x in chain.from_iterable(map(dict.values, self._tables)) if x is not None]
        others = [vars(module).get(name) for reference, name in self._others if (module := reference()) is not None]
        return registered + [x for x in others if isinstance(x, Tensor)]

    def _read_before_replay(self) -> tuple[list[Any], list[int]]:
        addresses = [x.data_ptr() for owner in self._owners for x in owner.values() if x is not None]
        return list(map(id, chain(*map(dict.values, self._parents)))), addresses

    def _read_objects(self) -> Iterator[Any]:
        """What is compared by identity, and the end. Registered tensors are not kept, so they can be freed."""
        patched = ((x for name, x in own.items() if name not in _OF_PATCH) for own in self._patched_attributes)
        return chain(*map(dict.values, self._attributes), *patched, *map(dict.values, self._children), (_END,))

    def _read_of_patch(self) -> list[Any]:
        return [own.get(name) for own in self._patched_attributes for name in _OF_PATCH]

    @property
    def _patched_attributes(self) -> list[dict[str, Any]]:
        return [vars(module) for reference in self._patched if (module := reference()) is not None]

    def _read_values(self) -> tuple[list[Any], ...]:
        """What is compared by value."""
        tensors = self.tensors()
        first: dict[int, int] = {}
        return (
            [first.setdefault(id(x), i) for i, x in enumerate(tensors)],  # which modules share a parameter
            [list(map(type, table.values())) for table in self._children],
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.stride, tensors)),
            [(x.dtype, x.shape, x.requires_grad) for x in tensors],
            [[getattr(x, name, None) for name in _OF_ADAPTERS] for x in self._adapters],
            [dict(getattr(x, "scaling", {})) for x in self._adapters],
        )

    @property
    def differentiable(self) -> list[Tensor]:
        """The parameters that require a gradient, in a fixed order. Modules may share a parameter."""
        return list({id(x): x for owner, name in self._differentiable if (x := owner[name]) is not None}.values())

    @contextmanager
    def replaced(self, others: Sequence[Tensor]) -> Iterator[None]:
        """A context in which these tensors are in the place of `differentiable`, in the same order."""
        before = [(owner, name, owner[name]) for owner, name in self._differentiable]
        other_of = {id(x): other for x, other in zip(self.differentiable, others, strict=True)}
        try:
            for owner, name, x in before:
                owner[name] = other_of[id(x)]
            yield
        finally:
            for owner, name, x in before:
                owner[name] = x

    @property
    def has_its_tensors(self) -> bool:
        """Whether the module has the same parts, and its tensors are in the same memory.

        If not, no graph may run: the memory may have been freed, or a table may have too few rows for the inputs. Takes
        about 0.1 µs for each module and tensor. Children are kept by `_objects`, so their ids stay unique.
        """
        was_freed = any(x.expired() for x in self._storages)
        return not was_freed and self._read_before_replay() == self._before_replay

    @property
    def is_current(self) -> bool:
        """Whether the module is as it was. The values of tensors may be others."""
        return (
            all(map(is_, self._read_objects(), self._objects))
            and self._read_values() == self._values
            and all(x is before() for x, before in zip(self._read_of_patch(), self._of_patch, strict=True))
        )

    def why_not_captured(self, differentiates: bool) -> str | None:
        """Why the module can't be captured, or None. `differentiates`: with the graph of its backward."""
        hooks = chain.from_iterable(table.values() for table in self._hooks if table)
        if any(getattr(hook, "__module__", "") not in _HOOKS for hook in hooks):
            return "a module has forward hooks"
        if differentiates and any(self._backward_hooks):
            return "a module has backward hooks"
        return self._kind


class Snapshot:
    """The attributes, lists, dictionaries and tensors of a module at a moment.

    It shows whether a forward changes the module, and undoes changes of everything but parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        containers = list(_containers_in([vars(x) for x in module.modules()]))
        self._containers: list[tuple[Any, Any]] = [(x, x.copy()) for x in containers]
        tensors = {id(x): x for each in containers for x in _items(each) if isinstance(x, Tensor)}
        # values too: batch_norm changes its statistics without changing their version
        self._tensors = [
            (x, version_of(x), None if isinstance(x, nn.Parameter) else x.clone()) for x in tensors.values()
        ]

    @property
    def is_current(self) -> bool:
        """Whether nothing was replaced, added, removed or changed in place."""
        return all(_same(x, before) for x, before in self._containers) and all(
            version_of(x) == version and (value is None or _equal(x, value)) for x, version, value in self._tensors
        )

    def restore(self) -> None:
        """Undo all changes but those of parameters."""
        for container, before in self._containers:
            if _same(container, before):
                continue
            if isinstance(container, dict):  # not cleared: other threads may use the module
                for name in container.keys() - before.keys():
                    del container[name]
                container.update(before)
            else:
                container.clear()
                container.extend(before)
        for x, _, value in self._tensors:
            if value is not None and not _equal(x, value):
                x.copy_(value)


def _containers_in(values: Any) -> Iterator[Any]:
    """Every list, deque and dictionary in these values, and in each other."""
    waiting, seen = list(values), set()
    while waiting:
        x = waiting.pop()
        if isinstance(x, SimpleNamespace):
            x = vars(x)
        if not isinstance(x, list | tuple | deque | dict) or id(x) in seen:
            continue
        seen.add(id(x))
        waiting += _items(x)
        if not isinstance(x, tuple):
            yield x


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have the same values. NaN equals NaN."""
    if torch.equal(one, two):
        return True
    return one.is_floating_point() and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _same(one: Any, two: Any) -> bool:
    """Whether two containers have the same objects, in the same order."""
    if isinstance(one, dict) and list(one) != list(two):
        return False
    return len(one) == len(two) and all(map(is_, _items(one), _items(two)))


def version_of(x: Tensor) -> int | None:
    """The version of a tensor, which in-place changes increase; None if it has none."""
    return None if x.is_inference() else torch_private.version_of(x)


def _weak(x: Any) -> Any:
    """A function that returns `x`, or None if it was freed."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


_END = object()
_OF_ADAPTERS = ("merged", "disable_adapters", "active_adapters")  # of PEFT, computed from other objects
