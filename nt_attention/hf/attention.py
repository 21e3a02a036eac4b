"""The attention function that transformers calls by name.

Packed rows, known by ``cu_seq_lens_q`` or by their positions, run through ``varlen_attention``; so do whole rows under
what the implementation that the name stands over can't do. Every other call goes to that implementation, mask and all:
padded batches are packed at the model's entry (``nt_attention.patch``), not in every layer.

Dimensions: B rows, T query and S key tokens of a row, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..functional import varlen_attention
from ..kernels.masks import Window, distances
from ..layout import SequenceLayout, layout_where
from . import masks
from .positions import begins

# A plain word: transformers takes names with "flash", "sdpa", "/" or "|" in them for its own.
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
    **kwargs: Any,
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
            "continuous batching (generate_batch) hands attention a paged cache, which nt_attention can't read: "
            "call generate, or set_attn_implementation('sdpa') for it (remove() a patch first)."
        )
    plain = cu_seq_lens_q is None and softcap is None and s_aux is None
    if plain and query.shape[2] == 1 and over == "sdpa":  # decoding, a token in each layer: no time to lose
        extra = {} if position_bias is None else {"position_bias": position_bias}
        return ALL_ATTENTION_FUNCTIONS[over](
            module, query, key, value, attention_mask, is_causal=is_causal, **extra, **kwargs
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", over == "sdpa" and _has_sdpa(cast(Any, type(module)))))
    if sliding_window and not is_causal and getattr(getattr(module, "config", None), "is_causal", True) is False:
        sliding_window += 1  # in a decoder that is told not to be causal, transformers' mask reaches w to both sides

    def dense(mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        extras = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        given: dict[str, Any] = {name: extra for name, extra in extras.items() if extra is not None}
        given |= {"is_causal": is_causal, "sliding_window": sliding_window, **kwargs}
        return _dense(over, module, query, key, value, mask, **given)

    if query.shape[2] == 1 and cu_seq_lens_q is None:  # decoding
        return dense(attention_mask)
    if cu_seq_lens_q is not None and attention_mask is not None and is_bypass_mask(attention_mask):
        attention_mask = None
    ours, here = (True, None) if _traced(query) else masks.made_from(attention_mask)
    if not ours or _is_cross(module):  # a mask of the caller's says all; another side's keys have other positions
        position_ids = None
    layouts = _layouts(module, query, key, cu_seq_lens_q, cu_seq_lens_k, position_ids, here)
    if layouts is None and _traced(query) and _may_be_packed(query, key, position_ids):
        same = _same_sequence(cast(Tensor, position_ids), query.shape[0], here)
        attention_mask = _both(_or_causal(attention_mask, is_causal, query, key), same)
    if layouts is None and attention_mask is None and query.shape[2] == key.shape[2]:
        windowed = sliding_window is not None and sliding_window < query.shape[2]
        if over == "eager" or (softcap is not None and query.device.type == "cpu"):  # which has no kernel with softcap
            attention_mask = _or_causal(None, is_causal, query, key, sliding_window)
        elif windowed or softcap is not None or s_aux is not None:
            layouts = (rows := _rows(query.shape[0], query.shape[2], query.device)), rows
    if layouts is None:
        return dense(attention_mask)
    if attention_mask is not None or position_bias is not None:
        if attention_mask is None:
            attention_mask = _or_causal(None, is_causal, query, key, sliding_window)
        return dense(_both(attention_mask, _same_layout(query, key, *layouts)))
    return _packed(query, key, value, *layouts, is_causal, sliding_window, softcap, s_aux, **kwargs), None


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    is_causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """Rows laid end to end through ``varlen_attention``; no copy where the model made them from (B, T, H·D)."""
    rows = query.shape[0]
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    window = (-1, -1) if not sliding_window else (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    out = varlen_attention(
        query,
        key,
        value,
        layout,
        key_layout,
        is_causal=is_causal,
        window_size=window,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=sinks,
        dropout_p=dropout,
    )
    return cast(Tensor, out).unflatten(0, (rows, -1))


def _dense(
    over: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The implementation underneath; for softcap and sinks, which sdpa lacks, the model's own eager one."""
    if over == "sdpa" and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return ALL_ATTENTION_FUNCTIONS[over](module, query, key, value, attention_mask, is_causal=is_causal, **kwargs)
    if attention_mask is None and is_causal and 1 < query.shape[2] < key.shape[2]:  # a static cache that was empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        attention_mask = _or_causal(None, True, query, key, kwargs.get("sliding_window"))
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return _eager(cast(Any, type(module)))(module, query, key, value, attention_mask, **kwargs)


