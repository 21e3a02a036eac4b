"""Packing of a batch, against a loop over rows: the tokens, their positions and their sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nt_attention as nta
from nt_attention.hf.pack.packing import Packing


@st.composite
def batches(draw, positions=True):
    """A mask and positions (either may be None), rows and length."""
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 11))
    kind = draw(st.sampled_from(["right", "left", "inner", "full", "none"]))
    lengths = torch.tensor(draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows)))
    right = torch.arange(length) < lengths[:, None]
    if kind == "inner":
        bits = draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
        mask = torch.tensor(bits).view(rows, length)
    else:
        mask = {"right": right, "left": right.flip(1), "full": torch.ones_like(right), "none": None}[kind]
    if mask is not None:
        mask = mask.to(draw(st.sampled_from([torch.bool, torch.int64, torch.float32])))
    position_ids = None
    if positions and (mask is None or draw(st.booleans())):
        shared = draw(st.booleans())
        steps = draw(st.lists(st.sampled_from([0, 0, 0, 0, -3, 1]), min_size=rows * length, max_size=rows * length))
        position_ids = torch.arange(length) + torch.tensor(steps).view(rows, length).cumsum(1)
        position_ids = position_ids[:1] if shared else position_ids
    return mask, position_ids, rows, length


def loop(mask, position_ids, rows, length):
    """The indices of the tokens in the flattened batch, a list for each sequence."""
    sequences = []
    for row in range(rows):
        last, members = None, []
        for place in range(length):
            if mask is not None and not mask[row, place]:
                continue
            if position_ids is None:
                begins = False
            else:
                positions = position_ids[row if position_ids.shape[0] > 1 else 0].tolist()
                goes_on = last is None or positions[place] == positions[last] + 1
                if mask is not None and last is not None:  # some count padding; and all alike tell of nothing
                    goes_on |= positions[place] - positions[last] == place - last or len({*positions}) == 1
                begins, last = not goes_on, place
            if begins:
                sequences.append(members)
                members = []
            members.append(row * length + place)
        if members or position_ids is None:  # without positions, a row without a token is an empty sequence
            sequences.append(members)
    return sequences


@settings(max_examples=150, deadline=None)
@given(batches())
def test_packing_agrees_with_a_loop_over_rows(batch):
    _, _, rows, length = batch
    packing = Packing.of(*batch)
    sequences = loop(*batch)
    flat = [place for members in sequences for place in members]
    assert (packing.rows, packing.length) == (rows, length)
    assert packing.layout.lengths.tolist() == [len(members) for members in sequences]
    assert packing.layout.total == len(flat)
    if packing.index is None:
        assert flat == list(range(rows * length))
    else:
        assert len(flat) < rows * length
        assert packing.index.tolist() == flat
        assert packing.index.dtype == torch.int64
    assert packing.padded_positions.tolist() == [place % length for place in flat]
    whole = len(sequences) == rows and all(len(members) == length for members in sequences)
    assert packing.saves_nothing == (whole or not flat)


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(0, 2))
def test_pack_and_pad(batch, features):
    mask, _, rows, length = batch
    packing = Packing.of(*batch)
    flat = [place for members in loop(*batch) for place in members]
    padded = torch.randn(rows, length, *(3, 2)[:features])
    packed = packing.pack(padded)
    assert packed.shape == (1, len(flat), *padded.shape[2:])
    for token, place in enumerate(flat):
        assert torch.equal(packed[0, token], padded[place // length, place % length])
    here = torch.ones(rows, length, dtype=torch.bool) if mask is None else mask.bool()
    for value in (0.0, -7.5):
        want = padded.clone()
        want[~here] = value
        assert torch.equal(packing.pad(packed, value), want)
    for kept in (torch.bool, torch.int64, torch.bfloat16):
        assert packing.pad(packing.pack(padded.to(kept))).dtype == kept
    shared = padded[:1]
    assert torch.equal(packing.pack(shared), packing.pack(shared.expand(rows, *shared.shape[1:])))


@settings(max_examples=100, deadline=None)
@given(batches(), st.lists(st.integers(0, 10), max_size=4))
def test_first_tokens_and_tokens_at_positions(batch, places):
    _, _, rows, length = batch
    packing = Packing.of(*batch)
    flat = [place for members in loop(*batch) for place in members]
    if flat:
        states = torch.randn(1, len(flat), 3)
        first = packing.first_tokens(states)
        assert first.shape == (rows, 3)
        for row in range(rows):
            mine = [token for token, place in enumerate(flat) if place // length == row]
            assert torch.equal(first[row], states[0, mine[0]] if mine else torch.zeros(3))
    places = [place for place in places if place < length]
    tokens, there = packing.tokens_at(torch.tensor(places, dtype=torch.int64))
    assert tokens.shape == there.shape == (rows, len(places))
    for row in range(rows):
        for column, place in enumerate(places):
            wanted = row * length + place
            assert bool(there[row, column]) == (wanted in flat)
            assert int(tokens[row, column]) == (flat.index(wanted) if wanted in flat else 0)


@settings(max_examples=50, deadline=None)
@given(batches(positions=False))
def test_positions_that_count_the_tokens_change_nothing(batch):
    mask, _, rows, length = batch
    if mask is None:
        return
    # counted over the tokens alone, as generate counts them; the padding has any position
    positions = (mask.long().cumsum(1) - 1).masked_fill(mask == 0, 1)
    alone, with_them = Packing.of(mask, None, rows, length), Packing.of(mask, positions, rows, length)
    lengths = alone.layout.lengths
    assert torch.equal(with_them.layout.lengths, lengths[lengths > 0])
    assert (with_them.index is None) == (alone.index is None)
    assert alone.index is None or torch.equal(with_them.index, alone.index)


def test_packing_gradients():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    for positions in (None, torch.tensor([[0, 1, 0]])):
        packing = Packing.of(mask, positions, 3, 3)
        padded = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
        packing.pad(packing.pack(padded).square(), value=5.0).sum().backward()
        torch.testing.assert_close(padded.grad, 2 * padded.detach() * mask[..., None])
        states = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(packing.first_tokens, states)
        torch.autograd.gradcheck(packing.pad, states)


def test_saves_nothing_with_one_row_of_two_sequences():
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    packing = Packing.of(None, positions, 2, 4)
    assert packing.index is None
    assert packing.layout.lengths.tolist() == [4, 2, 2]
    assert not packing.saves_nothing
    assert Packing.of(None, positions[:1], 2, 4).saves_nothing
    shared = Packing.of(None, positions[1:], 2, 4)
    assert shared.layout.lengths.tolist() == [2, 2, 2, 2]
    assert not shared.saves_nothing


def test_saves_nothing_with_as_many_sequences_as_rows():
    """A row without tokens and a row of two sequences: two sequences, and two rows."""
    packing = Packing.of(torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), torch.tensor([[0, 1, 0, 1]]), 2, 4)
    assert packing.layout.lengths.tolist() == [2, 2]
    assert packing.layout.batch_size == packing.rows
    assert not packing.saves_nothing


@pytest.mark.parametrize("positions", [None, torch.tensor([[0, 1, 2]])])
def test_packing_of_empty_batches(positions):
    for mask in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(0, 3), torch.zeros(2, 0)):
        given = None if positions is None else positions[:, : mask.shape[1]].expand(len(mask), -1)
        packing = Packing.of(mask.long(), given, *mask.shape)
        assert packing.layout.total == 0
        assert packing.saves_nothing
        assert packing.padded_positions.shape == (0,)
        packed = packing.pack(torch.randn(*mask.shape, 5))
        assert packed.shape == (1, 0, 5)
        assert torch.equal(packing.pad(packed, 3.0), torch.full((*mask.shape, 5), 3.0))


def test_packing_of_empty_positions():
    for shape in ((0, 3), (2, 0)):
        packing = Packing.of(None, torch.zeros(shape, dtype=torch.int64), *shape)
        assert packing.layout.total == 0
        assert packing.saves_nothing
        assert packing.pad(packing.pack(torch.randn(*shape, 5))).shape == (*shape, 5)


def test_packing_made_in_inference_mode_is_used_in_training():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for positions in (None, torch.tensor([[0, 1, 0]])):
        with torch.inference_mode():
            packing = Packing.of(mask, positions, 2, 3)
        q = torch.randn(packing.layout.total, 2, 8, requires_grad=True)
        nta.varlen_attention(q, q, q, packing.layout, is_causal=True).sum().backward()
        assert q.grad is not None
