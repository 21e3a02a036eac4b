"""The forms of a ragged batch, and the tensors that give its lengths.

A batch is a list of tensors, its parts: one for packed rows, NestedTensors and padded batches, B for a list.

Dimensions: B sequences, T tokens in all of them, L positions in a padded row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nt_attention import SequenceLayout
from nt_attention.layouts.bounded import BoundedLayout

Lengths = tuple[int, ...]
PADDED_LENGTH = 7


def ends(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(ends(lengths), dtype=dtype)


def token_mask(lengths: Sequence[int]) -> Tensor:
    """(B, L) bool, True where a token is; L is 7 for all the lengths of these tests, so that masks can be copied."""
    return torch.arange(PADDED_LENGTH) < torch.tensor(lengths)[:, None]


class Form:
    """Rows (T, …) to the parts of a batch and back; differentiable, by stock operations alone."""

    @staticmethod
    def wrap(rows: Tensor, lengths: Lengths, offsets: Tensor | None) -> list[Tensor]:
        return [rows]

    @staticmethod
    def rows(parts: Sequence[Tensor], lengths: Lengths) -> Tensor:
        return parts[0]

    @staticmethod
    def view(part: Tensor) -> Tensor:
        """A view of all of a part."""
        return part[:]


class Jagged(Form):
    """A NestedTensor (B, j, …)."""

    @staticmethod
    def wrap(rows: Tensor, lengths: Lengths, offsets: Tensor | None) -> list[Tensor]:
        return [torch.nested.nested_tensor_from_jagged(rows, offsets)]

    @staticmethod
    def rows(parts: Sequence[Tensor], lengths: Lengths) -> Tensor:
        return parts[0].values()

    @staticmethod
    def view(part: Tensor) -> Tensor:
        return part.values()


class Transposed(Form):
    """A NestedTensor (B, H, j, D)."""

    @staticmethod
    def wrap(rows: Tensor, lengths: Lengths, offsets: Tensor | None) -> list[Tensor]:
        return [torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)]

    @staticmethod
    def rows(parts: Sequence[Tensor], lengths: Lengths) -> Tensor:
        return parts[0].transpose(1, 2).values()

    @staticmethod
    def view(part: Tensor) -> Tensor:
        return part.transpose(1, 2).values()


class Listed(Form):
    """A list of tensors (Li, …)."""

    @staticmethod
    def wrap(rows: Tensor, lengths: Lengths, offsets: Tensor | None) -> list[Tensor]:
        return [rows[begin:end] for begin, end in itertools.pairwise(ends(lengths))]

    @staticmethod
    def rows(parts: Sequence[Tensor], lengths: Lengths) -> Tensor:
        return torch.cat(list(parts))


class Padded(Form):
    """(B, L, …), tokens at the left of each row, 0 elsewhere."""

    @staticmethod
    def wrap(rows: Tensor, lengths: Lengths, offsets: Tensor | None) -> list[Tensor]:
        padded = rows.new_zeros(len(lengths), PADDED_LENGTH, *rows.shape[1:])
        return [padded.index_put(token_mask(lengths).nonzero(as_tuple=True), rows)]

    @staticmethod
    def rows(parts: Sequence[Tensor], lengths: Lengths) -> Tensor:
        here = torch.arange(parts[0].shape[1]) < torch.tensor(lengths)[:, None]
        return parts[0][here.nonzero(as_tuple=True)]


@dataclass(frozen=True)
class Carrier:
    """The tensor that gives the lengths of a batch, and the layout made from it.

    Attributes:
        tensor: from lengths to that tensor.
        layout: from that tensor to a layout.
        offsets: from that tensor to offsets, by stock operations.
        copies: whether the layout shares no memory with the tensor.
        is_row: whether the tensor is a row of a table.
    """

    tensor: Callable[[Lengths], Tensor]
    layout: Callable[[Tensor], SequenceLayout]
    offsets: Callable[[Tensor], Tensor]
    copies: bool = True
    is_row: bool = False


def _from_counts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


def _begins(position_ids: Tensor) -> Tensor:
    """Offsets of positions (T,) that count from 0 in every sequence."""
    starts = (position_ids == 0).nonzero().flatten()
    return torch.cat([starts, torch.tensor([position_ids.shape[0]])])


def _positions(lengths: Lengths) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _nested(offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.zeros(29, 1), offsets)


CARRIERS = {
    "from_offsets": Carrier(offsets_of, SequenceLayout.from_offsets, lambda o: o),
    "from_offsets-int32": Carrier(lambda n: offsets_of(n, torch.int32), SequenceLayout.from_offsets, lambda o: o),
    "from_offsets-bound": Carrier(offsets_of, lambda o: SequenceLayout.from_offsets(o, max_seqlen=17), lambda o: o),
    "from_offsets-cu_seqlens": Carrier(
        offsets_of, lambda o: SequenceLayout.from_offsets(SequenceLayout.from_offsets(o).cu_seqlens), lambda o: o
    ),
    "from_offsets-view": Carrier(offsets_of, lambda o: SequenceLayout.from_offsets(o[:]), lambda o: o),
    "from_offsets-row": Carrier(
        lambda n: torch.stack([offsets_of(n), offsets_of(n)])[0], SequenceLayout.from_offsets, lambda o: o, is_row=True
    ),
    "from_lengths": Carrier(torch.tensor, SequenceLayout.from_lengths, _from_counts),
    "from_attention_mask": Carrier(token_mask, SequenceLayout.from_attention_mask, lambda m: _from_counts(m.sum(1))),
    "from_position_ids": Carrier(_positions, SequenceLayout.from_position_ids, _begins),
    "from_nested": Carrier(offsets_of, lambda o: SequenceLayout.from_nested(_nested(o)), lambda o: o),
}
# For code that needs no attention, which no backend for CPUs has with bounds.
BOUNDED = {
    "bounds": Carrier(offsets_of, lambda o: BoundedLayout(o, PADDED_LENGTH, int(o[-1])), lambda o: o, copies=False),
    "int32 bounds": Carrier(
        lambda n: offsets_of(n, torch.int32),
        lambda o: BoundedLayout(o, PADDED_LENGTH, int(o[-1])),
        lambda o: o,
        copies=False,
    ),
}
# key_padding_mask is True at padding; attention_mask is 1 at tokens.
MASKS = {
    "key_padding_mask": Carrier(
        lambda n: ~token_mask(n), lambda m: SequenceLayout.from_attention_mask(~m), lambda m: m, copies=False
    ),
    "attention_mask": Carrier(
        lambda n: token_mask(n).long(), SequenceLayout.from_attention_mask, lambda m: m, copies=False
    ),
}
