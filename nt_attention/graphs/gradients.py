"""The graph of a backward, and the autograd function that replays it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..torch_private import backward_hooks_of_tensor, copy_each
from .device import NotCapturedError, Slot
from .module_state import ModuleState

Gradients = list[Tensor | None]
OTHER_LEAF = "its outputs have gradients of tensors that are no parameters of the module"
_USE_INFERENCE = "patch the model with cuda_graphs=True, which runs calls with gradients without graphs."
_CHANGED = (
    "a parameter or a buffer that is needed for gradient computation has been modified by an inplace operation since "
    f"the forward, which ran as a CUDA graph: change it after the backward, or {_USE_INFERENCE}"
)
_HAS_HOOK = (
    "an output of a call that ran as a CUDA graph has a hook or retains its gradient, which does not contain what the "
    f"call has computed from this output, such as a loss: remove the hook, or {_USE_INFERENCE}"
)
_SECOND_BACKWARD = (
    f"a call that ran as a CUDA graph can have one backward only: pass the sum of all losses to it, or {_USE_INFERENCE}"
)


def first_part(x: Tensor, shape: Iterable[int]) -> Tensor:
    """The part of a tensor of a bucket that belongs to a call: the first rows of its first dimensions."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]


class Backward:
    """The backward of a call in a graph.

    Attributes:
        grads: the gradients of the outputs, which it reads; None for outputs that have no gradient.
        gradients: those of the inputs and parameters, which it writes; None where the outputs do not depend on them.
        depends_on: for each output, the indices of the inputs and parameters on which it depends.
    """

    def __init__(self, slot: Slot, inputs: list[Tensor], aliases: list[Tensor]) -> None:
        """`inputs`: those of the graph that require a gradient. `aliases`: see `alias`."""
        if [(x.shape, x.dtype) for x in slot.gradients] != [(x.shape, x.dtype) for x in aliases]:
            slot.gradients = [torch.empty_like(x, requires_grad=False) for x in aliases]
        self._leaves, self._written = [*inputs, *aliases], [*[None for _ in inputs], *slot.gradients]
        self.grads, self.gradients, self.depends_on = Gradients(), Gradients(), list[frozenset[int]]()

    def run(self, outputs: list[Tensor]) -> Gradients:
        """Run it without a graph, or while it is captured. Returns `gradients`.

        Raises:
            NotCapturedError: it can't be captured, or the outputs have gradients that it would not return.
        """
        if not self.grads:
            self._find_leaves(outputs)
        differentiated = [x for x, grad in zip(outputs, self.grads, strict=True) if grad is not None]
        grads = [grad for grad in self.grads if grad is not None]
        try:
            with torch.autocast(self._leaves[0].device.type, enabled=False):  # as in a backward after the forward
                found = torch.autograd.grad(differentiated, self._leaves, grads, allow_unused=True)
            made = [(x, y) for x, y in zip(self._written, found, strict=True) if x is not None and y is not None]
            if made:
                copy_each([x for x, _ in made], [y for _, y in made])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotCapturedError(f"its backward can't be captured ({str(error).splitlines()[0]})") from error
        return [y if x is None or y is None else x for x, y in zip(self._written, found, strict=True)]

    def _find_leaves(self, outputs: list[Tensor]) -> None:
        if not any(x.requires_grad for x in outputs):
            raise NotCapturedError("its outputs have no gradients")
        index = {id(x): i for i, x in enumerate(self._leaves)}
        self.depends_on = [frozenset(index.get(id(x), -1) for x in _leaves_of(output)) for output in outputs]
        if any(-1 in each for each in self.depends_on):
            raise NotCapturedError(OTHER_LEAF)
        self.grads = [torch.zeros_like(x, requires_grad=False) if x.requires_grad else None for x in outputs]

    def capture(self, slot: Slot, outputs: list[Tensor]) -> None:
        """Capture it. `outputs`: those of the graph of the forward."""
        self.replay, self.gradients = slot.capture(lambda: self.run(outputs))
        self._leaves, self._written = [], []  # they would keep the memory of the parameters


