"""`varlen_attention` computes attention over a ragged batch. `explain` shows which backend would run it.

Dimensions: B sequences, j their ragged length, T query tokens, S key tokens, H query heads, G key heads, D the head dim
of queries and keys, Dv that of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, get_type_hints, overload

import torch
from torch import Tensor

from .compiler import EAGER, TRACED, call_mode, is_compiling, refuse_tracers
from .kernels.adapters import Tensors
from .kernels.autograd import run
from .kernels.call import OPTIONS, AttentionSpec, Call, Options, all_options, check_slopes, describe, layout_fields
from .kernels.relative import RelativeBias, check_relative, check_type
from .kernels.select import Choice, Explanation, can_choose_later, choose_for, explain_call, selection_key, warn_if_slow
from .layouts.paged import PagedLayout
from .layouts.protocol import Layout, Sharded
from .layouts.sequence import SequenceLayout, unwrap_each
from .layouts.tree import TreeLayout
from .torch_private import forward_ad_level, graph_break, is_any_autocast_enabled, without_torch_function

_NO_OPERATOR = (
    "no custom operator supports this call (it has mask_mod, score_mod or backend='flex', or a backend for inference "
    "and gradients)"
)


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | Sharded | None = None,
    key_layout: Layout | PagedLayout | Sharded | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | Sharded | None = None,
    key_layout: Layout | PagedLayout | Sharded | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | Sharded | None = None,
    key_layout: Layout | PagedLayout | Sharded | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    return_lse: bool,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | Sharded | None = None,
    key_layout: Layout | PagedLayout | Sharded | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    return_lse: bool = False,
    backend: str = "auto",
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
    Second derivatives, forward-mode AD, `is_grads_batched=True`, and transforms other than `torch.func.grad`, such as
    `torch.vmap`, need `backend="reference"`. `torch.jit.trace` and `make_fx` are refused.

    Args:
        query: (T, H, D) packed, or a NestedTensor (B, j, H, D) or (B, H, j, D).
        key: (S, G, D) packed, or a NestedTensor with the same number of sequences as `query`.
        value: (S, G, Dv) packed, or a NestedTensor with the same lengths as `key`.
        layout: the sequences of packed tensors. Must be None for NestedTensors. With a `TreeLayout`, sequences share
            prefixes; it needs `is_causal=True`. With a `ShardedLayout`
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
    if isinstance(layout, Sharded):
        more: Any = {"sinks": sinks, "alibi_slopes": alibi_slopes, "relative": relative, "return_lse": return_lse}
        return layout.attend(query, key, value, key_layout, **more, backend=backend, options=options)
    if isinstance(layout, TreeLayout):
        options = check_tree(layout, key_layout, alibi_slopes, options)
    arguments = _read(query, key, value, layout, key_layout, relative, options)
    if sinks is not None:
        check_sinks(sinks, arguments.tensors.query)
        arguments = arguments._replace(sinks=True)
    call = plan_arguments(arguments, alibi_slopes, backend, options)
    if not isinstance(call.backend, str) and call.backend.name == "reference":
        warn_if_slow(call, backend)
    out, lse = run(call.backend, arguments.tensors, sinks, call, arguments.mode)
    if arguments.rewrap is not None:
        out = arguments.rewrap(out)
        lse = arguments.rewrap(lse, True) if return_lse else lse
    return (out, lse) if return_lse else out


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | None = None,
    key_layout: Layout | PagedLayout | None = None,
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
        ('cpu', ())
    """
    if isinstance(layout, TreeLayout):
        options = check_tree(layout, key_layout, alibi_slopes, options)
    arguments = _read(query, key, value, layout, key_layout, relative, options)._replace(sinks=sinks is not None)
    spec = _spec(arguments, alibi_slopes is not None, options)
    _check_tensors_of_call(arguments, alibi_slopes)
    if sinks is not None:
        check_sinks(sinks, arguments.tensors.query)
    return explain_call(Call(arguments.layout, arguments.key_layout, alibi_slopes, spec, None, relative), backend)


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


