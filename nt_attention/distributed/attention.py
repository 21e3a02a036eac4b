"""`varlen_attention` with a `ShardedLayout`: checks a call, selects the exchange, and runs it as one autograd function.

Dimensions: N query tokens of this rank, M key tokens of this rank, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import autocast, check_sinks, varlen_attention
from ..kernels.autograd import with_sinks
from ..kernels.call import OPTIONS, AttentionSpec, all_options, check_slopes, check_tensors
from .exchange import Exchange
from .exchange_heads import Heads, HeadsExchange
from .exchange_keys import KeysExchange, KeysPlan, Schedule, slopes_of
from .local_attention import TensorInfo
from .mods import has_mods
from .planner import Mask
from .sharded_layout import ShardedLayout

EXCHANGES = ("keys", "heads")
_PLAIN = {Tensor, torch.nn.Parameter}  # not DTensors or NestedTensors
# Rates of one GPU, for the choice: FLOPs in a µs, received bytes in a µs, and bytes read and written in a µs.
FLOPS_PER_US, BYTES_PER_US, COPIED_BYTES_PER_US = 4e8, 2e5, 2e6
SECOND_CALL_US = 600.0  # the host time of another exchange and call, forward and backward
SMALL_PART = 0.02  # if the exchange takes less than this part of the work, it may be hidden by half


@dataclass(frozen=True)
class ExchangeChoice:
    """Which exchange runs a call, and why. `print` shows it.

    Attributes:
        chosen: "keys" or "heads".
        reasons: exchange → why it can't run the call, or None if it can.
        received_bytes: exchange → the bytes that the rank with the most receives in a forward and a backward.
        expected_us: exchange → the expected time in µs of the slowest rank, from bytes and work.

    Example:
        >>> from nt_attention.distributed import ExchangeChoice
        >>> reasons = {"keys": "score_mod is not supported.", "heads": None}
        >>> print(ExchangeChoice("heads", reasons, {"heads": 8}, {"heads": 5.0}))
        exchange of heads
          keys   cannot run: score_mod is not supported.
          heads  can run: 0.0 MB received, 5 µs expected
    """

    chosen: str
    reasons: dict[str, str | None]
    received_bytes: dict[str, int]
    expected_us: dict[str, float]

    def __str__(self) -> str:
        lines = [f"exchange of {self.chosen}"]
        for name, reason in self.reasons.items():
            if reason is not None:
                lines.append(f"  {name:<5}  cannot run: {reason}")
            else:
                megabytes = self.received_bytes[name] / 1e6
                lines.append(
                    f"  {name:<5}  can run: {megabytes:.1f} MB received, {self.expected_us[name]:.0f} µs expected"
                )
        return "\n".join(lines)


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
    exchange: str,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attention` of the tokens of this rank. A collective: all ranks make the same calls in the same order.

    Args:
        query: (N, H, D); this and key and value may also be in the other forms of `ShardedLayout.unwrap`.
        key, value: (M, G, D) and (M, G, Dv).
        sharded, key_sharded: the layouts of queries and keys; `key_sharded` is None for self-attention.
        exchange: "auto", "keys" or "heads".
        sinks, alibi_slopes, relative, return_lse, backend, options: as for `varlen_attention`.

    Returns:
        out (N, H, Dv), and with `return_lse` also lse (N, H), in the form of the query.
    """
    request, schedule = prepare(query, key, value, sharded, key_sharded, alibi_slopes, relative, options, exchange)
    if sinks is not None:
        check_sinks(sinks, request.query)
    if schedule is not None and not schedule.plan.is_cut:
        plan = schedule.plan
        slopes = slopes_of(plan.whole_sequences, request.slopes)
        out, lse = varlen_attention(
            *request[:3], plan.whole_layout, alibi_slopes=slopes, return_lse=True, backend=backend, **options
        )
    else:
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in request[:3])
        selected = exchange_of(request, schedule, backend, needs_grad, return_lse or sinks is not None)
        out, lse = _Sharded.apply(*request[:3], selected) if needs_grad else selected.forward(*request[:3])
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    out = request.restore(out)
    return (out, request.restore(lse, True)) if return_lse else out