def alias(x: Tensor) -> Tensor:
    """A leaf with the same memory, whose gradient can't be accumulated.

    Autograd would let the stream of a capture wait for the stream where the parameter itself was used first, which ends
    the capture with an error.
    """
    other: Tensor = nn.Parameter(x.detach()) if isinstance(x, nn.Parameter) else x.detach().requires_grad_()
    vars(other).update(vars(x))

    def refuse(x: Tensor) -> None:
        raise NotCapturedError("a backward ran in its forward, or in another thread while it was captured")

    other.register_post_accumulate_grad_hook(refuse)
    return other


def _leaves_of(output: Tensor) -> list[Tensor]:
    """The leaves that get a gradient in a backward of the output."""
    if output.grad_fn is None:
        return [output] if output.requires_grad else []
    waiting: list[Any] = [output.grad_fn]
    seen = set(waiting)
    for node in waiting:  # it grows
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        waiting += new
    return [node.variable for node in waiting if hasattr(node, "variable")]  # nodes that accumulate in `.grad`


class Waiting:
    """A call that was replayed with this graph, until its backward has run. It keeps the memory that this reads."""

    def __init__(self, graph: Any, work: Any, state: ModuleState, guard: Callable[[], AbstractContextManager[Any]]):
        self.graph, self._guard = graph, guard
        self._parts = graph.parts(work, graph.backward.grads)
        self._tensors = [*(work.inputs[name] for name in work.differentiable), *state.differentiable]
        self._state, self._versions = state, state.versions
        self._read = list(map(Tensor.untyped_storage, state.tensors))
        self._watched: list[tuple[dict[int, Any], weakref.ref[Tensor]]] = []
        graph.slot.waiting = weakref.ref(self)

    def connect(self, results: list[Tensor]) -> list[Tensor]:
        """Make the results of the replay differentiable. Nobody else has them."""
        outputs: list[Tensor] = list(_Call.apply(self, results, *self._tensors))
        for x in outputs:
            if x.requires_grad:
                x.register_hook(lambda grad: None).remove()  # leaves an empty dictionary
            self._watched.append((backward_hooks_of_tensor(x), weakref.ref(x)))
        self._tensors = []
        return outputs

    def gradients(self, grads: Sequence[Tensor | None], needed: Sequence[bool], shapes: list[torch.Size]) -> Gradients:
        """The gradients of the inputs and parameters: copies. None where no output with a gradient depends on them.

        Raises:
            RuntimeError: the module was changed since the forward, or an output has a hook that would not get its whole
                gradient.
        """
        if self._state.versions != self._versions:
            raise RuntimeError(_CHANGED)
        for i, (hooks, reference) in enumerate(self._watched):
            is_read = hooks or ((x := reference()) is not None and x.requires_grad and x.retains_grad)
            if is_read and any(grad is not None for j, grad in enumerate(grads) if j != i):
                raise RuntimeError(_HAS_HOOK)
        backward, slot = self.graph.backward, self.graph.slot
        used = frozenset().union(*(at for at, grad in zip(backward.depends_on, grads, strict=True) if grad is not None))
        which = [i for i, x in enumerate(backward.gradients) if x is not None and needed[i] and i in used]
        with self._guard(), slot.in_order():
            # inputs of a call are the first parts of those of the graph
            sources = [first_part(cast(Tensor, backward.gradients[i]), shapes[i]) for i in which]
            copies = [torch.empty_like(x) for x in sources]
            for static, part, grad in zip(backward.grads, self._parts, grads, strict=True):
                if static is not None and (grad is None or cast(Tensor, part).numel() != static.numel()):
                    static.zero_()
                if part is not None and grad is not None:
                    part.copy_(grad)
            backward.replay()
            if which:
                copy_each(copies, sources)
        copy_of = dict(zip(which, copies, strict=True))
        return [copy_of.get(i) for i in range(len(shapes))]


class _Call(torch.autograd.Function):
    """Results of a replay → the same results, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx: Any, call: Waiting, results: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.shapes = call, [x.shape for x in tensors]
        ctx.set_materialize_grads(False)
        grads = call.graph.backward.grads
        ctx.mark_non_differentiable(*[x for x, grad in zip(results, grads, strict=True) if grad is None])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.call is None:
            raise RuntimeError(_SECOND_BACKWARD)
        gradients = ctx.call.gradients(grads, ctx.needs_input_grad[2:], ctx.shapes)
        ctx.call = None  # frees the slot, also if autograd keeps what it saved, with retain_graph=True
        return None, None, *gradients
