"""The caches of `flash_attn_with_kvcache`: where keys are stored in them, and writing new keys in place.

Dimensions: B sequences, P pages of a sequence, N new keys of a sequence, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler import can_be_read
from ..layouts.paged import PagedLayout, merge_pages
from ._layouts import token_positions

# The pools of keys and of values, and where the keys of each sequence are stored in them.
Pools = tuple[Tensor, Tensor, PagedLayout]


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
        cls,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: int,
        block_table: Tensor | None,
        cache_batch_idx: Tensor | None,
        cache_leftpad: Tensor | None,
    ) -> KVCache:
        """Check the arguments of these names.

        Raises:
            ValueError: They do not fit each other.
        """
        if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
            raise ValueError(
                "k_cache and v_cache must be (batch_size_cache, seqlen_cache, nheads_k, headdim), or with block_table "
                f"(num_blocks, page_block_size, nheads_k, headdim), got {tuple(k_cache.shape)} and "
                f"{tuple(v_cache.shape)}."
            )
        if block_table is not None:
            if cache_batch_idx is not None or cache_leftpad is not None:
                name = "cache_leftpad" if cache_batch_idx is None else "cache_batch_idx"
                raise ValueError(f"{name} can't be combined with block_table: leave out one of them.")
            _check_indices("block_table", block_table, (batch, None), k_cache)
            return cls(k_cache, v_cache, block_table, None)
        if cache_batch_idx is not None:
            _check_indices("cache_batch_idx", cache_batch_idx, (batch,), k_cache)
        elif k_cache.shape[0] < batch:
            raise ValueError(
                f"the cache has {k_cache.shape[0]} rows for {batch} sequences: pass a row for each, or cache_batch_idx."
            )
        if cache_leftpad is not None:
            _check_indices("cache_leftpad", cache_leftpad, (batch,), k_cache)
            _check_mergeable(k_cache, v_cache)
        rows = token_positions(batch, 1, k_cache)[0] if cache_batch_idx is None else cache_batch_idx
        return cls(k_cache, v_cache, rows.unsqueeze(1), cache_leftpad)

    @property
    def page_size(self) -> int:
        return self.key.shape[1]

    @property
    def capacity(self) -> int:
        """The number of positions of a sequence."""
        return self.table.shape[1] * self.page_size

    def lengths(self, cache_seqlens: int | Tensor | None, new: int) -> Tensor:
        """(B,) the number of positions of each sequence that are in use, before `new` keys are appended.

        On a GPU the host reads nothing.

        Raises:
            ValueError: On a CPU, or for an integer: there is no space for them and the new keys.
        """
        batch = self.table.shape[0]
        if cache_seqlens is None:
            cache_seqlens = self.capacity
        if isinstance(cache_seqlens, Tensor):
            _check_indices("cache_seqlens", cache_seqlens, (batch,), self.key)
            if batch and cache_seqlens.is_cpu and can_be_read(cache_seqlens):
                self._check_range(int(cache_seqlens.amin()), int(cache_seqlens.amax()), new)
            return cache_seqlens
        if not isinstance(cache_seqlens, int) or isinstance(cache_seqlens, bool):
            raise ValueError(f"cache_seqlens must be an integer or a tensor ({batch},), got {cache_seqlens!r}.")
        self._check_range(cache_seqlens, cache_seqlens, new)
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=self.key.device)

    def _check_range(self, least: int, most: int, new: int) -> None:
        if least < 0 or most + new > self.capacity:
            wrong = least if least < 0 else most
            raise ValueError(
                f"cache_seqlens has {wrong}, but the cache has {self.capacity} positions for each sequence, and {new} "
                f"new keys: pass numbers from 0 to {self.capacity - new}."
            )

    def append(self, k: Tensor, v: Tensor, sequences: Tensor, positions: Tensor) -> None:
        """Write new keys and values in place, by index, so that caches may have any strides. Needs no sync on a GPU.

        A page or a position outside of the cache raises an error; on a GPU, this is an assertion of the device.

        Args:
            k, v: (B·N, G, D) and (B·N, G, Dv).
            sequences, positions: (B·N,) int64, the sequence of each key, and its position.

        Raises:
            ValueError: On a CPU, if a page is outside of the cache.
        """
        pages = self.table[sequences, positions // self.page_size].long()
        where = positions % self.page_size
        if pages.numel() and pages.is_cpu and can_be_read(pages):
            wrong = pages[(pages < 0) | (pages >= len(self.key))]
            if wrong.numel():
                raise ValueError(
                    f"new keys belong to page {int(wrong[0])}, but the cache has {len(self.key)}: pass other pages in "
                    "block_table or cache_batch_idx."
                )
        else:  # a negative index would write to another page
            pages = torch.where(torch.minimum(pages, positions) < 0, len(self.key), pages)
        self.key.index_put_((pages, where), k)
        self.value.index_put_((pages, where), v)

    def pools(self, lengths: Tensor) -> Pools:
        """The keys at the positions before `lengths` (B,). Pools are views of the caches.

        Raises:
            ValueError: On a CPU, if a leftpad is negative or exceeds a length.
        """
        if self.leftpad is None:
            return self.key, self.value, PagedLayout(self.table, lengths, self.page_size)
        if self.leftpad.is_cpu and can_be_read(self.leftpad):
            _check_leftpad(self.leftpad, lengths)
        starts = self.table.squeeze(1).long() * self.page_size + self.leftpad
        # A slot has no end of its own, so a length of −1 stands for what is outside of the row.
        is_outside = (self.leftpad < 0) | (lengths > self.page_size)
        lengths = torch.where(is_outside, -1, lengths - self.leftpad)
        paged = PagedLayout.from_slots(starts, lengths, max_seqlen=self.page_size)
        return self.key.flatten(0, 1), self.value.flatten(0, 1), paged


def _check_indices(name: str, x: object, shape: tuple[int | None, ...], like: Tensor) -> None:
    is_index = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) and x.device == like.device
    if is_index and x.dim() == len(shape) and all(size in (None, n) for size, n in zip(shape, x.shape, strict=True)):  # type: ignore[attr-defined]
        return
    wanted = ", ".join("P" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
    if not is_index:
        got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name} must be a tensor ({wanted}) of int32 or int64 on {like.device}, got {got}.")
    raise ValueError(f"{name} must be ({wanted}), got {tuple(x.shape)}.")  # type: ignore[attr-defined]


def _check_mergeable(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that the first two dimensions can be merged without a copy."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if merge_pages(x) is None:
            raise ValueError(
                f"cache_leftpad needs a {name} whose first two dimensions can be merged without a copy, got the "
                f"strides {x.stride()} for {tuple(x.shape)}: pass a contiguous cache."
            )


def _check_leftpad(leftpad: Tensor, lengths: Tensor) -> None:
    wrong = (leftpad < 0) | (leftpad > lengths)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise ValueError(
            f"cache_leftpad of sequence {b} must be from 0 to its {int(lengths[b])} positions, got {int(leftpad[b])}."
        )
