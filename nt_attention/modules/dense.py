"""Dense inputs of a ``VarlenMultiheadAttention``: nn.MultiheadAttention's own arguments and what it makes of them.

Dimensions: B sequences, L and S lengths of queries and keys, E embed dim, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._tracing import can_be_read as can_be_read
from ..layout import SequenceLayout
from . import masked
from .masked import InputError

if TYPE_CHECKING:
    from .multihead import VarlenMultiheadAttention


def forward(
    module: VarlenMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention.forward: by real tokens alone where that is possible, else by every score."""
    _check(module, query, key, value, key_padding_mask, attn_mask)
    if is_causal and attn_mask is None and need_weights:
        raise InputError("is_causal=True alone gives no weights: pass attn_mask with it, or need_weights=False.")
    batched, is_self = query.dim() == 3, _is_self(query, key, value)
    hint = is_causal and attn_mask is not None
    if hint and (need_weights or key_padding_mask is not None):
        is_causal = False  # the mask says it
    elif hint:
        attn_mask = None  # stock goes by the hint then, over the keys that it adds as well
    if batched and not module.batch_first:
        query, key, value = _each(lambda x: x.transpose(0, 1), query, key, value)
    elif not batched:
        query, key, value = _each(lambda x: x.unsqueeze(0), query, key, value)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    padding = key_padding_mask if key_padding_mask is None or key_padding_mask.dtype == torch.bool else None
    if (
        attn_mask is None
        and not need_weights
        and padding is key_padding_mask
        and _is_for_packing(module, query, padding, is_self, is_causal)
    ):
        out, weights = _packed(module, query, key, value, padding, is_self, is_causal), None
    else:
        out, weights = _every_score(
            *(module, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal, is_self),
            over_added_keys=hint,
        )
    if weights is not None:
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if batched else weights.squeeze(0)
    if not batched:
        return out.squeeze(0), weights
    return out if module.batch_first else out.transpose(0, 1).contiguous(), weights


def _is_for_packing(
    module: VarlenMultiheadAttention, query: Tensor, padding: Tensor | None, is_self: bool, is_causal: bool
) -> bool:
    if module.drops_all or not can_be_read(query):
        return False
    if padding is None:
        return module.backend != "auto" or not module.is_stock
    if module.backend == "auto" and module.dropout_p and query.device.type == "cpu":
        return False  # where nothing but the reference drops weights
    # queries are not packed as keys are then, and places would be counted apart
    return is_self or not (is_causal or module.counts_places)


def _packed(
    module: VarlenMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    is_self: bool,
    is_causal: bool,
) -> Tensor:
    """(B, L, E) to (B, L, E): packed, attended, and padded again."""
    key_layout = _full(key) if padding is None else SequenceLayout.from_attention_mask(~padding)
    layout = key_layout if is_self else _full(query)
    q = layout.pack(query)
    k = q if key is query and key_layout is layout else key_layout.pack(key)
    v = q if value is query and key_layout is layout else k if value is key else key_layout.pack(value)
    return layout.pad(module.attend(q, k, v, layout, key_layout, is_causal))


def _every_score(
    module: VarlenMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    is_causal: bool,
    is_self: bool,
    *,
    over_added_keys: bool,
) -> tuple[Tensor, Tensor | None]:
    """(B, L, E) to (B, L, E) and weights (B, H, L, S)."""
    places, key_places = (torch.arange(x.shape[1], device=x.device).unsqueeze(0) for x in (query, key))
    if is_self and module.counts_places and padding is not None:  # as packed tokens are counted
        hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
        places = key_places = (~hidden).cumsum(1) - 1
    q, k, v = module.project(query, key, value, places, key_places)
    seen = bias = None
    for mask in (padding, attn_mask):
        if mask is None:
            continue
        if mask is padding:
            mask = mask[:, None, None, :]
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (query.shape[0], module.num_heads))
        if mask.dtype == torch.bool:
            seen = ~mask if seen is None else seen & ~mask
        else:
            mask = mask if need_weights else mask.to(q.dtype)  # as stock does
            bias = mask if bias is None else bias + mask
    out, weights = masked.attend_with(
        module, q, k, v, seen, bias, places, key_places, is_causal, need_weights, over_added_keys=over_added_keys
    )
    return module.out_proj(out.flatten(2)), weights


def _check(
    module: VarlenMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Refuse what nn.MultiheadAttention refuses.

    Raises:
        InputError: shapes or dtypes that do not fit.
    """
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise InputError(
            "query, key and value must be (L, E) each or three-dimensional each, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    module.check_widths(query, key, value, InputError)
    batched = query.dim() == 3
    order = (0, 1) if module.batch_first or not batched else (1, 0)
    (batch, queries), (key_batch, keys), values = (
        (x.shape[order[0]], x.shape[order[1]]) if batched else (1, x.shape[0]) for x in (query, key, value)
    )
    if key_batch != batch or values != (key_batch, keys):
        raise InputError(
            "query, key and value must share their batch, and key and value their length, got "
            f"{(batch, queries)}, {(key_batch, keys)} and {values} (batch, length)."
        )
    heads = module.num_heads
    wanted: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "key_padding_mask": (key_padding_mask, [(batch, keys) if batched else (keys,)]),
        "attn_mask": (attn_mask, [(queries, keys), (batch * heads, queries, keys)]),
    }
    for name, (mask, shapes) in wanted.items():
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(f"{name} must be a tensor of booleans or floating-point numbers, got {got}.")
        if mask.shape not in shapes:
            raise InputError(f"{name} must be {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.")


def _is_self(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the three are one tensor; module hooks hand in views of it."""
    return all(x is query or (can_be_read(x) and _in_memory(x) == _in_memory(query)) for x in (key, value))


def _in_memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _each(function, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """With inputs that were one object still one."""
    q = function(query)
    k = q if key is query else function(key)
    return q, k, q if value is query else k if value is key else function(value)


def _full(padded: Tensor) -> SequenceLayout:
    """The layout of a batch (B, L, E) without padding."""
    return SequenceLayout.from_lengths([padded.shape[1]] * padded.shape[0], device=padded.device)
