"""The size of a call for the cost model: visible pairs in closed form, compared with attention masks."""

import dataclasses
import gc
import math
import random

import pytest
import torch

from nt_attention import SequenceLayout
from nt_attention.kernels.call import AttentionSpec, Call
from nt_attention.kernels.cost_model import CallSize
from nt_attention.kernels.masks import Window

SPEC = AttentionSpec(torch.device("cpu"), torch.float32, 5, 5, 7, 7, 0.3)

OPEN = math.inf

WINDOWS = [
    *((OPEN, OPEN), (OPEN, 0), (0, OPEN), (0, 0)),
    *((OPEN, 3), (5, OPEN), (2, 7), (13, 0), (0, 11), (1000, 1000), (1000, 2), (3, 1000)),
]

EDGES = [0, 1, 2, 3, 17, 31]  # shorter and longer than the windows


def size_of(layout, key_layout, spec):
    return CallSize.of(Call(layout, key_layout, None, spec))


ALIGNMENTS = pytest.mark.parametrize("lower_right", [True, False], ids=["lower_right", "upper_left"])


def counted(queries, keys, window, lower_right):
    visible = Window(*window).mask(queries, keys, keys - queries if lower_right else 0, torch.device("cpu"))
    return queries * keys if visible is None else int(visible.sum())


def of_lengths(queries, keys, *, equal=False, **options):
    """Two layouts and the spec that goes with them."""
    layout = SequenceLayout.from_lengths(queries)
    key_layout = layout if equal else SequenceLayout.from_lengths(keys)
    about = {"equal_lengths": equal, "keyless": not key_layout.min_seqlen}
    return layout, key_layout, dataclasses.replace(SPEC, **about, **options)


@ALIGNMENTS
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_visible_pairs_are_those_of_the_attention_mask(window, lower_right):
    draw = random.Random(11)
    pairs = [(a, b) for a in EDGES for b in EDGES] + [(draw.randrange(41), draw.randrange(41)) for _ in range(83)]
    queries, keys = torch.tensor(pairs).unbind(1)
    want = [counted(*pair, window, lower_right) for pair in pairs]
    got = Window(*window).pairs(queries, keys, lower_right)
    assert got.dtype == torch.int64
    assert got.tolist() == want


@ALIGNMENTS
def test_visible_pairs_of_no_sequences(lower_right):
    none = torch.zeros(0, dtype=torch.int64)
    assert Window(3, 5).pairs(none, none, lower_right).shape == (0,)
    layout, key_layout, spec = of_lengths([], [], window_size=(3, 5))
    assert size_of(layout, key_layout, spec) == CallSize(0, 0, 0, 0)


@ALIGNMENTS
@pytest.mark.parametrize("window", [(OPEN, OPEN), (OPEN, 0), (127, 31)], ids=str)
def test_visible_pairs_exceed_32_bits(window, lower_right):
    n = 2**31 - 1  # tokens that a layout may have
    queries = torch.tensor([n])
    got = Window(*window).pairs(queries, queries, lower_right).item()
    left, right = window
    # row sums of a square, less the corners that a window cuts off
    cut_left = 0 if left == OPEN else (n - left) * (n - left - 1) // 2
    cut_right = 0 if right == OPEN else (n - right) * (n - right - 1) // 2
    assert got == n * n - cut_left - cut_right


LENGTHS = ([5, 0, 1, 127, 13], [11, 3, 0, 31, 13])

OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "upper_left": {"is_causal": True, "causal_alignment": "upper_left"},
    "window": {"window_size": (7, 3)},
    "window-upper_left": {"window_size": (-1, 3), "causal_alignment": "upper_left"},
    "causal-window": {"is_causal": True, "window_size": (7, 19)},
}


