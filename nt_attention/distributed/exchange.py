"""The exchange of keys and values between ranks, with the calls of attention that use them, forward and backward.

`exchange_plan.py` says what is sent and which calls run. In the backward, the gradients of received keys are sent back.
Their owner adds them in float32, in the order of the ranks.

Dimensions: N query tokens of this rank, M key tokens of this rank, H query heads, G key heads, g those of a part, D and
Dv head dims, K keys of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts.sequence import SequenceLayout
from .exchange_plan import Part, Schedule, Tables
from .local_attention import LocalAttention, Saved, TensorInfo, accumulation_dtype
from .mods import has_mods, with_indices_of_batch
from .rows import joined_width
from .sharded_layout import ShardedLayout


def slopes_of(sequences: Sequence[int], slopes: Tensor | None) -> Tensor | None:
    """The ALiBi slopes of some sequences: those of all sequences (H,) stay as they are, and (B, H) are selected."""
    if slopes is None or slopes.dim() == 1:
        return slopes
    return slopes[torch.tensor(sequences, dtype=torch.int64, device=slopes.device)]


class _Travelling(NamedTuple):
    """Some heads of this rank, the received rows, and a function that waits for them."""

    key: Tensor
    value: Tensor
    received: Tensor
    wait: Callable[[], object]


class Exchange:
    """A call that runs on all ranks.

    Attributes:
        plan, parts: those of the schedule.
        saved: what the backward needs of each part; None for parts without queries.
    """

    saved: list[Saved | None]

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
        return self.sharded.cached(("tables", self.plan, part.has_whole), lambda: self.plan.make_tables(part.has_whole))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """out (N, H, Dv) and lse (N, H), from query (N, H, D), key (M, G, D) and value (M, G, Dv)."""
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
        attention, rows = self._attention(self.parts[index]), self._query_rows(index)
        if rows is None:
            out, lse, self.saved[index] = attention.forward(query, key, value, given)
            return out, lse
        query = _spread(query, rows, attention.layout.total)
        out, lse, self.saved[index] = attention.forward(query, key, value)
        return out.index_select(0, rows), lse.index_select(0, rows)

    def _query_rows(self, index: int) -> Tensor | None:
        """Where the queries of a part are among those of its call, or None if the call has no others."""
        return self.tables.queries if self.tables is not None and self.parts[index].has_cut else None

    def _layouts(self, part: Part) -> tuple[SequenceLayout, SequenceLayout]:
        """The layouts of the queries and of the keys of the call of a part."""
        plan = self.plan
        if not part.has_cut:
            return plan.whole_layout, plan.whole_layout
        return plan.all_layouts if part.has_whole else (plan.layout, plan.key_layout)

    def _attention(self, part: Part) -> LocalAttention:
        """The call of a part. Without slopes and mods it is kept for other layers and batches with this layout."""

        def make() -> LocalAttention:
            options = self.options
            sequences = self.plan.sequences_of(part.has_whole, part.has_cut)
            if has_mods(options):
                options = with_indices_of_batch(options, sequences, part.heads.start or 0, self.sharded.device)
            slopes = slopes_of([b for b, *_ in sequences], self.slopes)
            slopes = None if slopes is None else slopes[..., part.heads].contiguous()
            return LocalAttention(*self._layouts(part), slopes, self.backend, options, self.needs_grad)

        if self.slopes is not None or has_mods(self.options):
            return make()
        which = ("attention", self.plan, part.has_whole, part.has_cut, self.backend, self.needs_grad)
        return self.sharded.cached((*which, *self.options.values()), make)

    def take_tensors(self) -> list[Tensor | None]:
        """Return the tensors that the backward needs, and drop them here."""
        each = [[] if saved is None else saved.take_tensors() for saved in self.saved]
        self._counts = [len(tensors) for tensors in each]
        return [x for tensors in each for x in tensors]

    def _split(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """The tensors of each part, from those of `take_tensors`."""
        found, at = [], 0
        for count in self._counts:
            found.append(tensors[at : at + count])
            at += count
        return found

    def backward(
        self, tensors: Sequence[Any], inputs: Sequence[TensorInfo], out: Tensor, grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value.

        Args:
            tensors: those of `take_tensors`.
            inputs: the shapes of query, key and value.
            out: (N, H, Dv) the result of the forward.
            grad: (N, H, Dv) the gradient of `out`.
            grad_lse: (N, H) the gradient of lse, or None.
        """
        if len(self.parts) == 1:
            return self._backward_of_one(tensors, inputs, out, grad, grad_lse)
        dq, dk, dv = (x.empty() for x in inputs)
        schedule, tensors_of = self.schedule, self._split(tensors)
        outs, grads, dqs = (schedule.of_parts(x) for x in (out, grad, dq))
        grads_lse = [None] * len(self.parts) if grad_lse is None else schedule.of_parts(grad_lse)
        dks, dvs = schedule.of_parts(dk, True), schedule.of_parts(dv, True)
        finish = []
        for i in reversed(range(len(self.parts))):  # whole sequences run last, while gradients travel
            no_rows = (dqs[i], dks[i][:0], dvs[i][:0])
            of_query, of_key, of_value = self._backward_of(
                i, tensors_of[i], (outs[i], grads[i], grads_lse[i]), no_rows, dqs[i]
            )
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
        no_rows = tuple([x.empty(0) for x in inputs])
        if self.tables is not None:
            query, of_key, of_value = self._backward_of(0, tensors, (out, grad, grad_lse), no_rows)
            key, value = (x.empty() for x in inputs[1:])
            self._return(of_key, of_value, key, value)()
            return query, key, value
        groups = zip(*map(self.schedule.of_groups, no_rows[1:]), strict=True)  # nothing is cut on this rank
        finish = [self._return(*none, *none) for none in reversed(list(groups))]
        query, key, value = self._backward_of(0, tensors, (out, grad, grad_lse), no_rows)
        for each in finish:
            each()
        return query, key, value

    def _backward_of(
        self,
        index: int,
        tensors: Sequence[Any],
        of_out: tuple[Tensor, Tensor, Tensor | None],
        no_rows: tuple[Tensor, ...],
        dq: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, and of the keys and values of the call of a part.

        Args:
            index: the part.
            tensors: what it saved.
            of_out: out and the gradients of out and lse.
            no_rows: the gradients if there are no queries, and so no keys.
            dq: where the backend may write the gradient of query.
        """
        saved, rows = self.saved[index], self._query_rows(index)
        if saved is None:
            query, key, value = no_rows
            return query, key, value
        if rows is None:
            return saved.backward(tensors, *of_out, dq)
        total = self._layouts(self.parts[index])[0].total
        out, grad, grad_lse = (None if x is None else _spread(x, rows, total) for x in of_out)
        assert out is not None
        assert grad is not None
        query, key, value = saved.backward(tensors, out, grad, grad_lse)
        return query.index_select(0, rows), key, value

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


def _spread(x: Tensor, rows: Tensor, total: int) -> Tensor:
    """(C, …) → (total, …), with zeros in the other rows."""
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows, x)
