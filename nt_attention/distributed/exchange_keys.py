"""The exchange of keys: each rank gets the keys and values that its queries see, and runs its own queries.

Sequences that are whole on a rank need no exchange. They run during the exchange of keys of cut sequences, or in one
call with the pieces of cut sequences: that copies fewer bytes, and is faster if few keys are exchanged. In the
backward, the gradients of received keys are sent back while the whole sequences run. Their owner adds them in float32,
in the order of the ranks.

The keys of a piece are those that its queries see. So its last query is aligned with its last key if the mask is
causal.

Dimensions: N tokens of this rank, W of them in whole sequences, C = N − W in cut ones, R received rows, S keys of all
pieces, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .._offsets import to_device
from ..layout import SequenceLayout
from .local_attention import LocalAttention, Saved, TensorInfo, accumulation_dtype
from .planner import Mask, Piece, needed_keys
from .rows import Pair, RowTable
from .sharded_layout import ShardedLayout, concatenate

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        visible: (W + S, 1), the keys of `all_layouts`, from the N own rows and the R received ones.
        visible_to_cut: (S, 1), those of `key_layout`.
        uses: (C, ·), where each own row of a cut sequence is in the S keys of pieces.
        uses_of_received: (R, ·), the same of each received row.
        sums: (C, ·), the gradients of each own row of a cut sequence: of its own uses, and those that are returned.
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
    visible: RowTable
    visible_to_cut: RowTable
    uses: RowTable
    uses_of_received: RowTable
    sums: RowTable

    @classmethod
    def make(cls, sharded: ShardedLayout, mask: Mask) -> KeysPlan:
        """The plan of this rank. All ranks know the pieces of all others, so nothing is exchanged for it."""
        lengths, rank, device = sharded.lengths, sharded.rank, sharded.device
        whole, cut = sharded.plan.whole[rank], sharded.plan.cut
        needed = [needed_keys(pieces, lengths, mask) for pieces in cut]
        transfers = [_transfers(need, cut) for need in needed]  # of each receiver: (sender, sequence, first, last)
        of_whole, of_pieces = [p.stop for p in whole], [p.stop - p.start for p in cut[rank]]
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
        sources = [known[s][first:last] for s, first, last in keys]
        uses = _uses([p.sequence for p in cut[rank]], sources, at)

        def table(rows: NDArray[np.int64]) -> RowTable:
            return RowTable(to_device(rows.astype(np.int32).reshape(len(rows), -1 if len(rows) else 1), device))

        return cls(
            mask=mask,
            whole=num_whole,
            whole_sequences=[p.sequence for p in whole],
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
            sent=table(num_whole + concatenate(sent)),
            visible=table(concatenate([np.arange(num_whole), num_whole + concatenate(sources)])),
            visible_to_cut=table(num_whole + concatenate(sources)),
            uses=table(uses[:num_cut]),
            uses_of_received=table(uses[num_cut:]),
            sums=table(_sums(num_cut, sent)),
        )


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


def _uses(sequences: Sequence[int], sources: Sequence[NDArray[np.int64]], rows: int) -> NDArray[np.int64]:
    """(rows, ·) the indices of keys of pieces that each row is, and −1. A row is in each piece of a sequence once."""
    counts = {sequence: list(sequences).count(sequence) for sequence in sequences}
    found = np.full((rows, max(counts.values(), default=1)), -1)
    at = 0
    for sequence, source in zip(sequences, sources, strict=True):
        counts[sequence] -= 1
        found[source, counts[sequence]] = np.arange(at, at + len(source))
        at += len(source)
    return found


def _sums(rows: int, sent: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(rows, ·) the row itself, and where it is among the rows that were sent to each rank, counted from `rows`."""
    columns = [np.arange(rows)]
    at = rows
    for each in sent:
        if len(each):
            columns.append(np.full(rows, -1))
            columns[-1][each] = np.arange(at, at + len(each))
            at += len(each)
    return np.stack(columns, 1)


def slopes_of(sequences: Sequence[int], slopes: Tensor | None) -> Tensor | None:
    """The ALiBi slopes of some sequences: those of all sequences (H,) stay as they are, and (B, H) are selected."""
    if slopes is None or slopes.dim() == 1:
        return slopes
    return slopes[torch.tensor(sequences, dtype=torch.int64, device=slopes.device)]


