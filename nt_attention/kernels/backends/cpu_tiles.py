"""How the backend `cpu` divides a batch into tiles: some queries of one sequence, with all keys that they see.

- Without a mask, or with upper left causality, which ATen's kernel supports, a tile is a sequence.
- With any other mask, or with ALiBi or a relative bias, a tile has at most `MASKED_ROWS` queries. So the cost of a
  window is tokens × window.
- Tiles of like shapes run in one call of the kernel, as each call starts threads, and these may have to wait for a CPU
  that other processes use. Their rows are gathered, for several calls at once. Shorter tiles are padded at their end
  with copies of their last row. So no row of another sequence is read, and mods get valid positions. Padded keys are
  hidden, and results of padded queries are written to a spare row.
- Equal tiles that follow each other, or a long tile, are a view of the packed rows.
- If scores or masks are in memory, tiles have few scores, and so has each call of several tiles.

Dimensions: T query tokens, S key tokens, H heads, n tiles of a call, P gathered rows of some calls.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...layouts.protocol import Layout
from ..call import AttentionSpec
from ..mods import Positions

# The estimated time of a call, in pairs of a query and a key. They were measured on two threads.
PAIRS_OF_ROW = 64  # a query or a key of the kernel
PAIRS_OF_COPY = 64  # the same for each row that is gathered
PAIRS_OF_CALL = 2**20  # a call of the kernel; less on an idle CPU, more on one that other processes use
SCORES_COST = 8  # a pair whose score is in memory takes about so many times as long
MOST_STARTS = 256  # shapes of which a group may begin with; limits the time that a plan takes
MOST_GATHERED = 3 * 2**22  # bytes of a tensor, unless one tile has more; fresh memory for more is slow
MASKED_ROWS = 128  # queries in a masked tile; limits the size of masks and the computed pairs outside of windows
MOST_SCORES = 2**20  # of all heads in a call whose scores or masks are in memory, unless `FEW_ROWS` queries have more
FEW_ROWS = 16

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Shape(NamedTuple):
    """The shape of a tile, or the largest numbers of rows and keys of the tiles of a call."""

    rows: int
    keys: int
    diagonal: int | None  # query i of the tile has the position of its key i + diagonal; None if nothing depends on it
    causal: bool  # whether the kernel applies the causal mask


class Tile(NamedTuple):
    """A tile as the row of a table."""

    sequence: int
    query: int  # the index of the first one in the sequence
    key: int
    query_row: int  # its packed row
    key_row: int
    rows: int
    keys: int


@dataclass(frozen=True)
class Rows:
    """The packed rows of the n tiles of a call."""

    tiles: int
    length: int
    step: int | None  # from one tile to the next, if the tiles are a view; None if they are gathered
    index: Tensor  # (n·length,) the packed rows
    targets: Tensor | None  # (n·length,) the same, but the spare row for padding; None if no rows are padding or shared

    @property
    def gathered(self) -> Tensor:
        """The packed rows that are not a view."""
        return self.index if self.step is None else self.index[:0]

    def of(self, packed: Tensor, gathered: Tensor | None = None) -> Tensor:
        """The tiles (n, H, length, …) of packed rows (T, H, …). `gathered`: the rows of them, if these are at hand."""
        if self.step is not None:
            return self._view(packed).transpose(1, 2)
        rows = packed.index_select(0, self.index) if gathered is None else gathered
        return rows.unflatten(0, (self.tiles, self.length)).transpose(1, 2)

    def write(self, packed: Tensor, tiles: Tensor, *, add: bool = False) -> None:
        """Write tiles to packed rows with a spare row (T + 1, H, …), or add them."""
        tiles = tiles.transpose(1, 2)
        if self.targets is None:
            view = self._view(packed)
            view.add_(tiles) if add else view.copy_(tiles)
        else:
            (packed.index_add_ if add else packed.index_copy_)(0, self.targets, tiles.flatten(0, 1))

    def _view(self, packed: Tensor) -> Tensor:
        assert self.step is not None
        stride, *others = packed.stride()
        size, strides = (self.tiles, self.length, *packed.shape[1:]), (self.step * stride, stride, *others)
        return packed.as_strided(size, strides, packed.storage_offset() + int(self.index[0]) * stride)


@dataclass(frozen=True)
class TileGroup:
    """n tiles of like shapes, which run in one call of the kernel."""

    shape: Shape
    tiles: Tensor  # (n, 7) int64, the table of each `Tile`
    queries: Rows
    keys: Rows
    padded_queries: Tensor | None  # (n, 1, rows) bool; None if there are none
    is_key: Tensor | None  # (n, 1, 1, keys) whether a key is no padding; None if padding is hidden anyhow

    @property
    def sequences(self) -> Tensor:
        """(n,) int64."""
        return self.tiles[:, 0]

    def positions(self) -> Positions:
        """For score_mod and mask_mod. Padding has the position of the last row, of which it is a copy."""
        _, query, key, _, _, rows, keys = self.tiles[:, :, None].unbind(1)
        queries = query + torch.arange(self.shape.rows, device="cpu").minimum(rows - 1)
        return Positions(self.sequences, queries, key + torch.arange(self.shape.keys, device="cpu").minimum(keys - 1))


class Side(NamedTuple):
    """The queries or the keys of some calls."""

    rows: list[Rows]
    gathered: Tensor  # (P,) the packed rows of those that are not views
    sizes: list[int]  # how many of them each call has

    @classmethod
    def of(cls, rows: list[Rows]) -> Side:
        """The side with these rows."""
        gathered = [x.gathered for x in rows]
        return cls(rows, torch.cat(gathered), [len(x) for x in gathered])

    def tiles(self, packed: Tensor) -> list[Tensor]:
        """The tiles (n, H, length, …) of each call, from packed rows (T, H, …)."""
        pieces = packed.index_select(0, self.gathered).split(self.sizes)
        return [rows.of(packed, piece) for rows, piece in zip(self.rows, pieces, strict=True)]


class Part(NamedTuple):
    """Some calls, for which rows are gathered at once."""

    calls: list[TileGroup]
    queries: Side
    keys: Side

    @classmethod
    def of(cls, calls: list[TileGroup]) -> Part:
        return cls(calls, Side.of([x.queries for x in calls]), Side.of([x.keys for x in calls]))

    def tiles(self, queries: list[Tensor], keys: list[Tensor]) -> Iterator[tuple[TileGroup, tuple[Tensor, ...]]]:
        """See `TilePlan.tiles`."""
        tensors = [self.queries.tiles(x) for x in queries] + [self.keys.tiles(x) for x in keys]
        return zip(self.calls, zip(*tensors, strict=True), strict=True)


@dataclass(frozen=True)
class TilePlan:
    """The calls of the kernel for one batch and mask."""

    parts: list[Part]
    fully_masked: list[slice]  # rows that see no key
    all_keys_once: bool  # whether every key is in exactly one tile, so that gradients are written, not added

    def tiles(self, queries: list[Tensor], keys: list[Tensor]) -> Iterator[tuple[TileGroup, tuple[Tensor, ...]]]:
        """Each call with its tiles (n, H, length, …) of packed tensors (T, H, …) of queries and of keys."""
        for part in self.parts:
            yield from part.tiles(queries, keys)


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

    @property
    def most_gathered(self) -> int:
        """How many rows `MOST_GATHERED` bytes are."""
        return MOST_GATHERED // (self.spec.num_heads * self.spec.head_dim * self.spec.dtype.itemsize)

    def rows(self, keys: int) -> int:
        """The queries of a tile with this many keys."""
        if not self.few_scores:
            return MASKED_ROWS
        most = max(FEW_ROWS, MOST_SCORES // max(1, keys * self.spec.num_heads))
        return most if self.spec.window.is_open else min(MASKED_ROWS, most)

    @functools.cached_property
    def price(self) -> int:
        """A call in pairs. That of the backward starts threads several times, and both have the same plan.

        With dropout it is that of a forward without gradients too: the first of a checkpoint draws the same numbers.
        """
        price = PAIRS_OF_CALL // SCORES_COST if changes_scores(self.spec) else PAIRS_OF_CALL
        return price * (2 if self.spec.needs_grad or self.spec.dropout_p else 1)

    def groups(self, tiles: Ints, key_rows: Ints) -> Iterator[Ints]:
        """The indices of the tiles (n, 7) of each call. `key_rows`: (n,) the row of the first key in memory."""
        rows, keys, heads = tiles[:, 5], tiles[:, 6], self.spec.num_heads
        # runs of equal tiles that follow each other are views of the packed rows
        steps = np.diff(key_rows)
        follows = (np.diff(tiles[:, 5:], axis=0) == 0).all(1) & (np.diff(tiles[:, 3]) == rows[1:])
        follows &= (steps == rows[1:]) | (steps == keys[1:])
        loose = []
        for run in np.split(np.arange(len(tiles)), np.flatnonzero(~follows) + 1):
            copied = heads * PAIRS_OF_COPY * int((rows + keys)[run].sum())
            if copied >= self.price:
                yield from self._few(run, int(rows[run[0]]), int(keys[run[0]]))
            else:
                loose.append(run)
        if loose:
            index = np.concatenate(loose)
            for group in self._like(rows[index], keys[index]):
                members = np.sort(index[group])
                yield from self._few(members, int(rows[members].max()), int(keys[members].max()))

    def _few(self, members: Ints, rows: int, keys: int) -> list[Ints]:
        """These tiles in calls of at most `MOST_SCORES`, if that is needed."""
        most = max(1, MOST_SCORES // (rows * keys * self.spec.num_heads)) if self.few_scores else len(members)
        return [members[at : at + most] for at in range(0, len(members), most)]

    def _like(self, rows: Ints, keys: Ints) -> Iterator[Ints]:
        """Groups of tiles with these numbers of rows and keys (n,) that take the least time together."""
        order = np.lexsort((rows, keys))
        rows, keys = rows[order], keys[order]
        begins = np.flatnonzero(np.diff(rows, prepend=-1) | np.diff(keys, prepend=-1))
        begins = begins[:: -(-len(begins) // MOST_STARTS)]
        ends = np.append(begins[1:], len(order))
        # a bias is shared by all tiles of a call, unless a mask that hides padding differs between them
        masks_bias = self.spec.has_bias and self.spec.window.right == math.inf
        least, first = np.append(0.0, np.full(len(begins), np.inf)), np.zeros(len(begins) + 1, np.int64)
        for i, begin in enumerate(begins):
            most_rows, most_keys = np.maximum.accumulate(rows[begin:])[ends[i:] - begin - 1], keys[ends[i:] - 1]
            pairs = most_rows * most_keys * np.where(masks_bias & (most_keys > keys[begin]), 2, 1)
            tile = pairs + (PAIRS_OF_ROW + PAIRS_OF_COPY) * (most_rows + most_keys)
            total = least[i] + self.price + (ends[i:] - begin) * self.spec.num_heads * tile
            better = total < least[i + 1 :]
            least[i + 1 :][better], first[i + 1 :][better] = total[better], i
        at = len(begins)
        while at:
            yield order[begins[first[at]] : ends[at - 1]]
            at = int(first[at])


def changes_scores(spec: AttentionSpec) -> bool:
    """Whether weights are dropped or scores are not linear in query · key, which ATen's kernel does not support."""
    return bool(spec.nonlinear or spec.dropout_p)


