"""Runs attention on one rank inside of an autograd function, which calls its forward and its backward.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..functional import plan
from ..kernels import autograd
from ..kernels.adapters import Tensors, differentiable_forward
from ..kernels.backend import Backend, BackwardInputs
from ..kernels.call import Call
from ..kernels.select import selection_key, warn_if_slow
from ..layouts.sequence import SequenceLayout
from ..torch_private import version_of


@dataclass
class LocalAttention:
    """One call on the tensors of this rank.

    Attributes:
        layout, key_layout: the sequences of queries and keys.
        slopes: (H,) or (B, H), or None.
        backend: as for `varlen_attention`.
        options: the options of `varlen_attention`.
        needs_grad: whether a backward follows.
        planned: the calls that were planned before, and their backends.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    slopes: Tensor | None
    backend: str
    options: dict[str, Any]
    needs_grad: bool
    planned: dict[Any, tuple[Backend, Call]] = field(default_factory=dict)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Saved]:
        """out (T, H, Dv), lse (T, H), and what the backward needs.

        If the backend can write to `given` (T, H, Dv), that is `out`.
        """
        of_tensors = [(x.shape[1:], x.dtype) for x in (query, key, value)]
        plan_key = (*of_tensors, *selection_key(self.backend))
        if self.slopes is None and (found := self.planned.get(plan_key)) is not None:
            return self._run(*found, Tensors(query.detach(), key.detach(), value.detach()), given)
        with torch.set_grad_enabled(self.needs_grad):
            inputs = Tensors(*[x.detach().requires_grad_(self.needs_grad) for x in (query, key, value)])
            more = {"alibi_slopes": self.slopes, "backend": self.backend, **self.options}
            call = plan(*inputs, self.layout, self.key_layout, **more)
            backend = call.backend
            assert isinstance(backend, Backend)
            if backend.name == "reference":
                warn_if_slow(call, self.backend)
            if backend.differentiable:
                with saved_tensors_hooks(_keep, _kept):
                    out, lse = differentiable_forward(backend, inputs, call)
                return out.detach(), lse.detach(), _SavedGraph(inputs, out, lse)
        if backend.name != "reference":  # it may be slow, and then warns
            self.planned[plan_key] = backend, call
        return self._run(backend, call, Tensors(*[x.detach() for x in inputs]), given)

    def _run(self, backend: Backend, call: Call, inputs: Tensors, given: Tensor | None) -> tuple[Tensor, Tensor, Saved]:
        out, lse, *rest = autograd.forward(backend, inputs, call, given)
        return out, lse, _SavedTensors(backend, call, [*inputs, self.slopes, lse, *rest])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of several ranks are added, and of lse: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class TensorInfo(NamedTuple):
    """What a backward needs to know of an input."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> TensorInfo:
        return cls(x.shape, x.dtype, x.device)

    def empty(self, rows: int | None = None) -> Tensor:
        """An uninitialized tensor, with this number of rows."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Saved:
    """What the backward of a call needs besides out. Its tensors belong into `ctx.save_for_backward`.

    Attributes:
        is_graph: whether it is a graph of autograd, which keeps tensors by itself.
    """

    is_graph: ClassVar[bool] = False

    def take_tensors(self) -> list[Tensor | None]:
        """Return the tensors, and drop them here. `backward` gets them as `tensors`."""
        return []

    def backward(
        self, tensors: Sequence[Any], out: Tensor, grad: Tensor, grad_lse: Tensor | None, dq: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query (T, H, D), key (S, G, D) and value (S, G, Dv).

        If the backend can write to `dq` (T, H, D), that is the gradient of the query.
        """
        raise NotImplementedError


@dataclass
class _SavedTensors(Saved):
    """Of a backend with a kernel for the backward."""

    backend: Backend
    call: Call
    tensors: list[Tensor | None]

    def take_tensors(self) -> list[Tensor | None]:
        tensors, self.tensors = self.tensors, []
        return tensors

    def backward(
        self, tensors: Sequence[Any], out: Tensor, grad: Tensor, grad_lse: Tensor | None, dq: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, slopes, lse, state, *more = tensors
        saved, inputs = BackwardInputs(grad, grad_lse, out, lse, state), Tensors(query, key, value)
        call = autograd.as_in_forward(self.call, slopes)
        grads = autograd.backward(self.backend, saved, tuple(more), inputs, call, dq)
        return grads[0], grads[1], grads[2]


# The graph of a `_SavedGraph` keeps its tensors itself. With the hooks of a checkpoint, each backward of such a graph
# would compute the forward of the checkpoint again, with its collectives, and not all ranks have as many.
def _keep(x: Tensor) -> tuple[Tensor, int]:
    return x, version_of(x)


def _kept(saved: tuple[Tensor, int]) -> Tensor:
    x, version = saved
    if version_of(x) != version:  # PyTorch does not compare them if there are hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: query, "
            "key or value of attention with a ShardedLayout."
        )
    return x


@dataclass
class _SavedGraph(Saved):
    """Of a backend whose forward consists of differentiable operations, such as the reference and flex."""

    is_graph: ClassVar[bool] = True

    inputs: Tensors
    out: Tensor
    lse: Tensor

    def backward(
        self, tensors: Sequence[Any], out: Tensor, grad: Tensor, grad_lse: Tensor | None, dq: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs, given = [self.out], [grad]
        if grad_lse is not None:
            outputs, given = [self.out, self.lse], [grad, grad_lse]
        # the graph is kept, because the caller may pass retain_graph=True, and this function can't know
        grads = torch.autograd.grad(
            outputs, self.inputs, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return grads[0], grads[1], grads[2]
