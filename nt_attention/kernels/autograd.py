"""Run a backend: one autograd function for whichever it is, and the sinks.

A sink, a key of value 0 whose score is learnt (Xiao et al. 2023; gpt-oss), only rescales:
out · sigmoid(lse − sink), and logaddexp(lse, sink).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._tracing import is_observed, is_tracing
from ..layout import SequenceLayout
from . import adapters, flops
from .adapters import Inputs
from .backend import Backend, BackwardInputs, Gradients
from .call import Call
from .custom_ops import arguments_of


def run(
    backend: Backend | str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H), both differentiable. Rows outside of the layout are 0 and −inf.

    Args:
        backend: the one that runs, or in a graph "auto" or a name, which is looked up when the graph runs.
    """
    if isinstance(backend, Backend) and backend.backward is None:
        out, lse = backend.forward(query, key, value, call)[:2]
    else:
        kernel = Kernel(None, backend) if isinstance(backend, str) else Kernel(backend)
        out, lse = _run_kernel(kernel, Inputs(query, key, value), call)
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks, call.layout)


@dataclass(frozen=True)
class Kernel:
    """A backend, or None for the one that is selected when a graph runs, by ``name``.

    It is called as a custom operator where somebody looks at operators, and directly where nobody does, which is 40 µs
    of host time less.
    """

    backend: Backend | None
    name: str = "auto"

    def forward(self, inputs: Inputs, call: Call) -> tuple[Any, ...]:
        """out (T, H, Dv), lse (T, H), the random numbers' state or None, and what else the backward takes."""
        if self.backend is None:
            return self._operator("forward")(*inputs, *arguments_of(call), self.name)
        if not is_observed(*inputs):
            return adapters.forward(self.backend, inputs, call)
        return self._operator("forward")(*inputs, *arguments_of(call))

    def backward(self, saved: BackwardInputs, more: tuple[Any, ...], inputs: Inputs, call: Call) -> Gradients:
        """The gradients. ``more``: what else the forward gave."""
        if self.backend is not None and not is_observed(saved.grad, *inputs):
            return adapters.backward(self.backend, saved, inputs, call)
        if saved.rng_state is None:
            saved = saved._replace(rng_state=saved.out.new_empty(0, dtype=torch.int64))
        return self._operator("backward")(*saved, *inputs, *arguments_of(call), *more)

    def _operator(self, direction: str) -> Callable[..., Any]:
        name = "auto" if self.backend is None else self.backend.name
        if not torch.compiler.is_compiling():
            flops.register(name)
        return getattr(torch.ops.nt_attention, f"{name}_{direction}").default


def _run_kernel(kernel: Kernel, inputs: Inputs, call: Call) -> tuple[Tensor, Tensor]:
    wants_gradient = call.spec.needs_grad or forward_ad._current_level >= 0
    transformed = torch._C._are_functorch_transforms_active()
    if not wants_gradient or (is_tracing() and not transformed):
        out, lse, *_ = kernel.forward(inputs, call)  # in a graph the operator has a gradient of its own
    else:
        function = _Attention if transformed else _EagerAttention
        out, lse, *_ = function.apply(*inputs, (kernel, call))
    return out, lse


class _Attention(torch.autograd.Function):
    """A backend's forward and backward, whichever backend it is."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, what: tuple[Kernel, Call]) -> tuple[Any, ...]:
        kernel, call = what
        return kernel.forward(Inputs(query, key, value), call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, out, lse, state, *more = ctx.saved_tensors
        kernel, call = ctx.what
        call = _as_in_forward(call, slopes)
        if grad is None and grad_lse is None:
            return (None,) * 4
        saved = BackwardInputs(torch.zeros_like(out) if grad is None else grad, grad_lse, out, lse, state)
        if torch.is_grad_enabled():  # someone may differentiate the gradients
            return (*_Gradients.apply((kernel, call), query, key, value, *saved, *more), None)
        return (*kernel.backward(saved, tuple(more), Inputs(query, key, value), call), None)


class _Gradients(torch.autograd.Function):
    """The gradients as a function of their own, which refuses to be differentiated; torch would give 0 in silence."""

    @staticmethod
    def forward(what: tuple[Kernel, Call], *tensors: Any) -> tuple[Tensor, ...]:
        kernel, call = what
        return kernel.backward(BackwardInputs(*tensors[3:8]), tensors[8:], Inputs(*tensors[:3]), call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "trying to differentiate twice what can be differentiated once: pass backend='reference', which is made of "
            "differentiable operations."
        )


class _EagerAttention(_Attention):
    """The same without ``setup_context``, which transforms need and which costs 20 µs of host time a call."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        out, lse, *more = _Attention.forward(*inputs)
        output = (out, lse.detach(), *more)  # autograd does not let a view that was made in here be changed in place
        _save(ctx, inputs, output)
        return output


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, ctx.what = inputs
    _, call = ctx.what
    out, lse, *more = output
    ctx.mark_non_differentiable(*[x for x in more if x is not None])
    ctx.set_materialize_grads(False)  # most calls have no gradient for lse
    ctx.save_for_backward(query, key, value, call.alibi_slopes, out, lse, *more)


def _as_in_forward(call: Call, slopes: Tensor | None) -> Call:
    """The call with the slopes that were saved.

    Raises:
        RuntimeError: the offsets of a layout were changed in place since the forward.
    """
    call.layout.check_saved()
    if call.key_layout is not call.layout:
        call.key_layout.check_saved()
    return call if slopes is None else call._replace(alibi_slopes=slopes)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    sinks = sinks.to(lse.dtype)
    masked = lse == -torch.inf  # all of a fully masked row's weight is the sink's
    lse = lse.masked_fill(masked, 0.0)
    share = torch.sigmoid(lse - sinks).masked_fill(masked, 0.0)
    out = (out * share.unsqueeze(-1)).to(out.dtype)
    lse = torch.where(masked, sinks, torch.logaddexp(lse, sinks))
    return out, layout.fill_past_end(lse, -torch.inf)