@pytest.mark.parametrize("equal", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_call_size_is_sequences_tokens_and_visible_pairs(options, equal):
    queries, keys = LENGTHS if not equal else (LENGTHS[0],) * 2
    layout, key_layout, spec = of_lengths(queries, keys, equal=equal, **options)
    size = size_of(layout, key_layout, spec)
    want = sum(counted(a, b, spec.window, spec.lower_right) for a, b in zip(queries, keys, strict=True))
    assert size[:4] == (5, (sum(queries) + sum(keys)) / 2, want, max(queries))
    masks = [spec.window.mask(a, b, spec.shift(a, b), torch.device("cpu")) for a, b in zip(queries, keys, strict=True)]
    rows = [
        b if mask is None else int(mask.sum(-1).max())
        for b, mask in zip(keys, masks, strict=True)
        if mask is None or len(mask)
    ]
    assert max(rows) <= size.most_keys <= max(keys)
    if spec.window.right == 0 or spec.window.is_open:
        assert size.most_keys == max(rows)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [LENGTHS[0], [1], [0, 0], [], [2, 2, 2]], ids=str)
def test_call_size_of_equal_lengths_by_the_fast_path(lengths, is_causal, monkeypatch):
    def refused(*_):
        raise AssertionError("counted sequence by sequence")

    layout, _, spec = of_lengths(lengths, lengths, equal=True, is_causal=is_causal)
    slow = size_of(layout, SequenceLayout.from_lengths(lengths), dataclasses.replace(spec, equal_lengths=False))
    monkeypatch.setattr(Window, "pairs", refused)
    assert size_of(layout, layout, spec) == slow


class TestCachedCallSize:
    @pytest.fixture
    def counts(self, monkeypatch):
        """The windows for which pairs were counted, in order."""
        windows, pairs = [], Window.pairs

        def counting(window, *call):
            windows.append(window)
            return pairs(window, *call)

        monkeypatch.setattr(Window, "pairs", counting)
        return windows

    def test_a_second_layer_counts_nothing(self, counts):
        layout, key_layout, spec = of_lengths(*LENGTHS, window_size=(7, 3))
        first = size_of(layout, key_layout, spec)
        # what pairs do not depend on
        again = dataclasses.replace(spec, num_heads=10, head_dim=64, scale=1.0, dtype=torch.float64, needs_grad=True)
        assert size_of(layout, key_layout, again) == first
        same = SequenceLayout.from_offsets(layout.offsets)
        assert size_of(same, SequenceLayout.from_offsets(key_layout.cu_seqlens), spec) == first
        assert counts == [(7, 3)]

    @pytest.mark.parametrize(
        "options", [{"is_causal": True}, {"window_size": (7, 2)}, {"causal_alignment": "upper_left"}]
    )
    def test_call_size_of_another_mask_is_counted_again(self, counts, options):
        layout, key_layout, spec = of_lengths(*LENGTHS, window_size=(7, 3))
        first = size_of(layout, key_layout, spec)
        assert size_of(layout, key_layout, dataclasses.replace(spec, **options)) != first
        assert len(counts) == 2

    def test_call_size_of_another_key_layout_is_counted_again(self, counts):
        layout, key_layout, spec = of_lengths(*LENGTHS)
        others = SequenceLayout.from_lengths([11, 3, 0, 31, 17])
        assert size_of(layout, others, spec).pairs - size_of(layout, key_layout, spec).pairs == 4 * 13
        assert len(counts) == 2

    def test_call_size_of_both_alignments_is_the_same_for_equal_lengths(self, counts):
        layout, _, spec = of_lengths(LENGTHS[0], None, equal=True, window_size=(7, 3))
        upper = dataclasses.replace(spec, causal_alignment="upper_left")
        assert size_of(layout, layout, upper) == size_of(layout, layout, spec)
        assert len(counts) == 1

    def test_call_size_is_freed_with_either_layout(self):
        layout, key_layout, spec = of_lengths(*LENGTHS)
        cache = layout.cache
        before = set(cache._entries)
        size_of(layout, key_layout, spec)
        (added,) = set(cache._entries) - before
        assert len(cache._entries[added]) == 1
        del key_layout
        gc.collect()
        assert len(cache._entries[added]) == 0
