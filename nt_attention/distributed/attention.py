"""`varlen_attention` with a `ShardedLayout`: checks a call, plans its exchange, and runs it as one autograd function.

Dimensions: N query tokens of this rank, M key tokens of this rank, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import autocast, check_sinks, varlen_attention
from ..kernels.autograd import with_sinks
from ..kernels.call import OPTIONS, AttentionSpec, all_options, check_slopes, check_tensors
from .exchange import Exchange, slopes_of
from .exchange_plan import ExchangePlan, Geometry, Schedule
from .local_attention import TensorInfo
from .mods import has_mods
from .planner import Mask
from .sharded_layout import ShardedLayout

_PLAIN = {Tensor, torch.nn.Parameter}  # not DTensors or NestedTensors
_OPEN = Mask.of(False, (-1, -1))
# Rates of one GPU, for the choice of calls: FLOPs in a µs, received bytes in a µs, and bytes read and written in a µs.
FLOPS_PER_US, BYTES_PER_US, COPIED_BYTES_PER_US = 4e8, 2e5, 2e6
SECOND_CALL_US = 600.0  # the host time of another exchange and call, forward and backward
SMALL_PART = 0.02  # if the exchange takes less than this part of the work, it may be hidden by half


class Request(NamedTuple):
    """A checked call."""

    query: Tensor
    key: Tensor
    value: Tensor
    sharded: ShardedLayout
    key_sharded: ShardedLayout
    slopes: Tensor | None
    options: dict[str, Any]
    restore: Callable[..., Tensor]  # converts a result to the form of the caller's query


def sharded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayout,
    key_sharded: ShardedLayout | None,
    *,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    relative: Any,
    return_lse: bool,
    backend: str,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attention` of the tokens of this rank. A collective: all ranks make the same calls in the same order.

    Args:
        query: (N, H, D); this and key and value may also be in the other forms of `ShardedLayout.unwrap`.
        key, value: (M, G, D) and (M, G, Dv).
        sharded, key_sharded: the layouts of queries and keys; `key_sharded` is None for self-attention.
        sinks, alibi_slopes, relative, return_lse, backend, options: as for `varlen_attention`.

    Returns:
        out (N, H, Dv), and with `return_lse` also lse (N, H), in the form of the query.
    """
    request, schedule = prepare(query, key, value, sharded, key_sharded, alibi_slopes, relative, options)
    if sinks is not None:
        check_sinks(sinks, request.query)
    if schedule.plan.is_cut or has_mods(request.options):
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in request[:3])
        exchange = Exchange(request.sharded, schedule, request.slopes, backend, request.options, needs_grad)
        out, lse = _Sharded.apply(*request[:3], exchange) if needs_grad else exchange.forward(*request[:3])
    else:
        plan = schedule.plan
        slopes = slopes_of(plan.whole_sequences, request.slopes)
        out, lse = varlen_attention(
            *request[:3], plan.whole_layout, alibi_slopes=slopes, return_lse=True, backend=backend, **options
        )
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    out = request.restore(out)
    return (out, request.restore(lse, True)) if return_lse else out


