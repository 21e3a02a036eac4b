"""Attention on padded tensors, under any mask, and the weights where they are asked for.

What has no ragged form runs here: weights that somebody wants to see, masks of numbers, whole graphs over padded
batches. Every score of the padded batch is computed.

Dimensions: B sequences, L and S padded lengths of queries and keys, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.call import MaskMod, ScoreMod
from ..kernels.masks import Window, alibi_bias, for_each_score

if TYPE_CHECKING:
    from .multihead import VarlenMultiheadAttention


class InputError(ValueError, AssertionError, RuntimeError):
    """Dense inputs that do not fit; nn.MultiheadAttention raises any of these types."""


@dataclass(frozen=True)
class Scores:
    """What is done to the scores, each part None or 0 where it is not wanted.

    Attributes:
        scale: D^−0.5 if None.
        seen: which keys a query sees, bool, broadcast to (B, H, L, S).
        bias: added to the scores, broadcast to (B, H, L, S); −inf hides a key.
        softcap: applied before the bias.
        sinks: (H,) a score for each head that takes part in the softmax and has no value.
        score_mod, mask_mod: as for ``varlen_attention``; applied after the bias.
        lengths: of each sequence's queries and keys, beyond which the mods are not asked.
    """

    scale: float | None = None
    seen: Tensor | None = None
    bias: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    lengths: Sequence[tuple[int, int]] = ()

    @property
    def are_plain(self) -> bool:
        """Whether scaled_dot_product_attention has all that is asked."""
        return not self.softcap and self.sinks is None and self.score_mod is None and self.mask_mod is None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    *,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(B, L, H, D), (B, S, G, D), (B, S, G, Dv) to (B, L, H, Dv) and the weights (B, H, L, S) after dropout, or None.

    A query that sees no key gives 0 and weights of 0, and passes no gradient. ``is_causal`` is upper left, over all S
    keys.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    fused = not need_weights and dropout_p != 1 and scores.are_plain and _takes_bias(query, scores.bias)
    if is_causal and not (fused and scores.seen is scores.bias is None):
        earlier = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = replace(scores, seen=earlier if scores.seen is None else scores.seen & earlier)
        is_causal = False
    if fused:
        return _fused(query, key, value, scores, dropout_p, is_causal).transpose(1, 2), None
    out, weights = _written_out(query, key, value, scores, dropout_p)
    return out.transpose(1, 2), weights if need_weights else None


def _takes_bias(query: Tensor, bias: Tensor | None) -> bool:
    """Whether scaled_dot_product_attention takes a bias of this dtype."""
    if bias is None or bias.dtype == query.dtype:
        return True
    return query.is_cpu and bias.dtype == torch.promote_types(query.dtype, torch.float32)


def _fused(query: Tensor, key: Tensor, value: Tensor, scores: Scores, dropout_p: float, is_causal: bool) -> Tensor:
    """By scaled_dot_product_attention, of whose kernels not all give 0 in a row that sees nothing."""
    mask, blind = scores.seen, None
    if scores.bias is not None:
        mask = scores.bias if mask is None else scores.bias.masked_fill(~mask, -torch.inf)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        blind = hidden.all(-1, keepdim=True)
        mask = mask | blind if mask.dtype == torch.bool else mask.masked_fill(blind, 0.0)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    grouped = bool(query.shape[1] != key.shape[1])  # torch.jit.trace makes tensors of these
    out = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scores.scale, enable_gqa=grouped
    )
    return out if blind is None else out.masked_fill(blind, 0.0)


def _written_out(query: Tensor, key: Tensor, value: Tensor, how: Scores, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Each step as it is written down; what stock attention lacks in at least float32."""
    dtype = query.dtype
    if not how.are_plain:
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if how.scale is None else how.scale
    scores = (query * scale) @ key.transpose(2, 3)
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.bias is not None:
        scores = scores + how.bias
    hidden = None if how.seen is None else ~how.seen
    if how.score_mod is not None:
        scores = _modified(how.score_mod, scores, how.lengths)
    if (mod := how.mask_mod) is not None:
        unwanted = _modified(lambda _, *at: ~mod(*at), scores, how.lengths).to(torch.bool)
        hidden = unwanted if hidden is None else hidden | unwanted
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # −inf from −inf is taken nowhere, forward or backward
    scores = scores.masked_fill(blind, 0.0)
    if how.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = how.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    weights = F.dropout(weights.masked_fill(blind, 0.0), dropout_p)
    return (weights.to(value.dtype) @ value).to(dtype), weights.to(dtype)


def _modified(mod: Callable[..., Tensor], scores: Tensor, lengths: Sequence[tuple[int, int]]) -> Tensor:
    """What ``mod`` makes of each sequence's own scores; 0 beyond."""
    made = []
    for b, (rows, columns) in enumerate(lengths):
        inside = scores[b, :, :rows, :columns]
        inside = for_each_score(mod, inside, b).to(scores.dtype) if inside.numel() else inside
        made.append(F.pad(inside, (0, scores.shape[3] - columns, 0, scores.shape[2] - rows)))
    return torch.stack(made)


def attend_with(
    module: VarlenMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    places: Tensor,
    key_places: Tensor,
    is_causal: bool,
    need_weights: bool,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    over_added_keys: bool = False,
    lengths: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor | None]:
    """``attend`` with all that a module does to scores, and its added keys, which every query sees.

    ``places`` (B or 1, L) and ``key_places`` are where causality, windows and ALiBi take tokens to be. With
    ``over_added_keys`` causality goes by the order of all keys, added ones last.
    """
    if bias is not None and bias.dtype != query.dtype:
        if not (bias.is_floating_point() and torch.is_autocast_enabled(query.device.type)):
            raise InputError(
                f"a mask of numbers must be {query.dtype} as query is, got {bias.dtype}: cast it, or pass a bool one."
            )
        bias = bias.to(query.dtype)
    # with nothing else in the way, causality is a word to the kernel
    over_added_keys |= not module.added_keys and module.window_size == (-1, -1) and seen is bias is None
    distances = _distances(places, key_places)
    inside = Window.of(module.window_size, is_causal and not over_added_keys).visible(distances)
    if inside is not None:
        seen = inside if seen is None else seen & inside
    if module.slopes is not None:
        # in the query's dtype, but for 16 bits, which would round the distances
        slanted = alibi_bias(distances, module.slopes.to(torch.promote_types(query.dtype, torch.float32)))
        bias = slanted if bias is None else bias + slanted  # 16-bit and float32 give float32
    if module.added_keys:
        added = (x.unsqueeze(0).expand(len(key), *[-1] * 3) for x in map(torch.cat, module.keys_to_add(key, value)))
        key, value = (torch.cat(pair, 1) for pair in zip((key, value), added, strict=True))
        seen = None if seen is None else F.pad(seen, (0, module.added_keys), value=True)
        bias = None if bias is None else F.pad(bias, (0, module.added_keys))
    scores = Scores(module.scale, seen, bias, module.softcap, module.sinks, score_mod, mask_mod, lengths)
    return attend(
        *(query, key, value, scores),
        dropout_p=module.dropout_p,
        need_weights=need_weights,
        is_causal=is_causal and over_added_keys,
    )


def _distances(places: Tensor, key_places: Tensor) -> Tensor:
    """(B or 1, 1, L, S): how far a key is ahead of a query."""
    return (key_places[:, None, :] - places[:, :, None]).unsqueeze(1)
