"""The exchange of keys: each rank gets the keys and values that its queries see, and runs its own queries.

Sequences that are whole on a rank need no exchange. They run while the keys of cut sequences travel. In the backward,
the gradients of received keys are sent back while the whole sequences run. Their owner adds them in float32, in the
order of the ranks.

The keys of a piece are those that its queries see. So its last query is aligned with its last key if the mask is
causal.

Dimensions: N tokens of this rank, W of them in whole sequences, C = N − W in cut ones, R received rows, S keys of all
pieces, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from .sharded_layout import ShardedLayout, concatenate

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class KeysPlan:
    """Which rows a rank sends and receives, and the calls that it runs.

    Attributes:
        whole: W.
        whole_sequences, cut_sequences: the index of the sequence of each whole one, and of each piece of a cut one.
        whole_layout: the whole sequences.
        layout, key_layout: the pieces of cut sequences, and the keys that they see.
        send_splits, receive_splits: the number of rows for each rank, and from each rank.
        send_rows: the rows to send, as rows of the C rows of cut sequences, by rank.
        source: (S,) the rows of the keys in the concatenation of the C own rows and the R received ones.
        rounds: the slices of `source`, as (rows, keys), such that each has a row at most once.
        is_needed: whether any rank receives a row.
        received: for each rank, the number of received rows.
    """

    whole: int
    whole_sequences: list[int]
    cut_sequences: list[int]
    whole_layout: SequenceLayout
    layout: SequenceLayout
    key_layout: SequenceLayout
    send_splits: list[int]
    receive_splits: list[int]
    send_rows: Tensor
    source: Tensor
    rounds: list[tuple[Tensor, Tensor]]
    is_needed: bool
    received: list[int]

    @classmethod
    def make(cls, sharded: ShardedLayout, mask: Mask) -> KeysPlan:
        """The plan of this rank. All ranks know the pieces of all others, so nothing is exchanged for it."""
        lengths, rank, device = sharded.lengths, sharded.rank, sharded.device
        whole, cut = sharded.plan.whole[rank], sharded.plan.cut
        needed = [needed_keys(pieces, lengths, mask) for pieces in cut]
        transfers = [_transfers(need, cut) for need in needed]  # of each receiver: (sender, sequence, first, last)

        known = _own_rows(cut[rank], lengths)

        send, send_splits = [], []
        for receiver in range(sharded.ranks):
            mine = [(s, first, last) for sender, s, first, last in transfers[receiver] if sender == rank]
            send += [known[s][first:last] for s, first, last in mine]
            send_splits.append(sum([last - first for _, first, last in mine]))
        receive_splits = [0] * sharded.ranks
        at = sum([p.stop - p.start for p in cut[rank]])
        for sender, s, first, last in transfers[rank]:
            known[s][first:last] = np.arange(at, at + last - first)
            at += last - first
            receive_splits[sender] += last - first

        keys = [(p.sequence, *mask.keys(p, lengths[p.sequence])) for p in cut[rank]]
        sources = [known[s][first:last] for s, first, last in keys]
        return cls(
            whole=sum([p.stop for p in whole]),
            whole_sequences=[p.sequence for p in whole],
            cut_sequences=[p.sequence for p in cut[rank]],
            whole_layout=SequenceLayout.from_lengths([p.stop for p in whole], device=device),
            layout=SequenceLayout.from_lengths([p.stop - p.start for p in cut[rank]], device=device),
            key_layout=SequenceLayout.from_lengths([last - first for _, first, last in keys], device=device),
            send_splits=send_splits,
            receive_splits=receive_splits,
            send_rows=to_device(concatenate(send), device),
            source=to_device(concatenate(sources), device),
            rounds=[
                (to_device(rows, device), to_device(which, device))
                for rows, which in _rounds([p.sequence for p in cut[rank]], sources)
            ],
            is_needed=any(transfers),
            received=[sum([last - first for *_, first, last in each]) for each in transfers],
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


def _rounds(
    sequences: Sequence[int], sources: Sequence[NDArray[np.int64]]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(rows, indices of keys): the first pieces of all sequences, then the second ones, and so on."""
    found: list[tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]] = []
    counts: dict[int, int] = {}
    at = 0
    for sequence, source in zip(sequences, sources, strict=True):
        number = counts.get(sequence, 0)
        counts[sequence] = number + 1
        if number == len(found):
            found.append(([], []))
        found[number][0].append(source)
        found[number][1].append(np.arange(at, at + len(source)))
        at += len(source)
    return [(np.concatenate(rows), np.concatenate(keys)) for rows, keys in found]


