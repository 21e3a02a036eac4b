"""`PagedLayout`: its constructors, the rows of keys, and gathering them."""

import pytest
import torch
from pools import FORMS, make

import nt_attention as nta

TABLE, LENGTHS = torch.tensor([[5, 1], [2, 0]]), torch.tensor([6, 3])


def test_attributes():
    paged = nta.PagedLayout(TABLE, LENGTHS, 4)
    assert (paged.batch_size, paged.max_seqlen, paged.page_size, paged.total) == (2, 8, 4, 16)
    assert repr(paged) == "PagedLayout(2 sequences of at most 8 keys, pages of 4, on cpu)"
    paged = nta.PagedLayout(TABLE, LENGTHS, 4, max_seqlen=7)
    assert paged.max_seqlen == 7
    paged = nta.PagedLayout.from_slots(LENGTHS, LENGTHS, 9)
    assert (paged.batch_size, paged.max_seqlen, paged.page_size) == (2, 9, 9)
    assert "slots" in repr(paged)
    paged = nta.PagedLayout.from_indices(torch.arange(5), torch.tensor([0, 2, 5]))
    assert (paged.batch_size, paged.max_seqlen, paged.page_size) == (2, 5, 1)
    assert paged.lengths.tolist() == [2, 3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page", [1, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_gather(form, page, dtype):
    case = make([1, 1, 1], [20, 0, 5], form=form, page=page, index_dtype=dtype)
    layout, (keys, values) = case.paged.gather(*case.pools)
    assert layout.same_lengths(case.key_layout)
    assert torch.equal(keys, case.keys)
    assert torch.equal(values, case.values)


def test_rows_do_not_overflow():
    paged = nta.PagedLayout(torch.tensor([[2**31 - 1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 256)
    assert paged.rows(torch.tensor([0]), torch.tensor([255])).tolist() == [(2**31 - 1) * 256 + 255]


def test_rows_may_be_beyond_the_length():
    """New keys are written there."""
    paged = nta.PagedLayout(TABLE, LENGTHS, 4)
    assert paged.rows(torch.tensor([1, 1]), torch.tensor([3, 4])).tolist() == [11, 0]


def test_lengths_are_read_when_they_are_needed():
    lengths = LENGTHS.clone()
    paged = nta.PagedLayout(TABLE, lengths, 4)
    lengths.add_(1)
    assert paged.lengths.tolist() == [7, 4]
    offsets = torch.tensor([0, 2, 5])
    paged = nta.PagedLayout.from_indices(torch.arange(5), offsets)
    offsets[1] = 1
    assert paged.lengths.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("make_layout", "error", "message"),
    [
        (lambda: nta.PagedLayout([[0]], LENGTHS, 4), TypeError, "block_table must be a tensor"),
        (lambda: nta.PagedLayout(TABLE[0], LENGTHS, 4), ValueError, r"block_table must be \(B, P\)"),
        (lambda: nta.PagedLayout(TABLE.float(), LENGTHS, 4), ValueError, "int32 or int64, got"),
        (lambda: nta.PagedLayout(TABLE, LENGTHS[:1], 4), ValueError, r"lengths must be \(2,\)"),
        (lambda: nta.PagedLayout(TABLE, LENGTHS.to("meta"), 4), ValueError, "on meta"),
        (lambda: nta.PagedLayout(TABLE, LENGTHS, 0), ValueError, "page_size must be an integer from 1"),
        (lambda: nta.PagedLayout(TABLE, LENGTHS, 4.0), ValueError, "page_size must be an integer"),
        (lambda: nta.PagedLayout(TABLE, LENGTHS, 4, 9), ValueError, "max_seqlen=9 exceeds the 8 keys"),
        (lambda: nta.PagedLayout(TABLE, LENGTHS, 4, -1), ValueError, "max_seqlen must be an integer from 0"),
        (lambda: nta.PagedLayout.from_slots(TABLE, LENGTHS, 4), ValueError, r"starts must be \(B,\)"),
        (lambda: nta.PagedLayout.from_slots(LENGTHS, LENGTHS, True), ValueError, "max_seqlen must be an integer"),
        (
            lambda: nta.PagedLayout.from_indices(LENGTHS, torch.tensor([0, 2]), page_size=4),
            ValueError,
            "lengths are needed with page_size=4",
        ),
        (lambda: nta.PagedLayout.from_indices(LENGTHS, LENGTHS[:0]), ValueError, "with 0 first"),
    ],
)
def test_invalid_arguments(make_layout, error, message):
    with pytest.raises(error, match=message):
        make_layout()


@pytest.mark.parametrize("name", ["layout", "key_layout"])
def test_paged_layout_in_the_place_of_a_sequence_layout(name):
    paged = nta.PagedLayout(TABLE, LENGTHS, 4)
    x = torch.randn(9, 2, 16)
    if name == "layout":
        with pytest.raises(TypeError, match="layout must be a SequenceLayout, got PagedLayout"):
            nta.varlen_attention(x, x, x, paged)
    else:
        module = nta.VarlenMultiheadAttention(32, 2)
        with pytest.raises(TypeError, match="key_layout must be a SequenceLayout, got PagedLayout"):
            module(
                x.flatten(1),
                x.flatten(1),
                x.flatten(1),
                layout=nta.SequenceLayout.from_lengths([4, 5]),
                key_layout=paged,
            )
