"""Random numbers in the trials of a proof: none of tokens, so that a model in training can be compared with itself.

Dropout of elements drops nothing, and random numbers for each token are constants. Random numbers for each row, as in
stochastic depth, are refused, because a packed batch has one row. So are those of Python and NumPy.

Dimensions: B rows of a padded batch, L positions in a row.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..pack.side_effects import RANDOM_FUNCTIONS
from ..route import dropout

_DROPOUT = {"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"}
# Functions of torch that draw inside: what they give is only examined.
_WITH_DRAWS = {"dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax", "rrelu"}


class Draws:
    """A context in which random numbers of the models are constants. Only one thread at a time may be in one.

    Attributes:
        level: the constant, between 0 and 1, for numbers that are uniform.
        by_row: an operation that drew numbers for each row of a batch, or None.
        any: whether numbers were drawn.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models
        self.level = 0.5
        self.any = False
        self.by_row: str | None = None
        self.shapes: list[tuple[int, ...]] = []  # (B, L) of each side of the batch that runs, if draws are examined

    @contextmanager
    def __call__(self) -> Iterator[None]:
        hooks = [model.register_forward_pre_hook(self._seed) for model in self.models]
        hooks += [model.register_forward_hook(self._compare) for model in self.models]
        dropout.thread[0] = threading.get_ident()
        try:
            with _Constant(self):
                yield
        finally:
            dropout.thread[0] = None
            for hook in hooks:
                hook.remove()

    def _seed(self, *_: Any) -> None:
        torch.default_generator.manual_seed(0)
        self.before = random.getstate(), _position_of_numpy()

    def _compare(self, *_: Any) -> None:
        if self.before != (random.getstate(), _position_of_numpy()):
            self.by_row = "Python's random or NumPy"

    def examine(self, name: str, x: Tensor) -> None:
        """Note an operation that drew numbers of the shape of `x`."""
        of_tokens = (x.shape[:2] in ((n, m), (m, n)) or x.shape[0] == n * m for n, m in self.shapes)
        if self.shapes and x.numel() > 1 and not any(of_tokens):
            self.by_row = self.by_row or name


def _position_of_numpy() -> int:
    """How many numbers of its state NumPy has used."""
    state: Any = np.random.get_state()
    return int(state[2])


class _Constant(TorchFunctionMode):
    """Replaces random numbers by constants."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in _DROPOUT:
            return self._drop(name, **dict(zip(("input", "p", "training"), args, strict=False)) | kwargs)
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = kwargs | {"dropout_p": 0.0}
        out = function(*args, **kwargs)
        if (
            kwargs.get("generator") is None
            and isinstance(out, Tensor)
            and (RANDOM_FUNCTIONS.fullmatch(name) or name in _WITH_DRAWS)
        ):
            self.draws.any = True
            self.draws.examine(name.strip("_"), out)
            _fill(name, out, args, kwargs, self.draws.level)
        return out

    def _drop(self, name: str, input: Tensor, p: float = 0.5, training: bool = True, **options: Any) -> Tensor:
        is_by_row = input.dim() > 1 and input.shape[1] == 1 and any(input.shape[0] == n for n, _ in self.draws.shapes)
        if is_by_row and p and training and options.get("train", True):
            self.draws.examine(name, input)
        return input


def _fill(name: str, out: Tensor, args: Any, kwargs: Any, level: float) -> None:
    """Write constants to a tensor of random numbers, in place."""
    if name.startswith("bernoulli"):
        chance = kwargs.get("p", args[1] if len(args) > 1 else args[0] if name == "bernoulli" else 0.5)
        out.copy_(torch.as_tensor(chance) >= level)
    elif name == "uniform_":
        low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
        low, high = kwargs.get("from", low), kwargs.get("to", high)
        out.fill_(low + level * (high - low))
    elif name in _WITH_DRAWS:
        return
    elif out.is_floating_point():
        out.fill_(level)
    elif name != "randperm":
        out.zero_()
