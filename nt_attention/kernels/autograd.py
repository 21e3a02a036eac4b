"""Run a backend: the autograd function of all backends, and sinks.

A sink is a learned score of a key whose value is 0 (Xiao et al. 2023; gpt-oss). It is applied to the results of
attention without sinks: out becomes out · sigmoid(lse − sink), and lse becomes logaddexp(lse, sink).

Dimensions: T query tokens, H query heads, Dv head dim of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compiler import EAGER, TRACED, call_mode, is_compiling, refuse_transforms
from ..layouts.protocol import Layout
from ..torch_private import is_transformed
from . import adapters, flops, paged, tree
from .adapters import Tensors
from .backend import Backend, BackwardInputs, Gradients
from .call import Call
from .custom_ops import arguments_of
from .mods import frozen
from .registry import number_of
from .relative import RelativeBias


def run(backend: Backend | str, tensors: Tensors, sinks: Tensor | None, call: Call, mode: str) -> tuple[Tensor, Tensor]:
    """Run a checked call.

    Args:
        backend: The backend that runs. In a graph, "auto" or a name, which is looked up when the graph runs.
        tensors: As for a backend's forward (`kernels/backend.py`).
        sinks: (H,) or None.
        call: All other arguments.
        mode: Who sees the call, see `call_mode`.

    Returns:
        out (T, H, Dv) and lse (T, H), both differentiable. Rows past the layout's total are 0 and −inf.
    """
    if isinstance(backend, Backend) and backend.differentiable and not call.spec.paged:
        if call.spec.tree:
            tensors, call = tree.with_copied_keys(tensors, call)
        out, lse = adapters.differentiable_forward(backend, tensors, call)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks, call.layout)
    if mode != EAGER:
        refuse_transforms()
    if call.spec.needs_grad and not call.spec.paged:
        out, lse, *_ = _run_with_gradients(backend, tensors, call, mode)
    else:
        out, lse, *_ = Kernel(backend, mode == EAGER).forward(tensors, call)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks, call.layout)


def _run_with_gradients(backend: Backend | str, tensors: Tensors, call: Call, mode: str) -> tuple[Any, ...]:
    kernel, in_transform = Kernel(backend, mode == EAGER), mode != EAGER and is_transformed()
    if mode == TRACED and not in_transform:  # in a graph, the custom operator itself is differentiable
        return kernel.forward(tensors, call)
    relative = _relative_tensors(call)
    call = call._replace(relative=None) if relative else call  # it would keep tensors alive that hooks unload
    if call.spec.score_mod is not None:  # the backward calls it again
        call = call._replace(spec=replace(call.spec, score_mod=frozen(call.spec.score_mod)))
    function = _Attention if in_transform else _EagerAttention
    return function.apply(*tensors, (kernel, call), *relative)


@dataclass(frozen=True)
class Kernel:
    """The kernel of a backend, or of the one that an operator selects for a name when a graph runs.

    It runs as a custom operator if a compiler, dispatch mode or function transform must see it. Otherwise it is called
    directly, which saves 40 µs of host time.

    Attributes:
        is_eager: Whether it is known that nobody must see the forward. Else it asks.
    """

    backend: Backend | str
    is_eager: bool = False

    def forward(self, inputs: Tensors, call: Call, given: Tensor | None = None) -> tuple[Any, ...]:
        """out (T, H, Dv), lse (T, H), the random state or None, and further results for the backward.

        If the backend can write to `given` (T, H, Dv), that is `out`.
        """
        if isinstance(self.backend, str) or not (self.is_eager or not _is_observed(call, *inputs)):
            return _operator("forward", call)(*inputs, *arguments_of(call, self._name))
        if call.spec.paged:
            return paged.forward(self.backend, *inputs, call)
        if call.spec.tree:
            return tree.forward(self.backend, inputs, call)
        return adapters.forward(self.backend, inputs, call, given)

    def backward(
        self,
        saved: BackwardInputs,
        more: tuple[Any, ...],
        inputs: Tensors,
        call: Call,
        dq: Tensor | None = None,
    ) -> Gradients:
        """The gradients, see `Gradients`. `more` are the further results of the forward.

        If the backend can write to `dq` (T, H, D), that is the gradient of the query.
        """
        if isinstance(self.backend, Backend):
            is_eager = not _is_observed(call, saved.grad, *inputs)
            if is_eager and call.spec.tree:
                return tree.backward(self.backend, saved, inputs, call)
            if is_eager:
                return adapters.backward(self.backend, saved, inputs, call, dq)
            if call.spec.tree:  # a graph or a dispatch mode sees the backward; operators have no trees
                return tree.backward_with_copies(functools.partial(self.backward, saved, more), inputs, call)
            more = more or (torch.tensor([number_of(self.backend)], device="cpu"),)
        if saved.rng_state is None:
            saved = saved._replace(rng_state=saved.out.new_empty(0, dtype=torch.int64))
        arguments = arguments_of(call, self._name)
        query, key, value, biases = _operator("backward", call)(*saved, *more, *inputs, *arguments)
        return (query, key, value, *biases)

    @property
    def _name(self) -> str:
        return self.backend if isinstance(self.backend, str) else self.backend.name


def _operator(direction: str, call: Call) -> Callable[..., Any]:
    """The operator of a call: the one that reads nothing on the host, if its lengths are not known."""
    name = "bounded" if call.spec.bounded else "attention"
    if not is_compiling():
        flops.register()
    return getattr(torch.ops.nt_attention, f"{name}_{direction}").default


class _Attention(torch.autograd.Function):
    """The autograd function of all backends. This variant also works under function transforms.

    A relative bias is passed as further arguments, the buckets and the biases, and not in the call.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, what: tuple[Kernel, Call], *relative: Tensor
    ) -> tuple[Any, ...]:
        kernel, call = what
        return kernel.forward(Tensors(query, key, value), _with_relative(call, relative))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        kernel, call = ctx.what
        refuse_transforms(grad, grad_lse)
        query, key, value, slopes, *rest = ctx.saved_tensors
        relative, (out, lse, state, *more) = _split_relative(call, rest)
        call = as_in_forward(call, slopes)
        if grad is None and grad_lse is None:
            return (None,) * (4 + len(relative))
        saved = BackwardInputs(torch.zeros_like(out) if grad is None else grad, grad_lse, out, lse, state)
        if torch.is_grad_enabled():  # create_graph=True
            grads = _Gradients.apply((kernel, call), query, key, value, *relative, *saved, *more)
        else:
            grads = kernel.backward(saved, tuple(more), Tensors(query, key, value), _with_relative(call, relative))
        if not relative:
            return (*grads, None)
        of_biases = grads[3:] or (None,) * (len(relative) - 1)
        return (*grads[:3], None, None, *of_biases)


