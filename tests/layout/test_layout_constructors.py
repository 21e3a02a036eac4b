"""The constructors of `SequenceLayout`, its properties, copies and pickles."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from layouts import LENGTHS, MAKERS

from nt_attention import SequenceLayout, varlen_attention
from nt_attention.layouts import reading


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 0], [], [3], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_all_constructors_give_the_same_layout(make, lengths):
    layout = make(lengths)
    positions = [position for length in lengths for position in range(length)]
    sequences = [b for b, length in enumerate(lengths) for _ in range(length)]
    assert layout.offsets.tolist() == [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    assert layout.cu_seqlens.tolist() == layout.host_offsets.tolist() == layout.offsets.tolist()
    assert (layout.offsets.dtype, layout.cu_seqlens.dtype) == (torch.int64, torch.int32)
    assert layout.lengths.tolist() == lengths
    assert layout.position_ids.tolist() == positions
    assert layout.sequence_ids.tolist() == sequences
    assert {x.dtype for x in (layout.lengths, layout.position_ids, layout.sequence_ids)} == {torch.int64}
    facts = (layout.batch_size, layout.total, layout.max_seqlen, layout.min_seqlen)
    assert facts == (len(lengths), sum(lengths), max(lengths, default=0), min(lengths, default=0))
    assert {type(fact) for fact in facts} == {int}
    assert layout.device == torch.device("cpu")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("pickled", [False, True])
def test_offsets_of_a_layout_give_the_same_layout(monkeypatch, make, pickled):
    layout = make(LENGTHS)
    layout = pickle.loads(pickle.dumps(layout)) if pickled else layout
    monkeypatch.setattr(reading, "_read", None)  # nothing is read again
    for offsets in (layout.offsets, layout.cu_seqlens, layout.operator_offsets):
        other = SequenceLayout.from_offsets(offsets)
        assert (other.offsets.dtype, other.cu_seqlens.dtype) == (torch.int64, torch.int32)
        assert other.offsets.tolist() == other.cu_seqlens.tolist() == layout.host_offsets.tolist()


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x])
def test_layouts_are_freed(dtype, use):
    x, before = torch.randn(sum(LENGTHS), 2, 8), len(reading._entries)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    layout = SequenceLayout.from_lengths(LENGTHS) if dtype is None else SequenceLayout.from_offsets(offsets.to(dtype))
    other = use(layout)
    varlen_attention(x, x, x, layout), varlen_attention(x, x, x, other)
    freed = [weakref.ref(tensor) for each in (layout, other) for tensor in (each.offsets, each.cu_seqlens)]
    del layout, other, offsets
    gc.collect()
    assert not any(reference() is not None for reference in freed)
    assert len(reading._entries) <= before


@pytest.mark.parametrize("make", [MAKERS["list"], MAKERS["mask"]], ids=["list", "mask"])
def test_nested_tensors_are_not_read_after_their_layout_is_freed(monkeypatch, make):
    x = torch.randn(sum(LENGTHS), 2, 8)
    layout = make(LENGTHS)
    nested, want = layout.to_nested(x), varlen_attention(x, x, x, layout)
    del layout
    gc.collect()
    monkeypatch.setattr(reading, "_read", None)
    torch.testing.assert_close(varlen_attention(nested, nested, nested).values(), want)


def test_nested_tensors_of_a_layout_can_be_added_to_the_one_it_was_made_from():
    values = torch.randn(6, 3)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 5, 6]))
    total = SequenceLayout.from_nested(nested).to_nested(values) + nested
    torch.testing.assert_close(total.values(), 2 * values)


def test_a_layout_keeps_no_tensor_of_the_user():
    table = torch.zeros(2, 100, dtype=torch.int64)
    layout, freed = SequenceLayout.from_offsets(table[0]), weakref.ref(table)
    nested = layout.to_nested(torch.randn(0, 3))
    assert layout.offsets.untyped_storage().nbytes() < table.untyped_storage().nbytes()
    del table
    gc.collect()
    assert freed() is None
    assert len(nested.offsets()) == 100


@pytest.mark.parametrize(
    ("position_ids", "lengths"),
    [
        ([0, 1, 2, 0, 1, 0], [3, 2, 1]),
        ([[0, 1, 2], [3, 4, 5]], [3, 3]),
        ([[2, 3, 4, 2], [2, 3, 2, 3]], [3, 1, 2, 2]),
        ([5, 3, 4, 4, 6], [1, 2, 1, 1]),
        ([7], [1]),
        ([], []),
        ([[], []], []),
    ],
    ids=["one-row", "a-row-ends-a-sequence", "counts-from-2", "jumps", "one-token", "no-tokens", "empty-rows"],
)
def test_from_position_ids(position_ids, lengths):
    layout = SequenceLayout.from_position_ids(torch.tensor(position_ids, dtype=torch.int64))
    assert layout.lengths.tolist() == lengths


def test_from_position_ids_of_the_position_ids_of_a_layout():
    layout = SequenceLayout.from_lengths([5, 1, 7])
    assert SequenceLayout.from_position_ids(layout.position_ids).same_lengths(layout)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_from_position_ids_narrow_integer_dtypes_do_not_overflow(dtype):
    top = min(torch.iinfo(dtype).max, 300) + 1
    positions = torch.cat([torch.arange(top), torch.arange(4)]).to(dtype)
    assert SequenceLayout.from_position_ids(positions).lengths.tolist() == [top, 4]
    if top < 300:  # the next number would have wrapped around to the lowest
        after = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
        assert SequenceLayout.from_position_ids(after).lengths.tolist() == [1, 1]


def test_from_lengths_on_a_device():
    layout = SequenceLayout.from_lengths(torch.tensor(LENGTHS), device="meta")
    assert layout.device.type == layout.cu_seqlens.device.type == "meta"
    assert layout.total == 13


def test_host_offsets_stay_on_the_host_under_a_default_device():
    """The default device is "meta" instead of "cuda", because meta tensors have no values."""
    with torch.device("meta"):
        layout = SequenceLayout.from_lengths([5, 0, 3], device="cpu")
        packed = SequenceLayout.from_position_ids(torch.tensor([0, 1, 0, 1, 2], device="cpu"))
    assert layout.host_offsets.tolist() == [0, 5, 5, 8]
    assert packed.host_offsets.tolist() == [0, 2, 5]


class TestMaxSeqlenBound:
    def test_max_seqlen_bound_replaces_the_longest_length(self):
        offsets = torch.tensor([0, 5, 5, 6])
        assert SequenceLayout.from_offsets(offsets, max_seqlen=11).max_seqlen == 11
        assert SequenceLayout.from_offsets(offsets, max_seqlen=5).max_seqlen == 5
        assert SequenceLayout.from_offsets(offsets).max_seqlen == 5, "a bound is its layout's own, not the offsets'"

    def test_max_seqlen_bound_is_the_padded_length(self):
        layout = SequenceLayout.from_offsets(torch.tensor([0, 5, 5, 6]), max_seqlen=11)
        values = torch.randn(6, 3)
        assert layout.pad(values).shape == (3, 11, 3)
        assert torch.equal(layout.pack(layout.pad(values)), values)

    def test_max_seqlen_bound_too_small_raises(self):
        with pytest.raises(ValueError, match="max_seqlen=4 is below the longest sequence of 5 tokens"):
            SequenceLayout.from_offsets(torch.tensor([0, 5, 5, 6]), max_seqlen=4)


def test_from_nested_of_a_strided_nested_tensor():
    parts = [torch.randn(n, 3) for n in LENGTHS]
    made = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    assert SequenceLayout.from_nested(made).lengths.tolist() == LENGTHS


def test_from_nested_with_holes():
    values, offsets = torch.randn(13, 3), torch.tensor([0, 5, 5, 13])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([4, 0, 7]))
    assert SequenceLayout.from_nested(holes).lengths.tolist() == [4, 0, 7]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copy_and_pickle_of_a_used_layout(duplicate):
    layout = SequenceLayout.from_attention_mask(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    x = torch.randn(3, 2, 5)
    out = varlen_attention(x, x, x, layout)
    other = duplicate(layout)
    assert torch.equal(varlen_attention(x, x, x, other), out)
    assert torch.equal(other.pad(x), layout.pad(x))


def test_extended():
    layout = SequenceLayout.from_lengths(LENGTHS)
    assert layout.extended(2).lengths.tolist() == [7, 2, 3, 9]
    assert layout.extended(2) is layout.extended(2)
    assert layout.extended(1).lengths.tolist() == [6, 1, 2, 8]


def test_same_lengths():
    layout = SequenceLayout.from_lengths(LENGTHS)
    assert layout.same_lengths(SequenceLayout.from_offsets(layout.cu_seqlens))
    assert not layout.same_lengths(SequenceLayout.from_lengths([5, 1, 0, 7]))
    assert not layout.same_lengths(SequenceLayout.from_lengths([5, 0, 1]))


@pytest.mark.parametrize(
    ("row", "has_holes"), [([1, 1, 0], False), ([0, 1, 1], False), ([1, 0, 1], True), ([1, 0, 0, 1], True)]
)
def test_holes_are_padding_between_tokens(row, has_holes):
    mask = torch.tensor([[1] * len(row), row, [0] * len(row)])
    assert SequenceLayout.from_attention_mask(mask).has_holes == has_holes
