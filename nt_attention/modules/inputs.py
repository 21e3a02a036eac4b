"""Converts the inputs of a `VarlenMultiheadAttention`, in any form, to `Inputs`, and converts outputs back.

Dimensions: B sequences, j their ragged length, L and S padded lengths of queries and keys, T tokens, E embed dim, H
query heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import can_be_read, is_tracing, refuse_tracers
from ..kernels.call import MaskMod, ScoreMod
from ..layouts.known import SequenceLayout, Unwrapped, layout_of_padding, unwrap_each
from ..layouts.protocol import Layout, Sharded
from ..torch_private import without_torch_function

_NAMES = ("query", "key", "value")
_Tensors = tuple[Tensor, Tensor, Tensor]


class InputError(ValueError, AssertionError, RuntimeError):
    """Padded inputs do not match. nn.MultiheadAttention raises one of the three base types in these cases."""


class Masks(NamedTuple):
    """The masks of a call.

    Attributes:
        is_causal, attn_mask, mask_mod, score_mod: as the caller passed them.
        key_padding_mask: as the caller passed it. In `Inputs` it is always (B, S).
        counts_added_keys: whether causality also masks added keys, at positions after the keys of the sequence.
    """

    is_causal: bool = False
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | Sequence[Tensor] | None = None
    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    counts_added_keys: bool = False

    def without_hint(self, need_weights: bool) -> Masks:
        """Drop `is_causal` or `attn_mask` if both are given: `is_causal` is then a hint that the mask is causal."""
        if not self.is_causal or self.attn_mask is None:
            return self
        if self.hint_replaces_mask(need_weights):
            return self._replace(attn_mask=None, counts_added_keys=True)
        return self._replace(is_causal=False)

    def hint_replaces_mask(self, need_weights: bool) -> bool:
        """Whether `attn_mask` is ignored, as in nn.MultiheadAttention, because `is_causal` says what it is."""
        both = self.is_causal and self.attn_mask is not None
        return both and not need_weights and self.key_padding_mask is None


class Inputs(NamedTuple):
    """The inputs of one call, after checks.

    Attributes:
        query, key, value: packed (T, E) with `layouts`, or padded (B, L, E) without. If the caller passed one object
            twice, these are one object too.
        masks: the masks of the call.
        need_weights: whether to return attention weights.
        layouts: the sequences of packed queries, and those of packed keys and values. None for padded inputs. If both
            are a `ShardedLayout`, T counts the tokens of this rank.
        restore: converts outputs (T, E) or (B, L, E) to the caller's form. None if no conversion is needed.
        is_batched: False for an unbatched padded query (L, E). Its weights have no batch dimension.
        is_sharded: whether the tokens are divided over ranks.
        in_graph: whether packed inputs become a part of a graph. This is asked once in each call, in `read_inputs`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    need_weights: bool
    layouts: tuple[Layout, Layout] | tuple[Any, Any] | None = None
    restore: Callable[[Tensor], Any] | None = None
    is_batched: bool = True
    is_sharded: bool = False
    in_graph: bool = False

    @property
    def is_self_attention(self) -> bool:
        """Whether padded query, key and value are one tensor, or equal views of it. Module hooks may create views."""
        query, *others = self[:3]
        return all(x is query or (can_be_read(x) and _same_memory(x, query)) for x in others)

    @property
    def positions(self) -> tuple[Layout, Layout] | tuple[Any, Any]:
        """The positions of queries and keys: layouts if packed, else tensors (B or 1, L) and (B or 1, S).

        In padded self-attention, positions only count tokens, as in packed inputs.
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

    def pack(self) -> Inputs | None:
        """Pack padded inputs, whose only masks are `is_causal` and a `key_padding_mask`. Syncs once for that.

        None if `key_padding_mask` has numbers other than 0 and −inf.
        """
        (query, key, _), padding = self[:3], self.masks.key_padding_mask
        key_layout = layout_without_padding(key) if padding is None else layout_of_padding(padding)
        if key_layout is None:
            return None
        layout = key_layout if self.is_self_attention else layout_without_padding(query)
        packed = self._convert(lambda each, x: each.pack(x), layout, key_layout)
        unpack = self.restore or (lambda out: out)
        return Inputs(
            *packed, Masks(self.masks.is_causal), False, (layout, key_layout), lambda out: unpack(layout.pad(out))
        )

    def without_rows_past_end(self) -> Inputs:
        """Replace packed rows that belong to no sequence by 0. Gradients of parameters need it: 0 · NaN is NaN."""
        assert self.layouts is not None
        layout, key_layout = self.layouts
        query, key, value = self[:3]
        are_known = type(layout) is SequenceLayout and type(key_layout) is SequenceLayout and not self.in_graph
        if are_known and query.shape[0] == layout.total and key.shape[0] == value.shape[0] == key_layout.total:
            return self
        query, key, value = self._convert(lambda each, x: each.fill_past_end(x, 0.0), layout, key_layout)
        return self._replace(query=query, key=key, value=value)

    def _convert(
        self, function: Callable[[Layout, Tensor], Tensor], layout: Layout, key_layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply `function` to query, key and value. Inputs that are one object stay one object."""
        query, key, value = self[:3]
        q = function(layout, query)
        k = q if key is query and key_layout is layout else function(key_layout, key)
        v = q if value is query and key_layout is layout else k if value is key else function(key_layout, value)
        return q, k, v

    def convert_back(self, out: Tensor, weights: Tensor | None, average: bool) -> tuple[Any, Tensor | None]:
        """Convert `out` (T, E) or (B, L, E) to the caller's form, and average weights (B, H, L, S) if `average`."""
        if weights is not None:
            weights = weights.mean(1) if average else weights
            weights = weights if self.is_batched else weights.squeeze(0)
        if self.layouts is not None and not self.is_sharded:
            out = self.layouts[0].fill_past_end(out, 0.0)
        return out if self.restore is None else self.restore(out), weights


