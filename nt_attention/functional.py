"""`varlen_attention` computes attention over a ragged batch. `explain` shows which backend would run it.

Dimensions: B sequences, j their ragged length, T query tokens, S key tokens, H query heads, G key heads, D the head dim
of queries and keys, Dv that of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack, cast, get_type_hints

import torch
from torch import Tensor

from .compiler import is_compiling, is_traced, refuse_jit_trace
from .kernels.autograd import run
from .kernels.backend import Backend
from .kernels.call import (
    DTYPES,
    OPTIONS,
    AttentionSpec,
    Call,
    Options,
    PreparedRuns,
    all_options,
    check_options,
    check_slopes,
    describe,
)
from .kernels.relative import RelativeBias, check_relative, check_type
from .kernels.select import Explanation, can_choose_later, choose_for, explain_call, selection_key, warn_if_slow
from .layouts import nested
from .layouts.known import SequenceLayout
from .layouts.paged import PagedLayout
from .torch_private import forward_ad_level, graph_break

_NO_OPERATOR = (
    "no custom operator supports this call (it has mask_mod, score_mod or backend='flex', or a backend for inference "
    "and gradients)"
)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | Any | None = None,
    key_layout: SequenceLayout | PagedLayout | Any | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    exchange: str = "auto",
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention over a ragged batch, in which a query only attends to keys of its own sequence.

    For each sequence and head this is `softmax(scale * query @ key.T + masks) @ value`. H must be a multiple of G: each
    key head serves H / G query heads (grouped-query attention, Ainslie et al. 2023). A sequence may have no queries or
    no keys. A query that sees no key gives the output 0 and the log-sum-exp −inf (with `sinks`, the sink). Packed
    tensors may have more rows than the layout has tokens. In these rows, output and gradients are 0 and the log-sum-exp
    is −inf.

    The call needs no sync for packed tensors. For NestedTensors it syncs once for each offsets tensor that was not read
    before. Under autocast, query, key and value are cast as in `scaled_dot_product_attention`; nothing else is cast.
    Second derivatives, forward-mode AD, batches of gradients (`is_grads_batched=True`, `torch.func.jacrev`) and
    `torch.vmap` over `torch.func.grad` need `backend="reference"`.

    Args:
        query: (T, H, D) packed, or a NestedTensor (B, j, H, D) or (B, H, j, D).
        key: (S, G, D) packed, or a NestedTensor with the same number of sequences as `query`.
        value: (S, G, Dv) packed, or a NestedTensor with the same lengths as `key`.
        layout: the sequences of packed tensors. Must be None for NestedTensors. With a `ShardedLayout`
            (`SequenceLayout.shard`), the tensors have the tokens of this rank, packed, as DTensors with `Shard(0)`, or
            as NestedTensors from `ShardedLayout.local`. The call is a collective then.
        key_layout: the sequences of packed key and value in cross-attention; None if they are those of `layout`. With a
            `PagedLayout`, key and value are pools (pages, page_size, G, D) or (N, G, D), which no gradient may need.
        is_causal: mask the keys after the position of a query.
        causal_alignment: the position of a query among the keys of its sequence. For query i of Lq and Lk keys,
            "lower_right" is i + Lk − Lq, as in flash-attn, and "upper_left" is i. `is_causal`, `window_size`,
            `alibi_slopes` and `relative` use this position.
        window_size: (left, right). A query sees the key at its position, `left` keys before it and `right` keys after
            it. −1 means no limit.
        scale: the factor of query · key; None is D^−0.5.
        softcap: if not 0, scores become softcap · tanh(scores / softcap).
        sinks: (H,), a score for each head that is added to the softmax and to the log-sum-exp, like that of a key whose
            value is 0.
        alibi_slopes: (H,) or (B, H), float32 or float64; adds −slope · |distance| to the scores. Gets no gradient.
        relative: learned biases by bucket of distance, for each head, query or key, which are added to the scores. See
            `nta.RelativeBias`.
        score_mod: as in flex_attention, `score_mod(score, b, h, q_idx, kv_idx)`. b is the index of the sequence;
            q_idx and kv_idx are indices in this sequence. It returns one number in the dtype of the score. Applied
            after softcap, ALiBi and `relative`.
        mask_mod: as in flex_attention, `mask_mod(b, h, q_idx, kv_idx)`, a boolean that is True if the query sees the
            key. A query sees a key only if `is_causal` and `window_size` allow it too.
        dropout_p: the probability with which an attention weight is dropped.
        deterministic: require that the same call always gives bitwise equal gradients.
        batch_invariant: require that the results of a sequence are bitwise equal in any batch.
        return_lse: also return the log-sum-exp of each query's scores, which is differentiable.
        backend: "auto", or a name from `available_backends()`. A named backend runs, or an error is raised.
        exchange: only with a `ShardedLayout`: what the ranks exchange, "keys" or "heads"; "auto" selects the one that
            is expected to be faster.

    Returns:
        The output, in the form of `query` with head dim Dv. With `return_lse`, a tuple of the output and the
            log-sum-exp, (T, H) or a NestedTensor (B, j, H), in float32 (in float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not match, or no backend supports the call.
        TypeError: an argument has a wrong type, or NestedTensors are mixed with packed tensors.

    Example:
        >>> import torch, nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 0, 3])
        >>> query, key, value = torch.randn(3, layout.total, 4, 8).unbind()
        >>> out, lse = nta.varlen_attention(query, key, value, layout, is_causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([5, 4, 8]), torch.Size([5, 4]))
    """
    if getattr(layout, "is_sharded", False):
        arguments = {"sinks": sinks, "alibi_slopes": alibi_slopes, "relative": relative, "return_lse": return_lse}
        given = {"backend": backend, "exchange": exchange, "options": options}
        return _run_sharded[type(layout)](query, key, value, layout, key_layout, **arguments, **given)
    if exchange != "auto":
        raise ValueError(f"exchange={exchange!r} is for a ShardedLayout: leave it out.")
    planned = _plan(_pack(query, key, value, layout, key_layout, relative), alibi_slopes, backend, options)
    if sinks is not None:
        check_sinks(sinks, planned.query)
    if not isinstance(planned.backend, str) and planned.backend.is_reference:
        warn_if_slow(planned.call, backend)
    out, lse = run(planned.backend, planned.query, planned.key, planned.value, sinks, planned.call)
    if planned.rewrap is not None:
        out = planned.rewrap(out)
        lse = planned.rewrap(lse, True) if return_lse else lse
    return (out, lse) if return_lse else out


