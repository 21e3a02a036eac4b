"""Plans: every token once, in shards of `torch.chunk`'s sizes, with about the same work."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nt_attention as nta
from nt_attention.cli.calls import draw_lengths
from nt_attention.distributed.planner import GOOD, PAIRS_PER_EXCHANGE, Mask, Piece, chunk_sizes, make_plan, needed_keys
from nt_attention.kernels.masks import Window
from nt_attention.layouts.bounded import BoundedLayout

MASKS = {"causal": (True, (-1, -1)), "full": (False, (-1, -1)), "behind": (True, (64, -1)), "around": (False, (3, 40))}
lengths_of = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 300), st.integers(0, 5000)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths_of, st.integers(1, 9), st.sampled_from(list(MASKS)))
def test_every_token_once_in_shards_of_chunk_sizes(lengths, ranks, which):
    mask = Mask.of(*MASKS[which])
    plan = make_plan(lengths, ranks, mask)
    assert plan == make_plan(tuple(lengths), ranks, mask)
    sizes = [sum(p.stop - p.start for p in pieces) for pieces in plan.pieces]
    chunks = torch.empty(sum(lengths)).chunk(ranks)
    assert [size for size in sizes if size] == [len(x) for x in chunks if len(x)]
    assert sizes == chunk_sizes(sum(lengths), ranks)
    seen = [np.zeros(n, int) for n in lengths]
    for pieces in plan.pieces:
        whole = [p.stop - p.start == lengths[p.sequence] for p in pieces]
        assert whole == sorted(whole, reverse=True)
        for p in pieces:
            assert p.start < p.stop
            seen[p.sequence][p.start : p.stop] += 1
    assert all((x == 1).all() for x in seen)


@settings(max_examples=60, deadline=None)
@given(lengths_of, st.integers(2, 9), st.sampled_from(list(MASKS)))
def test_work_and_received_rows(lengths, ranks, which):
    """Counted in another way."""
    (is_causal, window), mask = MASKS[which], Mask.of(*MASKS[which])
    plan = make_plan(lengths, ranks, mask)
    numbers = torch.tensor(lengths)
    assert sum(plan.work) == int(Window.of(window, is_causal).pairs(numbers, numbers, True).sum())
    for pieces, work, received in zip(plan.pieces, plan.work, plan.received, strict=True):
        assert work == sum(mask.work(p, lengths[p.sequence]) for p in pieces)
        needed = 0
        for sequence in {p.sequence for p in pieces}:
            visible, own = np.zeros(lengths[sequence], bool), np.zeros(lengths[sequence], bool)
            for p in (p for p in pieces if p.sequence == sequence):
                visible[slice(*mask.keys(p, lengths[sequence]))] = True
                own[p.start : p.stop] = True
            needed += int((visible & ~own).sum())
        assert received == needed


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(0.2, 1.6), st.integers(1, 300), st.booleans())
def test_work_is_balanced_over_8_ranks(seed, spread, count, is_causal):
    generator = np.random.RandomState(seed % 2**31)
    lengths = np.minimum(generator.lognormal(6, spread, count).astype(int) + 1, 65536)
    plan = make_plan(lengths, 8, Mask.of(is_causal, (-1, -1)))
    mean = sum(plan.work) / 8
    more = max(0.15 * mean, PAIRS_PER_EXCHANGE)  # 1.137 of the mean for 75 sequences of similar lengths
    assert max(plan.work) <= mean + more or lengths.sum() < 8 * 1024


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 10, 500, 3000, 8000, 20000]), min_size=1, max_size=60),
    st.sampled_from([(False, (-1, -1)), (True, (-1, -1)), (True, (256, -1)), (True, (4096, -1))]),
)
def test_work_of_few_sizes_is_balanced_over_8_ranks(lengths, mask):
    plan = make_plan(lengths, 8, Mask.of(*mask))
    assert plan.imbalance <= 1.12 or sum(lengths) < 8 * 1024


def test_sequences_that_fit_badly():
    """Plans that cut a sequence for some ranks only have 1.2 times the mean work here."""
    lengths = [20000] * 3 + [8000] * 7 + [3000] * 7 + [500] * 3 + [10] * 5
    assert make_plan(lengths, 8, Mask.of(True, (-1, -1))).imbalance <= 1.1


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_one_long_sequence_gives_each_rank_the_same_work(ranks):
    plan = make_plan([131072], ranks, Mask.of(True, (-1, -1)))
    assert plan.imbalance < 1.001
    assert max(plan.received) == 131072 - 131072 // ranks


def test_short_sequences_stay_whole():
    for lengths, ranks in (([256] * 64, 8), (draw_lengths("lognormal:1700", 65536, seed=8), 4)):
        plan = make_plan(lengths, ranks, Mask.of(True, (-1, -1)))
        assert not any(plan.cut)
        assert plan.imbalance <= GOOD


def test_a_batch_that_takes_less_time_than_an_exchange_is_not_cut():
    """Rank 0 has more than twice the work of the other one."""
    assert not any(make_plan([1000] + [10] * 100, 2, Mask.of(True, (-1, -1))).cut)
    assert any(make_plan([10000] + [100] * 100, 2, Mask.of(True, (-1, -1))).cut)


def test_no_swap_makes_the_shards_equal():
    """All lengths are even, and the shards are not."""
    plan = make_plan([2] * 33 + [30] * 8, 2, Mask.of(True, (-1, -1)))
    assert sum(len(cut) for cut in plan.cut) == 2


def test_needed_keys_are_those_of_other_ranks():
    pieces = [Piece(0, 2, 4), Piece(0, 6, 8)]
    for is_causal, left, want in (
        (True, -1, [(0, 2), (4, 6)]),
        (True, 1, [(1, 2), (5, 6)]),
        (False, -1, [(0, 2), (4, 6), (8, 9)]),
    ):
        assert needed_keys(Mask.of(is_causal, (left, -1)).seen(pieces, [9]), pieces) == {0: want}


def test_layouts_that_only_know_bounds_are_refused():
    class Mesh:
        ndim = 1

    with pytest.raises(ValueError, match="must be known on the host"):
        nta.SequenceLayout.shard(BoundedLayout(torch.tensor([0, 3]), 3, 3), Mesh())
