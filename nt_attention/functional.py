"""``varlen_attention``: attention over ragged sequences, packed or nested, and ``explain``, which tells what would run.

Dimensions: B sequences, j their ragged length, T query tokens, S key tokens, H query heads, G key heads, D and Dv head
dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import nested
from ._tracing import is_traced, refuse_jit_trace
from .kernels.autograd import run, run_later
from .kernels.call import (
    DTYPES,
    AttentionSpec,
    Backend,
    CausalAlignment,
    MaskMod,
    Problem,
    ScoreMod,
    check_shapes,
    check_slopes,
    describe,
)
from .kernels.select import Explanation, choose, chosen_later, circumstances, explain_spec, warn_if_slow
from .kernels.support import head_dims
from .kernels.work import work
from .layout import SequenceLayout

_NO_OPERATOR = "no operator takes this call (mask_mod and score_mod, and on a CPU dropout and softcap)"


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | None = None,
    *,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "lower_right",
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in which every sequence sees itself alone.

    A query that sees no key gives 0, and −inf as its log-sum-exp. Sequences of length zero are legal on either side.
    Tensors may have more rows than the layout has tokens: those give 0 and get a gradient of 0. Heads are grouped
    (Ainslie et al. 2023) where H is a multiple of G. Syncs with the device only to read NestedTensor offsets that it
    has not seen. Under autocast, query, key and value are cast as ``scaled_dot_product_attention`` casts them; nothing
    else is ever cast. Kernels can be differentiated once.

    Args:
        query: (T, H, D) packed, or a NestedTensor (B, j, H, D) or (B, H, j, D).
        key: (S, G, D), or a NestedTensor with the same number of sequences.
        value: (S, G, Dv), or a NestedTensor with the lengths of ``key``.
        layout: the sequences of packed tensors; None for NestedTensors, which bring their own.
        key_layout: those of key and value, where they differ.
        is_causal: query i of a sequence sees no key past its own place.
        causal_alignment: where that place is among Lk keys: i + Lk − Lq ("lower_right") or i ("upper_left"). Places
            windows and ALiBi as well.
        window_size: how many keys before and after its own place a query sees, both inclusive; −1 is no limit.
        scale: of the scores; D^−0.5 if None.
        softcap: if not 0, scores become softcap · tanh(scores / softcap).
        sinks: (H,) a score for each head that takes part in the softmax and has no value; lse includes it.
        alibi_slopes: (H,) or (B, H) float32 or float64; adds −slope · |distance| to the scores. Gets no gradient.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` as flex_attention's, b the sequence and both indices
            counted from its start. Applied after softcap and ALiBi.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, True where a query sees a key; on top of the other masks.
        dropout_p: the probability that a weight is dropped.
        deterministic: gradients are the same bits each time, or no backend runs.
        batch_invariant: a sequence gives the same bits whatever stands around it in the batch, or no backend runs.
        return_lse: also return the log-sum-exp of each query's scores; differentiable.
        backend: "auto", or a name from ``available_backends()``, which then runs or raises.

    Returns:
        out, shaped as query with value's head dim; and, if asked for, lse: (T, H) or a NestedTensor (B, j, H), in
        float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes, devices or layouts that do not fit each other, or no backend that can run this.
        TypeError: NestedTensors mixed with packed tensors.
    """
    call = _Call.check(
        query, key, value, layout, key_layout, sinks=sinks, alibi_slopes=alibi_slopes, is_causal=is_causal,
        causal_alignment=causal_alignment, window_size=window_size, scale=scale, softcap=softcap, score_mod=score_mod,
        mask_mod=mask_mod, dropout_p=dropout_p, deterministic=deterministic, batch_invariant=batch_invariant,
        backend=backend,
    )  # fmt: skip
    out, lse = _run(call, sinks)
    if call.rewrap is not None:
        out = call.rewrap(out)
        lse = call.rewrap(lse, True) if return_lse else lse
    return (out, lse) if return_lse else out


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | None = None,
    *,
    backend: str = "auto",
    **options: Any,
) -> Explanation:
    """Which backend would run this call of ``varlen_attention``, and why each other one would not.

    Takes the arguments of ``varlen_attention`` and runs nothing. Print what it returns.
    """
    options.pop("return_lse", None)
    unknown = sorted(options.keys() - (_Call.check.__kwdefaults__ or {}).keys())
    if unknown:
        raise TypeError(f"varlen_attention has no argument {', '.join(map(repr, unknown))}.")
    problem = _Call.check(query, key, value, layout, key_layout, backend=backend, **options, choosing=False).problem
    return explain_spec(problem.spec, work(problem.layout, problem.key_layout, problem.spec), backend)