_run_sharded: dict[type, Callable[..., Any]] = {}  # the class of sharded layouts, and its attention


def register_sharded(layout: type, attention: Callable[..., Any]) -> None:
    """Let `varlen_attention` run sharded layouts. `nt_attention.distributed`, which imports this file, calls it."""
    _run_sharded[layout] = attention


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | PagedLayout | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Explanation:
    """Show which backend would run a call of `varlen_attention`, and why others can't run it.

    Checks the arguments as `varlen_attention` does, and computes nothing. Syncs as that function does.

    Returns:
        The explanation. `print` shows it as a table. `chosen` is the name of the backend, or None if none supports the
            call. `reasons` has the reasons why each backend can't run it.

    Raises:
        ValueError: as `varlen_attention`, except if no backend supports the call.
        TypeError: as `varlen_attention`.

    Example:
        >>> import torch, nt_attention as nta
        >>> query = torch.randn(5, 4, 8)
        >>> explanation = nta.explain(query, query, query, nta.SequenceLayout.from_lengths([2, 3]), softcap=30.0)
        >>> explanation.chosen, explanation.reasons["cpu"]
        ('reference', ('...softcap...',))
    """
    inputs = _pack(query, key, value, layout, key_layout, relative)
    spec = _spec(inputs, alibi_slopes is not None, all_options(options))
    _check_rows(inputs, alibi_slopes)
    if sinks is not None:
        check_sinks(sinks, inputs.query)
    return explain_call(Call(inputs.layout, inputs.key_layout, alibi_slopes, spec, None, inputs.relative), backend)


