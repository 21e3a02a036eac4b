"""Ragged lengths, their masks, and every constructor of `SequenceLayout`."""

import torch

from nt_attention import SequenceLayout

LENGTHS = [5, 0, 1, 7]


def right(lengths, size):
    return torch.arange(size) < torch.tensor(lengths, dtype=torch.int64)[:, None]


def nested(lengths):
    layout = SequenceLayout.from_lengths(lengths)
    return torch.nested.nested_tensor_from_jagged(torch.randn(layout.total, 3), layout.offsets.clone())


MAKERS = {
    "list": lambda lengths: SequenceLayout.from_lengths(lengths),
    "tensor": lambda lengths: SequenceLayout.from_lengths(torch.tensor(lengths, dtype=torch.int32)),
    "offsets": lambda lengths: SequenceLayout.from_offsets(torch.tensor([0, *lengths]).cumsum(0)),
    "cu_seqlens": lambda lengths: SequenceLayout.from_offsets(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)),
    "mask": lambda lengths: SequenceLayout.from_attention_mask(right(lengths, max(lengths, default=0) + 2)),
    "integer-mask": lambda lengths: SequenceLayout.from_attention_mask(right(lengths, 13).long()),
    "float-mask": lambda lengths: SequenceLayout.from_attention_mask(right(lengths, 13).half()),
    "nested": lambda lengths: SequenceLayout.from_nested(nested(lengths)),
}