def read_inputs(
    query: Any,
    key: Any,
    value: Any,
    layout: Any,
    key_layout: Any,
    masks: Masks,
    need_weights: bool | None,
    embed_dims: tuple[int, int, int],
    num_heads: int,
    batch_first: bool,
) -> Inputs:
    """Check inputs of any form and convert them. For the arguments see `VarlenMultiheadAttention.forward`.

    `embed_dims` are the embedding dims of query, key and value.

    Raises:
        ValueError: the inputs do not match; an `InputError` if they are padded.
        TypeError: query, key and value are neither tensors nor lists.
    """
    in_lists = isinstance(query, (list, tuple))
    if in_lists:
        refuse_tracers()
    elif not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        name, other = next(x for x in zip(_NAMES, (query, key, value), strict=True) if not isinstance(x[1], Tensor))
        raise TypeError(f"query, key and value must be tensors or lists of tensors; {name} is {type(other).__name__}.")
    with without_torch_function():  # which takes 20 µs for an attribute of a NestedTensor
        is_nested = not in_lists and (query.is_nested or key.is_nested or value.is_nested)
    if not in_lists and layout is None and not is_nested:
        tensors = query, key, value
        return _from_dense(tensors, masks, need_weights is not False, embed_dims, num_heads, batch_first)
    if masks.key_padding_mask is not None:
        raise ValueError("ragged inputs have no padding: leave out key_padding_mask.")
    if isinstance(layout, Sharded):
        return _from_sharded(query, key, value, layout, key_layout, masks, need_weights, embed_dims)
    if layout is not None and (in_lists or is_nested):
        forms = "lists of tensors" if in_lists else "NestedTensors"
        raise ValueError(f"{forms} have their own layout: leave out layout= and key_layout=.")
    packed, restore, in_graph = None, None, False
    if in_lists:
        packed = _pack_lists(query, key, value)
    elif layout is None:
        packed = _unwrap(query, key, value)
        in_graph = type(packed[0].layout) is not SequenceLayout
    else:
        in_graph = is_tracing()
        key_layout = None if key_layout is layout else key_layout
        layout = SequenceLayout.require(layout, "layout")
        key_layout = layout if key_layout is None else SequenceLayout.require(key_layout, "key_layout")
    if packed is not None:
        (query, layout, restore), (key, key_layout, _), (value, *_) = packed
    _check_widths((query, key, value), embed_dims, ValueError)
    if packed is None:  # packed tensors; other forms have been checked
        _check_packed(query, key, value)
        layout.check_rows(query, "query")
        if key is not query or value is not query or key_layout is not layout:
            key_layout.check_keys(key, value)
    need_weights = bool(need_weights)
    masks = masks if masks.attn_mask is None else masks.without_hint(need_weights)
    return Inputs(query, key, value, masks, need_weights, (layout, key_layout), restore, in_graph=in_graph)


