"""Gradients of calls that run as CUDA graphs: the graph of a backward, and the autograd function that replays it.

The graph of a forward leaves what its backward needs in memory of the graphs. The next replay of any graph with the
same memory overwrites it. So graphs with gradients have memory of their own for each module, a `Slot`, and one call at
a time can wait for its backward. Further ones run without a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..torch_private import (
    backward_hooks_of_tensor,
    backward_id,
    caches_parametrizations,
    copy_each,
    forward_ad_level,
    saved_tensors_hooks,
)
from .device import Device, NotCapturedError
from .module_state import ModuleState, version_of

Gradients = list[Tensor | None]
OTHER_LEAF = "its outputs have gradients of tensors that are no parameters of the module"
_USE_INFERENCE = "patch the model with cuda_graphs=True, which runs calls with gradients without graphs."


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


class Slot:
    """Memory for the graphs of a module with gradients.

    Attributes:
        device: captures its graphs, and runs them one after another.
        gradients: where its graphs write the gradients of parameters. A backward returns copies.
        waiting: the call that waits for its backward.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.gradients: list[Tensor] = []
        self.waiting: weakref.ref[Replayed] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no call waits for its backward. Autograd frees a call with its results."""
        return self.waiting is None or self.waiting() is None


class Backward:
    """The graph of a backward, and the tensors that it reads and writes.

    Args:
        state: the module. While it is captured, aliases are in the place of its parameters: autograd would let the
            stream of a capture wait for the stream where the parameters themselves were used first, which ends the
            capture with an error.
        slot: its memory.
        inputs: the inputs of the graph of the forward that require a gradient.

    Attributes:
        grads: the gradients of the outputs, which it reads; None for outputs that have no gradient.
        gradients: those of the inputs and parameters, which it writes; None where the outputs do not depend on them.
        depends_on: for each output, the indices of the inputs and parameters on which it depends.
    """

    def __init__(self, state: ModuleState, slot: Slot, inputs: list[Tensor]) -> None:
        self.slot = slot
        self._state, self._aliases = state, [_alias(x) for x in state.differentiable]
        self._leaves = [*inputs, *self._aliases]
        self.grads: Gradients = []
        self.gradients: Gradients = []
        self.depends_on: list[frozenset[int]] = []
        if [x.shape for x in slot.gradients] != [x.shape for x in self._aliases]:
            slot.gradients = [torch.empty_like(x, requires_grad=False) for x in self._aliases]

    def with_aliases(self) -> AbstractContextManager[None]:
        """A context in which the module has aliases of its parameters."""
        return self._state.replaced(self._aliases)

    def run(self, outputs: list[Tensor]) -> None:
        """Run it without a graph.

        Raises:
            NotCapturedError: it can't be captured, or the outputs have gradients that it would not return.
        """
        if not self.grads:
            if not any(x.requires_grad for x in outputs):
                raise NotCapturedError("its outputs have no gradients")
            index = {id(x): i for i, x in enumerate(self._leaves)}
            self.depends_on = [frozenset(index.get(id(x), -1) for x in _leaves_of(output)) for output in outputs]
            if any(-1 in each for each in self.depends_on):
                raise NotCapturedError(OTHER_LEAF)
            self.grads = [torch.zeros_like(x, requires_grad=False) if x.requires_grad else None for x in outputs]
        try:
            self._run(outputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotCapturedError(f"its backward can't be captured ({str(error).splitlines()[0]})") from error

    def _run(self, outputs: list[Tensor]) -> Gradients:
        pairs = [(x, grad) for x, grad in zip(outputs, self.grads, strict=True) if grad is not None]
        with torch.autocast(self._leaves[0].device.type, enabled=False):  # as in a backward after the forward
            gradients = torch.autograd.grad(
                [x for x, _ in pairs], self._leaves, [grad for _, grad in pairs], allow_unused=True
            )
        inputs = len(self._leaves) - len(self._aliases)
        copied = [(x, y) for x, y in zip(self.slot.gradients, gradients[inputs:], strict=True) if y is not None]
        if copied:
            copy_each([x for x, _ in copied], [y for _, y in copied])
        shared = zip(self.slot.gradients, gradients[inputs:], strict=True)
        return [*gradients[:inputs], *(None if y is None else x for x, y in shared)]

    def capture(self, device: Device, outputs: list[Tensor]) -> None:
        """Capture it. `outputs`: those of the graph of the forward."""
        self.replay, self.gradients = device.capture(lambda: self._run(outputs))
        self._aliases, self._leaves = [], []  # they would keep the memory of the parameters


def _alias(x: Tensor) -> Tensor:
    """A leaf with the same memory, whose gradient can't be accumulated."""
    alias: Tensor = nn.Parameter(x.detach()) if isinstance(x, nn.Parameter) else x.detach().requires_grad_()
    vars(alias).update(vars(x))

    def refuse(x: Tensor) -> None:
        raise NotCapturedError("a backward ran in its forward, or in another thread while it was captured")

    alias.register_post_accumulate_grad_hook(refuse)
    return alias


