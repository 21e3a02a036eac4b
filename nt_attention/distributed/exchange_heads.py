"""The exchange of heads: each rank gets some heads of all tokens (Jacobs et al. 2023, Ulysses).

Every mask runs, because the kernel sees whole sequences. If there are fewer key heads than ranks, several ranks get the
same key head, and its owner adds their gradients in float32, in the order of the ranks.

Dimensions: T tokens, N tokens of this rank, S and M those of keys, H query heads, G key heads, h and g those of a rank,
D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .local_attention import LocalAttention, Saved, TensorInfo
from .sharded_layout import ShardedLayout


@dataclass(frozen=True)
class Heads:
    """The heads of a rank.

    Attributes:
        first, last: its query heads are `first` to `last` − 1.
        first_key, last_key: the key heads that these use.
        repeated: the key head of each query head, counted from `first_key`; None if each key head serves as many.
    """

    first: int
    last: int
    first_key: int
    last_key: int
    repeated: list[int] | None

    @classmethod
    def of_rank(cls, rank: int, ranks: int, heads: int, kv_heads: int) -> Heads:
        """Query heads are divided as evenly as possible, in whole groups if there are enough."""
        group = heads // kv_heads
        unit = group if kv_heads >= ranks else 1
        first, last = (heads // unit * r // ranks * unit for r in (rank, rank + 1))
        if first == last:
            return cls(first, first, 0, 0, None)
        first_key, last_key = first // group, (last - 1) // group + 1
        of_queries = [head // group - first_key for head in range(first, last)]
        counts = {of_queries.count(head) for head in of_queries}
        return cls(first, last, first_key, last_key, None if len(counts) == 1 else of_queries)

    @property
    def queries(self) -> slice:
        return slice(self.first, self.last)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.last_key)

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def key_count(self) -> int:
        return self.last_key - self.first_key


@dataclass
class HeadsExchange:
    """A call that runs with this exchange. `options` are those of `varlen_attention`.

    `returns_lse` is whether the log-sum-exp is needed. If not, it is not exchanged, and `forward` returns None.
    """

    sharded: ShardedLayout
    key_sharded: ShardedLayout
    slopes: Tensor | None
    backend: str
    options: dict[str, Any]
    needs_grad: bool
    returns_lse: bool

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """out (N, H, Dv) and lse (N, H)."""
        own = self._heads(query, key)[self.sharded.rank]
        q = self._to_heads(self.sharded, [query], "queries", query, key)[0]
        k, v = self._to_heads(self.key_sharded, [key, value], "keys", query, key)
        self.saved: list[Saved | None] = [None]
        wide = torch.promote_types(query.dtype, torch.float32)
        if own.count:
            if own.repeated is not None:
                index = torch.tensor(own.repeated, device=k.device)
                k, v = k.index_select(1, index), v.index_select(1, index)
            attention = LocalAttention(
                self.sharded.layout,
                self.key_sharded.layout,
                None if self.slopes is None else self.slopes[..., own.queries].contiguous(),
                self.backend,
                _with_first_head(self.options, own.first),
                self.needs_grad,
            )
            out, lse, self.saved[0] = attention.forward(q, k, v)
        else:
            out, lse = q.new_empty(q.shape[0], 0, value.shape[2]), q.new_empty(q.shape[0], 0, dtype=wide)
        out = self._to_tokens(self.sharded, [out], "queries", query, key)[0]
        if not self.returns_lse:
            return out, None
        return out, self._to_tokens(self.sharded, [lse.unsqueeze(2)], "queries", query, key)[0].squeeze(2)

    def backward(
        self, tensors: Sequence[Sequence[Any]], inputs: Sequence[TensorInfo], grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value. `tensors` are those of `saved`."""
        query, key, _ = inputs
        own = self._heads(query, key)[self.sharded.rank]
        grad = self._to_heads(self.sharded, [grad], "queries", query, key)[0]
        if self.returns_lse:
            if grad_lse is None:
                wide = torch.promote_types(query.dtype, torch.float32)
                grad_lse = torch.zeros(query.shape[:2], dtype=wide, device=query.device)
            grad_lse = self._to_heads(self.sharded, [grad_lse.unsqueeze(2)], "queries", query, key)[0].squeeze(2)
        saved = self.saved[0]
        if saved is None:
            dq, dk, dv = (grad.new_empty(rows, 0, x.shape[2]) for rows, x in zip(self._totals, inputs, strict=True))
        else:
            dq, dk, dv = saved.backward(tensors[0], grad, grad_lse if self.returns_lse else None)
            if own.repeated is not None:
                dk, dv = (_add_heads(x, own) for x in (dk, dv))
        dq = self._to_tokens(self.sharded, [dq], "queries", query, key)[0]
        dk, dv = self._to_tokens(self.key_sharded, [dk, dv], "keys", query, key)
        return dq, dk, dv

    @property
    def _totals(self) -> tuple[int, int, int]:
        keys = self.key_sharded.layout.total
        return self.sharded.layout.total, keys, keys

    def _heads(self, query: Tensor | TensorInfo, key: Tensor | TensorInfo) -> list[Heads]:
        ranks = self.sharded.ranks
        return [Heads.of_rank(rank, ranks, query.shape[1], key.shape[1]) for rank in range(ranks)]

    def _to_heads(
        self,
        sharded: ShardedLayout,
        tensors: Sequence[Tensor],
        which: str,
        query: Tensor | TensorInfo,
        key: Tensor | TensorInfo,
    ) -> list[Tensor]:
        """(N, all heads, ·) → (T, heads of this rank, ·) in the order of the packed tensor, for several tensors."""
        heads = [getattr(each, which) for each in self._heads(query, key)]
        counts = [each.stop - each.start for each in heads]
        dims = [x.shape[2] for x in tensors]
        sent = [torch.cat([x[:, each].flatten(1) for x in tensors], 1).flatten() for each in heads]
        own = counts[sharded.rank] * sum(dims)
        received = tensors[0].new_empty(sharded.layout.total, own)
        _exchange(
            received.view(-1), torch.cat(sent), [own * size for size in sharded.sizes], [len(x) for x in sent], sharded
        )
        rows = received.index_select(0, sharded.inverse_order)
        parts = rows.split([counts[sharded.rank] * dim for dim in dims], 1)
        return [x.unflatten(1, (counts[sharded.rank], dim)) for x, dim in zip(parts, dims, strict=True)]

    def _to_tokens(
        self,
        sharded: ShardedLayout,
        tensors: Sequence[Tensor],
        which: str,
        query: Tensor | TensorInfo,
        key: Tensor | TensorInfo,
    ) -> list[Tensor]:
        """The inverse of `_to_heads`. If several ranks have a head, their tensors are added."""
        heads = [getattr(each, which) for each in self._heads(query, key)]
        dims = [x.shape[2] for x in tensors]
        rows = torch.cat([x.flatten(1) for x in tensors], 1).index_select(0, sharded.order)
        widths = [(each.stop - each.start) * sum(dims) for each in heads]
        received = rows.new_empty(sharded.total * sum(widths))
        splits = [sharded.total * width for width in widths]
        _exchange(received, rows.flatten(), splits, [size * rows.shape[1] for size in sharded.sizes], sharded)
        most = (query if which == "queries" else key).shape[1]
        is_shared = sum(each.stop - each.start for each in heads) > most
        wide = torch.promote_types(rows.dtype, torch.float32) if is_shared else rows.dtype
        found = [rows.new_zeros(sharded.total, most, dim, dtype=wide) for dim in dims]
        for each, part in zip(heads, received.split(splits), strict=True):
            count = each.stop - each.start
            columns = part.view(sharded.total, count * sum(dims)).split([count * dim for dim in dims], 1)
            for x, column, dim in zip(found, columns, dims, strict=True):
                if is_shared:
                    x[:, each] += column.view(sharded.total, count, dim)
                else:
                    x[:, each] = column.view(sharded.total, count, dim)
        return [x.to(rows.dtype) for x in found]


