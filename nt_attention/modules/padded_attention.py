"""The attention of a `VarlenMultiheadAttention` on padded tensors, with any mask, and with weights if requested.

It serves the calls that can't run packed: with weights, with `attn_mask`, or with a padded batch in a graph. It
computes every score of the padded batch.

Dimensions: B sequences, L and S padded lengths of queries and keys, T tokens, H query heads, G key heads, D and Dv head
dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from ..compiler import is_tracing
from ..kernels.call import MaskMod, ScoreMod
from ..kernels.masks import Window, alibi_bias, distances
from ..kernels.mods import Positions, apply_mask_mod, apply_score_mod
from ..layouts.bounded import LengthsUnknownError
from ..layouts.protocol import Layout
from .config import AttentionConfig
from .inputs import InputError, Inputs


class _ScoreMask(NamedTuple):
    """The masks and biases of scores (B, H, L, S). Both tensors broadcast to this shape.

    Attributes:
        visible: bool, True if the query sees the key; None if all keys are visible.
        bias: numbers to add to the scores; −inf masks a key.
        is_causal: whether query i also only sees the keys 0 … i of all S keys.
        score_mod, mask_mod: as for `varlen_attention`. score_mod is applied after `bias`.
        lengths: (queries, keys) of each sequence. score_mod and mask_mod are not called for padding.
    """

    visible: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    lengths: Sequence[tuple[int, int]] = ()

    def only(self, visible: Tensor | None) -> _ScoreMask:
        """The same, with every key masked that is not `visible`."""
        if visible is None:
            return self
        return self._replace(visible=visible if self.visible is None else self.visible & visible)

    def plus(self, bias: Tensor) -> _ScoreMask:
        """The same, with `bias` added to the scores."""
        return self._replace(bias=bias if self.bias is None else self.bias + bias)


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, config: AttentionConfig
) -> tuple[Tensor, Tensor | None]:
    """Queries (B, L, H, D), keys (B, S, G, D), values (B, S, G, Dv) → outputs (B, L, H, Dv) and weights or None.

    Weights are (B, H, L, S), after dropout, with those of added keys at the end. For packed queries, keys and values
    (T, H, D), (S, G, D), (S, G, Dv), outputs are packed too, (T, H, Dv). For a query that sees no key, the output, its
    weights and its gradients are 0.
    """
    if inputs.layouts is not None:
        return _attend_ragged(q, k, v, inputs, config)
    masks, scores = inputs.masks, _ScoreMask()
    padding, attn_mask = masks.key_padding_mask, cast("Tensor | None", masks.attn_mask)
    if padding is not None:
        padding = rearrange(padding, "b s -> b 1 1 s")
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = rearrange(attn_mask, "(b h) l s -> b h l s", h=q.shape[2])
    for mask in (padding, attn_mask):
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.only(~mask)
        elif mask is not None:
            scores = scores.plus(mask if inputs.need_weights else mask.to(q.dtype))  # as nn.MultiheadAttention does
    return _attend(q, k, v, scores, inputs, config)


def _attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, config: AttentionConfig
) -> tuple[Tensor, Tensor | None]:
    """Pad packed queries, keys and values, and attend: (T, H, D) → (T, H, Dv), and weights (B, H, L, S) or None."""
    if is_tracing():
        raise ValueError(
            "weights, attn_mask and a dropout of 1 need the lengths, which are not known in a graph: pass mask_mod or "
            "is_causal=True, or call the module outside of the graph."
        )
    # Layouts from a mask would pad at the positions of the mask, and not at the end of each row.
    assert inputs.layouts is not None
    layout, key_layout = inputs.layouts
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(f"query has {layout.batch_size} sequences, and key and value have {key_layout.batch_size}.")
    if not (layout.knows_lengths and key_layout.knows_lengths):
        raise LengthsUnknownError(
            "attention weights, attn_mask and a dropout of 1 need the lengths, but a layout only knows bounds of them: "
            "make it without max_tokens, or leave out need_weights and attn_mask."
        )
    lengths = _lengths(layout, key_layout)
    layout, key_layout = (x.padded_right() for x in inputs.layouts)
    rows, masks = q.shape[0], inputs.masks
    q, k, v = layout.pad(q), key_layout.pad(k), key_layout.pad(v)
    tokens = rearrange(_token_mask(layout), "b l -> b 1 l 1")
    visible, bias = tokens & rearrange(_token_mask(key_layout), "b s -> b 1 1 s"), None
    if masks.attn_mask is not None:
        mask = _stack_masks(masks.attn_mask, layout, key_layout, q.shape[2])
        visible, bias = (visible & ~mask, None) if mask.dtype == torch.bool else (visible, mask)
    scores = _ScoreMask(visible, bias, score_mod=masks.score_mod, mask_mod=masks.mask_mod, lengths=lengths)
    out, weights = _attend(q, k, v, scores, inputs, config)
    if weights is not None and config.num_added_keys:  # queries at padding see added keys
        weights = weights.masked_fill(~tokens, 0.0)
    return F.pad(layout.pack(out), (0, 0, 0, 0, 0, rows - layout.total)), weights


def _token_mask(layout: Layout) -> Tensor:
    """(B, L) bool, True at tokens."""
    return torch.arange(layout.max_seqlen, device=layout.device) < layout.cached_lengths.unsqueeze(1)


def _lengths(layout: Layout, key_layout: Layout) -> list[tuple[int, int]]:
    return list(zip(*(x.host.diff().tolist() for x in (layout, key_layout)), strict=True))


def _stack_masks(mask: Tensor | Sequence[Tensor], layout: Layout, key_layout: Layout, num_heads: int) -> Tensor:
    """Convert the `attn_mask` of ragged inputs, a tensor or a list, to one tensor (B or 1, H or 1, L, S).

    Raises:
        ValueError: wrong shapes, or a wrong number of masks.
    """
    batch, queries, keys = layout.batch_size, layout.max_seqlen, key_layout.max_seqlen
    if isinstance(mask, Tensor):
        fits = mask.dim() in (2, 3) and mask.shape[-2] >= queries and mask.shape[-1] >= keys
        if not fits or (mask.dim() == 3 and mask.shape[0] != batch * num_heads):
            raise ValueError(
                f"attn_mask must be (L, S) or ({batch * num_heads}, L, S) with L ≥ {queries} and S ≥ {keys}, or a list "
                f"of {batch} masks, got {tuple(mask.shape)}."
            )
        mask = mask[..., :queries, :keys]
        return mask[None, None] if mask.dim() == 2 else rearrange(mask, "(b h) l s -> b h l s", h=num_heads)
    if not isinstance(mask, (list, tuple)) or len(mask) != batch or not all(isinstance(x, Tensor) for x in mask):
        got = f"a list of {len(mask)}" if isinstance(mask, (list, tuple)) else type(mask).__name__
        raise ValueError(f"attn_mask must be a tensor, or a list of one mask for each of {batch} sequences, got {got}.")
    for i, (one, lengths) in enumerate(zip(mask, _lengths(layout, key_layout), strict=True)):
        if one.shape not in (lengths, (num_heads, *lengths)) or one.dtype != mask[0].dtype:
            raise ValueError(
                f"attn_mask must be a list of {batch} masks of one dtype, (Li, Si) or ({num_heads}, Li, Si), but mask "
                f"{i} is {tuple(one.shape)} for lengths {lengths}, with {one.dtype}."
            )
    by_head = [one if one.dim() == 3 else repeat(one, "l s -> h l s", h=num_heads) for one in mask]
    return torch.stack([F.pad(x, (0, keys - x.shape[2], 0, queries - x.shape[1])) for x in by_head])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scores: _ScoreMask, inputs: Inputs, config: AttentionConfig
) -> tuple[Tensor, Tensor | None]:
    """Attention with the masks of `scores`, and with causality, windows, ALiBi and added keys."""
    scores = _add_positional(q, k, scores, inputs, config)
    if config.num_added_keys:
        added = (repeat(x, "n g d -> b n g d", b=k.shape[0]) for x in config.added_keys(k, v))
        k, v = (torch.cat(pair, 1) for pair in zip((k, v), added, strict=True))
        beyond = (0, config.num_added_keys)  # added keys are visible to every query
        scores = scores._replace(
            visible=None if scores.visible is None else F.pad(scores.visible, beyond, value=True),
            bias=None if scores.bias is None else F.pad(scores.bias, beyond),
        )
    q, k, v = (rearrange(x, "b l h d -> b h l d") for x in (q, k, v))
    options, need_weights = config.options, inputs.need_weights
    fused = (
        not need_weights and options["dropout_p"] != 1 and _is_plain(scores, options) and _supports_bias(q, scores.bias)
    )
    if scores.is_causal and not (fused and scores.visible is scores.bias is None):
        earlier = Window(right=0).visible(distances(q.shape[2], k.shape[2], 0, q.device))
        scores = scores._replace(is_causal=False).only(earlier)
    out, weights = (_fused if fused else _unfused)(q, k, v, scores, options)
    return rearrange(out, "b h l d -> b l h d"), weights if need_weights else None


def _add_positional(q: Tensor, k: Tensor, scores: _ScoreMask, inputs: Inputs, config: AttentionConfig) -> _ScoreMask:
    """Add causality, windows and ALiBi to `scores`."""
    slopes, is_causal, bias = config.options["alibi_slopes"], inputs.masks.is_causal, scores.bias
    if bias is not None and bias.dtype != q.dtype:
        if not (bias.is_floating_point() and torch.is_autocast_enabled(q.device.type)):
            raise InputError(
                f"a floating-point mask must have the dtype of query, {q.dtype}, got {bias.dtype}: cast it, or pass a "
                "bool mask."
            )
        scores = scores._replace(bias=bias.to(q.dtype))
    window_size = config.options["window_size"]
    window = Window.of(window_size)
    is_plain = window.is_open and not config.num_added_keys and scores.visible is bias is None
    # Without other masks, causality can be an argument of scaled_dot_product_attention.
    if is_causal and (is_plain or inputs.masks.counts_added_keys):
        scores, is_causal = scores._replace(is_causal=True), False
    if inputs.layouts is None and (slopes is not None or not window.is_open):
        positions, key_positions = cast(tuple[Tensor, Tensor], inputs.positions)
        distance = rearrange(key_positions, "b s -> b 1 1 s") - rearrange(positions, "b l -> b 1 l 1")
    elif slopes is not None or is_causal or not window.is_open:
        distance = distances(q.shape[1], k.shape[1], 0, q.device)
    else:
        return scores
    scores = scores.only(Window.of(window_size, is_causal).visible(distance))
    if slopes is None:
        return scores
    # In float32 for 16-bit queries, because their dtype would round the distances.
    return scores.plus(alibi_bias(distance, slopes.to(torch.promote_types(q.dtype, torch.float32))))


def _is_plain(scores: _ScoreMask, options: Mapping[str, Any]) -> bool:
    """Whether scaled_dot_product_attention supports all options that are used."""
    return not options["softcap"] and options["sinks"] is None and scores.score_mod is None and scores.mask_mod is None


def _supports_bias(query: Tensor, bias: Tensor | None) -> bool:
    """Whether scaled_dot_product_attention supports a bias of this dtype."""
    if bias is None or bias.dtype == query.dtype:
        return True
    return query.is_cpu and bias.dtype == torch.promote_types(query.dtype, torch.float32)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, scores: _ScoreMask, options: Mapping[str, Any]
) -> tuple[Tensor, None]:
    """Attention by scaled_dot_product_attention. Sets fully masked rows to 0, because not all of its kernels do."""
    mask, fully_masked = scores.visible, None
    if scores.bias is not None:
        mask = scores.bias if mask is None else scores.bias.masked_fill(~mask, -torch.inf)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        fully_masked = hidden.all(-1, keepdim=True)
        mask = mask | fully_masked if mask.dtype == torch.bool else mask.masked_fill(fully_masked, 0.0)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    grouped = bool(query.shape[1] != key.shape[1])  # under torch.jit.trace, sizes are tensors
    out = F.scaled_dot_product_attention(
        query, key, value, mask, options["dropout_p"], scores.is_causal, scale=options["scale"], enable_gqa=grouped
    )
    return out if fully_masked is None else out.masked_fill(fully_masked, 0.0), None


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, mask: _ScoreMask, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention by single PyTorch operations. With options that nn.MultiheadAttention lacks, at least in float32."""
    dtype, scale, softcap, sinks = query.dtype, options["scale"], options["softcap"], options["sinks"]
    if not _is_plain(mask, options):
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    key, value = (repeat(x, "b g s d -> b (g r) s d", r=query.shape[1] // x.shape[1]) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(2, 3)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask.bias is not None:
        scores = scores + mask.bias
    if mask.score_mod is not None:
        scores = _of_sequences(partial(_by_score_mod, mask.score_mod), scores, mask.lengths)
    if mask.mask_mod is not None:
        visible = _of_sequences(partial(_by_mask_mod, mask.mask_mod), scores, mask.lengths)
        mask = mask.only(visible.to(torch.bool))
    if mask.visible is not None:
        scores = scores.masked_fill(~mask.visible, -torch.inf)
    fully_masked = (scores == -torch.inf).all(-1, keepdim=True)  # their softmax and its gradient would be NaN
    scores = scores.masked_fill(fully_masked, 0.0)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    weights = F.dropout(weights.masked_fill(fully_masked, 0.0), options["dropout_p"])
    return (weights.to(value.dtype) @ value).to(dtype), weights.to(dtype)


def _by_score_mod(mod: ScoreMod, scores: Tensor, b: int) -> Tensor:
    """The scores (H, L, S) of a sequence, changed by score_mod."""
    return apply_score_mod(mod, scores[None], Positions.of_sequence(b, scores))[0]


def _by_mask_mod(mod: MaskMod, scores: Tensor, b: int) -> Tensor:
    """(H, L, S) which scores of a sequence are visible by mask_mod."""
    positions = Positions.of_sequence(b, scores)
    return apply_mask_mod(mod, len(scores), positions)[0].expand_as(scores)


def _of_sequences(apply: Callable[[Tensor, int], Tensor], scores: Tensor, lengths: Sequence[tuple[int, int]]) -> Tensor:
    """`apply(scores, b)` of the scores of each sequence b, with 0 at padding."""
    made = []
    for b, (rows, columns) in enumerate(lengths):
        inside = scores[b, :, :rows, :columns]
        inside = apply(inside, b).to(scores.dtype) if inside.numel() else inside
        made.append(F.pad(inside, (0, scores.shape[3] - columns, 0, scores.shape[2] - rows)))
    return torch.stack(made)
