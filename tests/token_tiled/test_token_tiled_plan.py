"""The plan of the token-tiled kernels, compared with a table of all visible pairs.

Dimensions: T query tokens, S key tokens.
"""

import gc
import itertools
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nt_attention import SequenceLayout
from nt_attention.kernels.masks import Window
from nt_attention.kernels.token_tiled.plan import Plan

LENGTHS = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=7)

SIDE = st.sampled_from([math.inf, 0, 1, 3, 11])

SHARED = st.sampled_from([0, 1, 5, 16, 31])

ROWS = st.sampled_from([1, 2, 7, 16])

examples = settings(max_examples=60, deadline=None)


def plan_of(lengths, window=(math.inf, math.inf), upper_left=False):
    queries, keys = (SequenceLayout.from_lengths(list(side)) for side in zip(*(lengths or [(0, 0)]), strict=True))
    return Plan.make(queries, keys, window, upper_left)


def positions(lengths, side):
    """(sequence, position) of each token."""
    return [(b, position) for b, pair in enumerate(lengths) for position in range(pair[side])]


def aligned_key(lengths, b, position, upper_left):
    """The position of the key that is aligned with a query."""
    queries, keys = lengths[b]
    return position + (0 if upper_left else keys - queries)


def visible(lengths, window, upper_left):
    """(T, S) bool, which keys are visible to which queries, one pair at a time."""
    left, right = window
    rows = [
        [b == c and -left <= j - aligned_key(lengths, b, i, upper_left) <= right for c, j in positions(lengths, 1)]
        for b, i in positions(lengths, 0)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(positions(lengths, 0)), len(positions(lengths, 1)))


def covered(*tiles):
    """Every row of the tiles, as often as a tile contains it."""
    return sorted(row for begin, end in itertools.chain(*tiles) for row in range(begin, end))


@examples
@given(LENGTHS, SIDE, SIDE, st.booleans())
def test_visible_range_of_each_token(lengths, left, right, upper_left):
    plan = plan_of(lengths, (left, right), upper_left)
    table = visible(lengths, (left, right), upper_left)
    for met, visible_keys in ((plan.queries, table), (plan.keys, table.T)):
        index = torch.arange(visible_keys.shape[1])
        inside = (met.lo[:, None] <= index) & (index < met.hi[:, None])
        assert torch.equal(inside, visible_keys)
        # kernels take the range of a tile from its first and last token and read these rows without a check
        for bound in (met.lo, met.hi):
            assert bound.dtype == torch.int32
            assert (bound.diff() >= 0).all()
            assert ((bound >= 0) & (bound <= visible_keys.shape[1])).all()
        assert (met.lo <= met.hi).all()


@examples
@given(LENGTHS, st.booleans())
def test_aligned_key_of_each_query(lengths, upper_left):
    plan = plan_of(lengths, upper_left=upper_left)
    begins = list(itertools.accumulate((keys for _, keys in lengths), initial=0))
    want = [begins[b] + aligned_key(lengths, b, i, upper_left) for b, i in positions(lengths, 0)]
    assert plan.queries.own.tolist() == want


@examples
@given(LENGTHS, SIDE, SIDE, ROWS, SHARED)
def test_query_tiles_cover_all_queries(lengths, left, right, rows, shared):
    plan = plan_of(lengths, (left, right))
    tiles = plan.query_tiles(rows, shared).tolist()
    of_token = positions(lengths, 0)
    assert covered(tiles) == list(range(len(of_token)))
    for begin, end in tiles:
        assert 0 < end - begin <= rows
        if of_token[begin][0] != of_token[end - 1][0]:
            assert end - begin <= shared
            # the keys of a tile fit into one block, whatever the window
            sequences = range(of_token[begin][0], of_token[end - 1][0] + 1)
            assert sum(lengths[b][1] for b in sequences) <= shared


@examples
@given(LENGTHS, SIDE, SIDE, ROWS)
def test_batch_invariant_tiles_depend_on_their_sequence_alone(lengths, left, right, rows):
    """Batch invariance: the tiles of a sequence depend on this sequence alone."""
    plan = plan_of(lengths, (left, right))
    for side, tiles in ((0, plan.query_tiles(rows, 0)), (1, plan.key_tiles(rows, 0))):
        of_token = positions(lengths, side)
        ends = {(b, lengths[b][side]) for b in range(len(lengths))}
        for begin, end in tiles.tolist():
            (b, position), (last_b, last) = of_token[begin], of_token[end - 1]
            assert b == last_b
            assert position % rows == 0
            assert end - begin == rows or (b, last + 1) in ends


