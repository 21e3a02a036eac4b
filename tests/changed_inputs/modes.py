"""How a program is run: eagerly, recomputed, compiled, traced, looked at, on threads, under a function transform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from calls import PassThrough
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Mode:
    """
    Attributes:
        prepare: from the flat function and example tensors to what is called in its place.
        lengths: which of ``run.BATCHES`` it is called with; it is prepared with the first.
        forward, backward: contexts around both passes.
        before: what is done with the same lengths before: a name in ``BEFORE``.
        through: how gradients are asked for: a name in ``run.THROUGH``.
        traced: prepared once, on other tensors and lengths, and kept.
        packed_only: what takes packed tensors alone.
    """

    prepare: Callable[..., Function] | None = None
    lengths: str = "first"
    forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    backward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    before: str = ""
    through: str = "backward"
    traced: bool = False
    packed_only: bool = False


def _checkpointed(reentrant: bool) -> Callable[[Function], Function]:
    return lambda function: lambda *xs: checkpoint(function, *xs, use_reentrant=reentrant)


def _compiled(backend: str) -> Callable[..., Function]:
    def prepare(function: Callable[..., Any], examples: Sequence[Tensor], layouts: Any) -> Function:
        compiled = torch.compile(function, backend=backend, dynamic=True)
        compiled(*examples, layouts=layouts)
        return compiled

    return prepare


class _Program(nn.Module):
    def __init__(self, function: Function, module: nn.Module | None) -> None:
        super().__init__()
        self.function, self.inner = function, module

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return self.function(*xs)


def _exported(strict: bool) -> Callable[..., Function]:
    def prepare(function: Function, examples: Sequence[Tensor], module: nn.Module | None) -> Function:
        dims = (dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in examples)
        program = _Program(function, module)
        exported = torch.export.export(program, tuple(examples), dynamic_shapes=(tuple(dims),), strict=strict)
        return exported.module()

    return prepare


def _traced(name: str, prepare: Any, lengths: Sequence[str]) -> dict[str, Mode]:
    return {f"{name}, {which} lengths": Mode(prepare, which, traced=True) for which in lengths}


BEFORE: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}

MODES: dict[str, Mode] = {
    "eager": Mode(),
    "backward twice": Mode(through="twice"),
    "differentiated twice": Mode(through="double"),
    "checkpoint, reentrant": Mode(_checkpointed(True)),
    "checkpoint": Mode(_checkpointed(False)),
    "dispatch mode around forward": Mode(forward=PassThrough),
    "dispatch mode around backward": Mode(backward=PassThrough),
    "dispatch mode around both": Mode(forward=PassThrough, backward=PassThrough),
    "inference_mode before": Mode(before="inference_mode"),
    "no_grad before": Mode(before="no_grad"),
    "lengths made in inference_mode": Mode(before="made in inference_mode"),
    "layout made in inference_mode": Mode(before="layout in inference_mode"),
    "four threads": Mode(through="threads"),
    "func.grad": Mode(through="func.grad", packed_only=True),
    **_traced("compile eager", _compiled("eager"), ("first", "same total", "other")),
    **_traced("compile aot_eager", _compiled("aot_eager"), ("first", "same total", "other")),
    **_traced("export", _exported(False), ("first", "same total", "other")),
    **_traced("export strict", _exported(True), ("first", "other")),
}
