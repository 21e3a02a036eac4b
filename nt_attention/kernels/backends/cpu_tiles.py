"""How the backend `cpu` divides a batch into tiles: some queries of one sequence, with all keys that they see.

- Without a mask, or with upper left causality, which ATen's kernel supports, a tile is a sequence.
- With any other mask, or with ALiBi or a relative bias, a tile has at most `MASKED_ROWS` queries. So the cost of a
  window is tokens × window.
- If scores or masks are in memory, tiles have few scores, and so has each call of several tiles.
- Short tiles of equal shape are gathered into one call. Each long tile runs in a call of its own, on views.
- With keys in a pool, a long tile is a view too if its keys are in one piece. Otherwise its keys are gathered.

Dimensions: T query tokens, S key tokens, H heads, n tiles of a call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...layouts.protocol import Layout
from ..call import AttentionSpec
from ..mods import Positions

MAX_GATHERED = 24  # rows and keys; one call of the kernel for each longer tile is faster than the copies
MAX_GATHERED_WITH_RULES = 64  # the same for tiles with masks, biases or changed scores, which cost more for each call
MASKED_ROWS = 128  # queries in a masked tile; limits the size of masks and the computed pairs outside of windows
MOST_SCORES = 2**20  # of all heads in a call whose scores or masks are in memory, unless `FEW_ROWS` queries have more
FEW_ROWS = 16


class Shape(NamedTuple):
    """The shape of a tile. Tiles of the same shape can run in one call."""

    rows: int
    keys: int
    diagonal: int  # query i of the tile has the position of its key i + diagonal; 0 if there is no mask
    causal: bool  # whether the kernel applies the causal mask


@dataclass(frozen=True)
class Rows:
    """The packed rows of the n tiles of a call: gathered by index, or a view if there is one tile."""

    begin: int
    length: int
    index: Tensor | None = None  # (n·length,)

    def gather(self, heads_first: Tensor) -> Tensor:
        """The tiles (n, H, length, …) of packed rows (1, H, T, …)."""
        if self.index is None:
            return heads_first.narrow(2, self.begin, self.length)
        packed = heads_first[0].transpose(0, 1)
        return packed.index_select(0, self.index).view(-1, self.length, *packed.shape[1:]).transpose(1, 2)

    def scatter(self, heads_first: Tensor, tiles: Tensor, *, add: bool = False) -> None:
        """Write tiles to packed rows, or add them."""
        if self.index is None:
            target = heads_first.narrow(2, self.begin, self.length)
            target.add_(tiles) if add else target.copy_(tiles)
        else:
            packed, tokens = heads_first[0].transpose(0, 1), tiles.transpose(1, 2).flatten(0, 1)
            packed.index_add_(0, self.index, tokens) if add else packed.index_copy_(0, self.index, tokens)


@dataclass(frozen=True)
class TileGroup:
    """n tiles of the same shape, which run in one call of the kernel."""

    shape: Shape
    sequences: Tensor  # (n,)
    first_query: Tensor  # (n,) the index in its sequence
    first_key: Tensor  # (n,)
    queries: Rows
    keys: Rows

    def positions(self) -> Positions:
        """For score_mod and mask_mod."""
        rows, keys = (torch.arange(length, device="cpu") for length in self.shape[:2])
        return Positions(self.sequences, self.first_query[:, None] + rows, self.first_key[:, None] + keys)


@dataclass(frozen=True)
class TilePlan:
    """The calls of the kernel for one batch and mask."""

    calls: list[TileGroup]
    fully_masked: list[slice]  # rows that see no key
    all_keys_once: bool  # whether every key is in exactly one tile, so that gradients are written, not added


@dataclass(frozen=True)
class Tiling:
    """What a plan depends on besides the lengths."""

    spec: AttentionSpec  # without mods, because a cache would keep these functions alive
    few_scores: bool  # whether a call has at most `MOST_SCORES`, because all of its scores or masks are in memory
    whole: bool  # whether the kernel can run a sequence without a mask, if its window needs none

    @classmethod
    def of(cls, spec: AttentionSpec) -> Tiling:
        few_scores = changes_scores(spec) or spec.mask_mod is not None
        without_mods = replace(spec, score_mod=None, mask_mod=None) if spec.has_mods else spec
        return cls(without_mods, few_scores, not (few_scores or spec.has_bias))

    def rows(self, keys: int) -> int:
        """The queries of a tile with this many keys."""
        if not self.few_scores:
            return MASKED_ROWS
        return max(FEW_ROWS, min(MASKED_ROWS, MOST_SCORES // max(1, keys * self.spec.num_heads)))

    def batches(self, shape: Shape, group: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """The tiles of each call."""
        is_plain = self.whole and (shape.causal or self.spec.window.is_open)
        if max(shape.rows, shape.keys) > (MAX_GATHERED if is_plain else MAX_GATHERED_WITH_RULES):
            return [[tile] for tile in group]
        if not self.few_scores:
            return [group]
        most = max(1, MOST_SCORES // (shape.rows * shape.keys * self.spec.num_heads))
        return [group[at : at + most] for at in range(0, len(group), most)]


def changes_scores(spec: AttentionSpec) -> bool:
    """Whether weights are dropped or scores are not linear in query · key, which ATen's kernel does not support."""
    return bool(spec.nonlinear or spec.dropout_p)