def _add_heads(x: Tensor, heads: Heads) -> Tensor:
    """(S, h, ·) gradients of repeated key heads → (S, g, ·), added in the order of the heads."""
    assert heads.repeated is not None
    wide = torch.promote_types(x.dtype, torch.float32)
    added = x.new_zeros(x.shape[0], heads.key_count, x.shape[2], dtype=wide)
    for i, head in enumerate(heads.repeated):
        added[:, head] += x[:, i]
    return added.to(x.dtype)


def _with_first_head(options: dict[str, Any], first: int) -> dict[str, Any]:
    """The options, in which score_mod and mask_mod get the index of a head in the whole model."""
    if not first or (options.get("score_mod") is None and options.get("mask_mod") is None):
        return options
    score_mod: Callable[..., Any] | None = options.get("score_mod")
    mask_mod: Callable[..., Any] | None = options.get("mask_mod")
    changed = dict(options)
    if score_mod is not None:
        changed["score_mod"] = lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h + first, q_idx, kv_idx)
    if mask_mod is not None:
        changed["mask_mod"] = lambda b, h, q_idx, kv_idx: mask_mod(b, h + first, q_idx, kv_idx)
    return changed


def _exchange(
    output: Tensor, given: Tensor, output_splits: list[int], given_splits: list[int], sharded: ShardedLayout
) -> None:
    dist.all_to_all_single(output, given, output_splits, given_splits, group=sharded.group)