def make_plan(layout: Layout, key_layout: Layout, spec: AttentionSpec) -> TilePlan:
    """The plan for these lengths and this mask, cached with the layout for all layers of a model."""
    key = Tiling.of(spec) if spec.has_mods else spec
    return layout.cached(("cpu plan", key), lambda: uncached_plan(layout, key_layout, Tiling.of(spec)), key_layout)


def uncached_plan(layout: Layout, key_layout: Layout, tiling: Tiling, pool_rows: Tensor | None = None) -> TilePlan:
    """`pool_rows`: (S,) the row of each key, if keys are not packed."""
    starts, key_starts = layout.host.tolist(), key_layout.host.tolist()
    classes: dict[tuple[int | None, bool], list[Tile]] = defaultdict(list)
    fully_masked: list[slice] = []
    keys_used, most_tiles = 0, 0
    for b in range(layout.batch_size):
        begin, key_begin = starts[b], key_starts[b]
        tiles = _tiles(starts[b + 1] - begin, key_starts[b + 1] - key_begin, tiling)
        most_tiles = max(most_tiles, len(tiles))
        for query, key, (rows, keys, diagonal, causal) in tiles:
            if keys:
                tile = Tile(b, query, key, begin + query, key_begin + key, rows, keys)
                classes[diagonal, causal].append(tile)
                keys_used += keys
            else:
                fully_masked.append(slice(begin + query, begin + query + rows))
    pool = None if pool_rows is None else pool_rows.numpy()
    calls = []
    for (diagonal, causal), members in classes.items():
        table = np.array(members, np.int64)
        for group in tiling.groups(table, table[:, 4] if pool is None else pool[table[:, 4]]):
            rows, keys = table[group, 5], table[group, 6]
            shape = Shape(int(rows.max()), int(keys.max()), diagonal, causal)
            # a sum with `right` could be greater than the largest int64
            hidden = diagonal is not None and (rows + diagonal <= keys - tiling.spec.window.right).all()
            of_queries, is_query = _rows(table[group, 3], rows, starts[-1])
            of_keys, is_key = _rows(table[group, 4], keys, key_starts[-1], pool)
            padded = None if is_query.all() else torch.from_numpy(~is_query)[:, None]
            shown = None if hidden or is_key.all() else torch.from_numpy(is_key)[:, None, None]
            calls.append(TileGroup(shape, torch.from_numpy(table[group]), of_queries, of_keys, padded, shown))
    parts = [Part.of(part) for part in _parts(calls, tiling.most_gathered)]
    return TilePlan(parts, fully_masked, most_tiles <= 1 and keys_used == key_layout.total)


