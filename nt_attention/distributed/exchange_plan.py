"""Which keys the ranks send each other for a call, and which calls of attention run with them.

Each rank gets the keys and values that its queries see, and runs its own queries. A piece of a sequence is one sequence
of the local call (`Extent`). Its keys are those that its queries see. A kernel takes the position of a query among its
keys from the two lengths, so queries are added to the piece where its last query does not belong to the last key: with
a window after a query, as many as the window has. Their values are 0, and their results are dropped.

What can run while keys travel (`Schedule`):

- Other heads. The key heads are divided into two groups, each with an exchange of its own, and the first group runs
  while the keys of the second one travel. In the backward, the gradients of the second group travel while the first one
  runs. Kernels then also need less memory for sums of gradients.
- Whole sequences, which need no exchange, in a call of their own.

Both take another call. Its results are copied to those of the first one, unless the backend can write there itself.
Small calls wait for the host, and run all at once.

Dimensions: N tokens of this rank, W of them in whole sequences, C = N − W in cut ones, M keys of this rank in cut ones
(C in self-attention), R received rows, S keys of all pieces, H query heads, G key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layouts.cache import to_device
from ..layouts.sequence import SequenceLayout
from .planner import Mask, Piece, needed_keys
from .rows import RowTable
from .sharded_layout import ShardedLayout, concatenate

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Geometry(NamedTuple):
    """Which keys the queries of a call see.

    Attributes:
        mask: what causality and window make.
        has_positions: whether masks or biases depend on the position of a query among the keys. Else all keys are
            visible.
        is_upper_left: whether query i is at key i. Else the last query is at the last key.
    """

    mask: Mask
    has_positions: bool
    is_upper_left: bool


class Extent(NamedTuple):
    """What a local call computes for a piece of a sequence: the queries and the keys of the sequence from … to.

    Attributes:
        piece: the piece. Other queries are not used.
        queries: [first, last) of the queries.
        keys: [first, last) of the keys.
    """

    piece: Piece
    queries: tuple[int, int]
    keys: tuple[int, int]

    @classmethod
    def of(cls, piece: Piece, geometry: Geometry, length: int, key_length: int | None) -> Extent:
        """`length` is that of the sequence, and `key_length` that of its keys in cross-attention."""
        _, start, stop = piece
        if key_length is None:
            keys = geometry.mask.keys(piece, length)
            return cls(piece, (start, keys[1] if geometry.has_positions else stop), keys)
        queries = (start, stop)
        if geometry.has_positions:
            queries = (0, stop) if geometry.is_upper_left else (start, length)
        return cls(piece, queries, (0, key_length))


class Tables(NamedTuple):
    """The rows that a call on this rank copies and adds. Its keys are K = S, or K = W + S with whole sequences.

    Attributes:
        queries: (C or N,) int64, where each own query is among those of the call; None if it has no others.
        visible: (K, 1), the keys of the call, from the own rows and the R received ones.
        uses_of_received: (R, ·), where each received row is among the K keys.
        sums: (M or W + M, ·), the gradients of each own row: those of its uses among the K keys, and those that return.
    """

    queries: Tensor | None
    visible: RowTable
    uses_of_received: RowTable
    sums: RowTable


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Which rows a rank sends and receives, and the calls that it runs.

    In cross-attention all sequences count as cut, because their keys may be on any rank.

    Attributes:
        whole: W.
        whole_sequences: the index of each whole sequence.
        extents: the pieces of cut sequences.
        whole_layout: the whole sequences.
        layout, key_layout: the queries and the keys of `extents`.
        all_layouts: the whole sequences and then the pieces, and their keys.
        send_splits, receive_splits: the number of rows for each rank, and from each rank.
        is_cut: whether a sequence is cut, on any rank.
        has_transfers: whether any rank receives a row.
        received: for each rank, the number of received rows.
        sent: (rows to send, 1), by rank, from the own rows.
        sources: (S,) each key of `key_layout`, as the index of one of the M own rows, or M plus that of a received row.
        returned: (M, ·) the indices of each own row among the sent rows, and −1.
    """

    whole: int
    whole_sequences: list[int]
    extents: list[Extent]
    whole_layout: SequenceLayout
    layout: SequenceLayout
    key_layout: SequenceLayout
    all_layouts: tuple[SequenceLayout, SequenceLayout]
    send_splits: list[int]
    receive_splits: list[int]
    is_cut: bool
    has_transfers: bool
    received: list[int]
    sent: RowTable
    sources: NDArray[np.int64]
    returned: NDArray[np.int64]

    @classmethod
    def make(cls, sharded: ShardedLayout, key_sharded: ShardedLayout, geometry: Geometry) -> ExchangePlan:
        """The plan of this rank. All ranks know the pieces of all others, so nothing is exchanged for it."""
        is_cross, lengths, rank, device = key_sharded is not sharded, sharded.lengths, sharded.rank, sharded.device
        whole = [] if is_cross else list(sharded.plan.whole[rank])
        cut = sharded.plan.pieces if is_cross else sharded.plan.cut
        owned = key_sharded.plan.pieces if is_cross else cut
        extents = [
            [Extent.of(p, geometry, lengths[p[0]], key_sharded.lengths[p[0]] if is_cross else None) for p in pieces]
            for pieces in cut
        ]
        seen = [[Piece(x.piece.sequence, *x.keys) for x in each] for each in extents]
        transfers = [_transfers(needed_keys(*each), owned) for each in zip(seen, owned, strict=True)]

        # the row of each position of a sequence: first the M own rows, then the R received ones
        known = {p.sequence: np.full(key_sharded.lengths[p.sequence], -1) for p in (*owned[rank], *seen[rank])}
        at, receive_splits = 0, [0] * sharded.ranks
        for sequence, first, last in owned[rank]:
            known[sequence][first:last] = np.arange(at, at + last - first)
            at += last - first
        num_own, sent = at, []
        for each in transfers:
            mine = [(s, first, last) for sender, s, first, last in each if sender == rank]
            sent.append(concatenate([known[s][first:last] for s, first, last in mine]))
        for sender, s, first, last in transfers[rank]:
            known[s][first:last] = np.arange(at, at + last - first)
            at += last - first
            receive_splits[sender] += last - first

        of_whole = [lengths[b] for b in whole]
        of_queries = [last - first for _, (first, last), _ in extents[rank]]
        of_keys = [last - first for _, _, (first, last) in extents[rank]]
        return cls(
            whole=sum(of_whole),
            whole_sequences=whole,
            extents=extents[rank],
            whole_layout=SequenceLayout.from_lengths(of_whole, device=device),
            layout=SequenceLayout.from_lengths(of_queries, device=device),
            key_layout=SequenceLayout.from_lengths(of_keys, device=device),
            all_layouts=(
                SequenceLayout.from_lengths(of_whole + of_queries, device=device),
                SequenceLayout.from_lengths(of_whole + of_keys, device=device),
            ),
            send_splits=[len(rows) for rows in sent],
            receive_splits=receive_splits,
            is_cut=is_cross or any(cut),
            has_transfers=any(transfers),
            received=[sum([last - first for *_, first, last in each]) for each in transfers],
            sent=_table(sum(of_whole) + concatenate(sent), device),
            sources=concatenate([known[s][first:last] for s, first, last in seen[rank]]),
            returned=_returned(num_own, sent),
        )

    def make_tables(self, has_whole: bool) -> Tables:
        """The tables of a call on the pieces of cut sequences, with or without the whole sequences before them."""
        whole, device = self.whole if has_whole else 0, self.sent.index.device
        own = np.arange(whole)
        keys, rows = whole + len(self.sources), len(self.returned)
        uses = _uses(self.sources, rows + self.num_received)
        uses[uses >= 0] += whole
        returned = np.where(self.returned < 0, -1, keys + self.returned)
        sums = np.full((whole + rows, uses.shape[1] + returned.shape[1]), -1)
        sums[:whole, 0] = own
        sums[whole:] = np.concatenate([uses[:rows], returned], 1)
        return Tables(
            queries=self._query_rows(whole),
            visible=_table(np.concatenate([own, self.whole + self.sources]), device),
            uses_of_received=_table(uses[rows:], device),
            sums=_table(sums, device),
        )

    def _query_rows(self, whole: int) -> Tensor | None:
        """`Tables.queries` for a call with this number of rows before those of the pieces."""
        if all(x.queries == x.piece[1:] for x in self.extents):
            return None
        rows, at = [np.arange(whole)], whole
        for (_, start, stop), (first, last), _ in self.extents:
            rows.append(np.arange(at + start - first, at + stop - first))
            at += last - first
        return to_device(concatenate(rows), self.sent.index.device)

    def sequences_of(self, has_whole: bool, has_cut: bool) -> list[tuple[int, int, int]]:
        """(index of the sequence, first query, first key) of each sequence of a call."""
        whole = [(b, 0, 0) for b in self.whole_sequences] if has_whole else []
        cut = [(x.piece.sequence, x.queries[0], x.keys[0]) for x in self.extents] if has_cut else []
        return whole + cut

    @property
    def num_received(self) -> int:
        """R."""
        return sum(self.receive_splits)