@dataclass
class KeysExchange:
    """A call that runs with this exchange. `options` are those of `varlen_attention`."""

    sharded: ShardedLayout
    plan: KeysPlan
    slopes: Tensor | None
    backend: str
    options: dict[str, Any]
    needs_grad: bool
    saved: list[Saved | None] = field(default_factory=list)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """out (N, H, Dv) and lse (N, H)."""
        plan, whole = self.plan, self.plan.whole
        work = received = None
        own = torch.cat([key[whole:].flatten(1), value[whole:].flatten(1)], 1)
        if plan.is_needed:
            sent = own.index_select(0, plan.send_rows)
            received = own.new_empty(sum(plan.receive_splits), own.shape[1])
            work = _start(received, sent, plan.receive_splits, plan.send_splits, self.sharded)
        parts = [self._run(query[:whole], key[:whole], value[:whole], is_whole=True)]
        if work is not None:
            work.wait()
        if plan.layout.batch_size:
            rows = own if received is None else torch.cat([own, received])
            keys, values = rows.index_select(0, plan.source).split([key[:1].numel(), value[:1].numel()], 1)
            keys, values = keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])
            parts.append(self._run(query[whole:], keys, values, is_whole=False))
        else:
            self.saved.append(None)
        found = [part for part in parts if part is not None]
        if not found:
            return query.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(
                query.shape[:2], dtype=accumulation_dtype(query.dtype)
            )
        if len(found) == 1:
            return found[0]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _run(self, query: Tensor, key: Tensor, value: Tensor, *, is_whole: bool) -> tuple[Tensor, Tensor] | None:
        plan = self.plan
        if not len(query):
            self.saved.append(None)
            return None
        sequences = plan.whole_sequences if is_whole else plan.cut_sequences
        layout = plan.whole_layout if is_whole else plan.layout
        slopes = self.slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[torch.tensor(sequences, device=slopes.device)]
        options = self.options if is_whole else {**self.options, "causal_alignment": "lower_right"}
        attention = LocalAttention(
            layout, layout if is_whole else plan.key_layout, slopes, self.backend, options, self.needs_grad
        )
        out, lse, saved = attention.forward(query, key, value)
        self.saved.append(saved)
        return out, lse

    def backward(
        self, tensors: Sequence[Sequence[Any]], inputs: Sequence[TensorInfo], grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value. `tensors` are those of `saved`."""
        plan, whole, (query, key, value) = self.plan, self.plan.whole, inputs
        of_whole, of_cut = self.saved
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        if of_cut is not None:
            of_lse = None if grad_lse is None else grad_lse[whole:]
            dq, dk, dv = of_cut.backward(tensors[1], grad[whole:], of_lse)
            rows = self._add_pieces(torch.cat([dk.flatten(1), dv.flatten(1)], 1), key)
        else:
            rows = torch.zeros(0, key.width + value.width, dtype=accumulation_dtype(key.dtype), device=key.device)
        own, received = rows.split([len(rows) - sum(plan.receive_splits), sum(plan.receive_splits)])
        returned = work = None
        if plan.is_needed:
            returned = torch.empty(sum(plan.send_splits), rows.shape[1], dtype=key.dtype, device=key.device)
            work = _start(returned, received.to(key.dtype), plan.send_splits, plan.receive_splits, self.sharded)
        if of_whole is not None:
            of_lse = None if grad_lse is None else grad_lse[:whole]
            parts.append(of_whole.backward(tensors[0], grad[:whole], of_lse))
        if work is not None and returned is not None:
            work.wait()
            splits = plan.send_splits
            for where, gradients in zip(plan.send_rows.split(splits), returned.split(splits), strict=True):
                own.index_add_(0, where, gradients.to(own.dtype))  # each row at most once for each rank
        if of_cut is not None:
            dk, dv = own.to(key.dtype).split([key.width, value.width], 1)
            parts.append((dq, dk.unflatten(1, key.shape[1:]), dv.unflatten(1, value.shape[1:])))
        if not parts:
            return query.zeros(), key.zeros(), value.zeros()
        dq, dk, dv = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts, strict=True))
        return dq, dk, dv

    def _add_pieces(self, gradients: Tensor, key: TensorInfo) -> Tensor:
        """(S, ·) gradients of the keys of all pieces → (C + R, ·), the gradients of the rows that they are from."""
        plan = self.plan
        count = key.shape[0] - plan.whole + sum(plan.receive_splits)
        rows = gradients.new_zeros(count, gradients.shape[1], dtype=accumulation_dtype(gradients.dtype))
        for where, which in plan.rounds:  # each row at most once, so the order of the sum is fixed
            rows.index_add_(0, where, gradients.index_select(0, which).to(rows.dtype))
        return rows


def _start(
    output: Tensor, given: Tensor, output_splits: list[int], given_splits: list[int], sharded: ShardedLayout
) -> dist.Work:
    """Start to exchange rows, the first dimension. `wait` on the result before `output` is read."""
    work = dist.all_to_all_single(
        output, given.contiguous(), output_splits, given_splits, group=sharded.group, async_op=True
    )
    assert work is not None
    return work