def _parts(calls: list[TileGroup], most: int) -> Iterator[list[TileGroup]]:
    """Calls in a row that gather at most so many rows, or one that gathers more."""
    part: list[TileGroup] = []
    count = 0
    for call in calls:
        size = max(len(call.queries.gathered), len(call.keys.gathered))
        if part and count + size > most:
            yield part
            part, count = [], 0
        part.append(call)
        count += size
    if part:
        yield part


def _rows(begins: Ints, lengths: Ints, spare: int, pool: Ints | None = None) -> tuple[Rows, np.ndarray[Any, Any]]:
    """The rows of tiles that begin at these packed rows, and (n, length) bool, which of them are no padding."""
    length = int(lengths.max())
    is_row = np.arange(length) < lengths[:, None]
    rows = begins[:, None] + np.minimum(np.arange(length), lengths[:, None] - 1)
    rows = rows if pool is None else pool[rows]
    step = _step(rows) if is_row.all() else None
    targets = None
    if step is None or step < length:
        targets = torch.from_numpy(np.where(is_row, rows, spare).ravel())
    return Rows(len(begins), length, step, torch.from_numpy(rows.ravel()), targets), is_row


def _step(rows: Ints) -> int | None:
    """From one tile to the next, if rows (n, length) follow each other in each tile, and tiles at equal distances."""
    steps = np.diff(rows[:, 0])
    if (np.diff(rows) != 1).any() or (steps != steps[:1]).any() or (steps < 1).any():
        return None
    return int(steps[0]) if len(steps) else rows.shape[1]


