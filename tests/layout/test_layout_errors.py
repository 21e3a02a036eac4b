"""Arguments that `SequenceLayout` refuses, and the messages."""

import pytest
import torch
from layouts import LENGTHS, nested

from nt_attention import SequenceLayout, varlen_attention

T = torch.tensor

MALFORMED_OFFSETS = {
    "fall": (T([0, 5, 3, 9]), "decrease from 5 to 3 at index 2.*from_lengths"),
    "lengths-instead-of-offsets": (T([5, 3, 9]), "decrease from 5 to 3 at index 1.*from_lengths"),
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


@pytest.mark.parametrize(("offsets", "message"), MALFORMED_OFFSETS.values(), ids=MALFORMED_OFFSETS)
def test_malformed_offsets(offsets, message):
    for _ in range(2):  # the error is not cached as a success
        with pytest.raises(ValueError, match=message):
            SequenceLayout.from_offsets(offsets)


@pytest.mark.parametrize("wrong", [4.9, 7.0, T(7.5), "7", T([7, 7])], ids=str)
@pytest.mark.parametrize("name", ["max_seqlen", "max_tokens"])
def test_bounds_must_be_integers(name, wrong):
    bounds = {"max_seqlen": 7, "max_tokens": 9, name: wrong}
    with pytest.raises(ValueError, match=f"{name} must be an integer, got "):
        SequenceLayout.from_offsets(T([0, 2, 5]), **bounds)
    assert SequenceLayout.from_offsets(T([0, 2, 5]), **{**bounds, name: T(7)}).max_seqlen == 7


def test_from_offsets_of_a_list():
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


@pytest.mark.parametrize(("lengths", "message"), MALFORMED_LENGTHS.values(), ids=MALFORMED_LENGTHS)
def test_malformed_lengths(lengths, message):
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.parametrize(("mask", "message"), MALFORMED_MASKS.values(), ids=MALFORMED_MASKS)
def test_malformed_masks(mask, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.from_attention_mask(mask)


MALFORMED_POSITIONS = {
    "float": (T([0.0, 1.0]), r"got shape \(2,\) and torch.float32"),
    "three-dimensional": (torch.zeros(1, 2, 3, dtype=torch.int64), r"got shape \(1, 2, 3\)"),
    "bool": (T([True, False]), "torch.bool"),
    "list": ([0, 1], "got list"),
}


@pytest.mark.parametrize(("positions", "message"), MALFORMED_POSITIONS.values(), ids=MALFORMED_POSITIONS)
def test_malformed_position_ids(positions, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.from_position_ids(positions)


@pytest.mark.parametrize("plain", [torch.zeros(3, 5, 2), torch.tensor([0, 3, 7])], ids=["padded", "offsets"])
def test_from_nested_of_a_plain_tensor(plain):
    with pytest.raises((TypeError, ValueError), match=r"(?i)nested"):
        SequenceLayout.from_nested(plain)


METHODS = {
    "pad": lambda layout, values: layout.pad(values),
    "to_nested": lambda layout, values: layout.to_nested(values),
    "attention": lambda layout, values: varlen_attention(*[values.unsqueeze(1)] * 3, layout),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_tensor_with_too_few_tokens(method):
    with pytest.raises(ValueError, match=r"has shape \(12, .*4 sequences have 13 tokens"):
        method(SequenceLayout.from_lengths(LENGTHS), torch.zeros(12, 3))


@pytest.mark.parametrize(
    "method", [*METHODS.values(), lambda layout, x: layout.pack(x[None].expand(4, 13, 3))], ids=[*METHODS, "pack"]
)
def test_tensor_on_another_device_than_the_layout(method):
    with pytest.raises(ValueError, match=r"is on meta and the layout on cpu.*make the layout.*on meta"):
        method(SequenceLayout.from_lengths(LENGTHS), torch.zeros(13, 3, device="meta"))


class TestInvalidLengthsAndOffsets:
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
    def test_pack_pad_to_nested_of_a_list(self, method):
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got list"):
            getattr(SequenceLayout.from_lengths([3]), method)([1, 2, 3])