def _name_options(function: Any) -> None:
    """Replace `**options` in the signature by the names of the options, for `help`, `inspect` and `typing`."""
    signature, hints = inspect.signature(function), get_type_hints(Options)
    *given, _ = signature.parameters.values()
    by_name = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[name])
        for name, option in OPTIONS.items()
    ]
    function.__signature__ = signature.replace(parameters=[*given[:5], *by_name, *given[5:]])
    del function.__annotations__["options"]
    function.__annotations__ |= hints


_name_options(varlen_attention)
_name_options(explain)


class Plan(NamedTuple):
    """A checked call and its backend.

    Attributes:
        query, key, value: packed tensors.
        call: all other arguments of a kernel.
        backend: the backend to run. In a graph, "auto" or a name, which is looked up when the graph runs.
        rewrap: converts a packed result to a NestedTensor like `query`; None if the caller passed packed tensors.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call
    backend: Backend | str
    rewrap: Callable[..., Tensor] | None


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | PagedLayout | None = None,
    *,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Plan:
    """Check a call of `varlen_attention` and choose its backend, without running it."""
    return _plan(_pack(query, key, value, layout, key_layout, relative), alibi_slopes, backend, options)


def _plan(inputs: _Inputs, alibi_slopes: Tensor | None, backend: str, given: Mapping[str, Any]) -> Plan:
    """See `plan`. The spec and the backend are cached with the layout, so that all layers of a model share them."""
    options = all_options(given)
    if "window_size" in given:  # as a tuple, because a list can't be a cache key
        options["window_size"] = OPTIONS["window_size"].parse("window_size", options["window_size"])

    def decide() -> tuple[AttentionSpec, Backend | str, tuple[int, int] | None]:
        spec = _spec(inputs, alibi_slopes is not None, options)
        return spec, *_choose(inputs, spec, backend)

    query, key, value, layout, key_layout, rewrap, is_traced, needs_grad, relative = inputs
    prepared: PreparedRuns | None = None
    if is_traced or options["score_mod"] is not None or options["mask_mod"] is not None:
        spec, chosen, dims = decide()  # the cache would keep score_mod and mask_mod alive as long as the layout
    else:
        cache_key = (
            *("call", query.shape[1:], key.shape[1:], value.shape[1:], query.dtype, key.dtype, value.dtype),
            (key_layout.batch_size, key_layout.max_seqlen) if isinstance(key_layout, PagedLayout) else None,
            *(query.device, key.device, value.device, alibi_slopes is None, needs_grad, *selection_key(backend)),
            relative and (relative.terms, relative.requires_grad),
            *(*options.values(), *map(type, options.values())),  # types too: 1 == True, but 1 is not a valid bool
        )
        try:
            other = None if key_layout is layout or isinstance(key_layout, PagedLayout) else key_layout
            spec, chosen, dims, prepared = layout.cached(cache_key, lambda: (*decide(), {}), other)
        except TypeError:
            check_options(**options)  # raises a clearer error: no option has unhashable values
            raise
    _check_rows(inputs, alibi_slopes)
    prepared = prepared if alibi_slopes is None and relative is None else None
    call = Call(layout, key_layout, alibi_slopes, spec, dims, relative, prepared)
    return Plan(query, key, value, call, chosen, rewrap)


class _Inputs(NamedTuple):
    """Packed tensors and their layouts. The caller passed packed tensors or NestedTensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: SequenceLayout
    key_layout: SequenceLayout  # or a PagedLayout, which has the attributes that this file uses
    rewrap: Callable[..., Tensor] | None
    is_traced: bool
    needs_grad: bool
    relative: RelativeBias | None