def _tiles(queries: int, keys: int, tiling: Tiling) -> list[tuple[int, int, Shape]]:
    """The tiles of one sequence: (first query, first key, shape) of each."""
    if not queries:
        return []
    spec = tiling.spec
    shift = spec.shift(queries, keys)
    # the kernel masks before it scales, so a scale of 0 or less turns −inf into NaN or inf
    kernel_causal = spec.window.is_causal and shift == 0 and spec.has_positive_scale and queries <= keys
    if not keys or (tiling.whole and (spec.window.is_open or kernel_causal)):
        is_open = spec.window.is_open
        return [(0, 0, Shape(queries, keys, None if is_open else 0, causal=not is_open))]
    left, right = spec.window
    tiles, most_rows = [], tiling.rows(int(min(keys, left + right + MASKED_ROWS)))
    if spec.window.is_open and not spec.has_bias:  # tiles of like sizes; others share masks or biases by their diagonal
        most_rows = math.ceil(queries / math.ceil(queries / most_rows))
    for first in range(0, queries, most_rows):
        rows = min(most_rows, queries - first)
        low = int(max(0, min(keys, first + shift - left)))
        high = int(max(low, min(keys, first + rows + shift + right)))
        diagonal = first + shift - low
        nothing = not spec.has_bias and spec.window.hides_nothing(rows, high - low, diagonal)
        tiles.append((first, low, Shape(rows, high - low, None if nothing else diagonal, causal=False)))
    return tiles
