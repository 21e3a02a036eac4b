"""Decides which rank has which tokens of a ragged batch.

Each rank gets as many tokens as `torch.chunk` would give it, and about the same work: the number of visible (query,
key) pairs of its queries. Short sequences stay whole, because only cut sequences need an exchange. Long sequences are
cut for several ranks. With a causal mask each of these ranks gets one part near the beginning, where queries see few
keys, and one near the end, as in the training of Llama 3 (Grattafiori et al. 2024).

If no sequence must be cut, whole sequences are swapped between ranks until each has its number of tokens. Then there is
nothing to exchange. An exchange has a fixed time, so small batches are rather unbalanced than cut.

A few numbers of cut sequences are tried, and the cheapest plan is taken. It depends on the lengths, the mask and the
number of ranks alone, so all ranks make the same plan.

Dimensions: B sequences, P ranks.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.masks import Window

# A received row costs as much as this number of visible (query, key) pairs. With 32 query heads, 8 key heads and a head
# dim of 128, forward and backward, a pair takes about 14 · 32 · 128 FLOPs at 400 TFLOP/s. A row is sent twice with
# 2 · 8 · 128 elements of 2 bytes at 200 GB/s, and read or written 6 times at 2 TB/s.
PAIRS_PER_ROW = 390
PAIRS_PER_EXCHANGE = 1_400_000  # the fixed time of the two collectives if a sequence is cut, 200 µs, in the same unit
GOOD = 1.06  # a plan whose cost is at most this factor of the mean work is taken at once
BALANCED = 1.12  # plans whose largest work is at most this factor of the mean are preferred, whatever rows they need
_BUNDLES = 48  # short sequences are placed in groups, about this number of groups for each rank
# Sequences are cut whose work exceeds this part of the mean work of a rank. If no plan is balanced, the next attempt is
# made. The last one cuts them for all ranks.
_ATTEMPTS = (((math.inf, 1.0, 0.5, 0.12), False), ((0.03, 0.0), False), ((0.5, 0.12, 0.03, 0.0), True))
_MOST_SWAPPED = 48  # the sequences of a rank that may be swapped, the shortest ones
_FULL = 0.98  # cut sequences may fill a rank up to this part of the mean work; short ones need the rest
_NO_LIMIT = 2**40


class Piece(NamedTuple):
    """The tokens `start` to `stop` − 1 of a sequence."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees, as distances: `left` before it and `right` after it."""

    left: int
    right: int

    @classmethod
    def of(cls, is_causal: bool, window_size: tuple[int, int]) -> Mask:
        left, right = (_NO_LIMIT if side < 0 else side for side in window_size)
        return cls(left, 0 if is_causal else right)

    def pairs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """(B,) the number of visible pairs of whole sequences."""
        window = Window(*[math.inf if side == _NO_LIMIT else side for side in (self.left, self.right)])
        numbers = torch.from_numpy(lengths)
        return window.pairs(numbers, numbers, lower_right=True).numpy()

    def work(self, piece: Piece, length: int) -> int:
        """The number of visible pairs of the queries of a piece."""
        _, start, stop = piece
        before = _sum_of_min(stop, self.left) - _sum_of_min(start, self.left)
        after = _sum_of_min(length - start, self.right) - _sum_of_min(length - stop, self.right)
        return before + after + stop - start

    def keys(self, piece: Piece, length: int) -> tuple[int, int]:
        """The keys [first, last) that the queries of a piece see."""
        return max(0, piece.start - self.left), min(length, piece.stop + self.right)

    def seen(self, pieces: Iterable[Piece], lengths: Sequence[int]) -> list[Piece]:
        """The keys that the queries of each piece see."""
        return [Piece(p.sequence, *self.keys(p, lengths[p.sequence])) for p in pieces]


def _sum_of_min(count: int, most: int) -> int:
    """The sum of min(i, most) for i from 0 to count − 1."""
    short = min(count, most + 1)
    return short * (short - 1) // 2 + (count - short) * most