class _Sharded(torch.autograd.Function):
    """Exchange and attention in one function, so that a rank without tokens takes part in the backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, selected: Exchange
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        out, lse = selected.forward(query, key, value)
        ctx.selected, ctx.inputs = selected, [TensorInfo.of(x) for x in (query, key, value)]
        # All ranks save a tensor, so that a checkpoint computes the forward again on all of them.
        ctx.save_for_backward(out if selected.reads_out else out.new_empty(0), *selected.take_tensors())
        return out, None if lse is None else lse.detach()  # a view that is made here can't be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention with a ShardedLayout has no second derivatives: call backward or grad without "
                "create_graph=True."
            )
        query, _, value = ctx.inputs
        if grad is None:
            grad = torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
        out, *tensors = ctx.saved_tensors
        return (*ctx.selected.backward(tensors, ctx.inputs, out, grad, grad_lse), None)


def explain_exchange(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayout,
    key_sharded: ShardedLayout | None = None,
    *,
    alibi_slopes: Tensor | None = None,
    exchange: str = "auto",
    **options: Any,
) -> ExchangeChoice:
    """Which exchange would run a call of `varlen_attention` with these arguments, and why. Nothing is computed.

    Args:
        query: (N, H, D), the tokens of this rank, or a DTensor or NestedTensor of them.
        key, value: (M, G, D) and (M, G, Dv), in the same way.
        sharded, key_sharded: the layouts of queries and of keys; None if they are the same.
        alibi_slopes, exchange, options: as for `varlen_attention`, without `backend`, `sinks`, `relative` and
            `return_lse`.

    Returns:
        The choice, with the reasons against the other exchange, bytes and expected times. `print` shows it.

    Raises:
        ValueError: as for `varlen_attention`.
        TypeError: a layout is not a `ShardedLayout`, or an option is not known.

    Example:
        >>> import torch, nt_attention as nta  # one process; torchrun starts several
        >>> from nt_attention.distributed import explain_exchange
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> sharded = nta.SequenceLayout.from_lengths([2, 3]).shard(torch.distributed.init_device_mesh("cpu", (1,)))
        >>> x = torch.randn(5, 4, 8)
        >>> explain_exchange(x, x, x, sharded, mask_mod=lambda b, h, q, k: k != 1).reasons["keys"]
        'score_mod and mask_mod need whole sequences.'
        >>> torch.distributed.destroy_process_group()
    """
    request = _check(query, key, value, sharded, key_sharded, alibi_slopes, None, options)
    return choose_exchange(request, exchange)


def choose_exchange(request: Request, exchange: str) -> ExchangeChoice:
    """The exchange of a call. The result is the same on all ranks.

    Raises:
        ValueError: `exchange` is unknown, or can't run this call.
    """
    if exchange not in ("auto", *EXCHANGES):
        raise ValueError(f"exchange must be 'auto', 'keys' or 'heads', got {exchange!r}.")
    query, _, value, sharded, key_sharded, _, options, _ = request
    (_, heads, dim), (_, kv_heads, value_dim) = query.shape, value.shape
    mask, size = _mask(options), query.dtype.itemsize
    reasons: dict[str, str | None] = {"keys": _why_not_keys(request), "heads": None}
    if reasons.get(exchange) is not None:
        raise ValueError(f'the exchange of {exchange} can\'t run this call: {reasons[exchange]} Pass exchange="heads".')
    flops = _flops_of_pair(request)
    received, us = {}, {}
    if reasons["keys"] is None:
        plan = _keys_plan(sharded, mask)
        received["keys"] = 2 * max(plan.received) * kv_heads * (dim + value_dim) * size
        us["keys"] = received["keys"] / BYTES_PER_US + flops * max(_work(sharded, mask)) / FLOPS_PER_US
    own = [Heads.of_rank(rank, sharded.ranks, heads, kv_heads) for rank in range(sharded.ranks)]
    most, most_keys = max(each.count for each in own), max(each.key_count for each in own)
    rows, key_rows = (each.layout.total - min(each.sizes) for each in (sharded, key_sharded))
    received["heads"] = 2 * size * (rows * most + key_rows * most_keys) * (dim + value_dim)
    pairs = (
        sum(_work(sharded, mask)) if key_sharded is sharded else sharded.layout.total * key_sharded.layout.max_seqlen
    )
    us["heads"] = received["heads"] / BYTES_PER_US + flops * pairs * most / heads / FLOPS_PER_US
    chosen = min(us, key=us.__getitem__) if exchange == "auto" else exchange
    return ExchangeChoice(chosen, reasons, received, us)


def _why_not_keys(request: Request) -> str | None:
    """Why the exchange of keys can't run a call, or None."""
    mask, options = _mask(request.options), request.options
    if request.key_sharded is not request.sharded:
        return "queries and keys are different sequences."
    if has_mods(options):
        return "score_mod and mask_mod need whole sequences."
    is_open = mask == Mask.of(False, (-1, -1)) and request.slopes is None
    if any(request.sharded.plan.cut) and mask.right and not is_open:
        return "a sequence is cut, and keys after a query are visible within a window or with ALiBi."
    return None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayout,
    key_sharded: ShardedLayout | None,
    slopes: Tensor | None,
    relative: object,
    options: dict[str, Any],
    exchange: str,
) -> tuple[Request, Schedule | None]:
    """Check a call and select its exchange. Returns the checked call, and the calls of the exchange of keys or None.

    A call with the same shapes and options as one before, as in other layers of a model, is not checked again.
    """
    inputs = (query, key, value)
    cache_key = None
    if key_sharded is None and slopes is None and relative is None:
        cache_key = _key_of(inputs, exchange, options)
    found = None if cache_key is None else sharded.found(cache_key)
    if found is not None:
        checked_options, schedule = found
        return Request(*inputs, sharded, sharded, None, checked_options, _unchanged), schedule
    request = _check(*inputs, sharded, key_sharded, slopes, relative, options)
    is_keys = choose_exchange(request, exchange).chosen == "keys"
    schedule = schedule_of(request) if is_keys else None
    if cache_key is not None and not has_mods(request.options):  # the cache would keep them alive
        sharded.cached(cache_key, lambda: (request.options, schedule))
    return request, schedule


