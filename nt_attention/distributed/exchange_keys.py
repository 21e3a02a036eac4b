"""The exchange of keys: each rank gets the keys and values that its queries see, and runs its own queries.

The keys of a piece are those that its queries see. So its last query is aligned with its last key if the mask is
causal. In the backward, the gradients of received keys are sent back. Their owner adds them in float32, in the order of
the ranks.

What can run while keys travel (`Schedule`):

- Other heads. The key heads are divided into two groups, each with an exchange of its own, and the first group runs
  while the keys of the second one travel. In the backward, the gradients of the second group travel while the first one
  runs. Kernels then also need less memory for sums of gradients.
- Whole sequences, which need no exchange, in a call of their own.

Both take another call. Its results are copied to those of the first one, unless the backend can write there itself.
Small calls wait for the host, and run all at once.

Dimensions: N tokens of this rank, W of them in whole sequences, C = N − W in cut ones, R received rows, S keys of all
pieces, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.known import SequenceLayout
from ..layouts.reading import to_device
from .exchange import Exchange
from .local_attention import LocalAttention, TensorInfo, accumulation_dtype
from .planner import Mask, Piece, needed_keys
from .rows import RowTable, joined_width
from .sharded_layout import ShardedLayout, concatenate

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Tables(NamedTuple):
    """The rows that a call on this rank copies and adds. Its keys are K = S, or K = W + S with whole sequences.

    Attributes:
        visible: (K, 1), the keys of the call, from the N own rows and the R received ones.
        uses_of_received: (R, ·), where each received row is among the K keys.
        sums: (C or N, ·), the gradients of each own row: those of its uses among the K keys, and those that return.
    """

    visible: RowTable
    uses_of_received: RowTable
    sums: RowTable


@dataclass(frozen=True)
class KeysPlan:
    """Which rows a rank sends and receives, and the calls that it runs.

    Attributes:
        mask: the mask.
        whole: W.
        whole_sequences, cut_sequences: the index of the sequence of each whole one, and of each piece of a cut one.
        whole_layout: the whole sequences.
        layout, key_layout: the pieces of cut sequences, and the keys that they see.
        all_layouts: the whole sequences and then the pieces, and their keys.
        send_splits, receive_splits: the number of rows for each rank, and from each rank.
        is_cut: whether a sequence is cut, on any rank.
        has_transfers: whether any rank receives a row.
        received: for each rank, the number of received rows.
        sent: (rows to send, 1), by rank, from the N own rows.
        sources: (S,) each key of `key_layout`, as the index of one of the C own rows, or C plus that of a received row.
        returned: (C, ·) the indices of each own row among the sent rows, and −1.
    """

    mask: Mask
    whole: int
    whole_sequences: list[int]
    cut_sequences: list[int]
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
    def make(cls, sharded: ShardedLayout, mask: Mask) -> KeysPlan:
        """The plan of this rank. All ranks know the pieces of all others, so nothing is exchanged for it."""
        lengths, rank, device = sharded.lengths, sharded.rank, sharded.device
        whole, cut = sharded.plan.whole[rank], sharded.plan.cut
        needed = [needed_keys(pieces, lengths, mask) for pieces in cut]
        transfers = [_transfers(need, cut) for need in needed]  # of each receiver: (sender, sequence, first, last)
        of_whole, of_pieces = [lengths[b] for b in whole], [p.stop - p.start for p in cut[rank]]
        num_whole, num_cut = sum(of_whole), sum(of_pieces)

        # the row of each position of a cut sequence: first the C own rows, then the R received ones
        known = _own_rows(cut[rank], lengths)
        sent = []
        for receiver in range(sharded.ranks):
            mine = [(s, first, last) for sender, s, first, last in transfers[receiver] if sender == rank]
            sent.append(concatenate([known[s][first:last] for s, first, last in mine]))
        receive_splits = [0] * sharded.ranks
        at = num_cut
        for sender, s, first, last in transfers[rank]:
            known[s][first:last] = np.arange(at, at + last - first)
            at += last - first
            receive_splits[sender] += last - first

        keys = [(p.sequence, *mask.keys(p, lengths[p.sequence])) for p in cut[rank]]
        of_keys = [last - first for _, first, last in keys]
        return cls(
            mask=mask,
            whole=num_whole,
            whole_sequences=list(whole),
            cut_sequences=[p.sequence for p in cut[rank]],
            whole_layout=SequenceLayout.from_lengths(of_whole, device=device),
            layout=SequenceLayout.from_lengths(of_pieces, device=device),
            key_layout=SequenceLayout.from_lengths(of_keys, device=device),
            all_layouts=(
                SequenceLayout.from_lengths(of_whole + of_pieces, device=device),
                SequenceLayout.from_lengths(of_whole + of_keys, device=device),
            ),
            send_splits=[len(rows) for rows in sent],
            receive_splits=receive_splits,
            is_cut=any(cut),
            has_transfers=any(transfers),
            received=[sum([last - first for *_, first, last in each]) for each in transfers],
            sent=_table(num_whole + concatenate(sent), device),
            sources=concatenate([known[s][first:last] for s, first, last in keys]),
            returned=_returned(num_cut, sent),
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
            visible=_table(np.concatenate([own, self.whole + self.sources]), device),
            uses_of_received=_table(uses[rows:], device),
            sums=_table(sums, device),
        )

    @property
    def num_received(self) -> int:
        """R."""
        return sum(self.receive_splits)


def _table(rows: NDArray[np.int64], device: torch.device) -> RowTable:
    return RowTable(to_device(rows.astype(np.int32).reshape(len(rows), -1 if len(rows) else 1), device))


def _own_rows(pieces: Sequence[Piece], lengths: Sequence[int]) -> dict[int, NDArray[np.int64]]:
    """Sequence → the row of each of its positions among the C rows of a rank; −1 for positions of other ranks."""
    rows: dict[int, NDArray[np.int64]] = {}
    at = 0
    for sequence, start, stop in pieces:
        if sequence not in rows:
            rows[sequence] = np.full(lengths[sequence], -1)
        rows[sequence][start:stop] = np.arange(at, at + stop - start)
        at += stop - start
    return rows


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


def slopes_of(sequences: Sequence[int], slopes: Tensor | None) -> Tensor | None:
    """The ALiBi slopes of some sequences: those of all sequences (H,) stay as they are, and (B, H) are selected."""
    if slopes is None or slopes.dim() == 1:
        return slopes
    return slopes[torch.tensor(sequences, dtype=torch.int64, device=slopes.device)]


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

    plan: KeysPlan
    groups: list[int]
    parts: list[Part]
    is_async: bool
    dim: int = 0
    sizes: Sequence[int] = ()
    key_sizes: Sequence[int] = ()

    @classmethod
    def of(cls, plan: KeysPlan, heads: int, groups: Sequence[int], runs_whole_alone: bool) -> Schedule:
        """The schedule for H query heads, the number of key heads of each exchange, and this choice.

        Several groups and whole sequences in a call of their own exclude each other.
        """
        is_async = len(groups) > 1 or runs_whole_alone
        of_keys = list(groups) if plan.is_cut else []
        if not plan.layout.total:  # nothing is cut on this rank
            return cls(plan, of_keys, [Part(_ALL, True, False)], is_async)
        if len(groups) > 1:
            sizes = [heads // sum(groups) * count for count in groups]
            slices = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
            return cls(plan, of_keys, [Part(x, plan.whole > 0, True) for x in slices], is_async, 1, sizes, of_keys)
        if plan.whole and runs_whole_alone:
            sizes = [plan.whole, plan.layout.total]
            return cls(plan, of_keys, [Part(_ALL, True, False), Part(_ALL, False, True)], is_async, 0, sizes, sizes)
        return cls(plan, of_keys, [Part(_ALL, plan.whole > 0, True)], is_async)

    def of_groups(self, x: Tensor) -> Sequence[Tensor]:
        """The key heads (N, g, …) of each exchange."""
        return x.split(self.groups, 1) if len(self.groups) > 1 else (x,) * len(self.groups)

    def of_parts(self, x: Tensor, are_keys: bool = False) -> Sequence[Tensor]:
        """The rows or heads of each part, of a tensor (N, H, …), or of one (N, G, …) if they are keys."""
        return x.split(self.key_sizes if are_keys else self.sizes, self.dim) if len(self.parts) > 1 else (x,)


class _Travelling(NamedTuple):
    """Some heads of this rank, the received rows, and a function that waits for them."""

    key: Tensor
    value: Tensor
    received: Tensor
    wait: Callable[[], object]


class KeysExchange(Exchange):
    """A call that runs with this exchange.

    Attributes:
        plan, parts: those of the schedule.
    """

    def __init__(
        self,
        sharded: ShardedLayout,
        schedule: Schedule,
        slopes: Tensor | None,
        backend: str,
        options: dict[str, Any],
        needs_grad: bool,
    ) -> None:
        """`slopes` are (H,) or (B, H) or None, and `options` are those of `varlen_attention`."""
        self.sharded, self.schedule, self.slopes, self.backend = sharded, schedule, slopes, backend
        self.options, self.needs_grad = options, needs_grad
        self.plan, self.parts = schedule.plan, schedule.parts
        self.saved = [None] * len(self.parts)
        self.tables = self._tables()

    def _tables(self) -> Tables | None:
        """The tables of the parts with pieces of cut sequences, which other layers share. None without such a part."""
        part = self.parts[-1]
        if not part.has_cut:
            return None
        key = ("tables", self.plan.mask, part.has_whole)
        return self.sharded.cached(key, lambda: self.plan.make_tables(part.has_whole))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        schedule = self.schedule
        groups = zip(schedule.of_groups(key), schedule.of_groups(value), strict=True)
        travelling = [self._send(*group) for group in groups]
        if len(self.parts) == 1:
            out, lse = self._run(0, query, *self._keys(0, key, value, travelling))
        else:
            out = query.new_empty(*query.shape[:2], value.shape[2])
            of_lse = []
            for i, (x, given) in enumerate(zip(schedule.of_parts(query), schedule.of_parts(out), strict=True)):
                found, lse = self._run(i, x, *self._keys(i, key, value, travelling), given)
                of_lse.append(lse.T)
                if found is not given:
                    given.copy_(found)
            lse = torch.cat(of_lse, 1 - schedule.dim).T
        for each in travelling:  # nothing is cut on this rank
            each.wait()
        return out, lse

    def _send(self, key: Tensor, value: Tensor) -> _Travelling:
        """Start to exchange some heads."""
        plan, width = self.plan, joined_width(key, value)
        sent, received = key.new_empty(len(plan.sent), width), key.new_empty(plan.num_received, width)
        plan.sent.gather(sent, key, value)
        return _Travelling(key, value, received, self._start(received, sent, plan.receive_splits, plan.send_splits))

    def _keys(self, index: int, key: Tensor, value: Tensor, travelling: list[_Travelling]) -> tuple[Tensor, Tensor]:
        """The keys and values of a part. Waits for the first of `travelling` and removes it, if the part needs it."""
        if not self.parts[index].has_cut:
            return self.schedule.of_parts(key, True)[index], self.schedule.of_parts(value, True)[index]
        assert self.tables is not None
        table, (key, value, received, wait) = self.tables.visible, travelling.pop(0)
        visible = key.new_empty(len(table), *key.shape[1:]), value.new_empty(len(table), *value.shape[1:])
        wait()
        table.gather(visible, key, value, received)
        return visible

    def _run(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a part, and keep what its backward needs. If the backend can write to `given`, that is out."""
        if not len(query):
            lse = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
            return query.new_empty(*query.shape[:2], value.shape[2]), lse
        out, lse, self.saved[index] = self._attention(self.parts[index]).forward(query, key, value, given)
        return out, lse

    def _attention(self, part: Part) -> LocalAttention:
        """The call of a part. Without slopes it is kept for other layers and batches with this layout."""

        def make() -> LocalAttention:
            plan, options = self.plan, self.options
            layouts, sequences = (plan.whole_layout, plan.whole_layout), plan.whole_sequences
            if part.has_cut:
                layouts, sequences = (plan.layout, plan.key_layout), plan.cut_sequences
                options = {**options, "causal_alignment": "lower_right"}
            if part.has_cut and part.has_whole:
                layouts, sequences = plan.all_layouts, [*plan.whole_sequences, *plan.cut_sequences]
            slopes = slopes_of(sequences, self.slopes)
            slopes = None if slopes is None else slopes[..., part.heads].contiguous()
            return LocalAttention(*layouts, slopes, self.backend, options, self.needs_grad)

        if self.slopes is not None:
            return make()
        which = ("attention", self.plan.mask, part.has_whole, part.has_cut, self.backend, self.needs_grad)
        return self.sharded.cached((*which, *self.options.values()), make)

    def backward(
        self,
        tensors: Sequence[Any],
        inputs: Sequence[TensorInfo],
        out: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.parts) == 1:
            return self._backward_of_one(tensors, inputs, out, grad, grad_lse)
        dq, dk, dv = (x.empty(self.sharded.total) for x in inputs)
        schedule, tensors_of = self.schedule, self.split(tensors)
        outs, grads, dqs = (schedule.of_parts(x) for x in (out, grad, dq))
        grads_lse = [None] * len(self.parts) if grad_lse is None else schedule.of_parts(grad_lse)
        dks, dvs = schedule.of_parts(dk, True), schedule.of_parts(dv, True)
        finish = []
        for i in reversed(range(len(self.parts))):  # whole sequences run last, while gradients travel
            saved = self.saved[i]
            assert saved is not None
            of_query, of_key, of_value = saved.backward(tensors_of[i], outs[i], grads[i], grads_lse[i], dqs[i])
            if of_query is not dqs[i]:
                dqs[i].copy_(of_query)
            if self.parts[i].has_cut:
                finish.append(self._return(of_key, of_value, dks[i], dvs[i]))
            else:
                dks[i].copy_(of_key)
                dvs[i].copy_(of_value)
        for each in finish:
            each()
        return dq, dk, dv

    def _backward_of_one(
        self, tensors: Sequence[Any], inputs: Sequence[TensorInfo], out: Tensor, grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` on a rank with one part."""
        saved, total = self.saved[0], self.sharded.total
        if self.tables is not None:
            assert saved is not None
            query, of_key, of_value = saved.backward(tensors, out, grad, grad_lse)
            key, value = (x.empty(total) for x in inputs[1:])
            self._return(of_key, of_value, key, value)()
            return query, key, value
        query, key, value = (x.empty(0) for x in inputs)  # nothing is cut on this rank
        groups = zip(self.schedule.of_groups(key), self.schedule.of_groups(value), strict=True)
        finish = [self._return(*none, *none) for none in reversed(list(groups))]
        if saved is not None:
            query, key, value = saved.backward(tensors, out, grad, grad_lse)
        for each in finish:
            each()
        return query, key, value

    def _return(self, key: Tensor, value: Tensor, dk: Tensor, dv: Tensor) -> Callable[[], object]:
        """Start to return the gradients of received keys.

        Args:
            key, value: (K, g, D) and (K, g, Dv), the gradients of the visible keys and values of a part.
            dk, dv: (C or N, g, ·), the gradients of the rows of this rank, not written yet.

        Returns:
            A function that waits for the returned gradients, and writes the sums to dk and dv.
        """
        plan, tables, width = self.plan, self.tables, joined_width(key, value)
        sent, returned = key.new_empty(plan.num_received, width), key.new_empty(len(plan.sent), width)
        if tables is not None:
            tables.uses_of_received.gather(sent, key, value)
        wait = self._start(returned, sent, plan.send_splits, plan.receive_splits)

        def finish() -> None:
            wait()
            if tables is not None:
                tables.sums.gather((dk, dv), key, value, returned)

        return finish

    def _start(
        self, output: Tensor, given: Tensor, output_splits: list[int], given_splits: list[int]
    ) -> Callable[[], object]:
        """Start to exchange rows, which are the first dimension. Returns a function that waits for `output`."""
        if not self.plan.has_transfers:
            return _nothing
        work = dist.all_to_all_single(
            output, given, output_splits, given_splits, group=self.sharded.group, async_op=self.schedule.is_async
        )
        return _nothing if work is None else work.wait


def _nothing() -> None:
    pass
