"""What a captured CUDA graph of a module depends on (`ModuleState`), and what a forward changes (`Snapshot`)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_private
from ..torch_private import HOOKS, backward_hooks_of, buffers_of, children_of, forward_hooks_of, parameters_of
from .device import Reasons

# Modules whose forward hooks may run while a graph is captured: they only collect tensors that are then returned.
_HOOKS = {"transformers.utils.output_capturing"}
_NOT_COMPARED = vars(nn.Module()).keys() - HOOKS
_of_memory = attrgetter("dtype", "requires_grad")


class ModuleState:
    """What a captured graph of a module depends on. It is compared before each replay.

    This is what all modules in it consist of, by identity: classes, attributes, items of attributes that are lists or
    dictionaries, children, parameters and buffers; and where the memory of the tensors is. Changes inside of other
    objects, such as a config, are not noticed. The training mode is a part of the key of a graph.

    Attributes:
        tensors: the parameters, buffers and other tensors of the module.
        differentiable: the parameters that require a gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._modules, self._classes = [weakref.ref(x) for x in modules], list(map(type, modules))
        tables = list(map(vars, modules))
        self._sizes = list(map(len, tables))
        names = [(i, name) for i, table in enumerate(tables) for name in table if name not in _NOT_COMPARED]
        # functions weakly: a patched `forward` refers to its module, which would never be freed
        self._functions = [(i, name, weakref.ref(x)) for i, name in names if _is_function(x := tables[i][name])]
        self._names = [(i, name) for i, name in names if not _is_function(tables[i][name])]
        self._hooks = [table for x in modules for table in forward_hooks_of(x)]
        self._backward_hooks = [table for x in modules for table in backward_hooks_of(x)]
        containers = [x for i, name in self._names if isinstance(x := tables[i][name], list | dict)]
        containers += [table for x in modules for table in (children_of(x), parameters_of(x), buffers_of(x))]
        self._contents = [x.values() if isinstance(x, dict) else x for x in containers]
        self._objects = self._read_objects(tables)
        self.tensors = list({id(x): x for x in self._objects if isinstance(x, Tensor)}.values())
        self._memory = self._read_memory()
        self._versioned = [x for x in self.tensors if not x.is_inference()]
        others = [type(x).__name__ for x in self.tensors if type(x) not in (Tensor, nn.Parameter)]
        self._other_class = next(iter(others), None)
        self._are_apart = len({x.device for x in self.tensors if x.is_cuda}) > 1
        owners: list[Any] = [table for x in modules for table in (parameters_of(x), buffers_of(x))]
        named_tensors = [(owner, name, x) for owner in owners for name, x in owner.items()]
        self._differentiable = [each for each in named_tensors if each[2] is not None and each[2].requires_grad]
        self.differentiable = list({id(x): x for _, _, x in self._differentiable}.values())

    def _read_objects(self, tables: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [*[tables[i].get(name) for i, name in self._names], *chain.from_iterable(self._contents)]

    def _read_memory(self) -> tuple[list[Any], ...]:
        read: tuple[Any, ...] = Tensor.data_ptr, Tensor.size, Tensor.stride, _of_memory
        return tuple([list(map(each, self.tensors)) for each in read])

    @property
    def is_current(self) -> bool:
        """Whether the module is as it was. The values of tensors may be others."""
        modules: list[Any] = [reference() for reference in self._modules]
        if list(map(type, modules)) != self._classes:
            return False
        tables = list(map(vars, modules))
        objects = self._read_objects(tables)
        return (
            list(map(len, tables)) == self._sizes
            and len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and all((x := function()) is not None and tables[i].get(name) is x for i, name, function in self._functions)
            and self._read_memory() == self._memory
        )

    @property
    def versions(self) -> list[int]:
        """The versions of its tensors. In-place changes increase them."""
        return list(map(torch_private.version_of, self._versioned))

    @property
    def training(self) -> tuple[bool, ...]:
        """The training mode of each module."""
        return tuple([module.training for x in self._modules if (module := x()) is not None])

    def reasons(self, differentiates: bool) -> Reasons:
        """Why the module can't be captured. `differentiates`: with the graph of its backward."""
        hooks = chain.from_iterable(table.values() for table in self._hooks if table)
        foreign = any(getattr(hook, "__module__", "") not in _HOOKS for hook in hooks)
        yield foreign, "a module has forward hooks"
        yield differentiates and any(self._backward_hooks), "a module has backward hooks"
        yield self._other_class is not None, f"its parameters are {self._other_class}s"
        yield self._are_apart, "its parameters are on several devices"

    @contextmanager
    def replaced(self, others: Sequence[Tensor]) -> Iterator[None]:
        """A context in which these tensors are in the place of `differentiable`, in the same order."""
        other_of = {id(x): other for x, other in zip(self.differentiable, others, strict=True)}
        try:
            for owner, name, x in self._differentiable:
                owner[name] = other_of[id(x)]
            yield
        finally:
            for owner, name, x in self._differentiable:
                owner[name] = x


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, nn.Module | type)


class Snapshot:
    """The attributes, lists, dictionaries and tensors of a module at a moment.

    It shows whether a forward changes the module, and undoes changes of everything but parameters.
    """

    def __init__(self, module: nn.Module, tables: Iterable[dict[str, Any]] = ()) -> None:
        """`tables`: other dictionaries that must stay as they are, such as the attributes of a config."""
        found = _containers_in([*map(vars, module.modules()), *tables])
        self._containers: list[tuple[Any, Any]] = [(x, x.copy()) for x in found]
        tensors = {id(x): x for _, each in self._containers for x in _items(each) if isinstance(x, Tensor)}
        # values too: batch_norm changes its statistics without changing their version
        self._tensors = [
            (x, version_of(x), None if isinstance(x, nn.Parameter) else x.clone()) for x in tensors.values()
        ]

    @property
    def is_current(self) -> bool:
        """Whether nothing was replaced, added, removed or changed in place."""
        return all(_same(x, before) for x, before in self._containers) and all(
            version_of(x) == version and (value is None or torch.equal(x, value)) for x, version, value in self._tensors
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
            if value is not None and not torch.equal(x, value):
                x.copy_(value)


def _containers_in(values: Iterable[Any]) -> Iterator[Any]:
    """Every list, deque and dictionary in these values, and in each other."""
    waiting, seen = list(values), set()
    while waiting:
        x = waiting.pop()
        if isinstance(x, list | tuple | deque | dict) and id(x) not in seen:
            seen.add(id(x))
            waiting += _items(x)
            if not isinstance(x, tuple):
                yield x


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
