"""Laws of `SequenceLayout`, for lengths and masks that hypothesis draws."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import MAKERS
from sweeps import covering
from torch import Tensor

from nt_attention import SequenceLayout, varlen_attention
from nt_attention.layouts.bounded import BoundedLayout

all_lengths = st.lists(st.integers(0, 6), max_size=6)
masks = st.tuples(st.integers(0, 4), st.integers(0, 6)).flatmap(
    lambda shape: st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda bits: torch.tensor(bits, dtype=torch.bool).view(shape)
    )
)
several = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(several, max_examples=15)  # of each kind of layout
COPIES = {
    "itself": lambda x: x,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


def offsets_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=dtype)


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@few
@given(lengths=all_lengths)
def test_all_constructors_agree_with_the_definitions(make, copier, lengths):
    layout = copier(make(lengths))
    ends = offsets_of(lengths).tolist()
    assert [x.tolist() for x in (layout.offsets, layout.cu_seqlens, layout.host_offsets)] == [ends] * 3
    assert layout.lengths.tolist() == lengths
    assert layout.position_ids.tolist() == [position for length in lengths for position in range(length)]
    assert layout.sequence_ids.tolist() == [b for b, length in enumerate(lengths) for _ in range(length)]
    tensors = layout.offsets, layout.lengths, layout.position_ids, layout.sequence_ids, layout.host_offsets
    assert [x.dtype for x in (*tensors, layout.cu_seqlens)] == [torch.int64] * 5 + [torch.int32]
    numbers = layout.batch_size, layout.total, layout.max_seqlen, layout.min_seqlen, layout.sum_of_squares
    squares = sum(n * n for n in lengths)
    assert numbers == (len(lengths), sum(lengths), max(lengths, default=0), min(lengths, default=0), squares)
    assert {type(x) for x in numbers} == {int}
    assert layout.device == torch.device("cpu")


@several
@given(lengths=all_lengths, extra=st.integers(0, 4))
def test_one_layout_from_another(lengths, extra):
    layout = SequenceLayout.from_lengths(lengths)
    assert layout.reversed.lengths.tolist() == lengths[::-1]
    assert layout.extended(extra).lengths.tolist() == [n + extra for n in lengths]
    assert layout.extended(extra) is layout.extended(extra)
    for offsets in (layout.offsets, layout.cu_seqlens, layout.operator_offsets, layout.offsets.clone()):
        assert SequenceLayout.from_offsets(offsets).same_lengths(layout)
    assert layout.same_lengths(SequenceLayout.from_lengths(lengths[::-1])) == (lengths == lengths[::-1])
    values = torch.randn(layout.total, 3, requires_grad=True)
    nested = layout.to_nested(values)
    assert nested.offsets() is layout.offsets
    assert [len(x) for x in nested.unbind()] == lengths
    sums = (nested + layout.to_nested(torch.ones(layout.total, 3))).values()  # nested tensors of a layout can be added
    assert torch.equal(sums, values + 1)
    assert torch.equal(torch.autograd.grad(sums.sum(), values)[0], torch.ones(layout.total, 3))
    assert SequenceLayout.from_nested(nested) is layout


@several
@given(
    rows=st.integers(0, 3),
    size=st.integers(0, 6),
    data=st.data(),
    begin=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
)
def test_a_sequence_begins_where_positions_do_not_go_on_by_one(rows, size, data, begin, dtype):
    """Each row of (B, L) begins one. Numbers are near the largest of the dtype, or near 0."""
    top = min(torch.iinfo(dtype).max, 10_000)
    numbers = [data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)) for _ in range(rows)]
    numbers = [[n if begin else top - n for n in row] for row in numbers]
    lengths: list[int] = []
    for row in numbers:
        for at, number in enumerate(row):
            if at and number == row[at - 1] + 1:
                lengths[-1] += 1
            else:
                lengths.append(1)
    positions = torch.tensor(numbers, dtype=dtype).view(rows, size)
    assert SequenceLayout.from_position_ids(positions).lengths.tolist() == lengths
    if rows == 1:
        assert SequenceLayout.from_position_ids(positions[0]).lengths.tolist() == lengths


def test_positions_do_not_wrap_around():
    for dtype in (torch.uint8, torch.int8, torch.int16):
        ends = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
        assert SequenceLayout.from_position_ids(ends).lengths.tolist() == [1, 1]


@several
@given(lengths=all_lengths, room=st.integers(0, 5), copier=st.sampled_from(list(COPIES.values())))
def test_a_bound_is_the_padded_length(lengths, room, copier):
    offsets, longest = offsets_of(lengths), max(lengths, default=0)
    layout = copier(SequenceLayout.from_offsets(offsets, max_seqlen=longest + room))
    values = torch.randn(layout.total, 2)
    padded = layout.pad(values)
    assert layout.max_seqlen == padded.shape[1] == longest + room
    assert torch.equal(layout.pack(padded), values)
    assert SequenceLayout.from_offsets(offsets).max_seqlen == longest, "a bound is its layout's own"
    with pytest.raises(ValueError, match="is below the longest sequence"):
        SequenceLayout.from_offsets(offsets, max_seqlen=longest - 1)


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
@few
@given(
    mask=masks,
    fill=st.sampled_from([0.0, -3.5, float("-inf")]),
    trailing=st.sampled_from([(), (3,), (2, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    past=st.integers(0, 2),
)
def test_pack_and_pad_use_the_positions_of_the_mask(copier, mask, fill, trailing, dtype, past):
    """Rows past the last one of the layout are not read."""
    layout = copier(SequenceLayout.from_attention_mask(mask))
    fill = fill if dtype.is_floating_point else 0
    values = torch.arange(1.0, 1 + past + int(mask.sum())).to(dtype)
    values = values.view(-1, *[1] * len(trailing)).expand(-1, *trailing)
    values, given = values[: layout.total], values
    padded = torch.full((*mask.shape, *trailing), fill, dtype=dtype)
    padded[mask] = values
    assert torch.equal(layout.pack(padded), values)
    assert torch.equal(layout.pad(given, fill), padded)
    assert layout.pad(given, fill).dtype == dtype
    assert torch.equal(layout.pad(torch.ones(layout.total, dtype=torch.bool)), mask)
    assert layout.lengths.tolist() == mask.sum(1).tolist()
    assert layout.padded_length == mask.shape[1]
    assert layout.padded_index.tolist() == mask.flatten().nonzero().flatten().tolist()
    spans = [row.nonzero().flatten() for row in mask]
    assert layout.has_holes == any(len(at) and len(at) <= int(at[-1] - at[0]) for at in spans)
    assert not layout.padded_right().has_holes
    right = layout.padded_right().pad(values)
    assert right.shape[1] == layout.max_seqlen
    assert torch.equal(layout.padded_right().pack(right), values)


@several
@given(lengths=all_lengths, other=all_lengths, dtype=st.sampled_from([torch.int32, torch.int64]))
def test_a_layout_copies_its_offsets(lengths, other, dtype):
    """The tensor may be a row of a table, or a strided view."""
    size = max(len(lengths), len(other)) + 1
    ends = torch.zeros(2, size, dtype=dtype)
    for row, numbers in zip(ends, (lengths, other), strict=True):
        row[:] = sum(numbers)
        row[: len(numbers) + 1] = offsets_of(numbers)
    for table in (ends.clone(), ends.repeat_interleave(2, dim=1)[:, ::2]):
        row = table[0]
        layout = SequenceLayout.from_offsets(row)
        row.copy_(ends[1])
        assert layout.host_offsets.tolist() == layout.offsets.tolist() == ends[0].tolist()
        assert SequenceLayout.from_offsets(row).host_offsets.tolist() == ends[1].tolist()
        assert layout.pad(torch.zeros(layout.total)).shape == (size - 1, layout.max_seqlen)


WRITES = {
    "add_": lambda x: x.add_(1),
    "a view": lambda x: x[1:].fill_(1),
    ".data": lambda x: x.data.fill_(0),
    "NumPy": lambda x: x.numpy().fill(1),
}
LENGTHS = [5, 0, 1, 7]
SOURCES = MAKERS | {
    "bound": lambda lengths: SequenceLayout.from_offsets(offsets_of(lengths), max_seqlen=11),
    "bounds": lambda lengths: BoundedLayout(offsets_of(lengths), 7, 13),
    "int32 bounds": lambda lengths: BoundedLayout(offsets_of(lengths, torch.int32), 7, 13),
    "extended": lambda lengths: SequenceLayout.from_lengths([n - 1 for n in lengths if n]).extended(1),
}
# These are for code of this package.
INTERNAL = {"host", "device_offsets", "operator_offsets", "safe_offsets", "cached_lengths", "cache", "reversed"}


@covering({"how": WRITES, "source": SOURCES})
def test_a_change_of_what_a_layout_returns_reaches_nothing_else(source, how):
    """Every public attribute that is a tensor."""
    x = torch.randn(13, 3, 5)

    def uses(layout):
        shape = layout.batch_size, layout.padded_length or layout.max_seqlen, 2
        yield layout.pad(x)
        yield layout.pack(torch.arange(torch.Size(shape).numel()).view(shape))
        yield layout.position_ids
        if layout.knows_lengths:
            yield varlen_attention(x, x, x, layout, backend="cpu")
            yield varlen_attention(x, x, x, layout, backend="reference")
            yield layout.to_nested(x).to_padded_tensor(0.0)
            yield SequenceLayout.from_offsets(layout.cu_seqlens).lengths
            yield SequenceLayout.from_offsets(layout.offsets).lengths

    def make():
        return SOURCES[source](LENGTHS)

    layout, want = make(), list(uses(make()))
    public = {name for name in {*dir(type(layout)), *vars(layout)} - INTERNAL if not name.startswith("_")}
    names = [name for name in sorted(public) if isinstance(getattr(layout, name), Tensor)]
    assert {"lengths", "sequence_ids", "position_ids", "offsets", "cu_seqlens"} <= set(names)
    for name in names:
        for is_used in (False, True):
            layout = make()
            if is_used:
                list(uses(layout))
            WRITES[how](getattr(layout, name))
            for got, expected in zip(uses(layout), want, strict=True):
                torch.testing.assert_close(got, expected, msg=f"{name}, {how}")