def _pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | PagedLayout | None,
    relative: RelativeBias | None,
) -> _Inputs:
    refuse_jit_trace()
    query, key, value, layout, key_layout, rewrap = _unwrap(query, key, value, layout, key_layout)
    if isinstance(key_layout, PagedLayout):  # pools are not cast, which would copy them in each call
        query = query if _autocast_dtype(query.device.type) is None else query.to(key.dtype)
    else:
        query, key, value = autocast(query, key, value)
    if relative is not None:
        check_type(relative)
    traced = is_traced(query)
    if traced:
        # Views: a graph's inputs do not show that a transform differentiates them, and can't be passed twice.
        query, key, value = query.view_as(query), key.view_as(key), value.view_as(value)
        relative = relative and relative.with_tensors([x.view_as(x) for x in relative.tensors])
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if isinstance(key_layout, PagedLayout):
        _check_paged(needs_grad, relative)
    if relative is not None and not needs_grad:
        needs_grad = torch.is_grad_enabled() and relative.requires_grad
    return _Inputs(query, key, value, layout, key_layout, rewrap, traced, needs_grad, relative)


def _unwrap(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | PagedLayout | None,
) -> tuple[Tensor, Tensor, Tensor, SequenceLayout, SequenceLayout, Callable[..., Tensor] | None]:
    """Convert NestedTensors to packed tensors, their layouts and `rewrap`. Packed tensors are only checked."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    kinds = nested.are_nested(query, key, value)
    if not any(kinds):
        if layout is None:
            raise ValueError(
                f"packed tensors such as query {tuple(query.shape)} need layout=: pass "
                "SequenceLayout.from_lengths([...]) or .from_offsets(cu_seqlens), or pass NestedTensors instead. "
                "To pack a padded batch, use SequenceLayout.from_attention_mask(mask).pack(padded)."
            )
        is_self = key_layout is None or key_layout is layout
        layout = SequenceLayout.require(layout, "layout")
        if isinstance(key_layout, PagedLayout):
            return query, key, value, layout, cast(SequenceLayout, key_layout), None
        key_layout = layout if is_self else SequenceLayout.require(key_layout, "key_layout")
        return query, key, value, layout, key_layout, None
    if not all(kinds):
        kinds_of = ", ".join(
            f"{name} is {'nested' if kind else 'a plain tensor'}"
            for name, kind in zip(("query", "key", "value"), kinds, strict=True)
        )
        raise TypeError(f"{kinds_of}: pass three NestedTensors, or three packed tensors and a layout.")
    if layout is not None or key_layout is not None:
        raise ValueError("NestedTensors have their own layout: leave out layout= and key_layout=.")
    q, k, v = nested.unwrap_each(query=query, key=key, value=value, for_weights=False)
    if not k.layout.same_lengths(v.layout):
        raise ValueError(
            f"key and value must have the same lengths, got {format_lengths(k.layout)} and {format_lengths(v.layout)}."
        )
    return q.values, k.values, v.values, q.layout, k.layout, q.rewrap


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast; None if it is not enabled."""
    # Compilers may not support is_autocast_available. The devices that they support have autocast, except for meta.
    if device == "meta" or not (is_compiling() or torch.amp.is_autocast_available(device)):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = _autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    # autocast casts floating-point tensors, but not float64
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _spec(inputs: _Inputs, alibi: bool, options: dict[str, Any]) -> AttentionSpec:
    """The spec of a call. Raises an error if tensors do not match or an option is invalid."""
    query, key, value, layout, key_layout, *_ = inputs
    is_paged = isinstance(key_layout, PagedLayout)
    check_tensors(query, key, value, is_paged)
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(
            f"layout has {layout.batch_size} sequences and key_layout {key_layout.batch_size}: pass as many sequences "
            "of keys as of queries. A sequence may have length 0."
        )
    if is_paged:
        return AttentionSpec.of_paged(query, key, value, options, alibi=alibi, bounded=not layout.knows_lengths)
    same, traced = layout is key_layout, inputs.is_traced  # a graph may run with other lengths
    return AttentionSpec.of(
        query.device,
        query.dtype,
        (query.shape, key.shape, value.shape),
        options,
        alibi=alibi,
        relative=() if inputs.relative is None else inputs.relative.terms,
        needs_grad=inputs.needs_grad,
        relative_grad=inputs.needs_grad and inputs.relative is not None and inputs.relative.requires_grad,
        equal_lengths=same or (not traced and layout.same_lengths(key_layout)),
        keyless=(traced and not same) or key_layout.min_seqlen == 0,
        bounded=not (layout.knows_lengths and key_layout.knows_lengths),
    )


