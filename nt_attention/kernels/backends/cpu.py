"""Packed attention on the CPU, over ATen's flash kernel.

That kernel (``aten::_scaled_dot_product_flash_attention_for_cpu``) takes a dense (n, H, L, D) batch. So the packed rows
are cut into tiles, each some queries of one sequence with all the keys that they see, and nothing is padded:

- without a mask, or causal from the upper left, which the kernel knows, a tile is a sequence;
- with any other mask a tile is at most ``MASKED_ROWS`` queries, with only the keys that they see, so a window costs
  tokens × window, and interior tiles share one mask;
- short tiles of equal shape are gathered into one call, long ones run where they lie.

Its gaps are closed here: it dies (SIGFPE) on a tile without rows or keys, and gives lse 0 where a row is fully masked
or has NaN for all its scores.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import SequenceLayout
from ..backend import COMMON, Backend, BackwardInputs, Gradients, HeadDims
from ..call import AttentionSpec, Call
from ..masks import alibi_bias, distances

GATHER_UP_TO = 64  # rows and keys; from about 128 on, one call a tile is as fast and copies nothing
MASKED_ROWS = 128  # queries in a masked tile: bounds the mask, and what a window computes in vain

_run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_run_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Shape(NamedTuple):
    """What tiles must share to run in one call."""

    rows: int
    keys: int
    diagonal: int  # query i of the tile stands across from key i + diagonal; 0 where nothing depends on it
    causal: bool  # the kernel's own causal path


@dataclass(frozen=True)
class Rows:
    """Where the n tiles of a call stand in the packed rows: gathered by index, or one tile in its place."""

    begin: int
    length: int
    index: Tensor | None = None  # (n·length,)

    def take(self, heads_first: Tensor) -> Tensor:
        """(1, H, T, …) to the tiles (n, H, length, …)."""
        if self.index is None:
            return heads_first.narrow(2, self.begin, self.length)
        packed = heads_first[0].transpose(0, 1)
        return packed.index_select(0, self.index).view(-1, self.length, *packed.shape[1:]).transpose(1, 2)

    def give(self, heads_first: Tensor, tiles: Tensor, *, add: bool = False) -> None:
        """Write the tiles back, or add them to what is there."""
        if self.index is None:
            place = heads_first.narrow(2, self.begin, self.length)
            place.add_(tiles) if add else place.copy_(tiles)
        else:
            packed, tokens = heads_first[0].transpose(0, 1), tiles.transpose(1, 2).flatten(0, 1)
            packed.index_add_(0, self.index, tokens) if add else packed.index_copy_(0, self.index, tokens)


@dataclass(frozen=True)
class Tiles:
    """n tiles of one shape, which run in one call of the kernel."""

    shape: Shape
    sequences: Tensor  # (n,)
    queries: Rows
    keys: Rows


@dataclass(frozen=True)
class Plan:
    calls: list[Tiles]
    fully_masked: list[slice]  # rows that see no key
    all_keys_once: bool  # whether every key is in just one tile, so that its gradient is written, not summed


def make_plan(layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec) -> Plan:
    """The calls for these lengths and this mask; cached with the layout, so a second layer does not plan again."""
    key = ("cpu plan", spec.window, spec.causal_alignment, spec.alibi, spec.has_positive_scale)
    return layout.cached(key, lambda: _make_plan(layout, key_layout, spec), key_layout)


def _make_plan(layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec) -> Plan:
    starts, key_starts = layout.host_offsets.tolist(), key_layout.host_offsets.tolist()
    groups: dict[Shape, list[tuple[int, int, int]]] = defaultdict(list)
    fully_masked: list[slice] = []
    keys_used, most_tiles = 0, 0
    for b in range(layout.batch_size):
        begin, key_begin = starts[b], key_starts[b]
        tiles = _tiles(starts[b + 1] - begin, key_starts[b + 1] - key_begin, spec)
        most_tiles = max(most_tiles, len(tiles))
        for first, first_key, shape in tiles:
            if shape.keys:
                groups[shape].append((b, begin + first, key_begin + first_key))
                keys_used += shape.keys
            else:
                fully_masked.append(slice(begin + first, begin + first + shape.rows))
    calls = []
    for shape, places in groups.items():
        batches = [places] if max(shape.rows, shape.keys) <= GATHER_UP_TO else [[place] for place in places]
        for batch in batches:
            sequences, begins, key_begins = torch.tensor(batch, device="cpu").unbind(1)
            calls.append(Tiles(shape, sequences, _rows(begins, shape.rows), _rows(key_begins, shape.keys)))
    return Plan(calls, fully_masked, all_keys_once=most_tiles <= 1 and keys_used == key_layout.total)


def _rows(begins: Tensor, length: int) -> Rows:
    index = (begins[:, None] + torch.arange(length, device="cpu")).flatten() if len(begins) > 1 else None
    return Rows(int(begins[0]), length, index)


def _tiles(queries: int, keys: int, spec: AttentionSpec) -> list[tuple[int, int, Shape]]:
    """The tiles of one sequence: first query, first key, shape."""
    if not queries:
        return []
    shift = spec.shift(queries, keys)
    # the kernel masks before it scales, so a scale of 0 or below turns its −inf into NaN or inf
    kernel_causal = spec.window.is_causal and shift == 0 and spec.has_positive_scale
    if not keys or (not spec.alibi and (spec.window.is_open or kernel_causal)):
        return [(0, 0, Shape(queries, keys, 0, causal=not spec.window.is_open))]
    left, right = spec.window
    tiles = []
    for first in range(0, queries, MASKED_ROWS):
        rows = min(MASKED_ROWS, queries - first)
        low = int(max(0, min(keys, first + shift - left)))
        high = int(max(low, min(keys, first + rows + shift + right)))
        tiles.append((first, low, Shape(rows, high - low, first + shift - low, causal=False)))
    return tiles


def _mask(tiles: Tiles, alibi_slopes: Tensor | None, spec: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
    """The bias (n or 1, H or 1, rows, keys) to add to the scores, and (rows,) True in fully masked rows."""
    rows, keys, diagonal, causal = tiles.shape
    if causal:
        return None, None
    visible = spec.window.mask(rows, keys, diagonal, spec.device)
    # the kernel takes a float32 bias beside 16-bit inputs, where a 16-bit one would round ALiBi
    dtype = torch.promote_types(spec.dtype, torch.float32)
    bias = None
    if alibi_slopes is not None:
        slopes = alibi_slopes[tiles.sequences] if alibi_slopes.dim() == 2 else alibi_slopes[None]
        bias = alibi_bias(distances(rows, keys, diagonal, spec.device), slopes.to(dtype))
    if visible is None:
        return bias, None
    if bias is None:
        bias = torch.zeros(1, 1, rows, keys, dtype=dtype, device="cpu")
    masked = ~visible.any(1)
    return bias.masked_fill(~visible, -torch.inf), masked if bool(masked.any()) else None


def _heads_first(packed: Tensor) -> Tensor:
    """(T, H, …) as the kernel wants it, (1, H, T, …); a view."""
    return packed.transpose(0, 1).unsqueeze(0)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    layout, key_layout, alibi_slopes, spec, _ = call
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[1::-1], dtype=torch.promote_types(spec.dtype, torch.float32)).T
    plan = make_plan(layout, key_layout, spec)
    for rows in plan.fully_masked:
        out[rows], lse[rows] = 0, -torch.inf
    query, key, value, to_out, to_lse = map(_heads_first, (query, key, value, out, lse))
    has_mask = alibi_slopes is not None or not spec.window.is_open
    for tiles in plan.calls:
        bias, masked = _mask(tiles, alibi_slopes, spec) if has_mask else (None, None)
        q, k, v = tiles.queries.take(query), tiles.keys.take(key), tiles.keys.take(value)
        tiles_out, tiles_lse = _run(q, k, v, 0.0, tiles.shape.causal, attn_mask=bias, scale=spec.scale)
        if masked is not None:
            tiles_lse = tiles_lse.masked_fill(masked, -torch.inf)
        tiles.queries.give(to_out, tiles_out)
        tiles.queries.give(to_lse, tiles_lse)
    _spread_nan(out, lse, query)
    return out, lse


def _spread_nan(out: Tensor, lse: Tensor, query: Tensor) -> None:
    """Write NaN where a query (1, H, T, D) holds NaN: the kernel takes such a row for a fully masked one.

    It then gives an output of 0 and an lse of 0, which is rare enough in other rows to look there alone.
    """
    if int(lse.count_nonzero()) == lse.numel():
        return
    wrong = (lse == 0) & query[0].isnan().any(-1).transpose(0, 1)
    out.masked_fill_(wrong.unsqueeze(-1), torch.nan)
    lse.masked_fill_(wrong, torch.nan)


def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    grad, _, out, lse, _ = saved
    layout, key_layout, alibi_slopes, spec, _ = call
    # The kernel's own backward on slices: autograd through slices would fill a whole gradient with zeros for each.
    plan = make_plan(layout, key_layout, spec)
    grad_query = torch.empty_like(query)
    fresh = torch.empty_like if plan.all_keys_once else torch.zeros_like
    grad_key, grad_value = fresh(key), fresh(value)
    for rows in plan.fully_masked:
        grad_query[rows] = 0
    grad, query, key, value, out, lse = map(_heads_first, (grad, query, key, value, out, lse))
    to_query, to_key, to_value = map(_heads_first, (grad_query, grad_key, grad_value))
    has_mask = alibi_slopes is not None or not spec.window.is_open
    for tiles in plan.calls:
        bias, masked = _mask(tiles, alibi_slopes, spec) if has_mask else (None, None)
        q, k, v = tiles.queries.take(query), tiles.keys.take(key), tiles.keys.take(value)
        tiles_grad, tiles_out, tiles_lse = (tiles.queries.take(x) for x in (grad, out, lse))
        if masked is not None:  # the kernel's own mark, with which their weights come out as 0
            tiles_lse = tiles_lse.masked_fill(masked, 0.0)
        dq, dk, dv = _run_backward(
            tiles_grad, q, k, v, tiles_out, tiles_lse, 0.0, tiles.shape.causal, attn_mask=bias, scale=spec.scale
        )
        tiles.queries.give(to_query, dq)
        tiles.keys.give(to_key, dk, add=not plan.all_keys_once)
        tiles.keys.give(to_value, dv, add=not plan.all_keys_once)
    return grad_query, grad_key, grad_value


BACKEND = Backend(
    name="cpu",
    about="ATen's CPU flash kernel over tiles of the packed rows",
    missing=lambda: None,
    forward=forward,
    backward=backward,
    features=COMMON | {"scale ≤ 0", "window", "alibi", "deterministic"},
    device_type="cpu",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    head_dims=HeadDims(equal=True),
)