class _Sharded(torch.autograd.Function):
    """Exchange and attention in one function, so that a rank without tokens takes part in the backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse = exchange.forward(query, key, value)
        ctx.exchange, ctx.inputs = exchange, [TensorInfo.of(x) for x in (query, key, value)]
        # All ranks save a tensor, so that a checkpoint computes the forward again on all of them.
        ctx.save_for_backward(out, *exchange.take_tensors())
        return out, lse.detach()  # a view that is made here can't be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention with a ShardedLayout has no second derivatives: call backward or grad without "
                "create_graph=True."
            )
        out, *tensors = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        return (*ctx.exchange.backward(tensors, ctx.inputs, out, grad, grad_lse), None)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayout,
    key_sharded: ShardedLayout | None,
    slopes: Tensor | None,
    relative: object,
    options: dict[str, Any],
) -> tuple[Request, Schedule]:
    """Check a call, and plan its exchange and calls.

    A call with the same shapes and options as one before, as in other layers of a model, is not checked again.
    """
    inputs = (query, key, value)
    cache_key = None
    if key_sharded is None and slopes is None and relative is None and not has_mods(options):
        cache_key = _key_of(inputs, options)
    found = None if cache_key is None else sharded.found(cache_key)
    if found is not None:
        checked_options, schedule = found
        return Request(*inputs, sharded, sharded, None, checked_options, _unchanged), schedule
    request = _check(*inputs, sharded, key_sharded, slopes, relative, options)
    schedule = schedule_of(request)
    if cache_key is not None:
        sharded.cached(cache_key, lambda: (request.options, schedule))
    return request, schedule


def _key_of(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """A cache key for a call on plain packed tensors without autocast. None for other calls."""
    is_plain = {type(x) for x in inputs} <= _PLAIN and not any(x.is_nested for x in inputs)
    if not is_plain or inputs[0].is_meta or torch.is_autocast_enabled(inputs[0].device.type):
        return None
    values = options.values()
    types = [(type(x), *map(type, x)) if isinstance(x, tuple) else type(x) for x in values]  # True == 1 == 1.0
    found = ("prepared", *[(x.shape, x.dtype, x.device) for x in inputs], *options, *values, *types)
    try:
        hash(found)
    except TypeError:  # window_size as a list
        return None
    return found


def _unchanged(x: Tensor, tokens_first: bool = False) -> Tensor:
    """`Request.restore` for packed tensors."""
    return x


def schedule_of(request: Request) -> Schedule:
    """The calls: one, or two if that hides more of the exchange than the second one costs."""
    query, key, value, sharded, *_ = request
    plan, mask, kv_heads = _plan_of(request), _mask(request.options), key.shape[1]
    # the bytes of a row: of a query and its output, and of a key and its value
    of_queries, of_keys = (x.shape[1] * (query.shape[2] + value.shape[2]) * x.dtype.itemsize for x in (query, key))
    work_us = _flops_of_pair(request) * max(_work(sharded, mask)) / FLOPS_PER_US
    received_us = 2 * max(plan.received) * of_keys / BYTES_PER_US
    # A second call takes host time, for which a GPU with enough work does not wait. It joins out and all gradients.
    call_us = SECOND_CALL_US if work_us < 5 * SECOND_CALL_US else 0.0
    # Only a part of the first group is not hidden. With two halves, kernels need the least memory for sums.
    first = kv_heads // 2 if received_us < SMALL_PART * work_us else max(1, kv_heads // 4)
    join_us = 2 * sharded.sizes[0] * of_queries / COPIED_BYTES_PER_US
    if plan.has_transfers and kv_heads > 1 and received_us * (1 - first / kv_heads) > join_us + call_us:
        return Schedule.of(plan, query.shape[1], (first, kv_heads - first), False)
    # One call for all copies the keys and values of whole sequences.
    copied_us = 2 * (sharded.total * (of_queries + of_keys) - plan.whole * of_keys) / COPIED_BYTES_PER_US
    received_us = 2 * plan.received[sharded.rank] * of_keys / BYTES_PER_US
    return Schedule.of(plan, query.shape[1], (kv_heads,), received_us > copied_us + call_us)


def _mask(options: dict[str, Any]) -> Mask:
    """The mask that causality and window make."""
    return Mask.of(options["is_causal"], tuple(options["window_size"]))


def _flops_of_pair(request: Request) -> int:
    """The FLOPs of a visible pair, forward and backward."""
    query, _, value, *_ = request
    return 7 * query.shape[1] * (query.shape[2] + value.shape[2])


def _plan_of(request: Request) -> ExchangePlan:
    """The plan of the exchange, which other layers and calls with such a mask share."""
    sharded, key_sharded, options = request.sharded, request.key_sharded, request.options
    mask = _mask(options)
    has_positions = mask != _OPEN or request.slopes is not None
    geometry = Geometry(mask, has_positions, options["causal_alignment"] == "upper_left")
    keys = None if key_sharded is sharded else key_sharded
    return sharded.cached(("plan", geometry, keys), lambda: ExchangePlan.make(sharded, key_sharded, geometry))


def _work(sharded: ShardedLayout, mask: Mask) -> tuple[int, ...]:
    """For each rank, the number of visible pairs of its queries."""
    if mask == sharded.mask:
        return sharded.plan.work

    def count() -> tuple[int, ...]:
        lengths = sharded.lengths
        return tuple([sum([mask.work(p, lengths[p.sequence]) for p in pieces]) for pieces in sharded.plan.pieces])

    return sharded.cached(("work", mask), count)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayout,
    key_sharded: ShardedLayout | None,
    slopes: Tensor | None,
    relative: object,
    given: dict[str, Any],
) -> Request:
    """Check a call. Raises a ValueError or TypeError if it can't run."""
    options = all_options(given)
    options["window_size"] = OPTIONS["window_size"].parse("window_size", options["window_size"])
    if relative is not None:
        raise ValueError("relative biases are not supported with a ShardedLayout: pass a packed batch on each rank.")
    if options["dropout_p"]:
        raise ValueError("dropout is not supported with a ShardedLayout: leave dropout_p at 0.")
    keys = sharded if key_sharded is None else key_sharded
    (query, key, value), restore = sharded.unwrap(query, key, value, keys)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be (tokens of this rank, heads, head dim), got {tuple(x.shape)}.")
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, is_paged=False)
    AttentionSpec.of(query.device, query.dtype, (query.shape, key.shape, value.shape), options)  # checks the options
    if slopes is not None:
        check_slopes(slopes, query.shape[1], len(sharded.lengths), query.device)
    if keys is sharded:
        options["causal_alignment"] = "lower_right"  # the same, and also that of pieces
    return Request(query, key, value, sharded, keys, slopes, options, restore)