class Arguments(NamedTuple):
    """The tensors of a call, and who sees it.

    Attributes:
        tensors: packed query, key and value.
        layout, key_layout, relative: as for `varlen_attention`, after checks.
        needs_grad: whether any gradients may be needed.
        mode: who sees the call, see `call_mode`.
        rewrap: converts a packed result to a NestedTensor like `query`; None if the caller passed packed tensors.
        sinks: whether sinks are passed.
    """

    tensors: Tensors
    layout: Layout
    key_layout: Any  # a `Layout` or a `PagedLayout`
    relative: RelativeBias | None = None
    needs_grad: bool = False
    mode: str = EAGER
    rewrap: Callable[..., Tensor] | None = None
    sinks: bool = False


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | None = None,
    key_layout: Layout | PagedLayout | None = None,
    *,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Call:
    """Check a call of `varlen_attention` and choose its backend, which is `Call.backend`, without running it."""
    if isinstance(layout, TreeLayout):
        options = check_tree(layout, key_layout, alibi_slopes, options)
    return plan_arguments(
        _read(query, key, value, layout, key_layout, relative, options), alibi_slopes, backend, options
    )


def plan_arguments(arguments: Arguments, slopes: Tensor | None, backend: str, options: Mapping[str, Any]) -> Call:
    """See `plan`. All layers of a model share one `Choice`, which is cached with the layout."""
    tensors, layout, key_layout, relative, needs_grad, mode, rewrap, sinks = arguments
    query, key, value = tensors
    is_paged = isinstance(key_layout, PagedLayout)
    if isinstance(options.get("window_size"), list):  # it can't be a part of a cache key
        options = {**options, "window_size": tuple(options["window_size"])}
    check = partial(_check, arguments, slopes, backend, options)
    if mode == TRACED or options.get("score_mod") is not None or options.get("mask_mod") is not None:
        choice = check()  # the cache would keep score_mod and mask_mod alive as long as the layout
    else:
        key_of_spec = (
            *(query.shape[1:], key.shape[1:], value.shape[1:], query.dtype, key.dtype, value.dtype),
            *(query.device, key.device, value.device, slopes is None, needs_grad, rewrap is None, sinks),
            (key_layout.batch_size, key_layout.max_seqlen) if is_paged else None,
            None if relative is None else (relative.terms, relative.requires_grad),
            *(*options.items(), *map(type, options.values())),  # 1 == True, but is no bool
        )
        other = None if is_paged or key_layout is layout else key_layout
        try:
            choice = layout.cached(("call", key_of_spec, selection_key(backend)), partial(check, key_of_spec), other)
        except TypeError:  # an option can't be a part of a cache key, so it is wrong
            choice = check()
    has_biases = slopes is not None or relative is not None
    rows = query.shape[0], key.shape[0], value.shape[0]
    if mode != TRACED and (has_biases or is_paged or rows != (layout.total, key_layout.total, key_layout.total)):
        _check_tensors_of_call(arguments, slopes)  # what is not in the cache key
    chosen, spec, dims, is_direct, prepared = choice
    prepared = None if has_biases else prepared
    return Call(layout, key_layout, slopes, spec, dims, relative, prepared, is_direct, chosen or backend)


def _check(
    arguments: Arguments,
    alibi_slopes: Tensor | None,
    backend: str,
    options: Mapping[str, Any],
    key: tuple[Any, ...] | None = None,
) -> Choice:
    """Check a call and choose its backend. `key` identifies all but the layouts."""
    spec = _spec(arguments, alibi_slopes is not None, options, key)
    _check_tensors_of_call(arguments, alibi_slopes)
    if arguments.mode == TRACED:
        if can_choose_later(spec, backend):
            return Choice(None, spec)
        if is_compiling():
            graph_break(f"{_NO_OPERATOR}, so it runs outside of the graph")
        else:
            raise ValueError(f"{_NO_OPERATOR}, so it can't run on FakeTensors: pass tensors with values.")
    return choose_for(Call(arguments.layout, arguments.key_layout, None, spec, None, arguments.relative), backend)


