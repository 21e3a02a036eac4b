"""NestedTensors in every form that `varlen_attention` takes.

Dimensions: H heads, D head dim.
"""

import itertools

import torch

from nt_attention import SequenceLayout

H, D = 3, 5

LENGTHS = {
    "mixed": [5, 0, 3, 1, 7],
    "equal": [5, 5, 5],
    "one": [7],
    "one-token": [1],
    "all-empty": [0, 0],
    "no-sequences": [],
}

jagged = torch.nested.nested_tensor_from_jagged


def offsets_of(parts, first=0):
    return torch.tensor([first, *(len(part) for part in parts)]).cumsum(0)


def packed(parts, gap=0, before=0, after=0):
    """The parts end to end, with rows of garbage before, between and after them."""
    garbage = torch.full((max(gap, before, after), H, D), 99.0, dtype=torch.float64)
    pieces = [garbage[:before], *itertools.chain.from_iterable((part, garbage[:gap]) for part in parts)]
    return torch.cat([*pieces, garbage[:after]])


def from_jagged(parts):
    return jagged(packed(parts), offsets_of(parts))


def int32_offsets(parts):
    return jagged(packed(parts), offsets_of(parts).int())


def heads_first(parts):
    return from_jagged(parts).transpose(1, 2)


def heads_first_contiguous(parts):
    return jagged(packed(parts).transpose(0, 1).contiguous(), offsets_of(parts), jagged_dim=2)


def not_contiguous(parts):
    values = packed(parts).flatten(1)
    return jagged(torch.cat([values, values + 1, values - 1], -1).chunk(3, -1)[1] - 1, offsets_of(parts)).unflatten(
        -1, (H, D)
    )


def strided_values(parts):
    return jagged(packed(parts).repeat_interleave(2, dim=2)[..., ::2], offsets_of(parts))


def with_holes(parts):
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(part) + 2 for part in parts)]).cumsum(0)
    return jagged(packed(parts, gap=2), offsets, lengths=lengths)


def with_holes_heads_first(parts):
    return with_holes(parts).transpose(1, 2)


def begins_later(parts):
    return jagged(packed(parts, before=3), offsets_of(parts, first=3))


def ends_early(parts):
    return jagged(packed(parts, after=2), offsets_of(parts))


def begins_later_and_ends_early(parts):
    return jagged(packed(parts, before=3, after=2), offsets_of(parts, first=3))


def from_layout(parts):
    return SequenceLayout.from_lengths([len(part) for part in parts]).to_nested(packed(parts))


ANY_LENGTHS = [
    from_jagged, int32_offsets, heads_first, heads_first_contiguous, not_contiguous, strided_values, with_holes,
    with_holes_heads_first, begins_later, ends_early, begins_later_and_ends_early, from_layout,
]  # fmt: skip


def as_list(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def narrowed(parts):
    starts = torch.tensor([b % 3 for b in range(len(parts))])
    lengths = torch.tensor([len(part) for part in parts])
    rows = [
        torch.nn.functional.pad(part, (0, 0, 0, 0, b % 3, 11 - b % 3 - len(part)), value=99.0)
        for b, part in enumerate(parts)
    ]
    return torch.nested.narrow(torch.stack(rows), 1, starts, lengths, layout=torch.jagged)


def strided(parts):
    return torch.nested.as_nested_tensor(parts, layout=torch.strided)


def strided_heads_first(parts):
    return strided(parts).transpose(1, 2)


def sequences(nested):
    """The sequences of a NestedTensor, each (L, H, …). Its own unbind knows no offsets that begin or end elsewhere."""
    if nested.layout == torch.strided:
        return list(nested.unbind())
    values = nested.values().movedim(nested._ragged_idx - 1, 0)
    begins = nested.offsets()[:-1]
    lengths = nested.offsets().diff() if nested.lengths() is None else nested.lengths()
    return [values[begin : begin + n] for begin, n in zip(begins.tolist(), lengths.tolist(), strict=True)]


def random_parts(lengths):
    return [torch.randn(n, H, D, dtype=torch.float64, requires_grad=True) for n in lengths]


def assert_all_close(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
