"""The exchange of heads: each rank gets some heads of all tokens (Jacobs et al. 2023, Ulysses).

Every mask runs, because the kernel sees whole sequences. If there are fewer key heads than ranks, several ranks get the
same key head, and its owner adds their gradients in float32, in the order of the ranks.

Dimensions: T tokens, N tokens of this rank, S and M those of keys, H query heads, G key heads, h and g those of a rank,
D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange
from .local_attention import LocalAttention, TensorInfo, accumulation_dtype
from .mods import has_mods, shift_heads
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


@dataclass(frozen=True)
class HeadsOfRank:
    """The queries or the keys of a call: where their tokens are, and how their heads are divided.

    Attributes:
        sharded: the layout of the tokens.
        heads: for each rank, its heads.
        num_heads: the number of all heads.
    """

    sharded: ShardedLayout
    heads: list[slice]
    num_heads: int

    @property
    def counts(self) -> list[int]:
        """The number of heads of each rank."""
        return [each.stop - each.start for each in self.heads]

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """(N, all heads, ·) → (T, heads of this rank, ·) in the order of the packed tensor, for several tensors."""
        sharded, count, dims = self.sharded, self.counts[self.sharded.rank], [x.shape[2] for x in tensors]
        sent = [torch.cat([x[:, each].flatten(1) for x in tensors], 1).flatten() for each in self.heads]
        width = count * sum(dims)
        received = tensors[0].new_empty(sharded.layout.total, width)
        splits = [width * size for size in sharded.sizes]
        dist.all_to_all_single(received.view(-1), torch.cat(sent), splits, [len(x) for x in sent], group=sharded.group)
        columns = received.index_select(0, sharded.inverse_order).split([count * dim for dim in dims], 1)
        return [x.unflatten(1, (count, dim)) for x, dim in zip(columns, dims, strict=True)]

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """The inverse of `to_heads`. If several ranks have a head, their tensors are added."""
        sharded, dims = self.sharded, [x.shape[2] for x in tensors]
        rows = torch.cat([x.flatten(1) for x in tensors], 1).index_select(0, sharded.order)
        splits = [sharded.total * count * sum(dims) for count in self.counts]
        received = rows.new_empty(sum(splits))
        sent_splits = [size * rows.shape[1] for size in sharded.sizes]
        dist.all_to_all_single(received, rows.flatten(), splits, sent_splits, group=sharded.group)
        is_shared = sum(self.counts) > self.num_heads
        dtype = accumulation_dtype(rows.dtype) if is_shared else rows.dtype
        found = [rows.new_zeros(sharded.total, self.num_heads, dim, dtype=dtype) for dim in dims]
        for heads, count, part in zip(self.heads, self.counts, received.split(splits), strict=True):
            columns = part.view(sharded.total, count * sum(dims)).split([count * dim for dim in dims], 1)
            for x, column, dim in zip(found, columns, dims, strict=True):
                if is_shared:
                    x[:, heads] += column.view(sharded.total, count, dim)
                else:
                    x[:, heads] = column.view(sharded.total, count, dim)
        return [x.to(rows.dtype) for x in found]


class HeadsExchange(Exchange):
    """A call that runs with this exchange.

    Attributes:
        own: the heads of this rank.
        queries, keys: the two sides of the call.
        out: (T, h, Dv) the output of the heads of this rank, until `take_tensors`.
    """

    reads_out: ClassVar[bool] = False  # its `out` has other rows and heads

    def __init__(
        self,
        queries: HeadsOfRank,
        keys: HeadsOfRank,
        own: Heads,
        slopes: Tensor | None,
        backend: str,
        options: dict[str, Any],
        needs_grad: bool,
        returns_lse: bool,
    ) -> None:
        """`options` are those of `varlen_attention`. Without `returns_lse`, lse is not exchanged, and it is None."""
        self.queries, self.keys, self.own = queries, keys, own
        self.needs_grad, self.returns_lse = needs_grad, returns_lse
        self.saved = [None]
        self.out: Tensor | None = None

        def make() -> LocalAttention:
            of_heads = None if slopes is None else slopes[..., own.queries].contiguous()
            layouts = queries.sharded.layout, keys.sharded.layout
            return LocalAttention(*layouts, of_heads, backend, _with_first_head(options, own.first), needs_grad)

        if slopes is None and keys.sharded is queries.sharded and not has_mods(options):
            cache_key = ("heads", own.first, own.last, backend, needs_grad, *options.values())
            self.attention = queries.sharded.cached(cache_key, make)  # for other layers with this layout
        else:
            self.attention = make()

    @classmethod
    def of(cls, sharded: ShardedLayout, key_sharded: ShardedLayout, heads: int, kv_heads: int, *more: Any) -> Self:
        """The exchange of a call with these numbers of query and key heads. `more`: from `slopes` on."""
        each = [Heads.of_rank(rank, sharded.ranks, heads, kv_heads) for rank in range(sharded.ranks)]
        queries = HeadsOfRank(sharded, [one.queries for one in each], heads)
        return cls(queries, HeadsOfRank(key_sharded, [one.keys for one in each], kv_heads), each[sharded.rank], *more)

    def _repeated_heads(self) -> Tensor:
        """(h,) the key head of each query head of this rank."""
        return torch.tensor(self.own.repeated, device=self.keys.sharded.device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """out (N, H, Dv), and lse (N, H) or None."""
        (q,), (k, v), own = self.queries.to_heads(query), self.keys.to_heads(key, value), self.own
        if own.count:
            if own.repeated is not None:
                index = self.keys.sharded.cached(("repeated", *own.repeated), self._repeated_heads)
                k, v = k.index_select(1, index), v.index_select(1, index)
            out, lse, self.saved[0] = self.attention.forward(q, k, v)
            self.out = out
        else:
            out = q.new_empty(q.shape[0], 0, value.shape[2])
            lse = q.new_empty(q.shape[0], 0, dtype=accumulation_dtype(q.dtype))
        (out,) = self.queries.to_tokens(out)
        if not self.returns_lse:
            return out, None
        return out, self.queries.to_tokens(lse.unsqueeze(2))[0].squeeze(2)

    def take_tensors(self) -> list[Tensor | None]:
        out, self.out = self.out, None
        return [out, *super().take_tensors()]

    def backward(
        self,
        tensors: Sequence[Any],
        inputs: Sequence[TensorInfo],
        out: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = inputs
        own_out, *rest = tensors
        (grad,) = self.queries.to_heads(grad)
        if self.returns_lse:
            if grad_lse is None:
                grad_lse = torch.zeros(query.shape[:2], dtype=accumulation_dtype(query.dtype), device=query.device)
            grad_lse = self.queries.to_heads(grad_lse.unsqueeze(2))[0].squeeze(2)
        saved, keys = self.saved[0], self.keys.sharded.layout.total
        if saved is None:
            dq = grad.new_empty(len(grad), 0, query.shape[2])
            dk, dv = (grad.new_empty(keys, 0, x.shape[2]) for x in (key, value))
        else:
            dq, dk, dv = saved.backward(rest, own_out, grad, grad_lse if self.returns_lse else None)
            if self.own.repeated is not None:
                dk, dv = (_add_heads(x, self.own) for x in (dk, dv))
        return *self.queries.to_tokens(dq), *self.keys.to_tokens(dk, dv)  # type: ignore[return-value]


def _add_heads(x: Tensor, heads: Heads) -> Tensor:
    """(S, h, ·) gradients of repeated key heads → (S, g, ·), added in the order of the heads."""
    assert heads.repeated is not None
    added = x.new_zeros(x.shape[0], heads.key_count, x.shape[2], dtype=accumulation_dtype(x.dtype))
    for i, head in enumerate(heads.repeated):
        added[:, head] += x[:, i]
    return added.to(x.dtype)


def _with_first_head(options: dict[str, Any], first: int) -> dict[str, Any]:
    """The options, in which score_mod and mask_mod get the index of a head among all heads."""
    if not first:
        return options
    mods = {name: options[name] for name in ("score_mod", "mask_mod") if options[name] is not None}
    return options | {name: shift_heads(mod, name == "mask_mod", first) for name, mod in mods.items()}