def _key_of(inputs: tuple[Tensor, ...], exchange: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """A cache key for a call on plain packed tensors without autocast. None for other calls."""
    is_plain = {type(x) for x in inputs} <= _PLAIN and not any(x.is_nested for x in inputs)
    if not is_plain or inputs[0].is_meta or torch.is_autocast_enabled(inputs[0].device.type):
        return None
    values = options.values()
    types = [(type(x), *map(type, x)) if isinstance(x, tuple) else type(x) for x in values]  # True == 1 == 1.0
    found = ("prepared", exchange, *[(x.shape, x.dtype, x.device) for x in inputs], *options, *values, *types)
    try:
        hash(found)
    except TypeError:  # window_size as a list
        return None
    return found


def _unchanged(x: Tensor, tokens_first: bool = False) -> Tensor:
    """`Request.restore` for packed tensors."""
    return x


def exchange_of(
    request: Request, schedule: Schedule | None, backend: str, needs_grad: bool, wants_lse: bool
) -> Exchange:
    """The exchange of keys with these calls, or that of heads if they are None."""
    query, key, _, sharded, key_sharded, slopes, options, _ = request
    if schedule is not None:
        return KeysExchange(sharded, schedule, slopes, backend, options, needs_grad)
    heads = (query.shape[1], key.shape[1])
    return HeadsExchange.of(sharded, key_sharded, *heads, slopes, backend, options, needs_grad, wants_lse)


def schedule_of(request: Request) -> Schedule:
    """The calls of the exchange of keys: one, or two if that hides more of the exchange than the second one costs."""
    query, key, value, sharded, _, _, options, _ = request
    mask, kv_heads = _mask(options), key.shape[1]
    plan = _keys_plan(sharded, mask)
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


def _keys_plan(sharded: ShardedLayout, mask: Mask) -> KeysPlan:
    return sharded.cached(("keys", mask), lambda: KeysPlan.make(sharded, mask))


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
    if not isinstance(sharded, ShardedLayout):
        raise TypeError(f"layout must be a ShardedLayout, got {type(sharded).__name__}: pass layout.shard(mesh).")
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
    return Request(query, key, value, sharded, keys, slopes, options, restore)