def _choose(inputs: _Inputs, spec: AttentionSpec, backend: str) -> tuple[Backend | str, tuple[int, int] | None]:
    """The backend and the head dims to call it with, or only a name if an operator chooses when the graph runs."""
    if inputs.is_traced:
        if can_choose_later(spec, backend):
            return backend, None
        if is_compiling():
            graph_break(f"{_NO_OPERATOR}, so it runs outside of the graph")
        else:
            raise ValueError(f"{_NO_OPERATOR}, so make_fx can't trace it: call it outside of the traced function.")
    return choose_for(Call(inputs.layout, inputs.key_layout, None, spec, None, inputs.relative), backend)


def _check_paged(needs_grad: bool, relative: RelativeBias | None) -> None:
    """Check what a call with a `PagedLayout` may not have."""
    if needs_grad or forward_ad_level() >= 0:
        raise ValueError(
            "keys in pools are for inference, but query, key or value needs a gradient, or forward-mode AD is active: "
            "call varlen_attention in torch.no_grad(), or pass packed keys and a SequenceLayout."
        )
    if relative is not None:
        raise ValueError(
            "relative biases are not supported with a PagedLayout: copy the keys with PagedLayout.gather, and pass the "
            "layout that it returns."
        )


def check_tensors(query: Tensor, key: Tensor, value: Tensor, is_paged: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if is_paged and name != "query":
            if x.dim() not in (3, 4):
                raise ValueError(f"{name} must be a pool (pages, page_size, G, D) or (N, G, D), got {tuple(x.shape)}.")
        elif x.dim() != 3:
            raise ValueError(
                f"{name} must be (tokens, heads, head dim), got {tuple(x.shape)}: pack a padded "
                "batch with layout.pack, and split an embedding with unflatten(-1, (heads, -1))."
            )
        if x.dtype != query.dtype or x.dtype not in DTYPES:
            raise ValueError(
                f"query, key and value must share one floating-point dtype, got {query.dtype}, {key.dtype} and "
                f"{value.dtype}: cast them to float16, bfloat16, float32 or float64, or use torch.autocast."
            )
        if x.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
            )


def _check_rows(inputs: _Inputs, alibi_slopes: Tensor | None) -> None:
    """Check the number of rows, the slopes and the relative bias, which can change in calls with the same layout."""
    if inputs.rewrap is None:  # unwrapping has checked NestedTensors
        inputs.layout.check_rows(inputs.query, "query")
        inputs.key_layout.check_keys(inputs.key, inputs.value)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, inputs.query.shape[1], inputs.layout.batch_size, inputs.query.device)
    if inputs.relative is not None:
        check_relative(inputs.relative, inputs.query, inputs.key)


def check_sinks(sinks: Tensor, query: Tensor) -> None:
    heads = query.shape[1]
    if not isinstance(sinks, Tensor) or sinks.shape != (heads,) or sinks.device != query.device:
        raise ValueError(
            f"sinks must be a tensor of one score for each of the {heads} query heads, on {query.device}, "
            f"got {describe(sinks)}."
        )
    if not sinks.is_floating_point():
        raise ValueError(f"sinks must be floating-point numbers, got {sinks.dtype}.")


def format_lengths(layout: SequenceLayout) -> str:
    """The first lengths of a layout, for error messages."""
    lengths = layout.host_offsets.diff()
    return f"{lengths[:6].tolist()}{' …' if len(lengths) > 6 else ''}"
