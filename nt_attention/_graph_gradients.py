"""Gradients of calls that run as CUDA graphs: the graph of a backward, and the autograd function that replays it.

The graph of a forward leaves what its backward needs in memory of the graphs. The next replay of any graph with the
same memory overwrites it. So graphs with gradients belong to a `Slot`, and a slot is taken until the backward of its
last call has run, or the results of that call were freed. Calls that wait for their backward at the same time take
several slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

Gradients = list[Tensor | None]
SLOTS = 4  # the most calls of a module that wait for their backward


class Slot:
    """Memory for the graphs of a module, of which one call at a time may wait for its backward.

    Attributes:
        number: its index among the slots of the module.
        device: captures its graphs, and runs them one after another.
        gradients: where its graphs write the gradients of parameters.
    """

    def __init__(self, number: int, device: Any) -> None:
        self.number, self.device = number, device
        self.gradients: list[Tensor] = []
        self._calls = 0
        self._waiting: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        """Whether no call waits for its backward."""
        return self._waiting is None or bool(self._waiting.expired())

    def take(self) -> Taken:
        """Take the slot until the token of the result is freed."""
        token = torch.empty(1, device="cpu")
        self._calls, self._waiting = self._calls + 1, StorageWeakRef(token.untyped_storage())
        return Taken(self, self._calls, token)

    def is_last(self, number: int) -> bool:
        """Whether the slot still has what the backward of this call needs."""
        return self._calls == number

    def leave(self) -> None:
        """Free the slot."""
        self._waiting = None

    def gradients_like(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Where to write the gradients of these parameters. All graphs of the slot share it."""
        kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in parameters]
        if kinds != [(x.shape, x.stride(), x.dtype, x.device) for x in self.gradients]:
            self.gradients = [torch.empty_like(x) for x in parameters]
        return self.gradients


class Taken(NamedTuple):
    """A slot that a call has taken.

    Attributes:
        slot: the slot.
        number: the number of the call, for `Slot.is_last`.
        token: a tensor that only autograd keeps, with what it saves for the backward.
    """

    slot: Slot
    number: int
    token: Tensor


@dataclass(frozen=True, eq=False)
class Backward:
    """The graph of a backward, and the tensors that it reads and writes.

    Attributes:
        replay: replays it.
        grads: the gradients of the outputs, which it reads; None for outputs that have no gradient.
        gradients: those of the inputs and parameters, which it writes; None where the outputs do not depend on them.
    """

    replay: Callable[[], None]
    grads: Gradients
    gradients: Gradients

    def run(self, grads: Sequence[Tensor | None], shapes: Sequence[torch.Size], needed: Sequence[bool]) -> Gradients:
        """Copies of the gradients that are needed, of tensors of these shapes, for the gradients of the outputs.

        Outputs and inputs of a call are the first parts of those of the graph. The others have a gradient of 0.
        """
        zeros, targets, sources = [], [], []
        for static, grad in zip(self.grads, grads, strict=True):
            if static is None:
                continue
            if grad is None or grad.shape != static.shape:
                zeros.append(static)
            if grad is not None:
                targets.append(_first(static, grad.shape))
                sources.append(grad)
        if zeros:
            torch._foreach_zero_(zeros)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.replay()
        found: Gradients = [None] * len(shapes)
        which = [i for i, x in enumerate(self.gradients) if x is not None and needed[i]]
        own = [_first(x, shapes[i]) for i in which if (x := self.gradients[i]) is not None]
        copies = [torch.empty_like(x, memory_format=torch.preserve_format) for x in own]
        if own:
            torch._foreach_copy_(copies, own)
        for i, copy in zip(which, copies, strict=True):
            found[i] = copy
        return found


def _first(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def backward_of(outputs: Sequence[Tensor], grads: Gradients, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors`, in the calling thread, and without autocast, as in a backward after the forward."""
    pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if grad is not None]
    kind = tensors[0].device.type
    with torch.autograd.set_multithreading_enabled(False), torch.autocast(kind, enabled=False):
        return torch.autograd.grad([x for x, _ in pairs], tensors, [x for _, x in pairs], allow_unused=True)


def depends_on_others(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether a leaf that is not in `tensors` gets a gradient in a backward of the outputs."""
    known = {id(x) for x in tensors}
    return any(id(x) not in known for x in _leaves_of(outputs))


def _leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (variable := getattr(node, "variable", None)) is not None:  # the node that accumulates in `.grad`
            yield variable
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)


class _Call(torch.autograd.Function):
    """Results of a replay → the same results, whose backward replays the other graph.

    The parameters are saved, so that autograd raises an error if they are changed in place before the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        taken: Taken,
        guard: Callable[[], AbstractContextManager[Any]],
        results: Sequence[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(taken.token, *tensors)
        ctx.replayed, ctx.slot, ctx.number, ctx.guard = backward, taken.slot, taken.number, guard
        ctx.shapes, ctx.ran = [x.shape for x in tensors], False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x, grad in zip(results, backward.grads, strict=True) if grad is None])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018  # raises an error if one was changed in place
        with ctx.guard():
            if ctx.ran or not ctx.slot.is_last(ctx.number):
                raise RuntimeError(
                    "a call that ran as a CUDA graph can have one backward only: pass the sum of all losses to it, or "
                    "patch the model with cuda_graphs=True, which runs calls with gradients without graphs."
                )
            ctx.ran = True
            with ctx.slot.device.in_order():
                gradients = ctx.replayed.run(grads, ctx.shapes, ctx.needs_input_grad[4:])
            ctx.slot.leave()  # also if autograd keeps what it saved, with retain_graph=True
        return (None, None, None, None, *gradients)


def connect(
    backward: Backward,
    taken: Taken,
    guard: Callable[[], AbstractContextManager[Any]],
    results: Sequence[Tensor],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Make the results of a replay differentiable.

    Args:
        backward: the graph of the backward.
        taken: the slot of the graphs.
        guard: a context in which graphs of this slot may run.
        results: copies of the outputs, which nobody else has.
        tensors: the inputs and parameters with gradients, in the order of `backward.gradients`.
    """
    return list(_Call.apply(backward, taken, guard, results, *tensors))


def why_not_differentiable() -> str | None:
    """Why a call at this moment can't have a backward graph, or None."""
    if torch._C._current_graph_task_id() != -1:  # dropout would not be that of the first forward
        return "it runs in a backward, as the second forward of a checkpoint does"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "there are hooks on saved tensors, as in a checkpoint"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    return None