_specs: dict[tuple[Any, ...], AttentionSpec] = {}  # of other batches


def _spec(
    arguments: Arguments, alibi: bool, options: Mapping[str, Any], key: tuple[Any, ...] | None = None
) -> AttentionSpec:
    """The spec of a call. Raises an error if tensors do not match or an option is invalid."""
    tensors, layout, key_layout, relative, needs_grad, *_, sinks = arguments
    more = layout_fields(tensors[0], layout, key_layout)
    key = key and (*key, *more.values())
    if key is not None and (found := _specs.get(key)) is not None:
        return found
    terms, relative_grad = ((), False) if relative is None else (relative.terms, needs_grad and relative.requires_grad)
    more |= {"alibi": alibi, "relative": terms, "needs_grad": needs_grad, "relative_grad": relative_grad}
    spec = AttentionSpec.of_tensors(tensors, all_options(options), sinks=sinks, **more)
    if key is not None:
        if len(_specs) >= 1024:
            _specs.clear()
        _specs[key] = spec
    return spec


def _read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Any,
    key_layout: Any,
    relative: RelativeBias | None,
    options: Mapping[str, Any],
) -> Arguments:
    """Pack the tensors, cast them under autocast, and ask who sees the call."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    rewrap = None
    with without_torch_function():  # which takes 20 µs for an attribute of a NestedTensor
        are_nested = query.is_nested, key.is_nested, value.is_nested
    if any(are_nested):
        query, key, value, layout, key_layout, rewrap = _unwrap(query, key, value, layout, key_layout, are_nested)
        mode = call_mode(query, key, value)
    else:
        mode = call_mode(query, key, value)
        if mode == TRACED:
            refuse_tracers()
        if isinstance(layout, TreeLayout) and mode != EAGER:  # operators have no trees
            layout.check_keys(key, value)
            key, value = layout.expand_keys(key, value)
            relative = relative and relative.map_rows(lambda x: x, layout.keys.expand)
            tree: Any = layout
            layout, key_layout = tree.segments, tree.paths
        if layout is None:
            all_options(options)  # other names than ours say what the layout should be
        if mode == EAGER and type(layout) is SequenceLayout and (key_layout is None or key_layout is layout):
            key_layout = layout
        else:
            layout, key_layout = _layouts(query, layout, key_layout, mode)
    is_paged = isinstance(key_layout, PagedLayout)
    if mode == TRACED or is_any_autocast_enabled():
        # pools are not cast, which would copy them in each call
        query, key, value = autocast(query, key, value, to=key.dtype if is_paged else None)
    if relative is not None:
        check_type(relative)
        mode = call_mode(*relative.tensors, relative.buckets) if mode == EAGER else mode
    if mode == TRACED:
        # Views: a graph's inputs do not show that a transform differentiates them, and can't be passed twice.
        query, key, value = query.view_as(query), key.view_as(key), value.view_as(value)
        relative = relative and relative.with_tensors([x.view_as(x) for x in relative.tensors])
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if is_paged:
        _check_paged(needs_grad, relative)
    if relative is not None and not needs_grad:
        needs_grad = torch.is_grad_enabled() and relative.requires_grad
    return Arguments(Tensors(query, key, value), layout, key_layout, relative, needs_grad, mode, rewrap)


def _layouts(
    query: Tensor, layout: Layout | None, key_layout: Layout | PagedLayout | None, mode: str
) -> tuple[Layout, Any]:
    """The layouts of packed tensors, after checks."""
    if layout is None:
        raise ValueError(
            f"packed tensors such as query {tuple(query.shape)} need layout=: pass "
            "SequenceLayout.from_lengths([...]) or .from_offsets(cu_seqlens), or pass NestedTensors instead. "
            "To pack a padded batch, use SequenceLayout.from_attention_mask(mask).pack(padded)."
        )
    is_self = key_layout is None or key_layout is layout
    if mode != EAGER or type(layout) is not SequenceLayout:
        layout = SequenceLayout.require(layout, "layout")
    if is_self:
        return layout, layout
    if isinstance(key_layout, TreeLayout):
        raise ValueError("a TreeLayout has queries and keys of its own: pass it as layout, without key_layout.")
    is_known = mode == EAGER and type(key_layout) is SequenceLayout
    if is_known or isinstance(key_layout, PagedLayout):
        return layout, key_layout
    return layout, SequenceLayout.require(key_layout, "key_layout")


def check_tree(tree: TreeLayout, key_layout: object, slopes: Tensor | None, options: Mapping[str, Any]) -> Any:
    """The options of a call with a tree, after checks. A segment is aligned to the end of its path."""
    for name, is_wrong in {
        "key_layout": key_layout is not None and key_layout is not tree,
        "dropout_p": options.get("dropout_p", 0.0) != 0.0,
        "score_mod": options.get("score_mod") is not None,
        "mask_mod": options.get("mask_mod") is not None,
        "alibi_slopes of each sequence": slopes is not None and slopes.dim() != 1,
    }.items():
        if is_wrong:
            raise ValueError(
                f"{name} is not supported with a TreeLayout: leave it out, or repeat the prefixes (expand)."
            )
    if not options.get("is_causal"):
        raise ValueError("a TreeLayout needs is_causal=True: a shared token must not depend on what follows it.")
    return {**options, "causal_alignment": "lower_right"}


def _unwrap(
    query: Tensor, key: Tensor, value: Tensor, layout: object, key_layout: object, are_nested: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Layout, Layout, Callable[..., Tensor]]:
    """Convert NestedTensors to packed tensors, their layouts and `rewrap`."""
    if not all(are_nested):
        kinds_of = ", ".join(
            f"{name} is {'nested' if is_nested else 'a plain tensor'}"
            for name, is_nested in zip(("query", "key", "value"), are_nested, strict=True)
        )
        raise TypeError(f"{kinds_of}: pass three NestedTensors, or three packed tensors and a layout.")
    if layout is not None or key_layout is not None:
        raise ValueError("NestedTensors have their own layout: leave out layout= and key_layout=.")
    q, k, v = unwrap_each(query=query, key=key, value=value, for_weights=False)
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


def autocast(*tensors: Tensor, to: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The tensors as autocast casts them. If it is enabled and `to` is a dtype, only the first is cast, to this one."""
    dtype = _autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    if to is not None:
        return (tensors[0].to(to), *tensors[1:])
    # autocast casts floating-point tensors, but not float64
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


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


def _check_tensors_of_call(arguments: Arguments, alibi_slopes: Tensor | None) -> None:
    """Check the number of rows, the slopes and the relative bias."""
    (query, key, value), layout = arguments.tensors, arguments.layout
    if arguments.rewrap is None:  # unwrapping has checked NestedTensors
        layout.check_rows(query, "query")
        arguments.key_layout.check_keys(key, value)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, query.shape[1], layout.batch_size, query.device)
    if arguments.relative is not None:
        check_relative(arguments.relative, query, key)


def check_sinks(sinks: Tensor, query: Tensor) -> None:
    heads = query.shape[1]
    if not isinstance(sinks, Tensor) or sinks.shape != (heads,) or sinks.device != query.device:
        raise ValueError(
            f"sinks must be a tensor of one score for each of the {heads} query heads, on {query.device}, "
            f"got {describe(sinks)}."
        )
    if not sinks.is_floating_point():
        raise ValueError(f"sinks must be floating-point numbers, got {sinks.dtype}.")


def format_lengths(layout: Layout) -> str:
    """The first lengths of a layout, for error messages."""
    lengths = layout.host.diff()
    return f"{lengths[:6].tolist()}{' …' if len(lengths) > 6 else ''}"
