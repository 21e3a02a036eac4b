"""SequenceLayout: where it comes from, what it tells, what it refuses, and what it remembers."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch

from nt_attention import SequenceLayout, varlen_attention
from nt_attention._offsets import _facts_of, read_offsets

LENGTHS = [5, 0, 1, 7]


def padded_with(mask, fill=0.0):
    """(B, L, 3) that counts the tokens from 1 where the mask is set, and ``fill`` elsewhere."""
    padded = torch.full((*mask.shape, 3), fill)
    padded[mask.bool()] = torch.arange(1.0, 1 + int(mask.sum()))[:, None].repeat(1, 3)
    return padded


def right(lengths, size):
    return torch.arange(size) < torch.tensor(lengths, dtype=torch.int64)[:, None]


MASKS = {
    "right": right(LENGTHS, 7),
    "right-with-room": right(LENGTHS, 11),
    "left": right(LENGTHS, 7).flip(1),
    "scattered": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]).bool(),
    "all-empty": torch.zeros(3, 5, dtype=torch.bool),
    "no-positions": torch.zeros(3, 0, dtype=torch.bool),
    "no-sequences": torch.zeros(0, 5, dtype=torch.bool),
}


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


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 0], [], [3], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_constructor_tells_the_same(make, lengths):
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_offsets_are_kept_not_copied(dtype):
    offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
    layout = SequenceLayout.from_offsets(offsets)
    assert (layout.offsets if dtype == torch.int64 else layout.cu_seqlens) is offsets


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


def test_position_ids_go_round():
    layout = SequenceLayout.from_lengths([5, 1, 7])
    assert SequenceLayout.from_position_ids(layout.position_ids).same_lengths(layout)


def test_a_device_may_be_asked_for():
    layout = SequenceLayout.from_lengths(torch.tensor(LENGTHS), device="meta")
    assert layout.device.type == layout.cu_seqlens.device.type == "meta"
    assert layout.total == 13


class TestMaxSeqlenBound:
    def test_stands_in_for_the_longest(self):
        offsets = torch.tensor([0, 5, 5, 6])
        assert SequenceLayout.from_offsets(offsets, max_seqlen=11).max_seqlen == 11
        assert SequenceLayout.from_offsets(offsets, max_seqlen=5).max_seqlen == 5
        assert SequenceLayout.from_offsets(offsets).max_seqlen == 5, "a bound is its layout's own, not the offsets'"

    def test_is_the_length_that_pad_pads_to(self):
        layout = SequenceLayout.from_offsets(torch.tensor([0, 5, 5, 6]), max_seqlen=11)
        values = torch.randn(6, 3)
        assert layout.pad(values).shape == (3, 11, 3)
        assert torch.equal(layout.pack(layout.pad(values)), values)

    def test_must_hold(self):
        with pytest.raises(ValueError, match="max_seqlen=4 is below the longest sequence of 5 tokens"):
            SequenceLayout.from_offsets(torch.tensor([0, 5, 5, 6]), max_seqlen=4)


class TestPackAndPad:
    @pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
    @pytest.mark.parametrize("fill", [0.0, -3.5, float("-inf")])
    def test_use_the_very_places_of_the_mask(self, mask, fill):
        layout = SequenceLayout.from_attention_mask(mask)
        padded = padded_with(mask, fill)
        packed = layout.pack(padded)
        assert packed.tolist() == [[n] * 3 for n in range(1, 1 + int(mask.sum()))]
        assert torch.equal(layout.pad(packed, fill), padded)

    @pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [], [3]], ids=str)
    def test_stand_left_without_a_mask(self, lengths):
        layout = SequenceLayout.from_lengths(lengths)
        mask = right(lengths, layout.max_seqlen)
        assert torch.equal(layout.pad(layout.pack(padded_with(mask, 9.0)), 9.0), padded_with(mask, 9.0))

    def test_pack_takes_more_positions_than_the_longest(self):
        packed = SequenceLayout.from_lengths(LENGTHS).pack(padded_with(MASKS["right-with-room"]))
        assert packed[:, 0].tolist() == list(range(1, 14))

    @pytest.mark.parametrize("trailing", [(), (3,), (2, 5)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16], ids=str)
    def test_any_shape_and_dtype(self, trailing, dtype):
        layout = SequenceLayout.from_attention_mask(MASKS["scattered"])
        values = torch.randint(0, 2, (layout.total, *trailing)).to(dtype)
        padded = layout.pad(values)
        assert padded.shape == (5, 4, *trailing)
        assert padded.dtype == dtype
        assert torch.equal(layout.pack(padded), values)

    def test_pad_ignores_rows_past_the_total(self):
        layout = SequenceLayout.from_lengths(LENGTHS)
        values = torch.randn(17, 3)
        assert torch.equal(layout.pad(values), layout.pad(values[:13]))

    @pytest.mark.parametrize("name", ["right", "scattered", "all-empty"])
    def test_can_be_differentiated(self, name):
        layout = SequenceLayout.from_attention_mask(MASKS[name])
        packed = torch.randn(layout.total + 2, 3, dtype=torch.float64, requires_grad=True)
        padded = torch.randn(*MASKS[name].shape, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(layout.pack, (padded,))
        assert torch.autograd.gradcheck(layout.pad, (packed,))

    @pytest.mark.parametrize(
        ("shape", "told"),
        [((3, 7, 2), "(3, 7, 2)"), ((4, 6, 2), "(4, 6, 2)"), ((13,), "(13,)")],
        ids=["batch", "positions", "dimensions"],
    )
    def test_pack_refuses_other_shapes(self, shape, told):
        layout = SequenceLayout.from_lengths(LENGTHS)
        with pytest.raises(ValueError, match=rf"padded must be \(4, 7 or more, …\).*got {re.escape(told)}"):
            layout.pack(torch.zeros(shape))

    def test_pack_wants_exactly_the_positions_of_the_mask(self):
        layout = SequenceLayout.from_attention_mask(MASKS["left"])
        with pytest.raises(ValueError, match=r"padded must be \(4, 7, …\) for this layout, got \(4, 8, 3\)"):
            layout.pack(torch.zeros(4, 8, 3))


def test_to_nested_is_ragged_by_the_layouts_own_offsets():
    layout = SequenceLayout.from_lengths(LENGTHS)
    values = torch.randn(13, 3, requires_grad=True)
    made = layout.to_nested(values)
    assert made.offsets() is layout.offsets
    assert [part.shape[0] for part in made.unbind()] == LENGTHS
    made.values().sum().backward()
    assert torch.equal(values.grad, torch.ones(13, 3))
    other = layout.to_nested(torch.ones(13, 3))
    assert torch.equal((made + other).values(), values + 1)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no-sequences", "all-empty"])
def test_to_nested_of_nothing(lengths):
    layout = SequenceLayout.from_lengths(lengths)
    assert layout.to_nested(torch.zeros(0, 3)).offsets() is layout.offsets


def test_from_nested_strided():
    parts = [torch.randn(n, 3) for n in LENGTHS]
    made = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    assert SequenceLayout.from_nested(made).lengths.tolist() == LENGTHS


def test_from_nested_counts_the_tokens_alone():
    values, offsets = torch.randn(13, 3), torch.tensor([0, 5, 5, 13])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([4, 0, 7]))
    assert SequenceLayout.from_nested(holes).lengths.tolist() == [4, 0, 7]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_used_layout_can_be_pickled_and_copied(duplicate):
    layout = SequenceLayout.from_attention_mask(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    x = torch.randn(3, 2, 5)
    out = varlen_attention(x, x, x, layout)
    other = duplicate(layout)
    assert torch.equal(varlen_attention(x, x, x, other), out)
    assert torch.equal(other.pad(x), layout.pad(x))


@pytest.mark.parametrize("plain", [torch.zeros(3, 5, 2), torch.tensor([0, 3, 7])], ids=["padded", "offsets"])
def test_from_nested_refuses_a_plain_tensor(plain):
    with pytest.raises((TypeError, ValueError), match=r"(?i)nested"):
        SequenceLayout.from_nested(plain)


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


T = torch.tensor

MALFORMED_OFFSETS = {
    "fall": (T([0, 5, 3, 9]), "decrease from 5 to 3 at index 2.*from_lengths"),
    "lengths-in-their-place": (T([5, 3, 9]), "decrease from 5 to 3 at index 1.*from_lengths"),
    "float": (T([0.0, 5.0]), r"got shape \(2,\) and torch.float32"),
    "bool": (T([False, True]), r"got shape \(2,\) and torch.bool"),
    "int16": (T([0, 5], dtype=torch.int16), r"got shape \(2,\) and torch.int16"),
    "two-dimensional": (T([[0, 5], [0, 3]]), r"got shape \(2, 2\) and torch.int64"),
    "scalar": (T(3), r"got shape \(\) and torch.int64"),
    "empty": (torch.zeros(0, dtype=torch.int64), r"offsets is empty.*torch.tensor\(\[0\]\)"),
    "begins-late": (T([3, 5, 9]), r"begin at 0, got 3.*offsets - offsets\[0\]"),
    "negative": (T([-2, 5, 9]), "got -2"),
    "too-large": (T([0, 2**31]), "got 2147483648"),
    "nested": (nested([2, 3]), "got shape nested"),
}


@pytest.mark.parametrize(("offsets", "told"), MALFORMED_OFFSETS.values(), ids=MALFORMED_OFFSETS)
def test_malformed_offsets(offsets, told):
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(ValueError, match=told):
            SequenceLayout.from_offsets(offsets)


def test_offsets_that_are_a_list():
    with pytest.raises(TypeError, match=r"got list: pass torch.tensor"):
        SequenceLayout.from_offsets([0, 3])


MALFORMED_LENGTHS = {
    "negative": ([5, -2, 3], r"lengths\[1\] is -2"),
    "negative-tensor": (T([5, 3, -7]), r"lengths\[2\] is -7"),
    "float": ([5.0, 3.0], r"got shape \(2,\) and torch.float32"),
    "bool": (T([True, False]), r"got shape \(2,\) and torch.bool"),
    "two-dimensional": (T([[5, 3]]), r"got shape \(1, 2\) and torch.int64"),
    "scalar": (T(5), r"got shape \(\) and torch.int64"),
    "too-large": ([2**30, 2**30], "add up to 2147483648"),
}


@pytest.mark.parametrize(("lengths", "told"), MALFORMED_LENGTHS.values(), ids=MALFORMED_LENGTHS)
def test_malformed_lengths(lengths, told):
    with pytest.raises(ValueError, match=told):
        SequenceLayout.from_lengths(lengths)


MALFORMED_MASKS = {
    "additive": (T([[0.0, -torch.inf], [0.0, 0.0]]), "mask has the value -inf.*mask == 0"),
    "two": (T([[1, 2], [1, 0]]), "mask has the value 2"),
    "half": (T([[1, 0.5], [1, 0]]), "mask has the value 0.5"),
    "negative": (T([[1, -1], [1, 0]]), "mask has the value -1"),
    "nan": (T([[1, torch.nan], [1, 0]]), "mask has the value nan"),
    "one-dimensional": (T([1, 0]), r"\(B, L\) tensor.*got \(2,\)"),
    "four-dimensional": (torch.ones(2, 1, 3, 3), r"got \(2, 1, 3, 3\)"),
    "list": ([[1, 0]], "got list"),
}


@pytest.mark.parametrize(("mask", "told"), MALFORMED_MASKS.values(), ids=MALFORMED_MASKS)
def test_malformed_masks(mask, told):
    with pytest.raises(ValueError, match=told):
        SequenceLayout.from_attention_mask(mask)


MALFORMED_POSITIONS = {
    "float": (T([0.0, 1.0]), r"got shape \(2,\) and torch.float32"),
    "three-dimensional": (torch.zeros(1, 2, 3, dtype=torch.int64), r"got shape \(1, 2, 3\)"),
    "bool": (T([True, False]), "torch.bool"),
    "list": ([0, 1], "got list"),
}


@pytest.mark.parametrize(("positions", "told"), MALFORMED_POSITIONS.values(), ids=MALFORMED_POSITIONS)
def test_malformed_position_ids(positions, told):
    with pytest.raises(ValueError, match=told):
        SequenceLayout.from_position_ids(positions)


METHODS = {
    "pad": lambda layout, values: layout.pad(values),
    "to_nested": lambda layout, values: layout.to_nested(values),
    "attention": lambda layout, values: varlen_attention(*[values.unsqueeze(1)] * 3, layout),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_total_beyond_the_tensor(method):
    with pytest.raises(ValueError, match=r"has shape \(12, .*4 sequences have 13 tokens"):
        method(SequenceLayout.from_lengths(LENGTHS), torch.zeros(12, 3))


@pytest.mark.parametrize(
    "method", [*METHODS.values(), lambda layout, x: layout.pack(x[None].expand(4, 13, 3))], ids=[*METHODS, "pack"]
)
def test_another_device(method):
    with pytest.raises(ValueError, match=r"is on meta and the layout on cpu.*make the layout.*on meta"):
        method(SequenceLayout.from_lengths(LENGTHS), torch.zeros(13, 3, device="meta"))


class TestMemory:
    """What is known of an offsets tensor is read once, goes stale when the tensor changes, and dies with it."""

    @pytest.fixture
    def reads(self, monkeypatch):
        """Counts the copies of whole offsets to the host."""
        seen = []

        def to(tensor, *args, _to=torch.Tensor.to, **kwargs):
            if args[:1] == ("cpu",):
                seen.append(tensor)
            return _to(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "to", to)
        return seen

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_offsets_are_read_once(self, reads, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        first, second = SequenceLayout.from_offsets(offsets), SequenceLayout.from_offsets(offsets, max_seqlen=7)
        assert len(reads) == 1
        assert first.position_ids is second.position_ids
        assert first.sequence_ids is second.sequence_ids
        assert first.host_offsets is second.host_offsets

    def test_equal_offsets_are_not_the_same_offsets(self, reads):
        first, second = (SequenceLayout.from_offsets(torch.tensor([0, 5, 6])) for _ in range(2))
        assert len(reads) == 2
        assert first.position_ids is not second.position_ids

    def test_from_lengths_reads_nothing_back(self, reads):
        layout = SequenceLayout.from_lengths(LENGTHS)
        reads.clear()
        assert SequenceLayout.from_offsets(layout.offsets).host_offsets is layout.host_offsets
        assert reads == []

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_a_layout_to_nested_and_back_reads_nothing_more(self, reads, dtype):
        layout = SequenceLayout.from_offsets(torch.tensor([0, 5, 5, 6], dtype=dtype))
        made = layout.to_nested(torch.randn(6, 3, 5))
        reads.clear()
        varlen_attention(made, made, made)
        assert reads == []

    def test_a_second_call_reads_nothing(self, reads):
        values = torch.randn(13, 3, 5)
        made = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 5, 6, 13]))
        holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 7, 13]), lengths=torch.tensor([5, 6]))
        for x in (made, holes):
            varlen_attention(x, x, x, is_causal=True)
            assert reads
            reads.clear()
            varlen_attention(x, x, x, is_causal=True)
            assert reads == []

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_a_change_in_place_is_noticed(self, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        assert SequenceLayout.from_offsets(offsets).position_ids.tolist() == [0, 1, 2, 3, 4, 0]
        offsets[1:3] = torch.tensor([2, 4])
        layout = SequenceLayout.from_offsets(offsets)
        assert layout.lengths.tolist() == [2, 2, 2]
        assert layout.position_ids.tolist() == [0, 1, 0, 1, 0, 1]
        offsets[1] = 5
        with pytest.raises(ValueError, match="decrease from 5 to 4"):
            SequenceLayout.from_offsets(offsets)

    def test_a_change_of_lengths_in_place_is_noticed(self):
        lengths = torch.tensor([4, 3])
        x = torch.nested.nested_tensor_from_jagged(torch.randn(11, 3), torch.tensor([0, 5, 11]), lengths=lengths)
        assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 3]
        lengths[1] = 6
        assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 6]

    def test_inference_tensors_are_not_remembered(self):
        with torch.inference_mode():
            offsets = torch.tensor([0, 5, 6])
            _, first = read_offsets(offsets)
            offsets[1] = 2  # no version tells of this
            assert read_offsets(offsets)[1] is not first
            layout = SequenceLayout.from_offsets(offsets)
            assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
            made = SequenceLayout.from_lengths([2, 4])
            assert read_offsets(made.offsets)[1].host is made.host_offsets  # its offsets are no inference tensor
        assert SequenceLayout.from_offsets(offsets).lengths.tolist() == [2, 4]

    def test_inference_lengths_are_not_remembered(self):
        offsets = torch.tensor([0, 5, 11])
        with torch.inference_mode():
            lengths = torch.tensor([4, 3])
            x = torch.nested.nested_tensor_from_jagged(torch.randn(11, 3), offsets, lengths=lengths)
            assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 3]
            lengths[1] = 6
            assert SequenceLayout.from_nested(x).lengths.tolist() == [4, 6]

    @staticmethod
    def attend(layout, key_layout=None):
        key_layout = layout if key_layout is None else key_layout
        query, key = (torch.randn(each.total, 3, 5, requires_grad=True) for each in (layout, key_layout))
        for options in ({}, {"is_causal": True}, {"window_size": (2, 0)}):
            out = varlen_attention(query, key, key, layout, key_layout, backend="cpu", **options)
            out.sum().backward()

    @pytest.mark.parametrize(
        "use",
        [
            lambda layout: None,
            lambda layout: (layout.lengths, layout.position_ids, layout.sequence_ids),
            lambda layout: layout.pack(layout.pad(torch.zeros(layout.total, 2))),
            lambda layout: TestMemory.attend(layout),
            lambda layout: TestMemory.attend(layout, SequenceLayout.from_lengths([7, 1, 2])),
            lambda layout: TestMemory.attend(SequenceLayout.from_lengths([7, 1, 2]), layout),
            lambda layout: TestMemory.attend(layout, layout.extended(1)),
            lambda layout: TestMemory.attend(layout.extended(1), layout),
            lambda layout: varlen_attention(*[layout.to_nested(torch.randn(6, 3, 5))] * 3),
        ],
        ids=[
            "made", "derived", "padded", "cpu-plan", "cpu-plan-as-query", "cpu-plan-as-key", "cpu-plan-extended-key",
            "cpu-plan-extended-query", "nested",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_nothing_outlives_its_offsets(self, use, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        layout = SequenceLayout.from_offsets(offsets)
        use(layout)
        mourned = [weakref.ref(x) for x in (layout.offsets, layout.cu_seqlens, layout.position_ids)]
        mourned.append(weakref.ref(layout.extended(1).offsets))
        del offsets, layout
        gc.collect()
        assert [ref() for ref in mourned] == [None] * 4

    @pytest.mark.parametrize("order", ["holes-ask-whole", "whole-asks-holes"])
    def test_nothing_outlives_offsets_with_holes(self, order):
        offsets, lengths, values = torch.tensor([0, 5, 11]), torch.tensor([4, 6]), torch.randn(11, 3, 5)
        whole = torch.nested.nested_tensor_from_jagged(values, offsets)
        holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths)
        query, key = (holes, whole) if order == "holes-ask-whole" else (whole, holes)
        varlen_attention(query, key, key, backend="cpu")
        inner = SequenceLayout.from_nested(holes)
        mourned = [weakref.ref(x) for x in (offsets, lengths, inner.offsets)]
        del offsets, lengths, values, whole, holes, query, key, inner
        gc.collect()
        assert [ref() for ref in mourned] == [None] * 3

    def test_many_batches_leave_nothing_behind(self):
        gc.collect()
        before = len(_facts_of)
        for n in range(20):
            layout = SequenceLayout.from_lengths([n, 3])
            self.attend(layout, layout.extended(1))
        del layout
        gc.collect()
        assert len(_facts_of) == before


class TestInferenceMode:
    """What is derived under inference_mode serves training as well, where inference tensors may not be saved."""

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
    def test_takes_offsets_from_outside(self, dtype):
        offsets = torch.tensor([0, 5, 5, 6], dtype=dtype)
        with torch.inference_mode():
            layout = SequenceLayout.from_offsets(offsets)
            assert layout.lengths.tolist() == [5, 0, 1]
        assert SequenceLayout.from_offsets(offsets).lengths.tolist() == [5, 0, 1]

    @pytest.mark.parametrize("make", ["offsets", "cu_seqlens", "list", "mask"])
    def test_what_it_derived_can_train(self, make):
        layout = MAKERS[make](LENGTHS)
        padded, slopes = torch.randn(4, layout.padded_length or 7, 3, 5), torch.rand(4, 3)

        def both_ways(padded):
            values = layout.pack(padded)
            out = varlen_attention(values, values, values, layout, alibi_slopes=slopes, window_size=(2, 2))
            return layout.pad(out)

        with torch.inference_mode():
            want = both_ways(padded)
        padded.requires_grad_()
        got = both_ways(padded)
        got.sum().backward()
        assert torch.equal(got.detach(), want)
        assert padded.grad.any()

    def test_nested_tensors_with_holes_can_train(self):
        x = torch.nested.nested_tensor_from_jagged(
            torch.randn(11, 3, 5, requires_grad=True), torch.tensor([0, 5, 11]), lengths=torch.tensor([4, 6])
        )
        with torch.inference_mode():
            layout = SequenceLayout.from_nested(x)
        varlen_attention(x, x, x).values().sum().backward()
        assert layout.lengths.tolist() == [4, 6]


def test_the_host_s_part_stays_there_under_a_default_device():
    """As ``with torch.device("cuda")`` does; meta stands for it here, and holds no values at all."""
    with torch.device("meta"):
        layout = SequenceLayout.from_lengths([5, 0, 3], device="cpu")
        packed = SequenceLayout.from_position_ids(torch.tensor([0, 1, 0, 1, 2], device="cpu"))
    assert layout.host_offsets.tolist() == [0, 5, 5, 8]
    assert packed.host_offsets.tolist() == [0, 2, 5]


def test_a_layout_of_an_evaluation_s_mask_serves_training():
    with torch.inference_mode():
        layout = SequenceLayout.from_attention_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    x = torch.randn(2, 3, 5, requires_grad=True)
    layout.pad(layout.pack(x)).sum().backward()
    assert x.grad.sum() == 25


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_packing_and_padding_are_each_other_s_gradient(mask):
    layout = SequenceLayout.from_attention_mask(mask)
    padded = torch.randn(*mask.shape, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(layout.total, 3, dtype=torch.float64, requires_grad=True)
    (back,) = torch.autograd.grad(layout.pack(padded), padded, grad, create_graph=True)
    assert torch.equal(back, layout.pad(grad))
    torch.autograd.gradcheck(layout.pack, (padded,))
    torch.autograd.gradgradcheck(layout.pack, (padded,))
    tangent = torch.randn_like(padded)
    pushed = torch.func.jvp(layout.pack, (padded.detach(),), (tangent,))[1]
    assert torch.equal(pushed, layout.pack(tangent))
    assert torch.equal(torch.func.vjp(layout.pack, padded.detach())[1](grad.detach())[0], back)


class TestRefusedWithAReason:
    @pytest.mark.parametrize("lengths", [[2**62] * 4, [2**31], [2**31 - 1, 1], [2**64]])
    def test_more_tokens_than_kernels_can_address(self, lengths):
        with pytest.raises(ValueError, match="lengths"):
            SequenceLayout.from_lengths(lengths)

    @pytest.mark.parametrize("lengths", [None, "ab", [[1], [2, 3]], [1, None], 3])
    def test_lengths_that_are_no_list_of_integers(self, lengths):
        with pytest.raises(ValueError, match=r"lengths must be one integer for each sequence.*pass a list such as"):
            SequenceLayout.from_lengths(lengths)

    def test_offsets_whose_differences_overflow(self):
        with pytest.raises(ValueError, match="offsets decrease"):
            SequenceLayout.from_offsets(torch.tensor([0, 2**63 - 1, -(2**63), 5]))

    @pytest.mark.parametrize(
        ("make", "given"),
        [
            (SequenceLayout.from_offsets, torch.tensor([0, 3], device="meta")),
            (SequenceLayout.from_lengths, torch.tensor([3], device="meta")),
            (SequenceLayout.from_attention_mask, torch.ones(2, 3, device="meta")),
            (SequenceLayout.from_position_ids, torch.arange(3, device="meta")),
        ],
    )
    def test_tensors_without_values(self, make, given):
        with pytest.raises(ValueError, match="on the meta device and has no values to read"):
            make(given)

    @pytest.mark.parametrize("method", ["pack", "pad", "to_nested"])
    def test_what_is_no_tensor(self, method):
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got list"):
            getattr(SequenceLayout.from_lengths([3]), method)([1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_positions_of_a_narrow_dtype_do_not_wrap_around(dtype):
    top = min(torch.iinfo(dtype).max, 300) + 1
    positions = torch.cat([torch.arange(top), torch.arange(4)]).to(dtype)
    assert SequenceLayout.from_position_ids(positions).lengths.tolist() == [top, 4]
    if top < 300:  # the next number would have wrapped around to the lowest
        after = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
        assert SequenceLayout.from_position_ids(after).lengths.tolist() == [1, 1]
