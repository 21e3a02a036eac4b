"""The launches of the `split_kv` kernels.

Dimensions: B sequences, T query tokens, H query heads, G key heads, D and V head dims, N rows of a pool.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import SequenceLayout
from ...paged import PagedLayout
from .. import bounds, device
from ..bounds import Checked
from ..call import AttentionSpec, Call
from ..launch import Launch, launch
from ..triton_support import block_size, input_precision

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHUNK = 256  # keys
_NO_LIMIT = 2**31 - 1
BLOCK = 1024  # sequences that a program reads at once
STAGES = 2
_PROGRAMS = 4  # for each multiprocessor
# The most splits of a sequence, by the rows of a tile: more chunks are split in pairs, fours, …
_MOST_SPLITS = {16: 128, 32: 64, 64: 16, 128: 16}
# Without `batch_invariant`, large batches have fewer splits, so that the parts have at most this many rows.
_MOST_PART_ROWS = 2**18


class Tile(NamedTuple):
    """The size of a tile, and which sequences it is for.

    Attributes:
        block_m: the rows of a tile.
        least, most: it is for sequences with more than `least` rows, and at most `most`.
        part_rows: the most rows of a sequence that is split.
        splits: the most splits of a sequence.
        splitting: CHUNK, MOST_SPLITS and DOUBLINGS of the kernels.
    """

    block_m: int
    least: int
    most: int
    part_rows: int
    splits: int
    splitting: tuple[int, int, int]

    @classmethod
    def make(cls, block_m: int, least: int, most: int, layout: SequenceLayout, keys: Keys, spec: AttentionSpec) -> Tile:
        part_rows = min(block_m, layout.max_seqlen * spec.num_heads // spec.num_kv_heads)
        splits = _MOST_SPLITS[block_m]
        rows = layout.batch_size * part_rows * spec.num_kv_heads
        while not spec.batch_invariant and splits > 1 and splits * rows > _MOST_PART_ROWS:
            splits //= 2
        chunks = -(-keys.max_seqlen // CHUNK)
        doublings = max(0, -(-chunks // splits) - 1).bit_length()
        return cls(block_m, least, most, part_rows, min(splits, chunks), (CHUNK, splits, doublings))


class Keys(NamedTuple):
    """Where keys are stored, as the kernels read it. `page` is 0 if the keys of a sequence are in one piece."""

    table: Tensor
    table_offsets: Tensor | None
    lengths: Tensor
    page: int
    max_seqlen: int

    @classmethod
    def in_pool(cls, paged: PagedLayout) -> Keys:
        table = paged.table if paged.table.stride(-1) == 1 else paged.table.contiguous()
        page = 0 if paged.has_slots else paged.page_size
        offsets = None if paged.table_offsets is None else paged.table_offsets.contiguous()
        return cls(table, offsets, paged.checked_lengths.contiguous(), page, paged.max_seqlen)

    @classmethod
    def packed(cls, layout: SequenceLayout, checked: Checked | None) -> Keys:
        offsets = layout.cu_seqlens if checked is None else checked.key_cu_seqlens
        lengths = layout.lengths if checked is None else offsets.diff()
        return cls(offsets[:-1].unsqueeze(1), None, lengths, 0, layout.max_seqlen)


def _tiles(layout: SequenceLayout, keys: Keys, spec: AttentionSpec) -> list[Tile]:
    """The kinds of tiles of a batch: small ones for few rows, large ones for more."""
    group = spec.num_heads // spec.num_kv_heads
    small, large = tile_rows(group, spec.head_dim, spec.dtype.itemsize)
    kinds = [(small, 0, small), (large, small, _NO_LIMIT)]
    fewest, most = layout.min_seqlen * group, layout.max_seqlen * group
    return [Tile.make(*kind, layout, keys, spec) for kind in kinds if kind[1] < most and fewest <= kind[2]]


def paged_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out (T, H, V) and lse (T, H) in float32, with keys in pools."""
    checked = bounds.check(call.layout, call.layout) if call.spec.bounded else None
    return _forward(query, key, value, call, Keys.in_pool(call.paged), checked)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The same with packed keys."""
    checked = bounds.check(call.layout, call.key_layout) if call.spec.bounded else None
    return _forward(query, key, value, call, Keys.packed(call.key_layout, checked), checked)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, keys: Keys, checked: Checked | None
) -> tuple[Tensor, Tensor]:
    layout = call.layout
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32).T
    offsets = layout.cu_seqlens if checked is None else checked.cu_seqlens
    with device.current(query.device):
        for tile in _tiles(layout, keys, call.spec):
            work = Work.make(tile, call, keys, offsets)
            work.plan()
            work.attend(query, key, value, out, lse)
            if tile.splits > 1:
                work.combine(out, lse)
    if checked is not None:
        out = bounds.fill_past_end(out, checked.queries)
        lse = bounds.lse_past_end(lse.T, checked.queries).T
    return out, lse


@dataclass(frozen=True)
class Work:
    """The sequences for which tiles of one kind are, and the launches for them.

    Attributes:
        offsets: (B+1,) int32, of the queries.
        ends: (2, B) int32, see `plan_kernel`.
        parts, part_lse: (P, G, R, V) and (P, G, R) float32, the results of splits.
        numbers: the last arguments of all kernels that are not compile-time arguments.
    """

    tile: Tile
    call: Call
    keys: Keys
    offsets: Tensor
    ends: Tensor
    parts: Tensor
    part_lse: Tensor
    numbers: tuple[int, ...]

    @classmethod
    def make(cls, tile: Tile, call: Call, keys: Keys, offsets: Tensor) -> Work:
        spec, batch = call.spec, call.layout.batch_size
        most_parts = batch * tile.splits if tile.splits > 1 else 1
        shape = (most_parts, spec.num_kv_heads, tile.part_rows, spec.value_dim)
        parts = torch.empty(shape, dtype=torch.float32, device=spec.device)
        ends = torch.empty(2, batch, dtype=torch.int32, device=spec.device)
        before, after = (int(min(side, _NO_LIMIT)) for side in spec.window)
        numbers = (batch, keys.max_seqlen, before, after, tile.least, tile.most)
        return cls(tile, call, keys, offsets, ends, parts, parts.new_empty(shape[:3]), numbers)

    @property
    def group(self) -> int:
        """The number of query heads of a key head."""
        return self.call.spec.num_heads // self.call.spec.num_kv_heads

    @property
    def blocks(self) -> tuple[int, int]:
        """D and V, rounded up for `tl.dot`."""
        return block_size(self.call.spec.head_dim), block_size(self.call.spec.value_dim)

    def plan(self) -> None:
        """Count the items."""
        from . import triton_kernels as kernels

        constants = (self.group, self.tile.block_m, not self.call.spec.lower_right, *self.tile.splitting, BLOCK)
        tensors = (self.offsets, self.keys.lengths, self.ends)
        launch(Launch(kernels.plan_kernel, (1, 1), tensors, self.numbers, (), constants, 4, 1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
        """Run the items: write `out` and `lse`, or parts of them."""
        from . import triton_kernels as kernels

        spec, tile, keys, slopes = self.call.spec, self.tile, self.keys, self.call.alibi_slopes
        if slopes is not None:
            slopes = slopes.to(torch.float32).contiguous()
        most_tiles = min(self.call.layout.batch_size, len(query)) + len(query) * self.group // tile.block_m
        programs = min(most_tiles * max(1, tile.splits), _programs(query.device) // spec.num_kv_heads)
        integers = (
            *(*query.stride()[:2], *_strides(key, keys.page), *_strides(value, keys.page), *out.stride()[:2]),
            *(lse.stride(1), slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0),
            *(keys.table.stride(0), key.shape[0] * key.shape[1] if key.dim() == 4 else key.shape[0]),
            *(tile.part_rows, *self.numbers),
        )
        constants = (
            *(self.group, spec.head_dim, spec.value_dim, *self.blocks, keys.page, keys.table_offsets is not None),
            *(not spec.lower_right, spec.softcap != 0, spec.alibi, spec.dtype == torch.float32, input_precision()),
            *(*tile.splitting, BLOCK, tile.block_m, block_of_keys(self.blocks, spec.dtype.itemsize)),
        )
        warps = warps_of(tile.block_m, self.blocks)
        grid, floats = (max(1, programs), spec.num_kv_heads), (spec.scale, spec.softcap)
        tensors = (self.offsets, keys.lengths, self.ends)
        launch(
            Launch(kernels.attention_kernel, grid, tensors, integers, floats, constants, warps, STAGES),
            (query, key, value, out, lse, self.parts, self.part_lse, slopes, keys.table, keys.table_offsets),
        )

    def combine(self, out: Tensor, lse: Tensor) -> None:
        """Write `out` and `lse` of the sequences that are split."""
        from . import triton_kernels as kernels

        spec, tile = self.call.spec, self.tile
        grid = (self.call.layout.batch_size * tile.part_rows, spec.num_kv_heads)
        tensors = (out, lse, self.parts, self.part_lse, self.offsets, self.keys.lengths, self.ends)
        integers = (*out.stride()[:2], lse.stride(1), tile.part_rows, *self.numbers)
        constants = (
            self.group,
            spec.value_dim,
            self.blocks[1],
            not spec.lower_right,
            *tile.splitting,
            tile.block_m,
            16,
        )
        launch(Launch(kernels.combine_kernel, grid, tensors, integers, (), constants, 4, 1))


def _strides(pool: Tensor, page: int) -> tuple[int, int, int]:
    """The strides of pages, rows and heads of a pool. The pages of slots are rows."""
    if pool.dim() == 4:
        return pool.stride(0), pool.stride(1), pool.stride(2)
    row, head, _ = pool.stride()
    return max(page, 1) * row, row, head


def tile_rows(group: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """The rows of small and of large tiles. Their queries fit in the shared memory of small GPUs, beside the keys."""
    room = 32768 if itemsize == 2 else 16384  # bytes; float32 needs more for the parts of tf32 products
    most = min(128, room // (block_size(head_dim) * itemsize))
    small = min(most, block_size(group))
    return small, max(small, min(64, most))


def warps_of(block_m: int, blocks: tuple[int, int]) -> int:
    """The warps of a program."""
    return 8 if block_m * max(blocks) > 64 * 128 else 4


def block_of_keys(blocks: tuple[int, int], itemsize: int) -> int:
    """The number of keys of a block. Two blocks of keys and values fit in the shared memory of small GPUs."""
    fitting = 32768 // (sum(blocks) * itemsize)
    return max(16, min(64, 1 << fitting.bit_length() - 1)) if itemsize == 2 else 16


@functools.cache
def _programs(where: torch.device) -> int:
    """How many programs of `attention_kernel` share the items."""
    if where.type != "cuda":
        return 16
    return _PROGRAMS * torch.cuda.get_device_properties(where).multi_processor_count
