"""The caches of `flash_attn_with_kvcache`: where keys are stored in them, and writing new keys in place.

Dimensions: B sequences, P pages of a sequence, N new keys of a sequence, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler import can_be_read
from ..layouts.paged import PagedLayout, merge_pages
from ..modules.rotary import rotate_pairs


def check_shape(name: str, x: Tensor, shape: str) -> Tensor:
    """Check that `x` has as many dimensions as `shape`, and the sizes that are numbers there."""
    sizes = shape.strip("()").split(", ")
    is_tensor = isinstance(x, Tensor)
    if is_tensor and x.dim() == len(sizes) and all(x.shape[i] == int(n) for i, n in enumerate(sizes) if n.isdigit()):
        return x
    raise ValueError(f"{name} must be a tensor {shape}, got {tuple(x.shape) if is_tensor else type(x).__name__}.")


def _check_indices(name: str, x: object, batch: int, like: Tensor, *, is_table: bool = False) -> None:
    """Check that `x` is (B,), or (B, P) for a table."""
    is_index = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) and x.device == like.device
    if isinstance(x, Tensor) and is_index and x.dim() == 1 + is_table and x.shape[0] == batch:
        return
    shape, of = f"({batch}, P)" if is_table else f"({batch},)", ""
    got = str(tuple(x.shape)) if isinstance(x, Tensor) else repr(x)
    if not is_index:
        shape, of = f"a tensor {shape}", f" of int32 or int64 on {like.device}"
        got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else got
    raise ValueError(f"{name} must be {shape}{of}, got {got}.")


@dataclass(frozen=True)
class KVCache:
    """The caches of keys and values, and where the keys of each sequence are stored in them.

    Attributes:
        key, value: (pages, page size, G, D) and (pages, page size, G, Dv). Without a block table, a page is a row of
            the cache, and each sequence has one.
        table: (B, P) int32 or int64, the pages of each sequence.
        leftpad: (B,) the position of the first key of each sequence, or None if it is 0.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    leftpad: Tensor | None

    @classmethod
    def of(
        cls, k_cache: Tensor, v_cache: Tensor, batch: int, table: Tensor | None, rows: Tensor | None, pad: Tensor | None
    ) -> KVCache:
        """Check the caches, `block_table`, `cache_batch_idx` and `cache_leftpad`."""
        if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
            raise ValueError(
                "k_cache and v_cache must be (batch_size_cache, seqlen_cache, nheads_k, headdim), or with block_table "
                f"(num_blocks, page_block_size, nheads_k, headdim), got {tuple(k_cache.shape)} and "
                f"{tuple(v_cache.shape)}."
            )
        if table is not None:
            if rows is not None or pad is not None:
                name = "cache_leftpad" if rows is None else "cache_batch_idx"
                raise ValueError(f"{name} can't be combined with block_table: leave out one of them.")
            _check_indices("block_table", table, batch, k_cache, is_table=True)
            return cls(k_cache, v_cache, table, None)
        if rows is not None:
            _check_indices("cache_batch_idx", rows, batch, k_cache)
        elif k_cache.shape[0] < batch:
            raise ValueError(
                f"the cache has {k_cache.shape[0]} rows for {batch} sequences: pass a row for each, or cache_batch_idx."
            )
        else:
            rows = torch.arange(batch, device=k_cache.device)
        if pad is not None:
            _check_indices("cache_leftpad", pad, batch, k_cache)
            for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
                if merge_pages(x) is None:
                    raise ValueError(
                        f"cache_leftpad needs a {name} whose first two dimensions can be merged without a copy, got "
                        f"the strides {x.stride()} for {tuple(x.shape)}: pass a contiguous cache."
                    )
        return cls(k_cache, v_cache, rows.unsqueeze(1), pad)

    @property
    def page_size(self) -> int:
        return self.key.shape[1]

    @property
    def capacity(self) -> int:
        """The number of positions of a sequence."""
        return self.table.shape[1] * self.page_size

    def lengths(self, cache_seqlens: int | Tensor | None, new: int) -> Tensor:
        """(B,) the number of positions of each sequence that are in use, before `new` keys are appended.

        On a GPU the host reads nothing. On a CPU, or for an integer, there must be space for them and the new keys.
        """
        batch = self.table.shape[0]
        if isinstance(cache_seqlens, Tensor):
            _check_indices("cache_seqlens", cache_seqlens, batch, self.key)
            is_read = bool(batch) and cache_seqlens.is_cpu and can_be_read(cache_seqlens)
            ends = [int(x) for x in cache_seqlens.aminmax()] if is_read else []
            lengths = cache_seqlens
        else:
            size = self.capacity if cache_seqlens is None else cache_seqlens
            if not isinstance(size, int) or isinstance(size, bool):
                raise ValueError(f"cache_seqlens must be an integer or a tensor ({batch},), got {cache_seqlens!r}.")
            ends, lengths = [size], torch.full((batch,), size, dtype=torch.int32, device=self.key.device)
        for wrong in ends:
            if wrong < 0 or wrong + new > self.capacity:
                raise ValueError(
                    f"cache_seqlens has {wrong}, but the cache has {self.capacity} positions for each sequence, and "
                    f"{new} new keys: pass numbers from 0 to {self.capacity - new}."
                )
        return lengths

    def check_new(self, k: Tensor, v: Tensor) -> int:
        """Check new keys (B, N, G, D) and values (B, N, G, Dv), and return N."""
        for name, x, pool in (("k", k, self.key), ("v", v, self.value)):
            check_shape(name, x, "(B, N, G, D)")
            wanted = (self.table.shape[0], k.shape[1], *pool.shape[2:])
            if x.shape != wanted or x.dtype != pool.dtype or x.device != pool.device:
                raise ValueError(
                    f"{name} must be {wanted} of {pool.dtype} on {pool.device}, as {name}_cache is, got "
                    f"{tuple(x.shape)} of {x.dtype} on {x.device}."
                )
        return k.shape[1]

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write new keys and values to positions (B, N), by index: caches may have any strides. Needs no sync on a GPU.

        A page or a position outside of the cache raises an error; on a GPU, this is an assertion of the device.
        """
        pages = self.table.gather(1, positions // self.page_size).long()
        if pages.numel() and pages.is_cpu and can_be_read(pages):
            wrong = pages[(pages < 0) | (pages >= len(self.key))]
            if wrong.numel():
                raise ValueError(
                    f"new keys belong to page {int(wrong[0])}, but the cache has {len(self.key)}: pass other pages in "
                    "block_table or cache_batch_idx."
                )
        else:  # a negative index would write to another page
            pages = torch.where(torch.minimum(pages, positions) < 0, len(self.key), pages)
        self.key.index_put_((pages, positions % self.page_size), k)
        self.value.index_put_((pages, positions % self.page_size), v)

    def pools(self, lengths: Tensor) -> tuple[Tensor, Tensor, PagedLayout]:
        """The keys and values at the positions before `lengths` (B,), as views of the caches, and where they are."""
        pad = self.leftpad
        if pad is None:
            return self.key, self.value, PagedLayout(self.table, lengths, self.page_size)
        if pad.is_cpu and can_be_read(pad) and bool((is_outside := (pad < 0) | (pad > lengths)).any()):
            b = int(is_outside.nonzero()[0])
            raise ValueError(
                f"cache_leftpad of sequence {b} must be from 0 to its {int(lengths[b])} positions, got {int(pad[b])}."
            )
        starts = self.table.squeeze(1).long() * self.page_size + pad
        # A slot has no end of its own, so a length of −1 stands for what is outside of the row.
        lengths = torch.where((pad < 0) | (lengths > self.page_size), -1, lengths - pad)
        paged = PagedLayout.from_slots(starts, lengths, max_seqlen=self.page_size)
        return self.key.flatten(0, 1), self.value.flatten(0, 1), paged


def positions_from(starts: Tensor, length: int) -> Tensor:
    """(B, length) int64: the positions of tokens that follow `starts` (B,)."""
    return starts.long().unsqueeze(1) + torch.arange(length, device=starts.device)


def check_rotary(cos: Tensor, sin: Tensor, q: Tensor, capacity: int) -> None:
    """Check `rotary_cos` and `rotary_sin` for a cache with `capacity` positions."""
    if cos.shape != sin.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        raise ValueError(
            f"rotary_cos and rotary_sin must be (seqlen_ro, R/2) with R up to {q.shape[-1]}, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    if len(cos) < capacity:
        raise ValueError(
            f"rotary_cos and rotary_sin have {len(cos)} positions, but the cache has {capacity} for each sequence: "
            "pass a row for each."
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.device != q.device or not x.is_floating_point():
            raise ValueError(f"{name} must have floating-point numbers on {q.device}, got {x.dtype} on {x.device}.")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate `x` (B, L, H, D) by positions (B, L). Computes in float32 or float64, and returns the dtype of `x`."""
    if positions.is_cpu and can_be_read(positions) and positions.numel() and positions.amax() >= len(cos):
        raise ValueError(
            f"a query is at position {int(positions.amax())}, but rotary_cos and rotary_sin have {len(cos)} "
            "positions: pass a row for each."
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[positions].unsqueeze(2).to(dtype) for table in (cos, sin))
    return rotate_pairs(x, cos, sin, interleaved=interleaved)
