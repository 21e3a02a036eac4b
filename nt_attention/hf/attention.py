"""The attention function that transformers calls by name.

Packed rows, known by ``cu_seq_lens_q`` or by their positions, run through ``varlen_attention``; so do whole rows under
what the implementation underneath can't do. Every other call goes to that implementation, mask and all: padded batches
are packed at the model's entry (``nt_attention.patch``), not in every layer.

Dimensions: B rows, T query and S key tokens of a row, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._tracing import is_traced
from ..functional import varlen_attention
from ..kernels.masks import Window, distances
from ..layout import SequenceLayout
from . import masks, positions

Layouts = tuple[SequenceLayout, SequenceLayout]  # of the queries and of the keys, over the B rows laid end to end

# transformers takes names with "flash", "sdpa", "/" or "|" in them for its own.
NAME_OVER = {"sdpa": "nt_attention", "eager": "nt_attention_eager"}


def register(over: str = "sdpa") -> str:
    """Make the name known to transformers, and return it, for ``attn_implementation=`` or ``set_attn_implementation``.

    Args:
        over: the implementation that runs what is not packed, "sdpa" or "eager".

    Raises:
        ValueError: any other ``over``.
    """
    if over not in NAME_OVER:
        raise ValueError(f"over must be one of {', '.join(map(repr, NAME_OVER))}, got {over!r}.")
    name = NAME_OVER[over]
    AttentionInterface.register(name, functools.partial(attention, over=over))
    AttentionMaskInterface.register(name, functools.partial(masks.mask, over=over))
    return name


class _Call(NamedTuple):
    """A call of ``attention``, with the module's defaults filled in; ``options`` go on to what is underneath."""

    over: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    sliding_window: int | None
    options: dict[str, Any]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    over: str,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query (B, H, T, D), key (B, G, S, D), value (B, G, S, Dv) to (B, T, H, Dv).

    Sequences are told apart by ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32, over the B rows laid end to end) or by
    ``position_ids`` (B, T) or (1, T) that do not go on by one; a query never attends to another sequence's keys. Where
    an ``attention_mask`` comes too, both hold. The device is read at most once for a tensor of lengths or positions.

    Args:
        scaling, dropout: as scaled_dot_product_attention's ``scale`` and ``dropout_p``.
        is_causal: the module's own ``is_causal`` if None; where it has none, True over sdpa if the model supports that.
        sliding_window: w, keys less than w before the query, and after it where attention is not causal.
        softcap, s_aux (H), position_bias (1 or B, H, T, S): of the scores; the sinks; added to the scores.

    Raises:
        ValueError: lengths that do not cover the queries or the keys; a paged cache of continuous batching.
    """
    if cache is not None:
        raise ValueError(
            "continuous batching (generate_batch) passes attention a paged cache, which nt_attention can't read: "
            "call generate, or set_attn_implementation('sdpa') for it (remove() a patch first)."
        )
    if position_bias is not None:
        options["position_bias"] = position_bias
    decoding = query.shape[2] == 1 and cu_seq_lens_q is None
    if decoding and over == "sdpa" and softcap is None and s_aux is None:  # a hot path: one token in each layer
        return ALL_ATTENTION_FUNCTIONS[over](module, query, key, value, attention_mask, is_causal=is_causal, **options)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", over == "sdpa" and _has_sdpa(cast(Any, type(module)))))
    if sliding_window and not is_causal and getattr(getattr(module, "config", None), "is_causal", True) is False:
        sliding_window += 1  # in a decoder that is called as not causal, transformers' mask reaches w to both sides
    options |= {name: x for name, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
    call = _Call(over, module, query, key, value, is_causal, sliding_window, options)
    layouts = None
    if not decoding:
        layouts, attention_mask = _plan(call, attention_mask, cu_seq_lens_q, cu_seq_lens_k, position_ids)
    return _run_padded(call, attention_mask) if layouts is None else (_run_packed(call, *layouts), None)


def _plan(
    call: _Call, mask: Tensor | None, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, ids: Tensor | None
) -> tuple[Layouts | None, Tensor | None]:
    """The layouts with which a call runs packed; or None, and the mask under which it runs padded."""
    query, key, options = call.query, call.key, call.options
    traced = is_traced(query)
    layouts = None
    if cu_seq_lens_q is not None:
        layouts = _layouts_of(query, key, cu_seq_lens_q, cu_seq_lens_k, traced)
        mask = None if is_bypass_mask(mask) else mask
    elif ids is not None and _may_be_packed(call, ids):
        if traced:
            mask = _both(_causal_mask(call) if mask is None else mask, positions.same_sequence(ids, query.shape[0]))
        elif (source := masks.source_of(mask)) is not None:  # a caller's mask already says which keys are visible
            layer = getattr(call.module, "layer_idx", None)
            layout = positions.read_layout(ids, query.shape[0], layer, source.token_mask)
            layouts = None if layout is None else (layout, layout)
    if layouts is None and mask is None and query.shape[2] == key.shape[2]:
        windowed = call.sliding_window is not None and call.sliding_window < query.shape[2]
        if call.over == "eager" or ("softcap" in options and query.device.type == "cpu"):  # no CPU kernel has softcap
            mask = _causal_mask(call)
        elif windowed or "softcap" in options or "s_aux" in options:
            layout = _whole_rows(query.shape[0], query.shape[2], query.device)
            layouts = layout, layout
    if layouts is not None and (mask is not None or "position_bias" in options):
        mask = _both(_causal_mask(call) if mask is None else mask, _same_layout(query, key, *layouts))
        layouts = None
    return layouts, mask


def _run_packed(call: _Call, layout: SequenceLayout, key_layout: SequenceLayout) -> Tensor:
    """Rows laid end to end through ``varlen_attention``; no copy where the model made them from (B, T, H·D)."""
    # plain views: this is a hot path
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))
    reach = call.sliding_window - 1 if call.sliding_window else -1
    out = varlen_attention(
        query,
        key,
        value,
        layout,
        key_layout,
        is_causal=call.is_causal,
        window_size=(reach, 0 if call.is_causal and reach >= 0 else reach),
        scale=call.options.get("scaling"),
        softcap=call.options.get("softcap", 0.0),
        sinks=call.options.get("s_aux"),
        dropout_p=call.options.get("dropout", 0.0),
    )
    return cast(Tensor, out).unflatten(0, (call.query.shape[0], -1))


def _run_padded(call: _Call, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The implementation underneath; for softcap and sinks, which sdpa does not support, the model's own eager one."""
    over, module, query, key, value, is_causal, sliding_window, options = call
    options = {"sliding_window": sliding_window, **options}
    if over == "sdpa" and "softcap" not in options and "s_aux" not in options:
        return ALL_ATTENTION_FUNCTIONS[over](module, query, key, value, mask, is_causal=is_causal, **options)
    if mask is None and is_causal and 1 < query.shape[2] < key.shape[2]:  # a static cache that was empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        mask = _causal_mask(call._replace(key=key))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return _eager_of(cast(Any, type(module)))(module, query, key, value, mask, **options)


