"""The inputs of a ``VarlenMultiheadAttention`` in all their forms, converted to ``Inputs``, and outputs converted back.

Dimensions: B sequences, j their ragged length, L and S padded lengths of queries and keys, T tokens, E embed dim, H
query heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import nested
from .._tracing import can_be_read, refuse_jit_trace
from ..kernels.call import MaskMod, ScoreMod
from ..layout import SequenceLayout

_NAMES = ("query", "key", "value")
_Tensors = tuple[Tensor, Tensor, Tensor]


class InputError(ValueError, AssertionError, RuntimeError):
    """Dense inputs that do not fit each other. nn.MultiheadAttention raises one or another of these types."""


class Masks(NamedTuple):
    """The masks of a call, as the caller passed them. In ``Inputs``, ``key_padding_mask`` is always (B, S).

    If ``counts_added_keys``, causality also masks added keys, by their positions after the sequence's own keys.
    """

    is_causal: bool = False
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | Sequence[Tensor] | None = None
    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    counts_added_keys: bool = False

    def without_hint(self, need_weights: bool) -> Masks:
        """With only one of ``is_causal`` and ``attn_mask``: next to ``attn_mask``, ``is_causal`` is a hint."""
        if not self.is_causal or self.attn_mask is None:
            return self
        if need_weights or self.key_padding_mask is not None:
            return self._replace(is_causal=False)
        return self._replace(attn_mask=None, counts_added_keys=True)  # nn.MultiheadAttention also uses the hint here


class Inputs(NamedTuple):
    """The inputs of one call, checked.

    Attributes:
        query, key, value: packed (T, E) each, with layouts; or padded (B, L, E) each, without. If the caller passed the
            same object twice, these are the same object too.
        need_weights: whether to return attention weights.
        layouts: of packed queries, and of packed keys and values; None for padded inputs.
        restore: converts outputs (T, E) or (B, L, E) to the caller's form; None if there is nothing to convert.
        is_batched: False for a dense query (L, E), whose weights have no batch dimension either.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    need_weights: bool
    layouts: tuple[SequenceLayout, SequenceLayout] | None = None
    restore: Callable[[Tensor], Any] | None = None
    is_batched: bool = True

    @property
    def is_self_attention(self) -> bool:
        """Whether padded query, key and value are the same tensor, or equal views of it, as module hooks may pass."""
        query, *others = self[:3]
        return all(x is query or (can_be_read(x) and _same_memory(x, query)) for x in others)

    @property
    def positions(self) -> tuple[SequenceLayout, SequenceLayout] | tuple[Tensor, Tensor]:
        """The positions of queries and keys: layouts if packed, else tensors (B or 1, L) and (B or 1, S).

        In padded self-attention, positions count tokens and not padding, as in packed inputs.
        """
        if self.layouts is not None:
            return self.layouts
        padding = self.masks.key_padding_mask
        if padding is not None and self.is_self_attention:
            hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
            positions = (~hidden).cumsum(1) - 1
            return positions, positions
        rows, key_rows = (torch.arange(x.shape[1], device=x.device).unsqueeze(0) for x in (self.query, self.key))
        return rows, key_rows

    def pack(self) -> Inputs:
        """Pack padded inputs, whose only masks are ``is_causal`` and a boolean ``key_padding_mask``."""
        if self.layouts is not None:
            return self
        (query, key, value), padding = self[:3], self.masks.key_padding_mask
        key_layout = _full(key) if padding is None else SequenceLayout.from_attention_mask(~padding)
        layout = key_layout if self.is_self_attention else _full(query)
        q = layout.pack(query)
        k = q if key is query and key_layout is layout else key_layout.pack(key)
        v = q if value is query and key_layout is layout else k if value is key else key_layout.pack(value)

        unpack = self.restore or (lambda out: out)
        return Inputs(
            q, k, v, Masks(self.masks.is_causal), False, (layout, key_layout), lambda out: unpack(layout.pad(out))
        )

    def give_back(self, out: Tensor, weights: Tensor | None, average: bool) -> tuple[Any, Tensor | None]:
        """``out`` (T, E) or (B, L, E) in the caller's form, and weights (B, H, L, S), or their mean over heads."""
        if weights is not None:
            weights = weights.mean(1) if average else weights
            weights = weights if self.is_batched else weights.squeeze(0)
        if self.layouts is not None:
            out = self.layouts[0].fill_past_end(out, 0.0)
        return out if self.restore is None else self.restore(out), weights