@functools.cache
def _eager(kind: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Each modeling file has its own; a class of somebody else's has its base class's."""
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


def _is_cross(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__


def _layouts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    position_ids: Tensor | None,
    here: Tensor | None,
) -> tuple[SequenceLayout, SequenceLayout] | None:
    """The layouts of the queries and the keys, where the rows hold more sequences than one."""
    if cu_seq_lens_q is not None:
        layout = SequenceLayout.from_offsets(cu_seq_lens_q)
        same = cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q
        key_layout = layout if same else SequenceLayout.from_offsets(cast(Tensor, cu_seq_lens_k))
        for which, what, lengths, tokens in (("q", "queries", layout, query), ("k", "keys", key_layout, key)):
            there = tokens.shape[0] * tokens.shape[2]
            if not _traced(query) and lengths.total != there:  # in a graph the operator looks
                raise ValueError(
                    f"cu_seq_lens_{which} ends at {lengths.total}, but there are {there} {what}: pass the lengths of "
                    f"all {what}{', in cross-attention those of the other side' if which == 'k' else ''}."
                )
        return layout, layout if layout.same_lengths(key_layout) else key_layout  # collators make a tensor for each
    if _traced(query) or not _may_be_packed(query, key, position_ids):
        return None
    layer = getattr(module, "layer_idx", None)
    found = _by_positions(cast(Tensor, position_ids), query.shape[0], layer, here)
    return None if found is None else (found, found)


def _may_be_packed(query: Tensor, key: Tensor, position_ids: Tensor | None) -> bool:
    """Whether positions can tell: they are there, one for each token, and no cache stands before them."""
    if position_ids is None or position_ids.dim() != 2:  # with three axes (M-RoPE), positions need not go on by one
        return False
    return position_ids.shape[1] == query.shape[2] == key.shape[2] > 1 and position_ids.shape[0] in (1, query.shape[0])


class _Found(NamedTuple):
    """What positions were found to say, and the layer that looked."""

    version: int | None
    rows: int
    layer: int | None
    layout: SequenceLayout | None


# By the tensor that the layers of a model hand on, then by the mask (B, L) beside it.
_found: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NO_MASK = torch.empty(0)


def _by_positions(position_ids: Tensor, rows: int, layer: int | None, here: Tensor | None) -> SequenceLayout | None:
    """The layout that ``position_ids`` describe if a row holds more sequences than one; read once for all layers.

    Padding belongs to the sequence before it, or to the first.
    """
    version = None if position_ids.is_inference() else position_ids._version
    by_mask = _found.setdefault(position_ids, WeakIdKeyDictionary())
    known = by_mask.get(_NO_MASK if here is None else here)
    # inference tensors have no version: the layer that looked, the first of a model, looks again
    looks_again = version is None and (layer is None or known is None or layer == known.layer)
    if known is not None and (known.version, known.rows) == (version, rows) and not looks_again:
        return known.layout
    if here is None:
        layout = SequenceLayout.from_position_ids(position_ids.expand(rows, -1))
    else:
        first = begins(position_ids, here)
        first[:, :1] = True
        layout = layout_where(first.flatten().cpu().numpy(), position_ids.device)
    found = layout if layout.batch_size > rows else None
    by_mask[_NO_MASK if here is None else here] = _Found(version, rows, layer, found)
    return found


@functools.lru_cache(maxsize=64)
def _rows(rows: int, length: int, device: torch.device) -> SequenceLayout:
    """Rows that are a sequence each."""
    return SequenceLayout.from_lengths([length] * rows, device=device)


def _or_causal(
    mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor, sliding_window: int | None = None
) -> Tensor:
    """The mask, or what no mask stands for: causality and a window, (1, 1, T, S) bool."""
    if mask is not None:
        return mask
    window = Window.of(((sliding_window or 0) - 1,) * 2, is_causal)
    visible = window.visible(distances(query.shape[2], key.shape[2], 0, key.device))
    if visible is None:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
    return visible[None, None]


def _same_layout(query: Tensor, key: Tensor, layout: SequenceLayout, key_layout: SequenceLayout) -> Tensor:
    """(B, 1, T, S) bool, where the query's sequence is the key's."""
    rows = query.shape[0]
    ids, key_ids = (
        x.locate_rows(rows * tokens.shape[2])[0].view(rows, 1, -1) for x, tokens in ((layout, query), (key_layout, key))
    )
    return ids.unsqueeze(3) == key_ids.unsqueeze(2)


def _same_sequence(position_ids: Tensor, rows: int, here: Tensor | None) -> Tensor:
    """(B or 1, 1, T, T) bool, as ``_by_positions`` has it, without reading the device."""
    ids = begins(position_ids, here).cumsum(1)
    return (ids[:, None, :, None] == ids[:, None, None, :]).expand(rows, -1, -1, -1)


def _both(mask: Tensor, other: Tensor) -> Tensor:
    """A bool or additive mask where ``other`` (bool) holds as well."""
    return mask & other if mask.dtype == torch.bool else mask.masked_fill(~other, torch.finfo(mask.dtype).min)


def _traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(tensor, torch.fx.Proxy)


def bypass_mask(device: torch.device) -> Tensor:
    """A mask that models hand to the attention function as it is, without reading or building one.

    transformers' mask functions return a 4-D mask unread; without one they would build (T, T) for a packed row. It has
    no elements, so other attention functions raise an error. They would mix the sequences where a checkpoint recomputes
    a packed row after the model's attention was set to something else.
    """
    return torch.ones((1, 1, 0, 0), dtype=torch.bool, device=device)


def is_bypass_mask(mask: Tensor) -> bool:
    return mask.shape == (1, 1, 0, 0)