def _from_sharded(
    query: Any,
    key: Any,
    value: Any,
    sharded: Any,
    key_sharded: Any | None,
    masks: Masks,
    need_weights: bool | None,
    embed_dims: tuple[int, int, int],
) -> Inputs:
    """Check the tokens of this rank, which are in one of the forms of `ShardedLayout.unwrap`, and pack them."""
    if need_weights:
        raise ValueError("a ShardedLayout can't return attention weights: pass need_weights=False.")
    if masks.attn_mask is not None:
        raise ValueError("attn_mask is not supported with a ShardedLayout: pass is_causal, mask_mod or score_mod.")
    if isinstance(query, (list, tuple)):
        raise ValueError("lists of tensors are not supported with a ShardedLayout: pass packed tensors of this rank.")
    (query, key, value), restore = sharded.unwrap(query, key, value, key_sharded)
    _check_packed(query, key, value)
    _check_widths((query, key, value), embed_dims, ValueError)
    layouts = (sharded, sharded if key_sharded is None else key_sharded)
    return Inputs(query, key, value, masks, False, layouts, restore, is_sharded=True)


def _from_dense(
    tensors: _Tensors,
    masks: Masks,
    need_weights: bool,
    embed_dims: tuple[int, int, int],
    num_heads: int,
    batch_first: bool,
) -> Inputs:
    """Check padded inputs as nn.MultiheadAttention does, and convert them to (B, L, E)."""
    if masks.mask_mod or masks.score_mod:
        raise ValueError("mask_mod and score_mod are only for ragged inputs: pass attn_mask for padded inputs.")
    query, key, value = tensors
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise InputError(
            "query, key and value must all be (L, E) or all be three-dimensional, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    _check_widths(tensors, embed_dims, InputError)
    restore: Callable[[Tensor], Tensor] | None = None
    is_batched = query.dim() == 3
    if not is_batched:
        tensors, restore = _each(lambda x: x.unsqueeze(0), *tensors), lambda out: out.squeeze(0)
    elif not batch_first:
        tensors, restore = _each(lambda x: x.transpose(0, 1), *tensors), lambda out: out.transpose(0, 1).contiguous()
    _check_padded(tensors, masks, num_heads, is_batched, masks.hint_replaces_mask(need_weights))
    if masks.is_causal and masks.attn_mask is None and need_weights:
        raise InputError("is_causal=True alone can't return weights: pass attn_mask as well, or need_weights=False.")
    if masks.key_padding_mask is not None and not is_batched:
        masks = masks._replace(key_padding_mask=masks.key_padding_mask.unsqueeze(0))
    return Inputs(*tensors, masks.without_hint(need_weights), need_weights, None, restore, is_batched)


def _check_padded(tensors: _Tensors, masks: Masks, num_heads: int, is_batched: bool, ignores_attn_mask: bool) -> None:
    """Check shapes and dtypes. Of a mask that is ignored only the number of dimensions, as nn.MultiheadAttention."""
    (batch, queries), (key_batch, keys), values = (tuple(x.shape[:2]) for x in tensors)
    if key_batch != batch or values != (key_batch, keys):
        raise InputError(
            "query, key and value must have one batch size, and key and value one length, got (batch, length) "
            f"{(batch, queries)}, {(key_batch, keys)} and {values}."
        )
    padding_shapes: list[tuple[int, ...]] = [(batch, keys) if is_batched else (keys,)]
    attn_shapes: list[tuple[int, ...]] = [(queries, keys), (batch * num_heads, queries, keys)]
    for name, shapes in (("key_padding_mask", padding_shapes), ("attn_mask", attn_shapes)):
        mask = getattr(masks, name)
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(f"{name} must be a boolean or floating-point tensor, got {got}.")
        if name == "attn_mask" and ignores_attn_mask and mask.dim() in ((2, 3) if is_batched else (2,)):
            continue
        if mask.shape not in shapes:
            raise InputError(f"{name} must be {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.")


def _check_packed(*tensors: Tensor) -> None:
    for name, x in zip(_NAMES, tensors, strict=True):
        if x.dim() != 2:
            raise ValueError(f"packed {name} must be (tokens, features), got {tuple(x.shape)}.")


def _check_widths(tensors: _Tensors, embed_dims: tuple[int, int, int], error: type[ValueError]) -> None:
    for i, width in enumerate(embed_dims):
        if i and tensors[i] is tensors[0] and width == embed_dims[0]:
            continue  # self-attention
        if len(shape := tensors[i].shape) < 2 or shape[-1] != width:
            raise error(f"{_NAMES[i]} must have {width} features in its last dimension, got {tuple(shape)}.")


def _unwrap(*tensors: Tensor) -> tuple[Unwrapped, ...]:
    with without_torch_function():
        are_nested = tensors[0].is_nested, tensors[1].is_nested, tensors[2].is_nested
    if not all(are_nested):
        plain = are_nested.index(False)
        raise ValueError(
            f"query, key and value must all be NestedTensors (B, j, E); {_NAMES[plain]} is a plain tensor "
            f"{tuple(tensors[plain].shape)}."
        )
    q, k, v = unwrap_each(query=tensors[0], key=tensors[1], value=tensors[2])
    for name, rows in zip(_NAMES, (q.values, k.values, v.values), strict=True):
        if rows.dim() != 2:
            raise ValueError(
                f"query, key and value must all be NestedTensors (B, j, E); {name} has {rows.dim() + 1} dims."
            )
    if k.layout is not v.layout:
        _check_values(k.layout, v.layout)
    return q, k, v


def _pack_lists(query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Unwrapped, ...]:
    packed: dict[int, tuple[Tensor, Layout]] = {}
    for name, xs in zip(_NAMES, (query, key, value), strict=True):
        fits = isinstance(xs, (list, tuple)) and all(isinstance(x, Tensor) and x.dim() == 2 for x in xs)
        if not fits or len(xs) != len(query) or not len(xs):
            got = f"a list of {len(xs)}" if isinstance(xs, (list, tuple)) else type(xs).__name__
            raise ValueError(
                "query, key and value must be lists of the same number of tensors (Li, E), at least one, but "
                f"{name} is {got}."
            )
        kinds = {(x.shape[1], x.dtype, x.device) for x in xs}
        if len(kinds) > 1:
            got = "; ".join(f"{width}, {dtype}, {device}" for width, dtype, device in kinds)
            raise ValueError(f"the tensors of {name} must have one width, dtype and device, got {got}.")
        if id(xs) not in packed:
            lengths = [len(x) for x in xs]
            packed[id(xs)] = torch.cat(list(xs)), SequenceLayout.from_lengths(lengths, device=xs[0].device)
    (q, layout), (k, key_layout), (v, value_layout) = (packed[id(xs)] for xs in (query, key, value))
    _check_values(key_layout, value_layout)
    key_layout = layout if layout.same_lengths(key_layout) else key_layout
    bounds = layout.host.tolist()
    # Not split(), because its outputs can't be changed in place.
    split: Any = lambda out: [out[begin:end] for begin, end in itertools.pairwise(bounds)]  # noqa: E731
    return Unwrapped(q, layout, split), Unwrapped(k, key_layout, split), Unwrapped(v, key_layout, split)


def _check_values(key_layout: Layout, value_layout: Layout) -> None:
    if not key_layout.same_lengths(value_layout):
        raise ValueError("key and value must have the same lengths.")


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _each(function: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> _Tensors:
    """Apply `function` to each input, but only once to the same object."""
    q = function(query)
    k = q if key is query else function(key)
    return q, k, q if value is query else k if value is key else function(value)


def layout_without_padding(padded: Tensor) -> Layout:
    """The layout of a batch (B, L, E) in which every position is a token."""
    return SequenceLayout.from_lengths([padded.shape[1]] * padded.shape[0], device=padded.device)