def read_inputs(
    query: Any,
    key: Any,
    value: Any,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | None,
    masks: Masks,
    need_weights: bool | None,
    embed_dims: tuple[int, int, int],
    num_heads: int,
    batch_first: bool,
) -> Inputs:
    """Check inputs of any form and convert them. ``need_weights`` None is True for dense inputs, False for ragged ones.

    ``embed_dims`` are those of query, key and value; ``batch_first`` is the order of a padded batch's dimensions.

    Raises:
        ValueError: inputs that do not fit each other; an ``InputError`` if they are dense.
        TypeError: query, key and value are neither tensors nor lists.
    """
    in_lists = isinstance(query, (list, tuple))
    if in_lists:
        refuse_jit_trace()
    elif not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        name, other = next(x for x in zip(_NAMES, (query, key, value), strict=True) if not isinstance(x[1], Tensor))
        raise TypeError(f"query, key and value must be tensors, or lists of them; {name} is {type(other).__name__}.")
    are_nested = [] if in_lists else nested.are_nested(query, key, value)
    if not in_lists and layout is None and not any(are_nested):
        tensors = query, key, value
        return _from_dense(tensors, masks, need_weights is not False, embed_dims, num_heads, batch_first)
    if masks.key_padding_mask is not None:
        raise ValueError("a ragged batch has no padding: leave out key_padding_mask, whose tokens are not there.")
    if layout is not None and (in_lists or any(are_nested)):
        forms = "lists of tensors" if in_lists else "NestedTensors"
        raise ValueError(f"{forms} bring their own layout: leave out layout= and key_layout=.")
    restore = None
    if in_lists:
        (query, key, value), layout, key_layout, restore = _pack_lists(query, key, value)
    elif layout is None:
        (query, key, value), layout, key_layout, restore = _pack_nested((query, key, value), are_nested)
    else:
        key_layout = None if key_layout is layout else key_layout
        layout = SequenceLayout.require(layout, "layout")
        key_layout = layout if key_layout is None else SequenceLayout.require(key_layout, "key_layout")
    _check_widths((query, key, value), embed_dims, ValueError)
    if restore is None:  # packed tensors; the other forms were checked above
        if not query.dim() == key.dim() == value.dim() == 2:
            name, other = next(x for x in zip(_NAMES, (query, key, value), strict=True) if x[1].dim() != 2)
            raise ValueError(f"packed {name} must be (tokens, features), got {tuple(other.shape)}.")
        layout.check_rows(query, "query")
        if key is not query or value is not query or key_layout is not layout:
            key_layout.check_keys(key, value)
    need_weights = bool(need_weights)
    return Inputs(query, key, value, masks.without_hint(need_weights), need_weights, (layout, key_layout), restore)


