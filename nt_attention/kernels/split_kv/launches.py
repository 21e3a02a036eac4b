"""The launches of the `split_kv` kernels.

Dimensions: B sequences, T query tokens, H query heads, G key heads, D and V head dims, N rows of a pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layouts.protocol import Layout
from .. import bounds, device
from ..bounds import Checked
from ..call import AttentionSpec, Call
from ..launch import Launch, Ready, launch, launch_again, launch_cached
from ..triton_support import block_size, column_parts, input_precision, shared_memory
from . import sharing
from .keys import NO_LIMIT, Keys
from .sharing import Bundles, window_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Chunks of 256 keys for tiles of 16 rows. A part of a large tile takes as long as some hundred keys, so its chunks are
# larger; with `batch_invariant` they have 512 keys, because the size can't depend on the batch.
_CHUNK_BITS, _LARGE_CHUNK_BITS, _LARGE_INVARIANT_CHUNK_BITS = 8, 11, 9
_BUNDLE_CHUNK_BITS = 9  # of bundles
_SMALL_CHUNK_BITS = 6  # the smallest chunks in small batches
SPLITS_AT_ONCE, COLUMNS, COMBINE_WARPS = 32, 64, 1  # a block of `combine_kernel`, and its warps
_MOST_SPLITS = 128  # of a sequence, if a tile has 16 rows
_MOST_PART_ROWS = 2**18  # of all sequences and key heads of a launch
_MUCH_MEMORY = 160 * 1024  # bytes of shared memory of a multiprocessor: the A100 and GPUs of capability 9.0 and 10.0
BLOCKS = (32, 256)  # sequences whose items a program counts at once, in small batches and in others


class SplitTile(NamedTuple):
    """The size of a tile, and which sequences it is for.

    Attributes:
        block_m: the rows of a tile.
        least, most: it is for sequences with more than `least` rows, and at most `most`.
        split_rows: the most rows of a sequence that is split.
        chunk_bits, splits, doublings: the arguments `chunk_bits`, `most_splits` and `doublings` of the kernels.
    """

    block_m: int
    least: int
    most: int
    split_rows: int
    chunk_bits: int
    splits: int
    doublings: int

    @classmethod
    def make(cls, block_m: int, least: int, most: int, layout: Layout, keys: Keys, spec: AttentionSpec) -> SplitTile:
        """The tiles of a batch.

        With `batch_invariant`, how a sequence is split must not depend on the batch: it is split if it has one tile.
        Otherwise sequences of more tiles are split too, unless they have many. Small batches have smaller chunks, so
        that all multiprocessors have work. Large ones have fewer splits, so that parts have few rows.
        """
        rows = min(most, layout.max_seqlen * spec.num_heads // spec.num_kv_heads)
        is_small, splits = block_m == 16, _MOST_SPLITS
        if spec.batch_invariant:
            chunk_bits = _CHUNK_BITS if is_small else _LARGE_INVARIANT_CHUNK_BITS
            rows, splits = min(rows, block_m), max(1, splits * 16 // block_m)
        else:
            chunk_bits = _CHUNK_BITS if is_small else _LARGE_CHUNK_BITS
            of_a_sequence = spec.num_kv_heads * -(-rows // block_m)
            tiles, wanted = layout.batch_size * of_a_sequence, programs_at_once(block_m, spec)
            if not is_small:  # so many that the longest sequence alone gives work to all multiprocessors
                splits = min(splits, -(-2 * wanted // of_a_sequence))
                wanted //= 2  # below that, a further part costs more than idle multiprocessors
            while chunk_bits > _SMALL_CHUNK_BITS and tiles * -(-keys.max_seqlen >> chunk_bits) < wanted:
                chunk_bits -= 1
            splits = _fewer(splits, rows * layout.batch_size * spec.num_kv_heads)
        chunks = -(-keys.max_seqlen >> chunk_bits)
        doublings = max(0, -(-chunks // splits) - 1).bit_length()
        return cls(block_m, least, most, rows if splits > 1 else 0, chunk_bits, max(1, min(splits, chunks)), doublings)

    @classmethod
    def of_bundles(cls, keys: Keys, rows: int, spec: AttentionSpec) -> SplitTile:
        """The tiles of bundles, which have at most so many rows each. All of them have parts, if only one."""
        block_m, chunk_bits = min(block_size(rows), tile_rows(spec)[1]), _BUNDLE_CHUNK_BITS
        tiles = keys.batch_size * spec.num_kv_heads * -(-rows // block_m)
        while chunk_bits > _SMALL_CHUNK_BITS and tiles * -(-keys.max_seqlen >> chunk_bits) < _fewest_items(spec):
            chunk_bits -= 1
        chunks, splits = (
            -(-keys.max_seqlen >> chunk_bits),
            _fewer(_MOST_SPLITS, rows * keys.batch_size * spec.num_kv_heads),
        )
        doublings = max(0, -(-chunks // splits) - 1).bit_length()
        return cls(block_m, 0, NO_LIMIT, rows, chunk_bits, min(splits, chunks), doublings)

    @property
    def splitting(self) -> tuple[int, int, int, int]:
        """The arguments of the kernels that say how sequences are split."""
        return self.split_rows, self.chunk_bits, self.splits, self.doublings

    def part_rows(self, spec: AttentionSpec) -> int:
        """The number of rows of the parts of a sequence."""
        return self.splits * spec.num_kv_heads * self.split_rows

    def sequences_at_once(self, spec: AttentionSpec) -> int:
        """The number of sequences of a launch. With `batch_invariant` it bounds the size of parts."""
        if self.splits == 1 or not spec.batch_invariant:
            return NO_LIMIT
        fitting = _MOST_PART_ROWS // self.part_rows(spec)
        return max(1, fitting // 4 * 4)  # so that slices of offsets stay aligned to 16 bytes


def _fewer(splits: int, rows: int) -> int:
    """So many splits that parts have few rows, if each split has `rows`."""
    while splits > 1 and splits * rows > _MOST_PART_ROWS:
        splits //= 2
    return splits


def _tiles(layout: Layout, keys: Keys, spec: AttentionSpec) -> list[SplitTile]:
    """The kinds of tiles of a batch: small ones for few rows, large ones for more."""
    group = spec.num_heads // spec.num_kv_heads
    small, large = tile_rows(spec)
    kinds = [(small, 0, small), (large, small, NO_LIMIT)]
    fewest, most = layout.min_seqlen * group, layout.max_seqlen * group
    return [SplitTile.make(*kind, layout, keys, spec) for kind in kinds if kind[1] < most and fewest <= kind[2]]


def paged_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out (T, H, V) and lse (T, H) in float32, with keys in pools."""
    checked = bounds.check(call.layout, call.layout) if call.spec.bounded else None
    return _run(_all_work(call, Keys.in_pool(call.paged), checked), checked, query, key, value)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The same with packed keys."""
    checked = bounds.check(call.layout, call.key_layout) if call.spec.bounded else None
    return _run(_all_work(call, Keys.packed(call.key_layout, checked), checked), checked, query, key, value)


def prepare_forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`forward` for other tensors of the same geometry."""
    checked = bounds.check(call.layout, call.key_layout) if call.spec.bounded else None
    all_work = _all_work(call, Keys.packed(call.key_layout, checked), checked)
    prepared = [replace(work, parts=work.parts.to("meta"), ready={}) for work in all_work]

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return _run([work.with_new_parts(query.device) for work in prepared], checked, query, key, value)

    return run