class _Call(NamedTuple):
    """A checked call: packed tensors, all else that there is to say, and how to give the result the query's form."""

    query: Tensor
    key: Tensor
    value: Tensor
    problem: Problem
    kernel: Backend | None
    backend: str
    rewrap: Callable[..., Tensor] | None

    @classmethod
    def check(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SequenceLayout | None,
        key_layout: SequenceLayout | None,
        *,
        is_causal: bool = False,
        causal_alignment: CausalAlignment = "lower_right",
        window_size: tuple[int, int] = (-1, -1),
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        batch_invariant: bool = False,
        backend: str = "auto",
        choosing: bool = True,
    ) -> _Call:
        refuse_jit_trace()
        query, key, value, layout, key_layout, rewrap = _packed(query, key, value, layout, key_layout)
        query, key, value = _autocast(query, key, value)
        check_window_size(window_size)
        if not (type(is_causal) is type(deterministic) is type(batch_invariant) is bool):
            check_bools(is_causal=is_causal, deterministic=deterministic, batch_invariant=batch_invariant)
        compiling = is_traced(query)
        if compiling:
            # an argument of the graph as it came in does not tell a transform's gradients, and may not come twice
            query, key, value = query.view_as(query), key.view_as(key), value.view_as(value)
        needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)

        def decide() -> tuple[AttentionSpec, Backend | None, tuple[int, int] | None]:
            _check_tensors(query, key, value, layout, key_layout)
            _check_options(causal_alignment, dropout_p)
            check_score_options(scale, softcap, score_mod, mask_mod)
            spec = AttentionSpec(
                device=query.device,
                dtype=query.dtype,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[2],
                value_dim=value.shape[2],
                scale=query.shape[2] ** -0.5 if scale is None else float(scale),
                is_causal=is_causal,
                causal_alignment=causal_alignment,
                window_size=(int(window_size[0]), int(window_size[1])),
                softcap=float(softcap),
                alibi=alibi_slopes is not None,
                score_mod=score_mod,
                mask_mod=mask_mod,
                dropout_p=float(dropout_p),
                deterministic=deterministic,
                batch_invariant=batch_invariant,
                needs_grad=needs_grad,
                # a graph may run with other lengths: what runs in it looks at them
                equal_lengths=layout is key_layout or (not compiling and layout.same_lengths(key_layout)),
                keyless=(compiling and layout is not key_layout) or key_layout.min_seqlen == 0,
            )
            if not choosing or (compiling and chosen_later(spec, backend)):
                return spec, None, None
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=f"{_NO_OPERATOR}, and what is no operator runs outside of a graph")
            elif compiling:
                raise ValueError(f"{_NO_OPERATOR}, so make_fx can't record it: make the call outside of the function.")
            kernel = choose(spec, work(layout, key_layout, spec), backend)
            return spec, kernel, head_dims(kernel, spec)

        if compiling or not choosing or score_mod is not None or mask_mod is not None:
            spec, kernel, dims = decide()  # to remember them would keep the functions given here as long as the batch
        else:
            # the same for all layers of a model
            asked = (
                *("call", query.shape[1:], key.shape[1:], value.shape[1:], query.dtype, key.dtype, value.dtype),
                *(query.device, key.device, value.device, alibi_slopes is None, is_causal, causal_alignment),
                *(tuple(window_size), scale, softcap, dropout_p, deterministic, batch_invariant, needs_grad),
                *circumstances(backend),
            )
            spec, kernel, dims = layout.cached(asked, decide, None if key_layout is layout else key_layout)
        if rewrap is None:  # NestedTensors have been checked
            layout.check_rows(query, "query")
            key_layout.check_keys(key, value)
        if sinks is not None:
            _check_sinks(sinks, query)
        if alibi_slopes is not None:
            check_slopes(alibi_slopes, query.shape[1], layout.batch_size, query.device)
        problem = Problem(layout, key_layout, alibi_slopes, spec, dims)
        return cls(query, key, value, problem, kernel, backend, rewrap)