@dataclass(frozen=True)
class ShardPlan:
    """The pieces of each rank.

    Attributes:
        lengths: (B,) the lengths of the sequences.
        whole: for each rank, the sequences that are whole there, in order.
        cut: for each rank, its pieces of the other sequences, ordered by sequence and start.
        work: for each rank, the number of visible pairs of one head.
        received: for each rank, the number of rows of keys that it needs from others.
    """

    lengths: Sequence[int]
    whole: tuple[tuple[int, ...], ...]
    cut: tuple[tuple[Piece, ...], ...]
    work: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """For each rank, its pieces."""
        return tuple([self.pieces_of(rank) for rank in range(len(self.whole))])

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """All pieces of a rank in the order of its rows: those of `whole`, then those of `cut`."""
        return (*[Piece(b, 0, self.lengths[b]) for b in self.whole[rank]], *self.cut[rank])

    @property
    def imbalance(self) -> float:
        """The work of the rank with the most, over the mean."""
        return max(self.work) * len(self.work) / max(1, sum(self.work))


def chunk_sizes(total: int, ranks: int) -> list[int]:
    """The sizes of `torch.chunk`, with zeros for ranks without tokens.

    Example:
        >>> from nt_attention.distributed.planner import chunk_sizes
        >>> chunk_sizes(5, 4)
        [2, 2, 1, 0]
    """
    size = -(-total // ranks)
    return [max(0, min(size, total - rank * size)) for rank in range(ranks)]


def make_plan(lengths: Iterable[int], ranks: int, mask: Mask) -> ShardPlan:
    """The cheapest plan that was found.

    Args:
        lengths: (B,) the lengths of the sequences.
        ranks: P.
        mask: the mask for which work is balanced. The plan may be used with other masks.

    Example:
        >>> from nt_attention.distributed.planner import Mask, make_plan
        >>> for pieces in make_plan([8], 2, Mask.of(True, (-1, -1))).pieces:
        ...     print([tuple(piece) for piece in pieces])
        [(0, 0, 2), (0, 6, 8)]
        [(0, 2, 6)]
    """
    batch = _Batch(np.asarray(list(lengths), np.int64), ranks, mask)
    best: _Draft | None = None
    for thresholds, cuts_for_all in _ATTEMPTS:
        for cut in batch.numbers_of_cuts(thresholds):
            draft = batch.draft(cut, cuts_for_all)
            if best is None or draft.rating < best.rating:
                best = draft
            if best.cost <= GOOD * batch.mean_work:
                return best.finish()
        assert best is not None
        if best.is_balanced:
            break
    assert best is not None
    return best.finish()


class _Batch:
    """A batch, with its sequences by descending length.

    Attributes:
        ranks, mask: as in `make_plan`.
        order: the sequences with tokens, by descending length.
        sorted_sizes, sorted_work: their lengths and visible pairs, in this order.
        lengths, work: the length and the visible pairs of each sequence of the batch.
        rooms: the number of tokens that each rank gets.
        capacity: the largest of these.
        mean_work: the visible pairs of all sequences over the number of ranks.
    """

    def __init__(self, sizes: NDArray[np.int64], ranks: int, mask: Mask) -> None:
        self.ranks, self.mask = ranks, mask
        order = np.argsort(-sizes, kind="stable")
        order = order[: int((sizes > 0).sum())]
        work = mask.pairs(sizes)
        self.sorted_sizes, self.sorted_work = sizes[order], work[order]
        self.order: list[int] = order.tolist()
        self.lengths: list[int] = sizes.tolist()
        self.work: list[int] = work.tolist()
        # sums over the first sequences in order
        self.sums_of_sizes: list[int] = [0, *self.sorted_sizes.cumsum().tolist()]
        self.sums_of_work: list[int] = [0, *self.sorted_work.cumsum().tolist()]
        self.rooms = chunk_sizes(int(sizes.sum()), ranks)
        self.capacity = self.rooms[0]
        self.mean_work = max(1.0, float(work.sum()) / ranks)

    def numbers_of_cuts(self, thresholds: Sequence[float]) -> list[int]:
        """How many of the longest sequences may be cut."""
        if self.ranks == 1:
            return [0]
        least = int((self.sorted_sizes > self.capacity).sum())
        counts = [int((self.sorted_work > part * self.mean_work).sum()) for part in thresholds]
        return sorted({max(least, count) for count in counts})

    def draft(self, cut: int, for_all: bool) -> _Draft:
        """The plan that cuts the `cut` longest sequences, for some ranks each or `for_all`."""
        draft = _Draft(self)
        for b in self.order[:cut]:
            draft.cut(b, for_all)
        rest: list[int] = []
        for first, last in self._bundles(cut):
            rest += draft.place(first, last)
        if cut or not draft.swap(rest):
            for b in rest:
                draft.fill(b)
        return draft

    def _bundles(self, first: int) -> list[tuple[int, int]]:
        """The sequences from number `first` on, in the order of length. Short neighbors are together.

        A bundle has the sequences number `first` to `last` − 1.
        """
        most, sums, bundles = max(1, self.capacity // _BUNDLES), self.sums_of_sizes, []
        while first < len(self.order):
            last = max(first + 1, bisect.bisect_right(sums, sums[first] + most) - 1)
            bundles.append((first, last))
            first = last
        return bundles


class _Draft:
    """A plan while it is made.

    Attributes:
        batch: the batch.
        rooms: how many more tokens each rank needs.
        work: the visible pairs of each rank so far.
        whole, pieces: the whole sequences and the other pieces of each rank so far.
        heap: (work, rank), while whole sequences are placed.
    """

    def __init__(self, batch: _Batch) -> None:
        self.batch, self.rooms = batch, list(batch.rooms)
        self.work = [0] * batch.ranks
        self.whole: list[list[int]] = [[] for _ in self.rooms]
        self.pieces: list[list[Piece]] = [[] for _ in self.rooms]
        self.heap: list[tuple[int, int]] = []

    def add(self, rank: int, piece: Piece) -> None:
        """Place a piece, unless it is empty."""
        if piece.start < piece.stop:
            self.pieces[rank].append(piece)
            self.rooms[rank] -= piece.stop - piece.start
            self.work[rank] += self.batch.mask.work(piece, self.batch.lengths[piece.sequence])

    def cut(self, sequence: int, for_all: bool) -> None:
        """Divide a sequence among the ranks with the least work, or among all of them.

        It is divided among so many ranks that it is at most half of the work of each, and none has more than the mean.
        """
        batch, mask, length = self.batch, self.batch.mask, self.batch.lengths[sequence]
        count = batch.ranks if for_all else max(2, int(2 * batch.work[sequence] / batch.mean_work) + 1)
        ranks: list[int] = []
        room, work = 0, batch.work[sequence]
        for rank in sorted(range(batch.ranks), key=self.work.__getitem__):
            is_enough = room >= length and len(ranks) >= count and work <= _FULL * batch.mean_work * len(ranks)
            if not is_enough and self.rooms[rank]:
                ranks.append(rank)
                room += self.rooms[rank]
                work += self.work[rank]
        ranks.sort()
        shares, at = _shares(length, [self.rooms[rank] for rank in ranks]), 0
        for rank, size in _parts(ranks, shares, mask):
            self.add(rank, Piece(sequence, at, at + size))
            at += size

    def place(self, first: int, last: int) -> list[int]:
        """Place a bundle on the rank with the least work that has room. Returns the sequences that have no room."""
        batch, full = self.batch, []
        if not self.heap:
            self.heap = [(work, rank) for rank, work in enumerate(self.work)]
            heapq.heapify(self.heap)
        size = batch.sums_of_sizes[last] - batch.sums_of_sizes[first]
        while self.heap and self.rooms[self.heap[0][1]] < size:
            full.append(heapq.heappop(self.heap))
        found = bool(self.heap)
        if found:
            load, rank = self.heap[0]
            self.work[rank] = load + batch.sums_of_work[last] - batch.sums_of_work[first]
            heapq.heapreplace(self.heap, (self.work[rank], rank))
            self.rooms[rank] -= size
            self.whole[rank] += batch.order[first:last]
        for entry in full:
            heapq.heappush(self.heap, entry)
        if found:
            return []
        if last == first + 1:
            return [batch.order[first]]
        return [b for one in range(first, last) for b in self.place(one, one + 1)]

    def swap(self, rest: Sequence[int]) -> bool:
        """Place sequences that have no room, and swap whole sequences so that each rank has its number of tokens.

        Returns False, and changes nothing, if no such swaps were found.
        """
        lengths, of_sequence = self.batch.lengths, self.batch.work
        whole, rooms, work = [list(each) for each in self.whole], list(self.rooms), list(self.work)
        for b in rest:
            rank = max(range(len(rooms)), key=rooms.__getitem__)
            whole[rank].append(b)
            rooms[rank] -= lengths[b]
            work[rank] += of_sequence[b]
        while any(rooms):
            a = min([rank for rank, room in enumerate(rooms) if room], key=lambda rank: abs(rooms[rank]))
            b = max(range(len(rooms)), key=lambda rank: -rooms[rank] if rooms[a] > 0 else rooms[rank])
            found = _swap(whole[a], whole[b], -rooms[a], work[a] - work[b], self.batch)
            if found is None:
                return False
            for source, target, moved in ((a, b, found[0]), (b, a, found[1])):
                for sequence in moved:
                    whole[source].remove(sequence)
                    whole[target].append(sequence)
                    work[source] -= of_sequence[sequence]
                    work[target] += of_sequence[sequence]
            rooms[a], rooms[b] = 0, rooms[a] + rooms[b]
        self.whole, self.rooms, self.work = whole, rooms, work
        return True

    def fill(self, sequence: int) -> None:
        """Cut a sequence into the room that is left. Later parts have more work, so ranks with less work get them."""
        at, length = 0, self.batch.lengths[sequence]
        for rank in sorted([r for r, room in enumerate(self.rooms) if room], key=lambda r: -self.work[r]):
            size = min(self.rooms[rank], length - at)
            self.add(rank, Piece(sequence, at, at + size))
            at += size

    @functools.cached_property
    def received(self) -> list[int]:
        """For each rank, the number of rows that it needs from others. Read it when all pieces are placed."""
        seen = [self.batch.mask.seen(pieces, self.batch.lengths) for pieces in self.pieces]
        each = map(needed_keys, seen, self.pieces)
        return [sum([last - first for found in needed.values() for first, last in found]) for needed in each]

    @functools.cached_property
    def cost(self) -> int:
        """The cost of the slowest rank, in visible pairs."""
        return max(work + PAIRS_PER_ROW * rows for work, rows in zip(self.work, self.received, strict=True))

    @property
    def rating(self) -> tuple[bool, int]:
        """Plans with a smaller rating are better."""
        return not self.is_balanced, self.cost + PAIRS_PER_EXCHANGE * any(self.pieces)

    @property
    def is_balanced(self) -> bool:
        mean = self.batch.mean_work
        most = BALANCED * mean if any(self.pieces) else max(BALANCED * mean, mean + PAIRS_PER_EXCHANGE)
        return max(self.work) <= most

    def finish(self) -> ShardPlan:
        """The plan, when all tokens are placed. Pieces that follow each other are joined."""
        lengths, all_whole, all_cut = self.batch.lengths, [], []
        for whole, pieces in zip(self.whole, self.pieces, strict=True):
            merged = _merge(sorted(pieces))
            cut = [piece for piece in merged if piece.stop - piece.start < lengths[piece.sequence]]
            # all parts of a sequence may be on one rank
            whole = sorted([*whole, *{piece.sequence for piece in merged} - {piece.sequence for piece in cut}])
            all_whole.append(tuple(whole))
            all_cut.append(tuple(cut))
        return ShardPlan(lengths, tuple(all_whole), tuple(all_cut), tuple(self.work), tuple(self.received))


def _swap(
    first: Sequence[int], second: Sequence[int], tokens: int, excess: int, batch: _Batch
) -> tuple[list[int], list[int]] | None:
    """Up to two sequences of each of two ranks which the ranks swap, so that the first loses this number of tokens.

    Of all such swaps, the one that balances the work best, for which `excess` is that of the first rank minus that of
    the second. None if there is no such swap.
    """
    (ids, sizes, work), (other_ids, other_sizes, other_work) = _pairs_of(first, batch), _pairs_of(second, batch)
    order = np.argsort(other_sizes, kind="stable")
    at = np.minimum(np.searchsorted(other_sizes, sizes - tokens, sorter=order), len(order) - 1)
    matches = order[at]
    fits = np.flatnonzero(other_sizes[matches] == sizes - tokens)
    if not len(fits):
        return None
    best = fits[np.abs(excess - 2 * (work[fits] - other_work[matches[fits]])).argmin()]
    return [int(b) for b in ids[best] if b >= 0], [int(b) for b in other_ids[matches[best]] if b >= 0]


def _pairs_of(sequences: Sequence[int], batch: _Batch) -> tuple[NDArray[np.int64], ...]:
    """(n, 2) all choices of at most two sequences, with −1 for none, and (n,) their tokens and their work."""
    shortest = sorted(sequences, key=batch.lengths.__getitem__)[:_MOST_SWAPPED]
    each = np.array([(b, batch.lengths[b], batch.work[b]) for b in shortest] + [(-1, 0, 0)] * 2)
    pairs = each[np.stack(np.triu_indices(len(each), 1), 1)]  # (n, 2, 3)
    return pairs[:, :, 0], pairs[:, :, 1].sum(1), pairs[:, :, 2].sum(1)


def _parts(ranks: Sequence[int], shares: Sequence[int], mask: Mask) -> list[tuple[int, int]]:
    """(rank, tokens) of the parts of a sequence, in order. `shares` are the tokens of each rank.

    In the part where later queries see more keys, each rank gets a part near the beginning and one near the end.
    """
    length = sum(shares)
    growing = 0 if mask.right else min(length, mask.left)
    if growing < max(shares) // 4:
        growing = 0
    grown = _shares(growing, shares)
    first = [(rank, size // 2) for rank, size in zip(ranks, grown, strict=True)]
    last = [(rank, size - size // 2) for rank, size in zip(ranks, grown, strict=True)]
    return [*first, *last[::-1], *zip(ranks, [a - b for a, b in zip(shares, grown, strict=True)], strict=True)]


def _shares(length: int, rooms: Sequence[int]) -> list[int]:
    """`length` tokens for all ranks, in proportion to their rooms."""
    ends, room, total = [], 0, sum(rooms)
    for each in rooms:
        room += each
        ends.append(room * length // total)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that follow each other in a sequence."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].sequence == piece.sequence and merged[-1].stop == piece.start:
            merged[-1] = Piece(piece.sequence, merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return merged


def needed_keys(seen: Iterable[Piece], own: Iterable[Piece]) -> dict[int, list[tuple[int, int]]]:
    """The keys that a rank needs from others: sequence → intervals [first, last), in order.

    Args:
        seen: the keys that its queries see.
        own: the keys that it has.
    """
    needed: dict[int, list[tuple[int, int]]] = {}
    for sequence, first, last in sorted(seen):
        found = needed.setdefault(sequence, [])
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    for piece in own:
        if piece.sequence in needed:
            intervals = needed[piece.sequence]
            needed[piece.sequence] = [rest for interval in intervals for rest in _without(interval, piece)]
    return needed


def _without(interval: tuple[int, int], part: Piece) -> list[tuple[int, int]]:
    """The non-empty parts of an interval before and after a piece."""
    first, last = interval
    before, after = (first, min(last, part.start)), (max(first, part.stop), last)
    return [one for one in (before, after) if one[0] < one[1]]
