"""The attention function and the mask function that transformers calls by name.

Packed rows, which come with ``cu_seq_lens_q``, run through ``varlen_attention``. Every other call goes to the
implementation that the name stands over, mask and all, and is exactly what it was: padded batches are packed at the
model's entry (``nt_attention.patch``), not in every layer.

Dimensions: T packed query tokens, S packed key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..functional import varlen_attention
from ..layout import SequenceLayout

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
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[over])
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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query (B, H, T, D), key (B, G, S, D), value (B, G, S, Dv) to (B, T, H, Dv).

    With ``cu_seq_lens_q`` the batch is one packed row and ``attention_mask`` is not read. Recognised beside it:
    ``cu_seq_lens_k``, ``scaling``, ``dropout``, ``is_causal``, ``sliding_window``, ``softcap``, ``s_aux``.

    Raises:
        NotImplementedError: a packed row with ``position_bias`` or with a cache.
        ValueError: more rows than one, or lengths that do not cover the keys.
    """
    if cu_seq_lens_q is None:
        return _not_packed(over, module)(module, query, key, value, attention_mask, **kwargs)
    return _packed(module, query, key, value, cu_seq_lens_q, **kwargs), None


def _packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> Tensor:
    if position_bias is not None or cache is not None:
        what = "position_bias" if position_bias is not None else "a cache"
        raise NotImplementedError(f"a packed row with {what} is not there yet: pad the batch, or leave out {what}.")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q describes one packed row, but the batch has {query.shape[0]} rows.")
    layout = SequenceLayout.from_offsets(cu_seq_lens_q)
    same = cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q
    key_layout = layout if same else SequenceLayout.from_offsets(cast(Tensor, cu_seq_lens_k))
    if key_layout.total != key.shape[2]:
        raise ValueError(
            f"cu_seq_lens_k ends at {key_layout.total}, but there are {key.shape[2]} keys: in cross-attention, pass "
            "the lengths of the other side."
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    window = (-1, -1) if not sliding_window else (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
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
        sinks=s_aux,
        dropout_p=dropout,
    )
    return cast(Tensor, out).unsqueeze(0)


def _not_packed(over: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if over == "eager":  # each modeling file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[over]


def bypass_mask(device: torch.device) -> Tensor:
    """A mask that models hand to the attention function as it is, without reading or building one.

    transformers' mask functions return a 4-D mask unread; without one they would build (T, T) for a packed row.
    """
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