def _table(rows: NDArray[np.int64], device: torch.device) -> RowTable:
    return RowTable(to_device(rows.astype(np.int32).reshape(len(rows), -1 if len(rows) else 1), device))


def _transfers(
    needed: dict[int, list[tuple[int, int]]], cut: Sequence[Sequence[Piece]]
) -> list[tuple[int, int, int, int]]:
    """The intervals that a rank receives, as (sender, sequence, first, last), ordered by sender and position."""
    found = []
    for sender, pieces in enumerate(cut):
        for sequence, start, stop in pieces:
            for first, last in needed.get(sequence, ()):
                if max(first, start) < min(last, stop):
                    found.append((sender, sequence, max(first, start), min(last, stop)))
    return found


def _uses(sources: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """(rows, ·) the indices in `sources` that have each row, in order, and −1."""
    counts = np.bincount(sources, minlength=rows)
    order = np.argsort(sources, kind="stable")
    number = np.arange(len(sources)) - np.repeat(counts.cumsum() - counts, counts)  # of a use among those of its row
    found = np.full((rows, max(1, counts.max(initial=0))), -1)
    found[sources[order], number] = order
    return found


def _returned(rows: int, sent: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(rows, ·) where each row is among the rows that were sent to all ranks, with a column for each receiver."""
    columns, at = [np.empty((rows, 0), np.int64)], 0
    for each in sent:
        if len(each):
            columns.append(np.full((rows, 1), -1))
            columns[-1][each, 0] = np.arange(at, at + len(each))
            at += len(each)
    return np.concatenate(columns, 1)


_ALL = slice(None)


class Part(NamedTuple):
    """One call on this rank: some rows or some heads.

    Attributes:
        heads: its query heads.
        has_whole, has_cut: whether its rows are whole sequences, pieces of cut ones, or both.
    """

    heads: slice
    has_whole: bool
    has_cut: bool


class Schedule(NamedTuple):
    """The exchanges and the calls of a rank.

    Attributes:
        plan: the rows that are exchanged.
        groups: the number of key heads of each exchange, the same on all ranks; empty if no sequence is cut.
        parts: the calls of this rank. The whole sequences are the first one if they run alone.
        is_async: whether something runs during an exchange.
        dim: the dimension that several parts divide: 0 for rows, 1 for heads.
        sizes, key_sizes: the rows or heads of each part, of queries and of keys.
    """

    plan: ExchangePlan
    groups: list[int]
    parts: list[Part]
    is_async: bool
    dim: int = 0
    sizes: Sequence[int] = ()
    key_sizes: Sequence[int] = ()

    @classmethod
    def of(cls, plan: ExchangePlan, heads: int, groups: Sequence[int], runs_whole_alone: bool) -> Schedule:
        """The schedule for H query heads, the number of key heads of each exchange, and this choice.

        Several groups and whole sequences in a call of their own exclude each other.
        """
        is_async = len(groups) > 1 or runs_whole_alone
        of_keys = list(groups) if plan.is_cut else []
        if not plan.extents and not len(plan.returned):  # nothing is cut on this rank
            return cls(plan, of_keys, [Part(_ALL, True, False)], is_async)
        if len(groups) > 1:
            sizes = [heads // sum(groups) * count for count in groups]
            slices = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
            return cls(plan, of_keys, [Part(x, plan.whole > 0, True) for x in slices], is_async, 1, sizes, of_keys)
        if plan.whole and runs_whole_alone:
            sizes = [plan.whole, len(plan.returned)]
            return cls(plan, of_keys, [Part(_ALL, True, False), Part(_ALL, False, True)], is_async, 0, sizes, sizes)
        return cls(plan, of_keys, [Part(_ALL, plan.whole > 0, True)], is_async)

    def of_groups(self, x: Tensor) -> Sequence[Tensor]:
        """The key heads (N, g, …) of each exchange."""
        return x.split(self.groups, 1) if len(self.groups) > 1 else (x,) * len(self.groups)

    def of_parts(self, x: Tensor, are_keys: bool = False) -> Sequence[Tensor]:
        """The rows or heads of each part, of a tensor (N, H, …), or of one (N, G, …) if they are keys."""
        return x.split(self.key_sizes if are_keys else self.sizes, self.dim) if len(self.parts) > 1 else (x,)