def _run(call: _Call, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H)."""
    tensors = (call.query, call.key, call.value)
    if call.kernel is None:
        return run_later(call.backend, *tensors, sinks, call.problem)
    if call.kernel.is_reference:
        warn_if_slow(call.problem, call.backend, stacklevel=4)
    return run(call.kernel, *tensors, sinks, call.problem)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout | None, key_layout: SequenceLayout | None
) -> tuple[Tensor, Tensor, Tensor, SequenceLayout, SequenceLayout, Callable[..., Tensor] | None]:
    """Packed tensors and both layouts, from whichever form came in."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    kinds = nested.are_nested(query, key, value)
    if not any(kinds):
        if layout is None:
            raise ValueError(
                f"packed tensors such as query {tuple(query.shape)} need layout=: pass "
                "SequenceLayout.from_lengths([...]), .from_offsets(cu_seqlens), or NestedTensors in their place. "
                "A padded batch is packed with SequenceLayout.from_attention_mask(mask).pack(padded)."
            )
        is_self = key_layout is None or key_layout is layout
        layout = SequenceLayout.require(layout, "layout")
        key_layout = layout if is_self else SequenceLayout.require(key_layout, "key_layout")
        return query, key, value, layout, key_layout, None
    if not all(kinds):
        told = ", ".join(
            f"{name} is {'nested' if kind else 'a plain tensor'}"
            for name, kind in zip(("query", "key", "value"), kinds, strict=True)
        )
        raise TypeError(f"{told}: pass three NestedTensors, or three packed tensors and a layout.")
    if layout is not None or key_layout is not None:
        raise ValueError("NestedTensors bring their own layout: leave out layout= and key_layout=.")
    q, k, v = nested.unwrap_each(query=query, key=key, value=value, for_weights=False)
    if not k.layout.same_lengths(v.layout):
        raise ValueError(
            f"key and value differ in their lengths: {_some(k.layout)} and {_some(v.layout)}. "
            "Every key needs one value."
        )
    return q.values, k.values, v.values, q.layout, k.layout, q.rewrap


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    # a compiler may not know the first question, and asks the second of devices that have an answer
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device):
        return tensors
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # as autocast does for every operation on its list: floating point, but not float64
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, key_layout: SequenceLayout
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(
                f"{name} must be (tokens, heads, head dim), got {tuple(x.shape)}: pack a padded "
                "batch with layout.pack, and split E with unflatten(-1, (heads, -1))."
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
    check_shapes(query.shape, key.shape, value.shape)
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(
            f"layout has {layout.batch_size} sequences and key_layout {key_layout.batch_size}: each sequence of "
            "queries needs its own keys, of length 0 if it has none."
        )


def check_bools(**options: object) -> None:
    """Refuse what is not True or False: a tensor, for example, may change after the call."""
    for name, option in options.items():
        if not isinstance(option, bool):
            raise ValueError(f"{name} must be True or False, got {option!r}.")


def check_score_options(scale: object, softcap: object, score_mod: object = None, mask_mod: object = None) -> None:
    """Refuse options of the scores that no kernel can run."""
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not callable(mod):
            raise ValueError(f"{name} must be a function as flex_attention takes it, got {mod!r}.")
    if not (isinstance(softcap, (int, float)) and 0 <= softcap < math.inf):
        raise ValueError(f"softcap must be 0 (off) or a positive number, got {softcap}.")
    if scale is not None and not (isinstance(scale, (int, float)) and -math.inf < scale < math.inf):
        raise ValueError(
            f"scale must be a finite number, or None for D^−0.5, got {scale!r}. It gets no gradient: to learn one, "
            "multiply query by it."
        )


def _check_options(causal_alignment: str, dropout_p: float) -> None:
    if causal_alignment not in ("lower_right", "upper_left"):
        raise ValueError(f"causal_alignment must be 'lower_right' or 'upper_left', got {causal_alignment!r}.")
    if not (isinstance(dropout_p, (int, float)) and 0 <= dropout_p < 1):
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}.")


def check_window_size(window_size: object) -> None:
    """Refuse what is not (left, right)."""
    sides = window_size if isinstance(window_size, Sequence) else ()
    if len(sides) != 2 or any(not isinstance(side, int) or not -1 <= side < 2**63 for side in sides):
        raise ValueError(
            f"window_size must be (left, right), each −1 for open or 0 and more, got {window_size!r}: two integers "
            "of up to 63 bits."
        )


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    heads = query.shape[1]
    if not isinstance(sinks, Tensor) or sinks.shape != (heads,) or sinks.device != query.device:
        raise ValueError(
            f"sinks must be a tensor of one score for each of the {heads} query heads, on {query.device}, "
            f"got {describe(sinks)}."
        )
    if not sinks.is_floating_point():
        raise ValueError(f"sinks must be floating-point numbers, got {sinks.dtype}: cast them.")


def _some(layout: SequenceLayout) -> str:
    lengths = layout.host_offsets.diff()
    return f"{lengths[:6].tolist()}{' …' if len(lengths) > 6 else ''}"