class _Gradients(torch.autograd.Function):
    """The gradients. Differentiating them raises an error; without this function, PyTorch would return 0."""

    @staticmethod
    def forward(what: tuple[Kernel, Call], *tensors: Any) -> tuple[Tensor, ...]:
        kernel, call = what
        relative, rest = _split_relative(call, tensors[3:])
        saved, more = BackwardInputs(*rest[:5]), tuple(rest[5:])
        return kernel.backward(saved, more, Tensors(*tensors[:3]), _with_relative(call, relative))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "trying to differentiate twice, but kernels have first derivatives only: pass backend='reference', or run "
            "it in nta.use_backend('reference'), which consists of PyTorch's own operators."
        )


class _EagerAttention(_Attention):
    """`_Attention` without `setup_context`, which only transforms need. This saves 20 µs of host time per call."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        out, lse, *more = _Attention.forward(*inputs)
        output = (out, lse.detach(), *more)  # autograd forbids in-place changes of a view that is created in a function
        _save(ctx, inputs, output)
        return output


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, ctx.what, *relative = inputs
    _, call = ctx.what
    out, lse, *more = output
    ctx.mark_non_differentiable(*[x for x in more if x is not None])
    ctx.set_materialize_grads(False)  # grad_lse is mostly None, which is cheaper than zeros
    ctx.save_for_backward(query, key, value, call.alibi_slopes, *relative, out, lse, *more)


def _is_observed(call: Call, *tensors: Tensor) -> bool:
    """Whether an operator must run the call. Operators have no functions as arguments, so modes see what these do."""
    return not call.spec.has_mods and call_mode(*tensors, *_relative_tensors(call)) != EAGER


def _relative_tensors(call: Call) -> tuple[Tensor, ...]:
    """The buckets and the biases of a relative bias; () without one."""
    return () if call.relative is None else (call.relative.buckets, *call.relative.tensors)


def _with_relative(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The call with these `_relative_tensors`. `call.spec.relative` has the names of the biases."""
    if not tensors:
        return call
    return call._replace(relative=RelativeBias(tensors[0], **dict(zip(call.spec.relative, tensors[1:], strict=True))))


def _split_relative(call: Call, tensors: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """`_relative_tensors`, and the tensors after them."""
    count = len(call.spec.relative) + 1 if call.spec.relative else 0
    return tensors[:count], tensors[count:]


def as_in_forward(call: Call, slopes: Tensor | None) -> Call:
    """The call with the saved slopes, after a check of the layouts.

    Raises:
        RuntimeError: The offsets of a layout were modified in place since the forward.
    """
    call.layout.check_saved()
    if call.key_layout is not call.layout:
        call.key_layout.check_saved()
    return call if slopes is None else call._replace(alibi_slopes=slopes)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, layout: Layout | None = None) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H) of attention with sinks (H,), from those without.

    The layout is that of the queries; None if all rows belong to sequences.
    """
    sinks = sinks.to(lse.dtype)
    masked = lse == -torch.inf  # in a fully masked row, the sink has a weight of 1
    finite = lse.masked_fill(masked, 0.0)
    share = torch.sigmoid(finite - sinks).masked_fill(masked, 0.0)
    out = (out * share.unsqueeze(-1)).to(out.dtype)
    with_sinks = torch.where(masked, sinks, torch.logaddexp(finite, sinks))
    if layout is None:
        return out, with_sinks
    with_sinks = layout.fill_past_end(with_sinks, -torch.inf)
    if not layout.knows_lengths:  # rows past the end are NaN if the offsets of the keys are not valid
        with_sinks = torch.where(lse.isnan(), lse, with_sinks)
    return out, with_sinks
