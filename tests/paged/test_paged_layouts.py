"""`PagedLayout`: its constructors, the rows of keys, and gathering them."""

import copy
import pickle

import pytest
import torch
from pools import FORMS, cpu_only, make

import nt_attention as nta

TABLE, LENGTHS = torch.tensor([[5, 1], [2, 0]]), torch.tensor([6, 3])


def test_attributes():
    paged = nta.PagedLayout(TABLE, LENGTHS, 4)
    assert (paged.batch_size, paged.max_seqlen, paged.page_size, paged.total) == (2, 8, 4, 16)
    assert repr(paged) == "PagedLayout(2 sequences of at most 8 keys, pages of 4, on cpu)"
    paged = nta.PagedLayout(TABLE, LENGTHS, 4, max_seqlen=7)
    assert paged.max_seqlen == 7
    assert nta.PagedLayout(TABLE, LENGTHS, 4, max_seqlen=9).max_seqlen == 8
    paged = nta.PagedLayout.from_slots(LENGTHS, LENGTHS, 9)
    assert (paged.batch_size, paged.max_seqlen, paged.page_size) == (2, 9, 9)
    assert "slots" in repr(paged)
    paged = nta.PagedLayout.from_indices(torch.arange(5), torch.tensor([0, 2, 5]))
    assert (paged.batch_size, paged.max_seqlen, paged.page_size) == (2, 5, 1)
    assert paged.lengths.tolist() == [2, 3]
    assert nta.PagedLayout.from_indices(torch.arange(5), torch.tensor([0, 2, 5]), max_seqlen=6).max_seqlen == 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page", [1, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_gather(form, page, dtype):
    case = make([1, 1, 1], [20, 0, 5], form=form, page=page, index_dtype=dtype)
    layout, (keys, values) = case.paged.gather(*case.pools)
    assert layout.same_lengths(case.key_layout)
    assert torch.equal(keys, case.keys)
    assert torch.equal(values, case.values)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copier):
    for form in FORMS:
        case = make([1, 2], [5, 7], form=form)
        for got, want in zip(copier(case.paged).gather(*case.pools)[1], (case.keys, case.values), strict=True):
            assert torch.equal(got, want)


def test_rows_do_not_overflow():
    paged = nta.PagedLayout(torch.tensor([[2**31 - 1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 256)
    assert paged.rows(torch.tensor([0]), torch.tensor([255])).tolist() == [(2**31 - 1) * 256 + 255]


@cpu_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("position", [-1, 10_000])
def test_rows_without_a_page(form, position):
    case = make([1, 1], [20, 5], form=form)
    with pytest.raises(ValueError, match=f"sequence 1 has no page for the position {position}: pass positions from 0"):
        case.paged.rows(torch.tensor([0, 1]), torch.tensor([0, position]))


def test_rows_of_a_negative_page():
    paged = nta.PagedLayout(torch.tensor([[5, -1]]), torch.tensor([3]), 4)
    with pytest.raises(ValueError, match="the table has the page -1 for a key"):
        paged.rows(torch.tensor([0, 0]), torch.tensor([0, 4]))


def test_largest_page_is_outside_of_the_pool():
    """Its row is beyond 64 bits, which must not give another row."""
    paged = nta.PagedLayout(torch.tensor([[2**62]]), torch.tensor([3]), 4)
    with pytest.raises(ValueError, match="pass pages of this pool"):
        paged.gather(torch.randn(8, 4, 2, 16))


@pytest.mark.parametrize(
    ("paged", "message"),
    [
        (
            nta.PagedLayout(TABLE, LENGTHS, 2, 4),
            r"pool 1 must be a pool \(pages, 2, G, D\) or \(N, G, D\), got \(8, 4, 1, 1\)",
        ),
        (nta.PagedLayout.from_slots(LENGTHS, LENGTHS, 8), r"pool 1 must be a pool \(N, G, D\) for slots"),
    ],
    ids=["pages", "slots"],
)
def test_gather_from_a_pool_of_a_wrong_shape(paged, message):
    with pytest.raises(ValueError, match=message):
        paged.gather(torch.randn(32, 1, 1), torch.randn(8, 4, 1, 1))


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
