"""The attention of a `VarlenMultiheadAttention` on packed tensors, computed by `varlen_attention`.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..functional import varlen_attention
from ..layouts.protocol import Layout
from .config import AttentionConfig
from .inputs import Inputs


def packed_attention(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, config: AttentionConfig) -> tuple[Tensor, None]:
    """Queries (T, H, D), keys (S, G, D) and values (S, G, Dv) → outputs (T, H, Dv), and None instead of weights."""
    assert inputs.layouts is not None
    layout, key_layout = inputs.layouts
    options, is_causal, alignment = config.options, inputs.masks.is_causal, "upper_left"
    if config.bias_k is not None or config.add_zero_attn:
        added = config.num_added_keys
        if is_causal and layout.same_lengths(key_layout):
            alignment = "lower_right"  # the added keys come first, so every query sees them
        elif is_causal:
            options, is_causal = {**options, "window_size": (-1, added)}, False
        longer = key_layout.extended(added)
        ks, vs = config.added_keys(k, v)
        k, v = _prepend(ks, k, key_layout, longer), _prepend(vs, v, key_layout, longer)
        key_layout = longer
    if inputs.masks.mask_mod is not None or inputs.masks.score_mod is not None:
        options = {**options, "mask_mod": inputs.masks.mask_mod, "score_mod": inputs.masks.score_mod}
    out = varlen_attention(
        q, k, v, layout, key_layout, is_causal=is_causal, causal_alignment=cast(Any, alignment), **options
    )
    return cast(Tensor, out), None


def _prepend(added: Tensor, x: Tensor, layout: Layout, longer: Layout) -> Tensor:
    """Insert the rows `added` (n, G, D) before every sequence of `x` (S, G, D)."""
    rows, count = x.shape[0], added.shape[0]

    def build() -> Tensor:
        sequence, position = longer.locate_rows(rows + count * layout.batch_size)
        own = position - count
        return torch.where(own < 0, rows + position, layout.safe_offsets[sequence] + own)

    return torch.cat([x, added]).index_select(0, layout.cached(("prepended", count, rows), build))