def _leaves_of(output: Tensor) -> Iterator[Tensor]:
    """The leaves that get a gradient in a backward of the output."""
    if output.grad_fn is None and output.requires_grad:
        yield output
    waiting = [] if output.grad_fn is None else [output.grad_fn]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        if (variable := getattr(node, "variable", None)) is not None:  # the node that accumulates in `.grad`
            yield variable
        others = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= others
        waiting += others


class Replayed:
    """A call whose forward was replayed. Its results come from `connect`.

    Args:
        backward: the graph of its backward.
        parts: the parts of `backward.grads` that belong to its outputs.
        tensors: its inputs and parameters that require a gradient, in the order of `backward.gradients`.
        state: the module.
        guard: makes a context in which graphs of the device may run.
        kept: the graph of the forward, in whose memory the activations are.
    """

    def __init__(
        self,
        backward: Backward,
        parts: Gradients,
        tensors: Sequence[Tensor],
        state: ModuleState,
        guard: Callable[[], AbstractContextManager[Any]],
        kept: object,
    ) -> None:
        self.backward, self._parts, self.guard, self._kept = backward, parts, guard, kept
        self.tensors = tensors
        # the memory stays until the backward has run
        self._read = [(x, version_of(x), x.untyped_storage()) for x in state.tensors]
        self._watched: list[tuple[dict[int, Any], weakref.ref[Tensor]]] = []
        backward.slot.waiting = weakref.ref(self)

    def connect(self, results: list[Tensor]) -> list[Tensor]:
        """Make the results of the replay differentiable. Nobody else has them."""
        outputs: list[Tensor] = list(_Call.apply(self, results, *self.tensors))
        for x in outputs:
            if x.requires_grad:
                x.register_hook(lambda grad: None).remove()  # leaves an empty dictionary
            self._watched.append((backward_hooks_of_tensor(x), weakref.ref(x)))
        self.tensors = ()
        return outputs

    def gradients(self, grads: Sequence[Tensor | None], needed: Sequence[bool], shapes: list[torch.Size]) -> Gradients:
        """The gradients of the inputs and parameters: copies, of these shapes, None where they are not needed.

        They are also None where no output with a gradient depends on them.

        Raises:
            RuntimeError: the module was changed since the forward, or an output has a hook that would not get its whole
            gradient.
        """
        self._check(grads)
        backward = self.backward
        used = frozenset().union(*(at for at, grad in zip(backward.depends_on, grads, strict=True) if grad is not None))
        which = [i for i, x in enumerate(backward.gradients) if x is not None and needed[i] and i in used]
        with self.guard(), backward.slot.device.in_order():
            # inputs of a call are the first parts of those of the graph
            sources = [_first(cast(Tensor, backward.gradients[i]), shapes[i]) for i in which]
            copies = [torch.empty_like(x) for x in sources]
            for static, part, grad in zip(backward.grads, self._parts, grads, strict=True):
                if static is not None and (grad is None or cast(Tensor, part).numel() != static.numel()):
                    static.zero_()
                if part is not None and grad is not None:
                    part.copy_(grad)
            backward.replay()
            if which:
                copy_each(copies, sources)
        backward.slot.waiting = None  # also if autograd keeps what it saved, with retain_graph=True
        copy_of = dict(zip(which, copies, strict=True))
        return [copy_of.get(i) for i in range(len(shapes))]

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        if any(version_of(x) != version for x, version, _ in self._read):
            raise RuntimeError(
                "a parameter or a buffer that is needed for gradient computation has been modified by an inplace "
                "operation since the forward, which ran as a CUDA graph: change it after the backward, or "
                + _USE_INFERENCE
            )
        for i, (hooks, reference) in enumerate(self._watched):
            x = reference()
            others = any(grad is not None for j, grad in enumerate(grads) if j != i)
            if others and (hooks or (x is not None and x.requires_grad and x.retains_grad)):
                raise RuntimeError(
                    "an output of a call that ran as a CUDA graph has a hook or retains its gradient, which does not "
                    "contain what the call has computed from this output, such as a loss: remove the hook, or "
                    + _USE_INFERENCE
                )


def _first(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x[tuple(map(slice, shape))]


class _Call(torch.autograd.Function):
    """Results of a replay → the same results, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx: Any, call: Replayed, results: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.shapes = call, [x.shape for x in tensors]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x, grad in zip(results, call.backward.grads, strict=True) if grad is None])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.call is None:
            raise RuntimeError(
                "a call that ran as a CUDA graph can have one backward only: pass the sum of all losses to it, or "
                + _USE_INFERENCE
            )
        gradients = ctx.call.gradients(grads, ctx.needs_input_grad[2:], ctx.shapes)
        ctx.call = None  # who keeps results does not keep the graphs
        return None, None, *gradients