@functools.cache
def _eager_of(kind: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Each modeling file has its own; a class defined elsewhere has its base class's."""
    for base in kind.__mro__:
        eager = getattr(sys.modules[base.__module__], "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise NotImplementedError(f"{kind.__name__} comes from no modeling file with an eager_attention_forward.")


@functools.cache
def _has_sdpa(kind: Any) -> bool:
    """Whether models of an attention module's file support sdpa, which takes modules without is_causal for causal."""
    found = [x for x in list(vars(sys.modules[kind.__module__]).values()) if isinstance(x, type)]
    models: list[Any] = [x for x in found if issubclass(x, PreTrainedModel) and x.__module__ == kind.__module__]
    return not models or any(x._supports_sdpa for x in models)


def _layouts_of(
    query: Tensor, key: Tensor, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, traced: bool
) -> Layouts:
    layout = SequenceLayout.from_offsets(cu_seq_lens_q)
    same = cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q
    key_layout = layout if same else SequenceLayout.from_offsets(cast(Tensor, cu_seq_lens_k))
    for which, what, lengths, tokens in (("q", "queries", layout, query), ("k", "keys", key_layout, key)):
        expected = tokens.shape[0] * tokens.shape[2]
        if not traced and lengths.total != expected:  # in a graph the operator checks it
            raise ValueError(
                f"cu_seq_lens_{which} ends at {lengths.total}, but there are {expected} {what}: pass the lengths of "
                f"all {what}{', in cross-attention those of the other side' if which == 'k' else ''}."
            )
    return layout, layout if layout.same_lengths(key_layout) else key_layout  # collators make a tensor for each


def _may_be_packed(call: _Call, position_ids: Tensor) -> bool:
    """Whether positions can separate sequences: in self-attention, one for each token, and without a cache."""
    query, key, module = call.query, call.key, call.module
    if position_ids.dim() != 2 or not position_ids.shape[1] == query.shape[2] == key.shape[2] > 1:
        return False  # with three axes (M-RoPE), positions need not go on by one
    is_cross = bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__
    return position_ids.shape[0] in (1, query.shape[0]) and not is_cross


@functools.lru_cache(maxsize=64)
def _whole_rows(rows: int, length: int, device: torch.device) -> SequenceLayout:
    """Rows that are a sequence each."""
    return SequenceLayout.from_lengths([length] * rows, device=device)


def _causal_mask(call: _Call) -> Tensor:
    """(1, 1, T, S) bool, what a mask of None stands for: causality and the window."""
    queries, keys, device = call.query.shape[2], call.key.shape[2], call.key.device
    window = Window.of(((call.sliding_window or 0) - 1,) * 2, call.is_causal)
    visible = window.visible(distances(queries, keys, 0, device))
    return (torch.ones(queries, keys, dtype=torch.bool, device=device) if visible is None else visible)[None, None]


def _same_layout(query: Tensor, key: Tensor, layout: SequenceLayout, key_layout: SequenceLayout) -> Tensor:
    """(B, 1, T, S) bool, where the query's sequence is the key's."""
    rows = query.shape[0]
    ids, _ = layout.locate_rows(rows * query.shape[2])
    key_ids, _ = key_layout.locate_rows(rows * key.shape[2])
    return rearrange(ids, "(b t) -> b 1 t 1", b=rows) == rearrange(key_ids, "(b s) -> b 1 1 s", b=rows)


def _both(mask: Tensor, other: Tensor) -> Tensor:
    """A bool or additive mask where ``other`` (bool) holds as well."""
    return mask & other if mask.dtype == torch.bool else mask.masked_fill(~other, torch.finfo(mask.dtype).min)


def bypass_mask(device: torch.device) -> Tensor:
    """A mask that models pass on to the attention function, without reading or building one.

    transformers' mask functions return a 4-D mask unread; without one they would build (T, T) for a packed row. It has
    no elements, so other attention functions raise an error. They would mix the sequences where a checkpoint recomputes
    a packed row after the model's attention was set to something else.
    """
    return torch.ones((1, 1, 0, 0), dtype=torch.bool, device=device)


def is_bypass_mask(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.shape == (1, 1, 0, 0)