@dataclass
class KeysExchange:
    """A call that runs with this exchange. `options` are those of `varlen_attention`.

    Attributes:
        slopes: (H,) or (B, H), or None.
        overlaps: whether whole sequences run during the exchange, in a call of their own. If not, all pieces run in one
            call, which copies fewer bytes.
        saved: what the backward needs of the call of whole sequences, and of that of the other pieces or of all. None
            for calls without queries.
    """

    sharded: ShardedLayout
    plan: KeysPlan
    slopes: Tensor | None
    backend: str
    options: dict[str, Any]
    needs_grad: bool
    overlaps: bool
    saved: list[Saved | None] = field(default_factory=lambda: [None, None])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """out (N, H, Dv) and lse (N, H)."""
        plan, whole = self.plan, self.plan.whole
        if not plan.is_cut:
            return self._run(0, query, key, value)
        own = Pair.of(key, value)
        width, value_width = own.key.shape[1], own.value.shape[1]
        sent = key.new_empty(len(plan.sent), width + value_width)
        plan.sent.gather(Pair.columns(sent, width), own)
        received = key.new_empty(len(plan.uses_of_received), width + value_width)
        wait = self._start(received, sent, plan.receive_splits, plan.send_splits)
        if whole == len(query):  # nothing is cut on this rank
            found = self._run(0, query, key, value)
            wait()
            return found
        if not (self.overlaps and whole):
            wait()
            return self._run(1, query, *self._visible_rows(plan.visible, received, key, value))
        first = self._run(0, query[:whole], key[:whole], value[:whole])
        wait()
        second = self._run(1, query[whole:], *self._visible_rows(plan.visible_to_cut, received, key, value))
        out, lse = (torch.cat(each) for each in zip(first, second, strict=True))
        return out, lse

    def _visible_rows(self, table: RowTable, received: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a table, from those of this rank and the received rows."""
        found = [x.new_empty(len(table), *x.shape[1:]) for x in (key, value)]
        table.gather(Pair.of(*found), Pair.of(key, value), received)
        return found[0], found[1]

    def _run(self, which: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Run the whole sequences (0), or the other pieces (1), which may come after the whole sequences."""
        plan = self.plan
        if not len(query):
            lse = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
            return query.new_empty(*query.shape[:2], value.shape[2]), lse
        layouts, sequences, options = (plan.whole_layout, plan.whole_layout), plan.whole_sequences, self.options
        if which:
            is_all = len(query) != plan.layout.total
            layouts = plan.all_layouts if is_all else (plan.layout, plan.key_layout)
            sequences = [*sequences, *plan.cut_sequences] if is_all else plan.cut_sequences
            options = {**options, "causal_alignment": "lower_right"}
        attention = self._attention(layouts, slopes_of(sequences, self.slopes), options)
        out, lse, self.saved[which] = attention.forward(query, key, value)
        return out, lse

    def _attention(
        self, layouts: tuple[SequenceLayout, SequenceLayout], slopes: Tensor | None, options: dict[str, Any]
    ) -> LocalAttention:
        """A call on this rank. Without slopes it is kept for other layers and batches with this layout."""

        def make() -> LocalAttention:
            return LocalAttention(*layouts, slopes, self.backend, options, self.needs_grad)

        if slopes is not None:
            return make()
        which = [layout is layouts[1] for layout in (self.plan.whole_layout, self.plan.key_layout)]
        cache_key = ("attention", self.plan.mask, *which, self.backend, self.needs_grad, *options.values())
        return self.sharded.cached(cache_key, make)

    def backward(
        self, tensors: Sequence[Sequence[Any]], inputs: Sequence[TensorInfo], grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value. `tensors` are those of `saved`."""
        (_, key, value), (of_whole, of_pieces), plan = inputs, self.saved, self.plan
        if not plan.is_cut and of_whole is not None:
            return of_whole.backward(tensors[0], grad, grad_lse)
        count, alone = len(grad), 0 if of_whole is None else plan.whole  # the rows that ran in a call of their own
        if of_pieces is None:
            dq, dk, dv = (x.empty(0) for x in inputs)
        else:
            of_lse = None if grad_lse is None else grad_lse[alone:]
            dq, dk, dv = of_pieces.backward(tensors[1], grad[alone:], of_lse)
            dk, dv = dk.contiguous(), dv.contiguous()  # `sums` is written to them
        first = plan.whole - alone  # of the rows of cut sequences
        of_visible = Pair.of(dk[first:], dv[first:])
        sent = torch.empty(len(plan.uses_of_received), key.width + value.width, dtype=key.dtype, device=key.device)
        plan.uses_of_received.gather(Pair.columns(sent, key.width), of_visible)
        returned = sent.new_empty(len(plan.sent), sent.shape[1])
        wait = self._start(returned, sent, plan.send_splits, plan.receive_splits)
        own = sent.new_empty(len(plan.uses), sent.shape[1], dtype=accumulation_dtype(key.dtype))
        plan.uses.gather(Pair.columns(own, key.width), of_visible)
        if of_whole is not None:
            of_lse = None if grad_lse is None else grad_lse[:alone]
            of_whole_sequences = of_whole.backward(tensors[0], grad[:alone], of_lse)
        wait()
        dk, dv = dk[: count - alone], dv[: count - alone]  # there are as many keys as queries, and more
        plan.sums.gather(Pair.of(dk[first:], dv[first:]), Pair.columns(own, key.width), returned)
        if of_whole is None:
            return dq, dk, dv
        if of_pieces is None:
            return of_whole_sequences
        dq, dk, dv = (torch.cat(each) for each in zip(of_whole_sequences, (dq, dk, dv), strict=True))
        return dq, dk, dv

    def _start(
        self, output: Tensor, given: Tensor, output_splits: list[int], given_splits: list[int]
    ) -> Callable[[], object]:
        """Start to exchange rows, which are the first dimension. Returns a function that waits for `output`."""
        if not self.plan.has_transfers:
            return _nothing
        work = dist.all_to_all_single(
            output, given, output_splits, given_splits, group=self.sharded.group, async_op=self.overlaps
        )
        return _nothing if work is None else work.wait


def _nothing() -> None:
    pass
