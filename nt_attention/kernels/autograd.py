"""Run a chosen backend: one autograd node for whichever it is, and the sinks.

A sink, a key of value 0 whose score is learnt (Xiao et al. 2023; gpt-oss), only rescales:
out · sigmoid(lse − sink), and logaddexp(lse, sink).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._tracing import is_tracing
from ..layout import SequenceLayout
from . import custom_ops
from .adapters import Inputs
from .call import Backend, Known, Problem


def run(
    backend: Backend, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H), both differentiable. Rows outside of the layout are 0 and −inf."""
    if backend.backward is None:
        out, lse = backend.forward(query, key, value, problem)[:2]
    else:
        out, lse = _run_operator(custom_ops.Operator(backend), query, key, value, problem)
    return _with_sinks(out, lse, sinks, problem.layout)


def run_later(
    asked: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """``run``, for a graph: the backend ("auto" or a name) is chosen when the graph runs."""
    out, lse = _run_operator(custom_ops.Operator(None, asked), query, key, value, problem)
    return _with_sinks(out, lse, sinks, problem.layout)


def _run_operator(
    operator: custom_ops.Operator, query: Tensor, key: Tensor, value: Tensor, problem: Problem
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(query, key, value)
    wants_gradient = problem.spec.needs_grad or forward_ad._current_level >= 0
    transformed = torch._C._are_functorch_transforms_active()
    if not wants_gradient or (is_tracing() and not transformed):
        out, lse, *_ = operator.forward(inputs, problem)  # in a graph it has a gradient of its own
    else:
        node = _Kernel if transformed else _EagerKernel
        out, lse, *_ = node.apply(*inputs, (operator, problem))
    return out, lse


class _Kernel(torch.autograd.Function):
    """A backend's forward and backward as one node, whichever backend it is."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, call: tuple[custom_ops.Operator, Problem]
    ) -> tuple[Any, ...]:
        operator, problem = call
        return operator.forward(Inputs(query, key, value), problem)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _remember(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, out, lse, state, *told = ctx.saved_tensors
        operator, problem = ctx.call
        problem = _as_in_forward(problem, slopes)
        if grad is None and grad_lse is None:
            return (None,) * 4
        known = Known(torch.zeros_like(out) if grad is None else grad, grad_lse, out, lse, state)
        if torch.is_grad_enabled():  # someone may differentiate the gradients
            return (*_Gradients.apply((operator, problem), query, key, value, *known, *told), None)
        return (*operator.backward(known, tuple(told), Inputs(query, key, value), problem), None)


class _Gradients(torch.autograd.Function):
    """The gradients as a node of their own, which refuses to be differentiated; torch would give 0 in silence."""

    @staticmethod
    def forward(call: tuple[custom_ops.Operator, Problem], *tensors: Any) -> tuple[Tensor, ...]:
        operator, problem = call
        return operator.backward(Known(*tensors[3:8]), tensors[8:], Inputs(*tensors[:3]), problem)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "trying to differentiate twice what can be differentiated once: pass backend='reference', which is made of "
            "differentiable operations."
        )


class _EagerKernel(_Kernel):
    """The same without ``setup_context``, which transforms want and which costs 20 µs of host time a call."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        out, lse, *told = _Kernel.forward(*inputs)
        output = (out, lse.detach(), *told)  # autograd does not let a view that was made in here be changed in place
        _remember(ctx, inputs, output)
        return output


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, ctx.call = inputs
    _, problem = ctx.call
    out, lse, *told = output
    ctx.mark_non_differentiable(*[x for x in told if x is not None])
    ctx.set_materialize_grads(False)  # most calls have no gradient for lse
    ctx.save_for_backward(query, key, value, problem.alibi_slopes, out, lse, *told)


def _as_in_forward(problem: Problem, slopes: Tensor | None) -> Problem:
    """The problem with the slopes that were saved.

    Raises:
        RuntimeError: the offsets of a layout were changed in place since the forward.
    """
    problem.layout.check_saved()
    if problem.key_layout is not problem.layout:
        problem.key_layout.check_saved()
    return problem if slopes is None else problem._replace(alibi_slopes=slopes)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return out, lse
    sinks = sinks.to(lse.dtype)
    blind = lse == -torch.inf  # all of such a row's weight is the sink's
    lse = lse.masked_fill(blind, 0.0)
    share = torch.sigmoid(lse - sinks).masked_fill(blind, 0.0)
    out = (out * share.unsqueeze(-1)).to(out.dtype)
    lse = torch.where(blind, sinks, torch.logaddexp(lse, sinks))
    return out, layout.fill_past_end(lse, -torch.inf)
