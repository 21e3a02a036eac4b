"""Gradients of calls that run as CUDA graphs: the graph of a backward, and the autograd function that replays it.

The graph of a forward leaves what its backward needs in memory of the graphs. The next replay of any graph with the
same memory overwrites it. So graphs with gradients belong to a `Slot`, and a slot is taken until the backward of its
last call has run, or the results of that call were freed. Calls that wait for their backward at the same time take
several slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import (
    backward_hooks_of_tensor,
    backward_id,
    caches_parametrizations,
    copy_each,
    forward_ad_level,
    saved_tensors_hooks,
)
from .device import Device
from .module_state import version_of

Gradients = list[Tensor | None]
SLOTS = 4  # the most calls of a module that wait for their backward
_ONE_BACKWARD = (
    "a call that ran as a CUDA graph can have one backward only: pass the sum of all losses to it, or patch the model "
    "with cuda_graphs=True, which runs calls with gradients without graphs."
)


class Slot:
    """Memory for the graphs of a module, of which one call at a time may wait for its backward.

    Attributes:
        number: its index among the slots of the module.
        device: captures its graphs, and runs them one after another.
        gradients: where its graphs write the gradients of parameters.
    """

    def __init__(self, number: int, device: Device) -> None:
        self.number, self.device = number, device
        self.gradients: list[Tensor] = []
        self._waiting: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        """Whether no call waits for its backward."""
        return self._waiting is None or bool(self._waiting.expired())

    def take(self) -> Tensor:
        """Take the slot for a call, until this tensor is freed, which autograd has to save for the backward."""
        token = torch.empty(1, device="cpu")
        self._waiting = StorageWeakRef(token.untyped_storage())
        return token

    def leave(self) -> None:
        """Free the slot."""
        self._waiting = None

    def gradients_like(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Where to write the gradients of these parameters. All graphs of the slot share it."""
        kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in parameters]
        if kinds != [(x.shape, x.stride(), x.dtype, x.device) for x in self.gradients]:
            self.gradients = [torch.empty_like(x) for x in parameters]
        return self.gradients


@dataclass(frozen=True, eq=False)
class Backward:
    """The graph of a backward, and the tensors that it reads and writes.

    Attributes:
        replay: replays it.
        grads: the gradients of the outputs, which it reads; None for outputs that have no gradient.
        gradients: those of the inputs and parameters, which it writes; None where the outputs do not depend on them.
        depends_on: for each output, the indices of the inputs and parameters on which it depends.
        used_by: for each output, the indices of the outputs that are computed from it.
        kept: further tensors that it reads, and the graph of the forward, in whose memory the activations are.
    """

    replay: Callable[[], None]
    grads: Gradients
    gradients: Gradients
    depends_on: Sequence[frozenset[int]]
    used_by: Sequence[frozenset[int]]
    kept: object

    def prepare(
        self, grads: Sequence[Tensor | None], parts: Gradients, shapes: Sequence[torch.Size], needed: Sequence[bool]
    ) -> Callable[[], Gradients]:
        """Copy the gradients of the outputs. The result replays the graph, and returns the gradients that are needed.

        They are copies, of tensors of these shapes, and None where no output with a gradient depends on them. Inputs of
        a call are the first parts of those of the graph. `parts` of `self.grads` belong to the outputs of the call. The
        other parts have a gradient of 0.
        """
        used = frozenset().union(*(at for at, grad in zip(self.depends_on, grads, strict=True) if grad is not None))
        which = [i for i, x in enumerate(self.gradients) if x is not None and needed[i] and i in used]
        own = [_first(cast(Tensor, self.gradients[i]), shapes[i]) for i in which]
        copies = [torch.empty_like(x) for x in own]  # before the replay, after which no error may happen
        zeros, targets, sources = [], [], []
        for static, part, grad in zip(self.grads, parts, grads, strict=True):
            if static is None or part is None:
                continue
            if grad is None or part.numel() != static.numel():
                zeros.append(static)
            if grad is not None:
                targets.append(part)
                sources.append(grad)
        for x in zeros:
            x.zero_()
        if targets:
            copy_each(targets, sources)

        def run() -> Gradients:
            self.replay()
            if own:
                copy_each(copies, own)
            copy_of = dict(zip(which, copies, strict=True))
            return [copy_of.get(i) for i in range(len(shapes))]

        return run


