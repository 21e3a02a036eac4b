"""Where the inputs come from, and what is changed in place between the forward and the backward pass.

Each has two sides: what the tested programs do in place, and the same thing without it, for the float64 oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .forms import Form

Shape = tuple[int, ...]


# ---- origins: the shape of the leaf, and how the rows (T, …) come from it


@dataclass(frozen=True)
class Origin:
    """How rows of a given shape come from a leaf; ``shared``: all inputs are slices (or the whole) of one leaf."""

    leaf: Callable[[Shape], Shape]
    rows: Callable[[Tensor, Shape], Tensor]
    is_leaf: bool = False
    shared: str = ""


ORIGINS = {
    "nonleaf": Origin(lambda s: s, lambda x, s: x * 1.0),
    "leaf": Origin(lambda s: s, lambda x, s: x, is_leaf=True),
    "expanded rows": Origin(lambda s: (1, *s[1:]), lambda x, s: x.expand(s)),
    "expanded features": Origin(lambda s: (*s[:-1], 1), lambda x, s: x.expand(s)),
    "transposed": Origin(lambda s: (s[1], s[0], *s[2:]), lambda x, s: (x * 1.0).transpose(0, 1)),
    "strided": Origin(lambda s: (*s[:-1], 2 * s[-1]), lambda x, s: (x * 1.0)[..., ::2]),
    "sliced": Origin(lambda s: (s[0] + 3, *s[1:]), lambda x, s: (x * 1.0)[2:-1]),
    "one tensor": Origin(lambda s: s, lambda x, s: x * 1.0, shared="same"),
    "chunks": Origin(lambda s: (s[0], 3, *s[1:]), lambda x, s: x * 1.0, shared="chunks"),
}


# ---- changes of values


@dataclass(frozen=True)
class Operation:
    """``in_place(part, operand, form)``, and the same as a function of rows."""

    in_place: Callable[[Tensor, Tensor, type[Form]], Any]
    result: Callable[[Tensor, Tensor], Tensor]


def _without_gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The value of ``function(x, y)``, with the gradient of ``x``."""
    return lambda x, y: x + (function(x, y) - x).detach()


def _in_no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2.0)


OPERATIONS = {
    "mul_": Operation(lambda x, y, form: x.mul_(2.0), lambda x, y: x * 2.0),
    "add_": Operation(lambda x, y, form: x.add_(y), lambda x, y: x + y),
    "copy_": Operation(lambda x, y, form: x.copy_(y), lambda x, y: y + 0.0 * x),
    "zero_": Operation(lambda x, y, form: x.zero_(), lambda x, y: 0.0 * x),
    "mul_ of a view": Operation(lambda x, y, form: form.view(x).mul_(2.0), lambda x, y: x * 2.0),
    "mul_ of detach()": Operation(lambda x, y, form: x.detach().mul_(2.0), _without_gradient(lambda x, y: x * 2.0)),
    "mul_ in no_grad": Operation(lambda x, y, form: _in_no_grad(x), _without_gradient(lambda x, y: x * 2.0)),
    "mul_ of a detached view": Operation(
        lambda x, y, form: form.view(x.detach()).mul_(2.0), _without_gradient(lambda x, y: x * 2.0)
    ),
}


# ---- changes of lengths


def _through_numpy(tensor: Tensor, new: Tensor) -> None:
    tensor.numpy()[...] = new.numpy()


def _swap(tensor: Tensor, new: Tensor) -> None:
    tensor.data = new.clone()


def _in_inference(tensor: Tensor, new: Tensor) -> None:
    with torch.inference_mode():
        tensor.copy_(new)


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda tensor, new: tensor.copy_(new),
    "through a view": lambda tensor, new: tensor[:].copy_(new),
    "through detach()": lambda tensor, new: tensor.detach().copy_(new),
    "in inference_mode": _in_inference,
    "set_": lambda tensor, new: tensor.set_(new.clone()),
    "through .data": lambda tensor, new: tensor.data.copy_(new),
    "through NumPy": _through_numpy,
    ".data = other": _swap,
}
HIDDEN = ("through .data", "through NumPy", ".data = other")  # torch's version counter does not change
MOMENTS = ("before forward", "before backward", "between two readings")

# What a layout hands out, and in which ways it is changed.
HANDED_OUT = ("position_ids", "sequence_ids", "lengths", "host_offsets", "padded_index", "offsets", "cu_seqlens")
OFFSETS = ("offsets", "cu_seqlens")  # a layout is refused if these are changed
WAYS_OF_RESULTS = ("copy_", "in inference_mode", "through NumPy")
NO_VALUES = ("lengths", "layout", "table", "weight")  # targets that are neither inputs nor outputs


@dataclass(frozen=True)
class Change:
    """
    Attributes:
        target: an input or output by name, "weight" (a parameter), "lengths", "layout" (a tensor that it hands out),
            "table" (another row of the table whose row gives the lengths), or "" for none.
        how: a name in ``OPERATIONS``, or in ``WAYS`` for lengths, layouts and tables.
        other: the operand: "" for a constant, else an input or output by name (a residual). For layouts, the attribute.
        moment: for lengths, layouts and tables, a name in ``MOMENTS``.
        side: for lengths and layouts, those of the queries or of the keys.
    """

    target: str = ""
    how: str = ""
    other: str = ""
    moment: str = ""
    side: int = 0

    @property
    def label(self) -> str:
        if not self.target:
            return "no change"
        if self.target == "lengths":
            return f"{'key ' if self.side else ''}lengths {self.how} {self.moment}"
        if self.target in NO_VALUES and self.moment:
            name = f"layout.{self.other}" if self.other else "another row of the table"
            return f"{'key ' if self.side else ''}{name} {self.how} {self.moment}"
        return f"{self.target} {self.how}{f' {self.other}' if self.other else ''}"


def changes_of_values(inputs: list[str], outputs: list[str]) -> list[Change]:
    """Every input and output in every way, and residuals both ways."""
    own = [Change(target, how) for target, how in itertools.product([*inputs, *outputs], OPERATIONS)]
    residuals = [Change(inputs[0], "add_", "out"), Change("out", "add_", inputs[0])]
    return own + residuals


def changes_of_results(sides: int) -> list[Change]:
    """Of what layouts hand out."""
    return [
        Change("layout", how, name, moment, side)
        for name, how, moment, side in itertools.product(HANDED_OUT, WAYS_OF_RESULTS, MOMENTS[:2], range(sides))
    ]


def changes_of_other_rows() -> list[Change]:
    return [Change("table", how, moment=moment) for how, moment in itertools.product(WAYS_OF_RESULTS, MOMENTS[:2])]


def changes_of_lengths(sides: int) -> list[Change]:
    return [
        Change("lengths", how, moment=moment, side=side)
        for how, moment, side in itertools.product(WAYS, MOMENTS, range(sides))
    ]
