"""Sharded attention as a custom operator, for graphs of torch.compile.

A graph holds tensors and numbers, so the operator takes the handle of a `ShardedLayout`. Another batch has another
handle, and the same graph runs it. What the backward needs is found by a tensor too, the result `state`.

Dimensions: N query tokens of this rank, M key tokens of this rank, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..compiler import is_traced, outside_of_graphs
from ..functional import autocast
from ..kernels.autograd import with_sinks
from ..kernels.call import OPTIONS, SCHEMA, all_options, check_options, from_schema, values_in_schema
from ..layouts.cache import owner_of, tensor_of
from ..layouts.protocol import Sharded
from ..operators import LIBRARY, define
from ..torch_private import recording_in_operators
from .attention import prepare, sharded_attention
from .exchange import Exchange
from .local_attention import TensorInfo, accumulation_dtype
from .mods import has_mods
from .sharded_layout import ShardedLayout

_FORWARD = f"Tensor query, Tensor key, Tensor value, Tensor handle, Tensor key_handle, Tensor? alibi_slopes, {SCHEMA}"
_run_outside_of_graphs = outside_of_graphs(sharded_attention)


class TracedShardedLayout(Sharded):
    """A `ShardedLayout` in a graph, of which only the handle is known."""

    def __init__(self, handle: Tensor) -> None:
        self.handle = handle


def attend(
    sharded: ShardedLayout | TracedShardedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_sharded: ShardedLayout | TracedShardedLayout | None,
    *,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    relative: Any,
    return_lse: bool,
    backend: str,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`sharded_attention`, as an operator in graphs.

    In a graph, calls with `score_mod`, `mask_mod`, NestedTensors or DTensors run outside of it.
    """
    is_in_graph = is_traced(query) and relative is None and _are_plain(query, key, value)
    if not is_in_graph or has_mods(options):
        layouts = _layout_of(sharded), None if key_sharded is None else _layout_of(key_sharded)
        named: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes, "relative": relative}
        named |= {"return_lse": return_lse, "backend": backend, "options": options}
        return _run_outside_of_graphs(query, key, value, *layouts, **named)
    check_options(**options)
    given = all_options(options)
    query, key, value = (x.view_as(x) for x in autocast(query, key, value))  # a graph can't take one tensor twice
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    handles = (sharded.handle, (sharded if key_sharded is None else key_sharded).handle)
    scale = query.shape[2] ** -0.5 if given["scale"] is None else given["scale"]
    values = values_in_schema({**given, "scale": scale, "needs_grad": needs_grad, "relative_grad": False})
    operator = torch.ops.nt_attention.sharded_forward.default
    out, lse, _ = operator(query, key, value, *handles, alibi_slopes, *values, backend)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _are_plain(*tensors: Tensor) -> bool:
    return not any(isinstance(x, DTensor) or x.is_nested for x in tensors)


def _layout_of(layout: Any) -> Any:
    return _from_handle(layout.handle) if isinstance(layout, TracedShardedLayout) else layout


@outside_of_graphs
def _from_handle(handle: Tensor) -> ShardedLayout:
    found = owner_of(handle)
    if not isinstance(found, ShardedLayout):
        raise ValueError("the tensor is not the handle of a ShardedLayout: pass sharded.handle, and no copy of it.")
    return found


@dataclass
class _State:
    """What the backward needs besides tensors of the graph.

    The compiler may write to a tensor of the graph that it does not need later. So the backward also gets `out`, query,
    key and value as arguments, and nothing else here is an alias of a tensor of the graph.

    Attributes:
        exchange: that of the call.
        tensors: what it saved.
        inputs: the shapes of query, key and value.
    """

    exchange: Exchange
    tensors: list[Tensor | None]
    inputs: list[TensorInfo]


def _forward(query: Tensor, key: Tensor, value: Tensor, handle: Tensor, key_handle: Tensor, *arguments: Any) -> Any:
    slopes, *values, backend = arguments
    slopes = None if slopes is None else slopes.clone()  # the backward does not get them, see `_State`
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in from_schema(values).items()}
    needs_grad = options["needs_grad"]
    options = {name: x for name, x in options.items() if name in OPTIONS}
    sharded, keys = _from_handle(handle), _from_handle(key_handle)
    key_sharded = None if keys is sharded else keys
    request, schedule = prepare(query, key, value, sharded, key_sharded, slopes, None, options)
    exchange = Exchange(sharded, schedule, request.slopes, backend, request.options, bool(needs_grad))
    with recording_in_operators():
        out, lse = exchange.forward(*request[:3])
    if any(saved is not None and saved.is_graph for saved in exchange.saved):  # it needs the tensors that it has made
        out = out.clone(memory_format=torch.contiguous_format)
    lse = lse.clone(memory_format=torch.contiguous_format)
    state = _State(exchange, exchange.take_tensors(), [TensorInfo.of(x) for x in (query, key, value)])
    return out.contiguous(), lse, tensor_of(state, query.device)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, handle: Tensor, *arguments: Any) -> Any:
    out = query.new_empty(*query.shape[:2], value.shape[2])
    lse = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
    return out, lse, handle.new_empty(())


def _backward(
    grad: Tensor, grad_lse: Tensor | None, state: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    saved = owner_of(state)
    if not isinstance(saved, _State):
        raise RuntimeError(
            "sharded attention in a graph can't have its saved tensors copied, as saved_tensors_hooks and save_on_cpu "
            "do: leave them out, or do not compile it."
        )
    with recording_in_operators():
        dq, dk, dv = saved.exchange.backward(saved.tensors, saved.inputs, out, grad, grad_lse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _fake_backward(
    grad: Tensor, grad_lse: Tensor | None, state: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.others = len(inputs) - 3
    out, _, state = output
    ctx.save_for_backward(*inputs[:3], out, state)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    query, key, value, out, state = ctx.saved_tensors
    if grad is None:
        grad = query.new_zeros(*query.shape[:2], value.shape[2])
    operator = torch.ops.nt_attention.sharded_backward.default
    grads: Sequence[Tensor] = operator(grad, grad_lse, state, out, query, key, value)
    return (*grads, *[None] * ctx.others)


define(f"sharded_forward({_FORWARD}, str backend) -> (Tensor out, Tensor lse, Tensor state)", _forward, _fake_forward)
define(
    "sharded_backward(Tensor grad, Tensor? grad_lse, Tensor state, Tensor out, Tensor query, Tensor key, "
    "Tensor value) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd(
    "nt_attention::sharded_forward", _differentiate, setup_context=_setup_context, lib=LIBRARY
)

Sharded.attend = attend
Sharded.in_graph = TracedShardedLayout