def _run(
    works: Iterable[SplitWork], checked: Checked | None, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32).T
    with device.current(query.device):
        for work in works:
            work.attend(query, key, value, out, lse)
            if work.is_combined:
                work.combine(out, lse)
    if checked is not None:
        out = bounds.fill_past_end(out, checked.queries)
        lse = bounds.lse_past_end(lse.T, checked.queries).T
    return out, lse


def _all_work(call: Call, keys: Keys, checked: Checked | None) -> Iterator[SplitWork]:
    """What is launched for a call."""
    offsets = call.layout.device_offsets if checked is None else checked.cu_seqlens
    batch_size, tiles = call.layout.batch_size, _tiles(call.layout, keys, call.spec)
    if sharing.can_win(call, keys):
        yield from SplitWork.of_bundles(tiles[0], call, keys, offsets)
        return
    for tile in tiles:
        at_once = tile.sequences_at_once(call.spec)
        for first in range(0, batch_size, at_once):
            yield SplitWork.make(tile, call, keys, offsets, first, min(first + at_once, batch_size))


@dataclass(frozen=True)
class SplitWork:
    """Some sequences, their tiles of one kind, and the launches for them.

    Attributes:
        keys: those of these sequences.
        offsets: (B+1,) int32, of the queries.
        slopes: (H,) or (B, H) float32, or None.
        parts, part_lse: (B, S, G, R, V) and (B, S, G, R) float32, the results of splits.
        part: "all", or "shared" if the sequences are bundles, or "other" for the keys that no bundle shares.
        bundles, bundle_tile: of "other", the bundles and their tiles. Their parts follow in `parts`.
        ready: the launches that were made before, by the function of the kernel. None if the geometry of the tensors
            may differ.
    """

    tile: SplitTile
    spec: AttentionSpec
    keys: Keys
    offsets: Tensor
    slopes: Tensor | None
    parts: Tensor
    part_lse: Tensor
    part: str = "all"
    bundles: Bundles | None = None
    bundle_tile: SplitTile | None = None
    ready: dict[Any, Ready] | None = None

    @classmethod
    def make(cls, tile: SplitTile, call: Call, keys: Keys, offsets: Tensor, first: int, last: int) -> SplitWork:
        """The work of the sequences from `first` to before `last`."""
        spec, slopes = call.spec, call.alibi_slopes
        if slopes is not None:
            slopes = (slopes if slopes.dim() == 1 else slopes[first:last]).to(torch.float32).contiguous()
        shape = (last - first, tile.splits, spec.num_kv_heads, tile.split_rows)
        parts = torch.empty(*shape, spec.value_dim, dtype=torch.float32, device=spec.device)
        offsets = offsets[first : last + 1]
        return cls(tile, spec, keys.select(first, last), offsets, slopes, parts, parts.new_empty(shape))

    @classmethod
    def of_bundles(cls, tile: SplitTile, call: Call, keys: Keys, offsets: Tensor) -> list[SplitWork]:
        """The work of the keys that bundles share, and that of all other keys, in one tensor of parts."""
        spec, bundles, rows = call.spec, sharing.find(call, keys, offsets), sharing.rows_of(call)
        tile = tile._replace(split_rows=rows)  # a sequence that shares keys has parts, if only one
        bundle_tile = SplitTile.of_bundles(bundles.keys, sharing.BUNDLE * rows, spec)
        at = keys.batch_size * tile.part_rows(spec)
        all_rows = at + bundles.keys.batch_size * bundle_tile.part_rows(spec)
        lse = torch.empty(all_rows, dtype=torch.float32, device=spec.device)
        parts = lse.new_empty(len(lse), spec.value_dim)
        shared = cls(bundle_tile, spec, bundles.keys, bundles.offsets, None, parts[at:], lse[at:], "shared")
        return [shared, cls(tile, spec, keys, offsets, None, parts, lse, "other", bundles, bundle_tile)]

    def with_new_parts(self, where: torch.device) -> SplitWork:
        """The same work in memory of its own."""
        parts = torch.empty_like(self.parts, device=where)
        return replace(self, parts=parts, part_lse=parts.new_empty(parts.shape[:-1]))

    @property
    def batch_size(self) -> int:
        return len(self.offsets) - 1

    @property
    def is_combined(self) -> bool:
        """Whether its parts are added up when it has run."""
        return self.part == "other" or (self.part == "all" and self.tile.splits > 1)

    @property
    def group(self) -> int:
        """The number of query heads of a key head."""
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def warps(self) -> int:
        """The warps of a program. If bundles have few items, each has twice as many, so that it ends earlier."""
        tile, spec = self.tile, self.spec
        warps = warps_of(tile.block_m, spec)
        items = self.batch_size * spec.num_kv_heads * tile.splits * -(-tile.split_rows // tile.block_m)
        return min(8, 2 * warps) if self.part == "shared" and items < 2 * _fewest_items(spec) else warps

    @property
    def limits(self) -> tuple[int, ...]:
        """The last integers of both kernels, from `max_seqlen` on."""
        tile, window = self.tile, (NO_LIMIT, NO_LIMIT)
        if self.part != "shared":  # all queries see the shared keys
            window = window_of(self.spec)
        return (self.keys.max_seqlen, *window, tile.least, tile.most, *tile.splitting)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
        """Run the items: write `out` and `lse`, or parts of them."""
        from . import triton_kernels as kernels

        first_keys = None if self.bundles is None else self.bundles.first_keys
        parts, keys = (self.parts, self.part_lse), (self.slopes, self.keys.table, self.keys.table_offsets, first_keys)
        make = functools.partial(self._attention, kernels.attention_kernel, query, key, value, out, lse)
        self._launch(kernels.attention_kernel, (query, key, value, out, lse, *parts, *keys), make)

    def _launch(self, kernel: Any, first: tuple[Tensor | None, ...], make: Callable[[], Launch]) -> None:
        """Launch a kernel, again if it was launched with the same numbers."""
        if self.ready is None:
            launch(make(), first)
        elif (ready := self.ready.get(kernel.fn)) is not None:
            launch_again(ready, first)
        elif (ready := launch_cached({}, None, first, make)) is not None:
            self.ready[kernel.fn] = ready

    def _attention(self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Launch:
        """The launch of `attention_kernel`."""
        spec, tile, keys, slopes = self.spec, self.tile, self.keys, self.slopes
        most_tiles = min(self.batch_size, len(query)) + len(query) * self.group // tile.block_m
        programs = min(most_tiles * tile.splits, programs_at_once(tile.block_m, spec) // spec.num_kv_heads)
        integers = (
            *(*query.stride()[:2], *_strides(key, keys.page), *_strides(value, keys.page), *out.stride()[:2]),
            *(lse.stride(1), slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0),
            *(keys.table.stride(0), key.shape[0] * key.shape[1] if key.dim() == 4 else key.shape[0]),
            *(self.batch_size, *self.limits),
        )
        block_n, parts = block_of_keys(tile.block_m, spec), (column_parts(spec.head_dim), column_parts(spec.value_dim))
        constants = (
            *(self.group, spec.head_dim, spec.value_dim, *[block for block, _ in parts], *[rest for _, rest in parts]),
            *(keys.page, keys.table_offsets is not None),
            *(not spec.lower_right, spec.has_positive_scale and not spec.softcap and not spec.alibi, spec.softcap != 0),
            *(spec.alibi, spec.dtype == torch.float32, input_precision()),
            *(BLOCKS[self.batch_size > BLOCKS[0]], tile.block_m, block_n),
            *(max(key.stride(-3), value.stride(-3)) * _most_rows(keys.page, block_n) >= 2**31, self.part),
        )
        grid, floats = (max(1, programs), spec.num_kv_heads), (spec.scale, spec.softcap)
        tensors, sizes = (self.offsets, keys.lengths), (self.warps, stages_of(tile.block_m, spec))
        return Launch(kernel, grid, tensors, integers, floats, constants, *sizes)

    def combine(self, out: Tensor, lse: Tensor) -> None:
        """Write `out` and `lse` of the sequences that are split."""
        from . import triton_kernels as kernels

        bundles: tuple[Tensor | None, ...] = (None, None, None)
        if self.bundles is not None:
            bundles = (self.bundles.first_keys, self.bundles.offsets, self.bundles.keys.lengths)
        make = functools.partial(self._combination, kernels.combine_kernel, out, lse)
        self._launch(kernels.combine_kernel, (out, lse, self.parts, self.part_lse, *bundles), make)

    def _combination(self, kernel: Any, out: Tensor, lse: Tensor) -> Launch:
        """The launch of `combine_kernel`."""
        spec, tile = self.spec, self.tile
        programs_per_row = -(-spec.value_dim // COLUMNS)
        grid = (self.batch_size * tile.split_rows * programs_per_row, spec.num_kv_heads)
        splitting: tuple[int, ...] = (0, 0, 0, 0, 0)
        if self.bundle_tile is not None:
            splitting = (*self.bundle_tile.splitting, self.batch_size * tile.part_rows(spec))
        tensors, integers = (self.offsets, self.keys.lengths), (*out.stride()[:2], lse.stride(1), *self.limits)
        constants = (
            *(self.group, spec.value_dim, not spec.lower_right, tile.block_m, SPLITS_AT_ONCE, COLUMNS),
            *(self.part, sharing.BUNDLE),
        )
        return Launch(kernel, grid, tensors, (*integers, *splitting), (), constants, COMBINE_WARPS, 1)


def _strides(pool: Tensor, page: int) -> tuple[int, int, int]:
    """The strides of pages, rows and heads of a pool. The pages of slots are rows."""
    if pool.dim() == 4:
        return pool.stride(0), pool.stride(1), pool.stride(2)
    row, head, _ = pool.stride()
    return max(page, 1) * row, row, head


def tile_rows(spec: AttentionSpec) -> tuple[int, int]:
    """The rows of small and of large tiles. Their queries fit in the shared memory of small GPUs, beside the keys."""
    room = 32768 if spec.dtype.itemsize == 2 else 16384  # bytes; float32 needs more for the parts of tf32 products
    most = min(128, _power_of_2(room // (max(_columns(spec)) * spec.dtype.itemsize)))
    small = min(most, block_size(spec.num_heads // spec.num_kv_heads))
    return small, max(small, min(64, most))


def _power_of_2(most: int) -> int:
    """The largest power of 2 up to `most`; 1 if there is none."""
    return 1 << max(1, most).bit_length() - 1


def _columns(spec: AttentionSpec) -> tuple[int, int]:
    """D and V, rounded up for `tl.dot`."""
    return sum(column_parts(spec.head_dim)), sum(column_parts(spec.value_dim))


def warps_of(block_m: int, spec: AttentionSpec) -> int:
    """The warps of a program of `attention_kernel`: one for each 4 KiB of queries."""
    return min(8, _power_of_2(block_m * max(_columns(spec)) * spec.dtype.itemsize // 4096))


def stages_of(block_m: int, spec: AttentionSpec) -> int:
    """The pipeline stages of `attention_kernel`: three for large tiles, on GPUs with the shared memory for it."""
    return 3 if block_m > 16 and spec.dtype != torch.float32 and shared_memory(spec.device) >= _MUCH_MEMORY else 2


def block_of_keys(block_m: int, spec: AttentionSpec) -> int:
    """The number of keys of a block. Two blocks of keys and values fit in the shared memory of small GPUs."""
    if spec.dtype == torch.float32:
        return 16
    fitting = (8192 if block_m == 16 else 32768) // (sum(_columns(spec)) * spec.dtype.itemsize)
    return max(16, min(64, _power_of_2(fitting)))


def _most_rows(page: int, block_n: int) -> int:
    """An upper bound of `more` in `_find_keys`: rows of a block, or of a page if neither divides the other."""
    return page if page % block_n and block_n % page else block_n


def programs_at_once(block_m: int, spec: AttentionSpec) -> int:
    """How many programs of `attention_kernel` run at the same time."""
    return _multiprocessors(spec.device) * max(2, 8 // warps_of(block_m, spec))


def _fewest_items(spec: AttentionSpec) -> int:
    """So many items of bundles give work to all multiprocessors: nearly two for each, as two run there at once."""
    return 7 * _multiprocessors(spec.device) // 4


@functools.cache
def _multiprocessors(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 2
