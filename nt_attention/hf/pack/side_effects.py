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

# Functions that make random numbers, but for dropout of elements.
RANDOM_FUNCTIONS = re.compile(
    "rand|randn|randint|(rand|randn|randint)_like|randperm|normal|(uniform|normal|log_normal|exponential|geometric"
    "|cauchy|random)_|bernoulli_?|multinomial|poisson|binomial|dropout[123]d|feature_alpha_dropout|gumbel_softmax|rrelu"
)

_OF_TORCH = vars(nn.Module()).keys()


class RandomNumbers(TorchFunctionMode):
    """A context that notices random numbers, also if the state of the generator is reset after them.

    Args:
        device: that of the model.

    Attributes:
        made: the names of `RANDOM_FUNCTIONS` that made some, and the shapes of these.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []
        self._device = device
        self._before = self._expected = self._states()
        self._are_for_tokens = False

    def _states(self) -> list[Tensor]:
        """The states of the generators, which are on the host."""
        device = self._device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    @property
    def are_for_tokens(self) -> bool:
        """Whether some were for tokens, by `RANDOM_FUNCTIONS` or by other functions, such as dropout.

        A single number is none of tokens: it is the same for all rows of a packed batch. PEFT's LoHa and LoKr make one
        to decide whether an adapter runs.
        """
        return self._are_for_tokens or not all(map(torch.equal, self._expected, self._states()))

    def by_row(self, rows: int, length: int) -> str | None:
        """A function that has made some for each row of a padded batch, and not for each token, or None."""
        for name, shape in self.made:
            of_tokens = shape[:2] in ((rows, length), (length, rows)) or shape[:1] == (rows * length,)
            if len(shape) and shape[0] == rows and not of_tokens:
                return name
        return None

    def restore(self) -> None:
        """Set the generators back to their states before."""
        torch.set_rng_state(self._before[0])
        if len(self._before) > 1:
            torch.cuda.set_rng_state(self._before[1], self._device)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if not RANDOM_FUNCTIONS.fullmatch(name):
            return function(*args, **kwargs)
        self._are_for_tokens, before = self.are_for_tokens, self._states()
        out = function(*args, **kwargs)
        self._expected = self._states()
        if kwargs.get("generator") is None and all(map(torch.equal, before, self._expected)):
            return out  # in evaluation mode, `dropout2d` makes none
        is_tensor = isinstance(out, Tensor)
        self.made.append((name.strip("_"), tuple(out.shape) if is_tensor else ()))
        self._are_for_tokens |= not (is_tensor and out.numel() == 1 and out.is_floating_point())
        return out


_SEVERAL = 8  # numbers, of which the largest is taken: one may be in the middle, and the size of noise is not seen


class ConstantNumbers(TorchFunctionMode):
    """A context in which each call for random numbers of a distribution gives one number in all elements.

    It is the same for the same distribution, whatever the shape is. So noise whose size depends on the length of a row,
    as that of NEFTune, still differs between a packed row and padded ones, and noise for each token does not.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        out = function(*args, **kwargs)
        if not RANDOM_FUNCTIONS.fullmatch(name) or not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        torch.manual_seed(0)
        if name in ("rand", "randn"):
            return out.fill_(function(_SEVERAL, dtype=out.dtype, device=out.device).amax())
        is_in_place = name.endswith("_") and not any(isinstance(x, Tensor) for x in args[1:])
        if is_in_place or name in ("rand_like", "randn_like"):
            options = {key: x for key, x in kwargs.items() if key != "input"}
            return out.fill_(function(out.new_empty(_SEVERAL), *args[1:], **options).amax())
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