def make_plan(layout: Layout, key_layout: Layout, spec: AttentionSpec) -> TilePlan:
    """The plan for these lengths and this mask, cached with the layout for all layers of a model."""
    tiling = Tiling.of(spec)
    return layout.cached(("cpu plan", tiling), lambda: uncached_plan(layout, key_layout, tiling), key_layout)


def uncached_plan(layout: Layout, key_layout: Layout, tiling: Tiling, pool_rows: Tensor | None = None) -> TilePlan:
    """`pool_rows`: (S,) the row of each key, if keys are not packed."""
    starts, key_starts = layout.host.tolist(), key_layout.host.tolist()
    groups: dict[Shape, list[tuple[int, ...]]] = defaultdict(list)
    fully_masked: list[slice] = []
    keys_used, most_tiles = 0, 0
    for b in range(layout.batch_size):
        begin, key_begin = starts[b], key_starts[b]
        tiles = _tiles(starts[b + 1] - begin, key_starts[b + 1] - key_begin, tiling)
        most_tiles = max(most_tiles, len(tiles))
        for query, key, shape in tiles:
            if shape.keys:
                groups[shape].append((b, query, key, begin + query, key_begin + key))
                keys_used += shape.keys
            else:
                fully_masked.append(slice(begin + query, begin + query + shape.rows))
    calls = []
    for shape, group in groups.items():
        for batch in tiling.batches(shape, group):
            sequences, first, first_key, begins, key_begins = torch.tensor(batch, device="cpu").unbind(1)
            keys = _rows(key_begins, shape.keys)
            keys = keys if pool_rows is None else _rows_in_pool(keys, pool_rows)
            calls.append(TileGroup(shape, sequences, first, first_key, _rows(begins, shape.rows), keys))
    return TilePlan(calls, fully_masked, most_tiles <= 1 and keys_used == key_layout.total)


def _rows(begins: Tensor, length: int) -> Rows:
    index = (begins[:, None] + torch.arange(length, device="cpu")).flatten() if len(begins) > 1 else None
    return Rows(int(begins[0]), length, index)


def _rows_in_pool(keys: Rows, pool_rows: Tensor) -> Rows:
    """The rows in a pool of packed keys, whose rows in the pool are `pool_rows` (S,)."""
    index = pool_rows.narrow(0, keys.begin, keys.length) if keys.index is None else pool_rows[keys.index]
    if keys.index is None and bool((index.diff() == 1).all()):
        return Rows(int(index[0]), keys.length)
    return Rows(0, keys.length, index)


def _tiles(queries: int, keys: int, tiling: Tiling) -> list[tuple[int, int, Shape]]:
    """The tiles of one sequence: (first query, first key, shape) of each."""
    if not queries:
        return []
    spec = tiling.spec
    shift = spec.shift(queries, keys)
    # the kernel masks before it scales, so a scale of 0 or less turns −inf into NaN or inf
    kernel_causal = spec.window.is_causal and shift == 0 and spec.has_positive_scale
    if not keys or (tiling.whole and (spec.window.is_open or kernel_causal)):
        return [(0, 0, Shape(queries, keys, 0, causal=not spec.window.is_open))]
    left, right = spec.window
    tiles, most_rows = [], tiling.rows(int(min(keys, left + right + MASKED_ROWS)))
    for first in range(0, queries, most_rows):
        rows = min(most_rows, queries - first)
        low = int(max(0, min(keys, first + shift - left)))
        high = int(max(low, min(keys, first + rows + shift + right)))
        tiles.append((first, low, Shape(rows, high - low, first + shift - low, causal=False)))
    return tiles