@examples
@given(LENGTHS, SIDE, SIDE, ROWS, ROWS, SHARED)
def test_fused_and_other_tiles_cover_every_token_once(lengths, left, right, rows, key_rows, shared):
    plan = plan_of(lengths, (left, right))
    fused = plan.fused_tiles(shared).tolist()
    queries = plan.query_tiles(rows, shared, without_fused=True).tolist()
    keys = plan.key_tiles(key_rows, shared).tolist()
    assert covered(queries, (tile[:2] for tile in fused)) == list(range(len(positions(lengths, 0))))
    assert covered(keys, (tile[2:] for tile in fused)) == list(range(len(positions(lengths, 1))))
    assert all(0 < end - begin <= rows for begin, end in queries)
    assert all(0 < end - begin <= key_rows for begin, end in keys)

    corners = set(zip(*(side.offsets.tolist() for side in plan.sides), strict=True))
    for first, last, start, end in fused:
        assert {(first, start), (last, end)} <= corners  # whole sequences, the same of queries and keys
        assert max(last - first, end - start) <= shared
    in_fused_tiles = {of_token for first, last, *_ in fused for of_token in positions(lengths, 0)[first:last]}
    assert {b for b, _ in in_fused_tiles} == {b for b, pair in enumerate(lengths) if pair[0] and max(pair) <= shared}


def test_short_sequences_share_a_tile_with_all_that_fit():
    plan = plan_of([(n, n) for n in (5, 0, 11, 1, 40, 3, 13, 2)])
    tiles = sorted(plan.query_tiles(16, 16).tolist())
    assert tiles == [[0, 16], [16, 17], [17, 33], [33, 49], [49, 57], [57, 73], [73, 75]]
    assert plan.fused_tiles(16).tolist() == [[0, 16] * 2, [16, 17] * 2, [57, 73] * 2, [73, 75] * 2]


def test_tiles_are_sorted_by_work():
    lengths = [(3, 3), (257, 257), (17, 17)]
    plan = plan_of(lengths, (math.inf, 0))
    for met, tiles in ((plan.queries, plan.query_tiles(16, 0)), (plan.keys, plan.key_tiles(16, 0))):
        work = [int(met.hi[end - 1] - met.lo[begin]) for begin, end in tiles.tolist()]
        assert work == sorted(work, reverse=True)
        assert work[0] == 257


def test_tiles_are_cached():
    plan = plan_of([(5, 7), (40, 3)])
    for make in (
        lambda: plan.query_tiles(16, 32),
        lambda: plan.query_tiles(16, 32, without_fused=True),
        lambda: plan.key_tiles(16, 32),
        lambda: plan.fused_tiles(32),
    ):
        assert make() is make()
    assert plan.query_tiles(16, 32) is not plan.query_tiles(16, 0)


@pytest.mark.parametrize("window", [(math.inf, math.inf), (3, 0)], ids=str)
def test_a_plan_keeps_no_offsets_alive(window):
    layouts = [SequenceLayout.from_lengths(lengths) for lengths in ([5, 0, 3], [2, 7, 3])]
    offsets = [weakref.ref(x) for layout in layouts for x in (layout.offsets, layout.cu_seqlens)]
    plan = Plan.make(*layouts, window, False)
    plan.query_tiles(16, 16)
    del layouts
    gc.collect()
    assert [x() for x in offsets] == [None] * 4


def test_window_of_operator_arguments():
    assert Window.of((-1, 5)) == (math.inf, 5)
    assert Window.of((0, -1)) == (0, math.inf)
    assert Window.of((3, -1), is_causal=True).sizes == (3, 0)


@pytest.mark.parametrize("window", [(math.inf, math.inf), (3, 3), (3, 1), (math.inf, 0)], ids=str)
def test_plan_of_one_layout_equals_that_of_two_equal_ones(window):
    one, two = (SequenceLayout.from_lengths([5, 0, 1, 13, 2]) for _ in range(2))
    got, want = Plan.make(one, one, window, False), Plan.make(one, two, window, False)
    for side in ("queries", "keys"):
        for name in ("lo", "hi", "own"):
            assert torch.equal(getattr(getattr(got, side), name), getattr(getattr(want, side), name)), (side, name)


def test_offsets_that_are_not_contiguous():
    offsets = torch.tensor([0, 99, 3, 7, 7, 55, 12, 1], dtype=torch.int32)[::2]
    other = torch.tensor([[0, 9], [2, 99], [2, 50], [6, 1]], dtype=torch.int32)[:, 0]
    got = Plan.make(SequenceLayout.from_offsets(offsets), SequenceLayout.from_offsets(other), (3, 0), False)
    want = plan_of([(3, 2), (4, 0), (5, 4)], (3, 0))
    for side in ("queries", "keys"):
        for name in ("lo", "hi", "own"):
            assert torch.equal(getattr(getattr(got, side), name), getattr(getattr(want, side), name)), (side, name)
