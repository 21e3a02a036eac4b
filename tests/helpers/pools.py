"""Pools of keys and values for tests of `PagedLayout`, full of NaN where no key is stored.

Dimensions: B sequences, S keys, T query tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from token_tiled_cases import DEVICE, GPU
from torch import Tensor

import nt_attention as nta

FORMS = ("table", "slots", "indices")
cpu_only = pytest.mark.skipif(GPU, reason="an error on a CPU only, or of the CPU backend")


@dataclass
class Pools:
    """Packed keys and values, and the same in pools.

    Attributes:
        query: (T, H, D).
        layout: the sequences of the queries.
        keys, values: packed, (S, G, D) and (S, G, Dv).
        key_layout: the sequences of the packed keys.
        pools: key and value.
        paged: where the keys are stored in the pools.
    """

    query: Tensor
    layout: nta.SequenceLayout
    keys: Tensor
    values: Tensor
    key_layout: nta.SequenceLayout
    pools: tuple[Tensor, Tensor]
    paged: nta.PagedLayout

    def share(self, first: int, last: int, pages: int) -> None:
        """Let the sequences `first` to `last` begin with the same pages, as far as they have some."""
        offsets, table = self.paged.table_offsets, self.paged.table
        for b in range(first, last + 1):
            if offsets is None:
                table[b, :pages] = table[first, :pages]
            else:
                at, of_first = int(offsets[b]), int(offsets[first])
                count = min(pages, int(offsets[b + 1]) - at)
                table[at : at + count] = table[of_first : of_first + count]
        self.repack()

    def repack(self) -> None:
        """Read the packed keys and values from the pools, after a change of pages or lengths."""
        self.key_layout, (self.keys, self.values) = self.paged.gather(*self.pools)

    def exact(self, **options: Any) -> tuple[Tensor, Tensor]:
        """out and lse in float64, of packed keys."""
        tensors = [x.double() for x in (self.query, self.keys, self.values)]
        for name in ("sinks", "alibi_slopes"):
            if name in options:
                options[name] = options[name].double()
        return nta.varlen_attention(
            *tensors, self.layout, self.key_layout, backend="reference", return_lse=True, **options
        )

    def solve(self, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
        return nta.varlen_attention(
            self.query, *self.pools, self.layout, self.paged, backend=backend, return_lse=True, **options
        )

    def check(self, backend: str, tolerance: float = 1e-5, **options: Any) -> None:
        got, want = self.solve(backend, **options), self.exact(**options)
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), two, rtol=tolerance, atol=tolerance)


def make(
    lengths: list[int],
    key_lengths: list[int],
    *,
    page: int = 16,
    form: str = "table",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare: int = 1,
    index_dtype: torch.dtype = torch.int32,
) -> Pools:
    """Random tensors. Pages are in a random order, and each sequence has `spare` pages more than it needs."""
    value_dim = head_dim if value_dim is None else value_dim
    key_layout = nta.SequenceLayout.from_lengths(key_lengths, device=DEVICE)
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    query = torch.randn(layout.total, heads, head_dim, device=DEVICE).to(dtype)
    packed = [torch.randn(key_layout.total, kv_heads, d, device=DEVICE).to(dtype) for d in (head_dim, value_dim)]
    given = torch.tensor(key_lengths, dtype=index_dtype, device=DEVICE)
    pages = -(-max(key_lengths) // page) + spare
    count = len(lengths) * pages + 3
    order = torch.randperm(count, device=DEVICE).to(index_dtype)
    if form == "table":
        table = order[: len(lengths) * pages].view(-1, pages)
        paged = nta.PagedLayout(table, given, page, max_seqlen=2**20)  # a bound that the pages lower
    elif form == "slots":
        starts = torch.arange(len(lengths), device=DEVICE).to(index_dtype).flip(0) * pages * page + 5
        paged = nta.PagedLayout.from_slots(starts, given, max_seqlen=pages * page)
    else:
        needed = [-(-n // page) for n in key_lengths]
        offsets = torch.tensor([0, *needed], device=DEVICE).cumsum(0).to(index_dtype)
        paged = nta.PagedLayout.from_indices(order[: sum(needed)], offsets, given, page, max(1, max(key_lengths)))
    pools = [x.new_full((count * page + 5, *x.shape[1:]), torch.nan) for x in packed]
    rows = paged.rows(key_layout.sequence_ids, key_layout.position_ids)
    for pool, x in zip(pools, packed, strict=True):
        pool[rows] = x
    if form != "slots":
        pools = [pool[: count * page].unflatten(0, (-1, page)) for pool in pools]
    return Pools(query, layout, *packed, key_layout, (pools[0], pools[1]), paged)