def _first(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def backward_of(outputs: Sequence[Tensor], grads: Gradients, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors`, without autocast, as in a backward after the forward."""
    pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if grad is not None]
    kind = tensors[0].device.type
    with torch.autocast(kind, enabled=False):
        return torch.autograd.grad([x for x, _ in pairs], tensors, [x for _, x in pairs], allow_unused=True)


def dependencies_of(output: Tensor, tensors: Sequence[Tensor]) -> frozenset[int] | None:
    """The indices of the tensors on which an output depends; None if it depends on another leaf too."""
    index = {id(x): i for i, x in enumerate(tensors)}
    found = [index.get(id(x), -1) for x in _leaves_of(output)]
    return None if -1 in found else frozenset(found)


def used_by(outputs: Sequence[Tensor]) -> list[frozenset[int]]:
    """For each output, the indices of the outputs that are computed from it, such as the loss from logits."""
    nodes = [set(_nodes_of(x)) for x in outputs]
    last = [x.grad_fn for x in outputs]
    return [
        frozenset(j for j, other in enumerate(last) if node in nodes[j] and other is not node)
        for node in last  # None is in no set
    ]


def _leaves_of(output: Tensor) -> Iterator[Tensor]:
    """The leaves that get a gradient in a backward of the output."""
    if output.grad_fn is None and output.requires_grad:
        yield output
    for node in _nodes_of(output):
        if (variable := getattr(node, "variable", None)) is not None:  # the node that accumulates in `.grad`
            yield variable


def _nodes_of(output: Tensor) -> Iterator[Any]:
    """The nodes of autograd that a backward of the output runs."""
    waiting = [] if output.grad_fn is None else [output.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)


@dataclass(eq=False)
class Replayed:
    """A call whose forward was replayed.

    Attributes:
        backward: the graph of its backward.
        slot: the slot of the graphs.
        guard: a context in which graphs of this slot may run.
        read: the tensors of the module, their versions and their memory, which stays until the backward has run.
        shapes: those of the inputs and parameters with gradients.
        parts: the parts of `backward.grads` that belong to the outputs of the call.
        ran: whether the backward has run.
        watched: the outputs from which others are computed: their indices, hooks, and references to them.
    """

    backward: Backward
    slot: Slot
    guard: Callable[[], AbstractContextManager[Any]]
    read: Sequence[tuple[Tensor, int | None, torch.UntypedStorage]]
    shapes: list[torch.Size]
    parts: Gradients
    ran: bool = False
    watched: list[tuple[int, dict[int, Any], weakref.ref[Tensor]]] = field(default_factory=list)

    def watch(self, results: Sequence[Tensor]) -> None:
        """Note where hooks of the results will be, because their gradients will be incomplete."""
        for i, others in enumerate(self.backward.used_by):
            if others and (x := results[i]).requires_grad:
                x.register_hook(lambda grad: None).remove()  # leaves an empty dictionary
                self.watched.append((i, backward_hooks_of_tensor(x), weakref.ref(x)))

    def _check_hooks(self, grads: Sequence[Tensor | None]) -> None:
        for i, hooks, reference in self.watched:
            x = reference()
            if (hooks or (x is not None and x.retains_grad)) and any(
                grads[j] is not None for j in self.backward.used_by[i]
            ):
                raise RuntimeError(
                    "an output of a call that ran as a CUDA graph has a hook or retains its gradient, which does not "
                    "contain the part of the loss that the call has computed from this output: remove the hook, or "
                    "patch the model with cuda_graphs=True, which runs calls with gradients without graphs."
                )

    def gradients(self, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> Gradients:
        """See `Backward.prepare`.

        Raises:
            RuntimeError: it has run before, the module was changed since the forward, or an output has a hook that
            would not get its whole gradient.
        """
        with self.guard():
            if self.ran:
                raise RuntimeError(_ONE_BACKWARD)
            if any(version_of(x) != version for x, version, _ in self.read):
                raise RuntimeError(
                    "a parameter or a buffer that is needed for gradient computation has been modified by an inplace "
                    "operation since the forward, which ran as a CUDA graph: change it after the backward, or patch "
                    "the model with cuda_graphs=True, which runs calls with gradients without graphs."
                )
            self._check_hooks(grads)
            with self.slot.device.in_order():
                run = self.backward.prepare(grads, self.parts, self.shapes, needed)
                self.ran = True
                found = run()
            self.slot.leave()  # also if autograd keeps what it saved, with retain_graph=True
        return found


class _Call(torch.autograd.Function):
    """Results of a replay → the same results, whose backward replays the other graph."""

    @staticmethod
    def forward(
        ctx: Any, call: Replayed, token: Tensor, results: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(token)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x, grad in zip(results, call.backward.grads, strict=True) if grad is None])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018  # raises an error if autograd has freed them
        if ctx.call is None:
            raise RuntimeError(_ONE_BACKWARD)
        found = ctx.call.gradients(grads, ctx.needs_input_grad[3:])
        ctx.call = None  # who keeps results does not keep the graphs
        return None, None, None, *found


def connect(call: Replayed, token: Tensor, results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make the results of a replay differentiable.

    Args:
        call: the call.
        token: that of `Slot.take`.
        results: copies of the outputs, which nobody else has.
        tensors: the inputs and parameters with gradients, in the order of `call.backward.gradients`.
    """
    outputs = list(_Call.apply(call, token, results, *tensors))
    call.watch(outputs)
    return outputs


def why_not_differentiable() -> str | None:
    """Why a call at this moment can't have a backward graph, or None."""
    if backward_id() != -1:  # dropout would not be that of the first forward
        return "it runs in a backward, as the second forward of a checkpoint does"
    if saved_tensors_hooks(True) is not None:
        return "there are hooks on saved tensors, as in a checkpoint"
    if forward_ad_level() >= 0:
        return "forward-mode AD is active"
    if torch.is_anomaly_enabled():
        return "anomalies are detected, which reads values on the host"
    if caches_parametrizations():
        return "the values of parametrizations are cached"
    return None
