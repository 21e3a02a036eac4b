"""Notices what a call of a model does beside its output: random numbers for tokens, and values that modules store."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_private import buffers_of

RANDOM_FUNCTIONS = re.compile(
    "rand|randn|randint|(rand|randn|randint)_like|randperm|normal|(uniform|normal|log_normal|exponential|geometric"
    "|cauchy|random)_|bernoulli_?|multinomial|poisson|binomial"
)

_OF_TORCH = vars(nn.Module()).keys()


class RandomNumbers(TorchFunctionMode):
    """A context that notices random numbers for tokens, also if the state of the generator is reset after them.

    A single number is none of tokens: it is the same for all rows of a packed batch. PEFT's LoHa and LoKr make one to
    decide whether an adapter runs.

    Args:
        device: that of the model.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._before = self._expected = self._states()
        self._are_new = False

    def _states(self) -> list[Tensor]:
        """The states of the generators, which are on the host."""
        device = self._device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    @property
    def are_new(self) -> bool:
        """Whether the call made some for tokens, by `RANDOM_FUNCTIONS` or by other functions, such as dropout."""
        return self._are_new or not all(map(torch.equal, self._expected, self._states()))

    @property
    def has_single(self) -> bool:
        """Whether the call made a single number."""
        return self._expected is not self._before

    def restore(self) -> None:
        """Set the generators back to their states before."""
        torch.set_rng_state(self._before[0])
        if len(self._before) > 1:
            torch.cuda.set_rng_state(self._before[1], self._device)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not RANDOM_FUNCTIONS.fullmatch(getattr(function, "__name__", "")):
            return function(*args, **(kwargs or {}))
        self._are_new = self.are_new
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == 1 and out.is_floating_point():
            self._expected = self._states()
        else:
            self._are_new = True
        return out


class StoredValues:
    """Notices tensors with a graph of gradients that modules store, such as losses of routers.

    They are in attributes, in buffers, or in lists and dictionaries of the user that are attributes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        values = self._values()
        self._tables = [(x, x.copy()) for module in self._modules for x in (vars(module), buffers_of(module))]
        self._lists = [(x, x.copy()) for x in _containers(values)]
        self._known = {id(x): x for x in _computed(values)}

    def _values(self) -> list[Any]:
        """Buffers, and attributes but those that all modules have."""
        values: list[Any] = []
        for module in self._modules:
            table = vars(module)
            values += [table[name] for name in table.keys() - _OF_TORCH]
            values += buffers_of(module).values()
        return values

    @property
    def are_new(self) -> bool:
        """Whether there are some that there were not before."""
        return any(id(x) not in self._known for x in _computed(self._values()))

    def restore(self) -> None:
        """Give attributes, buffers, lists and dictionaries the values before."""
        for table, attributes in self._tables:
            for name in table.keys() - attributes.keys():
                del table[name]
            table.update(attributes)
        for x, before in self._lists:
            x.clear()
            x.update(before) if isinstance(x, dict) else x.extend(before)


_DEPTH = 3  # of lists and dictionaries in an attribute


def _containers(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[Any]:
    """The lists and dictionaries in these values, and in each other."""
    for x in values:
        if depth and isinstance(x, list | tuple | deque | dict):
            if not isinstance(x, tuple):
                yield x
            yield from _containers(x.values() if isinstance(x, dict) else x, depth - 1)


def _computed(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors with a graph of gradients in these values, and in lists and dictionaries up to this depth."""
    for x in values:
        if isinstance(x, Tensor):
            if not x.is_leaf and not _is_of_parameter(x):
                yield x
        elif depth and isinstance(x, list | tuple | deque | dict):
            yield from _computed(x.values() if isinstance(x, dict) else x, depth - 1)


def _is_of_parameter(x: Tensor) -> bool:
    """Whether it is a view of a parameter, as FSDP makes them."""
    node: Any = x.grad_fn
    while node is not None and re.match("View|Split", node.name()):
        node = node.next_functions[0][0]
    return hasattr(node, "variable")
