"""Ragged inputs of a ``VarlenMultiheadAttention`` for which every score is wanted: padded, attended, packed again.

Dimensions: B sequences, L and S the longest lengths of queries and keys, T tokens, H heads, E embed dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from .._tracing import is_tracing
from ..kernels.call import MaskMod, ScoreMod
from ..layout import SequenceLayout
from . import masked

if TYPE_CHECKING:
    from .multihead import VarlenMultiheadAttention


def attend(
    module: VarlenMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    attn_mask: Tensor | Sequence[Tensor] | None,
    is_causal: bool,
    mask_mod: MaskMod | None,
    score_mod: ScoreMod | None,
    *,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Packed (T, E) to (T, E) and weights (B, H, L, S) or None."""
    if is_tracing():
        raise ValueError(
            "weights, attn_mask and a dropout of 1 want lengths, which a graph does not know: pass mask_mod or "
            "is_causal=True, or call this outside of the graph."
        )
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(f"query has {layout.batch_size} sequences, and key and value have {key_layout.batch_size}.")
    rows = query.shape[0]
    tokens = module.project(query, key, value, layout, key_layout)
    # tokens first in each row, wherever the layout's own mask had them
    own, other = (SequenceLayout.from_offsets(x.offsets) for x in (layout, key_layout))
    q, k, v = (x.pad(rows) for x, rows in zip((own, other, other), tokens, strict=True))
    here, key_here = (_here(x, padded) for x, padded in ((own, q), (other, k)))
    places, key_places = (torch.arange(x.shape[1], device=x.device).unsqueeze(0) for x in (q, k))
    seen = (here.unsqueeze(2) & key_here.unsqueeze(1)).unsqueeze(1)
    bias = None
    if attn_mask is not None:
        mask = _batched(attn_mask, own, other, module.num_heads)
        seen, bias = (seen & ~mask, None) if mask.dtype == torch.bool else (seen, mask)
    out, weights = masked.attend_with(
        *(module, q, k, v, seen, bias, places, key_places, is_causal, need_weights, mask_mod, score_mod),
        lengths=_lengths(own, other),
    )
    if weights is not None and module.added_keys:  # which are seen from beyond a sequence's end as well
        weights = weights.masked_fill(~here[:, None, :, None], 0.0)
    out = module.out_proj(own.pack(out.flatten(2)))
    return F.pad(out, (0, 0, 0, rows - own.total)), weights


def _here(layout: SequenceLayout, padded: Tensor) -> Tensor:
    """(B, L) bool, where tokens are."""
    return torch.arange(padded.shape[1], device=padded.device) < layout.lengths.unsqueeze(1)


def _lengths(layout: SequenceLayout, key_layout: SequenceLayout) -> list[tuple[int, int]]:
    return list(zip(*(x.host_offsets.diff().tolist() for x in (layout, key_layout)), strict=True))


def _batched(mask: Tensor | Sequence[Tensor], layout: SequenceLayout, key_layout: SequenceLayout, heads: int) -> Tensor:
    """(B or 1, H or 1, L, S) of the masks that a caller may pass.

    Raises:
        ValueError: other shapes, or other numbers of masks.
    """
    batch, queries, keys = layout.batch_size, layout.max_seqlen, key_layout.max_seqlen
    if isinstance(mask, Tensor):
        fits = mask.dim() in (2, 3) and mask.shape[-2] >= queries and mask.shape[-1] >= keys
        if not fits or (mask.dim() == 3 and mask.shape[0] != batch * heads):
            raise ValueError(
                f"attn_mask must be (L, S) or ({batch * heads}, L, S) with L ≥ {queries} and S ≥ {keys}, or a list of "
                f"{batch} masks, got {tuple(mask.shape)}."
            )
        mask = mask[..., :queries, :keys]
        return mask.view(1, 1, queries, keys) if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
    lengths = _lengths(layout, key_layout)
    if not isinstance(mask, (list, tuple)) or len(mask) != batch or not all(isinstance(x, Tensor) for x in mask):
        told = f"{len(mask)} of them" if isinstance(mask, (list, tuple)) else type(mask).__name__
        raise ValueError(f"attn_mask must be a tensor, or a list of {batch} masks, one a sequence; got {told}.")
    for i, one in enumerate(mask):
        if one.shape not in (lengths[i], (heads, *lengths[i])) or one.dtype != mask[0].dtype:
            raise ValueError(
                f"attn_mask must be a list of {batch} masks of one dtype, (Li, Si) or ({heads}, Li, Si); number {i} of "
                f"{batch} is {tuple(one.shape)} for lengths {lengths[i]}, of {one.dtype}."
            )
    by_head = [one if one.dim() == 3 else one.unsqueeze(0).expand(heads, -1, -1) for one in mask]
    return torch.stack([F.pad(x, (0, keys - x.shape[2], 0, queries - x.shape[1])) for x in by_head])