def _from_dense(
    tensors: _Tensors,
    masks: Masks,
    need_weights: bool,
    embed_dims: tuple[int, int, int],
    num_heads: int,
    batch_first: bool,
) -> Inputs:
    """nn.MultiheadAttention's inputs, (L, E) or three-dimensional, as (B, L, E). Has the checks of that module."""
    if masks.mask_mod or masks.score_mod:
        raise ValueError("mask_mod and score_mod are for ragged inputs: pass attn_mask to padded ones.")
    query, key, value = tensors
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise InputError(
            "query, key and value must be (L, E) each or three-dimensional each, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    _check_widths(tensors, embed_dims, InputError)
    restore: Callable[[Tensor], Tensor] | None = None
    is_batched = query.dim() == 3
    if not is_batched:
        tensors, restore = _each(lambda x: x.unsqueeze(0), *tensors), lambda out: out.squeeze(0)
    elif not batch_first:
        tensors, restore = _each(lambda x: x.transpose(0, 1), *tensors), lambda out: out.transpose(0, 1).contiguous()
    _check_padded(tensors, masks, num_heads, is_batched)
    if masks.is_causal and masks.attn_mask is None and need_weights:
        raise InputError("is_causal=True alone gives no weights: pass attn_mask with it, or need_weights=False.")
    if masks.key_padding_mask is not None and not is_batched:
        masks = masks._replace(key_padding_mask=masks.key_padding_mask.unsqueeze(0))
    return Inputs(*tensors, masks.without_hint(need_weights), need_weights, None, restore, is_batched)


def _check_padded(tensors: _Tensors, masks: Masks, num_heads: int, is_batched: bool) -> None:
    (batch, queries), (key_batch, keys), values = (tuple(x.shape[:2]) for x in tensors)
    if key_batch != batch or values != (key_batch, keys):
        raise InputError(
            "query, key and value must share their batch, and key and value their length, got "
            f"{(batch, queries)}, {(key_batch, keys)} and {values} (batch, length)."
        )
    padding_shapes: list[tuple[int, ...]] = [(batch, keys) if is_batched else (keys,)]
    attn_shapes: list[tuple[int, ...]] = [(queries, keys), (batch * num_heads, queries, keys)]
    for name, shapes in (("key_padding_mask", padding_shapes), ("attn_mask", attn_shapes)):
        mask = getattr(masks, name)
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(f"{name} must be a tensor of booleans or floating-point numbers, got {got}.")
        if mask.shape not in shapes:
            raise InputError(f"{name} must be {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.")


def _check_widths(tensors: _Tensors, embed_dims: tuple[int, int, int], error: type[ValueError]) -> None:
    for i, width in enumerate(embed_dims):
        if i and tensors[i] is tensors[0] and width == embed_dims[0]:
            continue  # self-attention
        if len(shape := tensors[i].shape) < 2 or shape[-1] != width:
            raise error(f"{_NAMES[i]} must have {width} features in its last dimension, got {tuple(shape)}.")


_Packed = tuple[_Tensors, SequenceLayout, SequenceLayout, Callable[[Tensor], Any]]


def _pack_nested(tensors: _Tensors, are_nested: list[bool]) -> _Packed:
    if not all(are_nested):
        plain = are_nested.index(False)
        raise ValueError(
            "query, key and value must all be NestedTensors (B, j, E); "
            f"{_NAMES[plain]} is a plain tensor {tuple(tensors[plain].shape)}."
        )
    q, k, v = nested.unwrap_each(query=tensors[0], key=tensors[1], value=tensors[2])
    for name, rows in zip(_NAMES, (q.values, k.values, v.values), strict=True):
        if rows.dim() != 2:
            raise ValueError(
                f"query, key and value must all be NestedTensors (B, j, E); {name} has {rows.dim() + 1} dims."
            )
    _check_values(k.layout, v.layout)
    return (q.values, k.values, v.values), q.layout, k.layout, q.rewrap


def _pack_lists(query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor]) -> _Packed:
    packed: dict[int, tuple[Tensor, SequenceLayout]] = {}
    for name, xs in zip(_NAMES, (query, key, value), strict=True):
        fits = isinstance(xs, (list, tuple)) and all(isinstance(x, Tensor) and x.dim() == 2 for x in xs)
        if not fits or len(xs) != len(query) or not len(xs):
            got = f"{len(xs)} of them" if isinstance(xs, (list, tuple)) else type(xs).__name__
            raise ValueError(
                f"query, key and value must be lists of as many tensors (Li, E), one or more; {name} is {got}."
            )
        kinds = {(x.shape[1], x.dtype, x.device) for x in xs}
        if len(kinds) > 1:
            got = "; ".join(f"{width}, {dtype}, {device}" for width, dtype, device in kinds)
            raise ValueError(f"the tensors of {name} must share their width, dtype and device, got {got}.")
        if id(xs) not in packed:
            lengths = [len(x) for x in xs]
            packed[id(xs)] = torch.cat(list(xs)), SequenceLayout.from_lengths(lengths, device=xs[0].device)
    (q, layout), (k, key_layout), (v, value_layout) = (packed[id(xs)] for xs in (query, key, value))
    _check_values(key_layout, value_layout)
    key_layout = layout if layout.same_lengths(key_layout) else key_layout
    bounds = layout.host_offsets.tolist()
    # not split, whose outputs can't be changed in place
    return (q, k, v), layout, key_layout, lambda out: [out[begin:end] for begin, end in itertools.pairwise(bounds)]


def _check_values(key_layout: SequenceLayout, value_layout: SequenceLayout) -> None:
    if not key_layout.same_lengths(value_layout):
        raise ValueError("key and value must have the same lengths.")


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _each(function: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> _Tensors:
    """Apply ``function`` to each input, once for the same object."""
    q = function(query)
    k = q if key is query else function(key)
    return q, k, q if value is query else k if value is key else function(value)


def _full(padded: Tensor) -> SequenceLayout:
    """The layout of a batch (B, L, E) without padding."""
    return SequenceLayout.from_lengths([padded.shape[1]] * padded.shape[0], device=padded.device)
