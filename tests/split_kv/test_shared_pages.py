"""`split_kv` reads pages that neighbouring sequences share once for each bundle. The results are as without that.

Without a GPU, Triton's interpreter runs the kernels.
"""

import itertools

import pytest
import torch
from pools import make
from sweeps import pairwise, sweep_except
from token_tiled_cases import DEVICE, GPU, IGNORED_WARNINGS

import nt_attention as nta
from nt_attention.kernels.split_kv import launches, sharing, triton_kernels

pytestmark = IGNORED_WARNINGS

FEW_HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 16}
EIGHT = [100, 70, 64, 49, 65, 128, 66, 90]

# Lengths of keys, and groups of sequences that share so many pages of 16 rows: (first, last, pages).
BATCHES = {
    "one prompt": (EIGHT, [(0, 7, 3)]),
    "nothing shared": (EIGHT, []),
    "two prompts": ([*EIGHT, *EIGHT], [(0, 7, 3), (8, 15, 2)]),
    "a bundle of two prompts": ([*EIGHT[:6], 80, 70, *EIGHT[:5]], [(0, 5, 3), (6, 12, 4)]),
    "alone in a bundle": ([*EIGHT, 200], [(0, 8, 3)]),
    "ends in shared pages": ([100, 33, 16, 5, 120, 48, 64, 17], [(0, 7, 3)]),
    "ends with a shared page": ([48, 48, 49, 47, 48, 64, 48, 48], [(0, 7, 3)]),
    "empty sequences": ([100, 0, 80, 0, 90, 70, 0, 60, 0, 0], [(0, 9, 3)]),
    "all equal": ([96] * 5, [(0, 4, 6)]),
    "the others share more": ([100, 90, 80, 100, 90, 80, 70, 90], [(0, 7, 1), (1, 6, 4)]),
    "one differs": ([100, 90, 80, 100, 90, 80, 70, 90], [(0, 4, 4), (6, 7, 4)]),
}


@pytest.fixture(autouse=True)
def small_batches_share(monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_BYTES", 0)
    monkeypatch.setattr(sharing, "LEAST_SAVED", 1)


@pytest.fixture
def bundles(monkeypatch):
    """What was found in each call."""
    calls, find = [], sharing.find

    def recorded(*arguments):
        calls.append(find(*arguments))
        return calls[-1]

    monkeypatch.setattr(sharing, "find", recorded)
    return calls


def batch(which, queries=1, **options):
    """Sequences with as many queries, or as many as they have keys."""
    lengths, groups = BATCHES[which]
    each = queries if isinstance(queries, list) else [queries] * len(lengths)
    case = make(each, lengths, **FEW_HEADS | options)
    for group in groups:
        case.share(*group)
    return case


def keys_to_read(found, lengths):
    """The number of keys that are read for each key head: of bundles once, and what sequences do not share."""
    return int(found.keys.lengths.sum() + (lengths - found.first_keys[: len(lengths)]).sum())


@pytest.mark.parametrize(
    ("which", "form", "queries"),
    sweep_except(
        itertools.product(BATCHES, ["table", "indices"], [1, 2, 4]),
        *(("nothing shared", "table", 1), ("a bundle of two prompts", "indices", 2), ("one differs", "table", 4)),
        *(("alone in a bundle", "indices", 1), ("ends in shared pages", "table", 2), ("empty sequences", "table", 1)),
    ),
)
def test_as_the_reference(which, form, queries, bundles):
    batch(which, queries, form=form).check("split_kv", is_causal=True)
    assert len(bundles) == 1
    assert bool(bundles[0].first_keys[: len(BATCHES[which][0])].any()) == (which != "nothing shared")


@pairwise(
    {
        "page": [1, 3, 16, 64],
        "form": ["table", "indices"],
        "mask": [{}, {"is_causal": True}, {"window_size": (-1, 2)}, {"causal_alignment": "upper_left"}],
        "queries": [1, [2, 0, 1, 3, 4, 1, 2, 1, 0]],
    }
)
def test_pages_and_masks(page, form, mask, queries, bundles):
    lengths = [150, 140, 132, 200, 133, 160, 170, 131, 30]
    each = queries if isinstance(queries, list) else [queries] * len(lengths)
    case = make(each, lengths, page=page, form=form, **FEW_HEADS)
    case.share(0, 7, 128 // page)
    case.check("split_kv", **mask)
    assert int(bundles[0].keys.lengths[0]) == 128 // page * page


CALLS = {
    "softcap": ({}, {"softcap": 1.3}),
    "negative scale": ({}, {"scale": -0.3}),
    "sinks": ({}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0], device=DEVICE)}),
    "window of all keys": ({}, {"window_size": (500, 0)}),
    "all": ({}, {"softcap": 1.3, "is_causal": True, "sinks": torch.ones(4, device=DEVICE)}),
    "a key head for each head": ({"heads": 3, "kv_heads": 3}, {}),
    "17 heads": ({"heads": 17, "kv_heads": 1}, {}),  # not shared: a sequence has more rows than a small tile
    "16 heads": ({"heads": 16, "kv_heads": 1}, {}),
    "head dims": ({"head_dim": 40, "value_dim": 24}, {"is_causal": True}),
    "float16": ({"dtype": torch.float16}, {"is_causal": True}),
}


@pytest.mark.parametrize("which", sweep_except(CALLS, "all", "window of all keys", "17 heads", "16 heads", "head dims"))
def test_options_heads_and_dtypes(which, bundles):
    sizes, options = CALLS[which]
    queries = 1 if sizes else 2
    batch("a bundle of two prompts", queries, **sizes).check("split_kv", 2e-2 if "dtype" in sizes else 1e-5, **options)
    assert len(bundles) == (which != "17 heads")


NOT_SHARED = {
    "window": {"window_size": (90, 0)},
    "alibi": {"alibi_slopes": torch.linspace(0, 1, 4, device=DEVICE)},
    "upper-left": {"is_causal": True, "causal_alignment": "upper_left"},
}


@pytest.mark.parametrize("which", NOT_SHARED)
def test_calls_without_sharing(which, bundles):
    batch("one prompt", 2).check("split_kv", **NOT_SHARED[which])
    assert not bundles


def test_batch_invariant_calls_do_not_share(bundles):
    case = batch("one prompt")
    got, want = case.solve("split_kv", batch_invariant=True), case.exact()
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)
    assert not bundles


def test_without_sharing_by_numbers_that_the_host_knows(bundles, monkeypatch):
    batch("one prompt", 9).check("split_kv")  # 18 rows of a sequence and key head
    batch("nothing shared", form="slots").check("split_kv")
    make([1], [100], **FEW_HEADS).check("split_kv")
    monkeypatch.setattr(sharing, "LEAST_BYTES", 2**20)
    batch("one prompt").check("split_kv")
    assert not bundles


def test_shared_keys_that_save_little_are_not_shared(bundles, monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_SAVED", 3 * 16 * 7)
    batch("one prompt").check("split_kv")
    monkeypatch.setattr(sharing, "LEAST_SAVED", 3 * 16 * 7 + 1)
    batch("one prompt").check("split_kv")
    assert [int(found.keys.lengths[0]) for found in bundles] == [48, 0]


# Keys that a bundle reads, and first keys of its sequences.
FOUND = {
    "one prompt": ([48], [48] * 8),
    "a bundle of two prompts": ([48, 64], [48] * 6 + [0] * 2 + [64, 64, 64, 0, 64]),
    "alone in a bundle": ([48, 0], [48] * 8 + [0]),
    "ends in shared pages": ([48], [48, 0, 0, 0, 48, 48, 48, 0]),
    "ends with a shared page": ([48], [48, 48, 48, 0, 48, 48, 48, 48]),
    "empty sequences": ([48, 0], [48, 0, 48, 0, 48, 48, 0, 48, 0, 0]),
    "the others share more": ([64], [0, 64, 64, 64, 64, 64, 64, 0]),
    "one differs": ([64], [64] * 5 + [0] * 3),
}


@pytest.mark.parametrize("which", sweep_except(FOUND, "a bundle of two prompts", "empty sequences", "one differs"))
def test_what_is_shared(which, bundles):
    batch(which).solve("split_kv", is_causal=True)
    (found,) = bundles
    shared, first = FOUND[which]
    assert found.keys.lengths.tolist() == shared
    assert found.first_keys[: len(first)].tolist() == first


@pytest.mark.skipif(GPU, reason="counts in Triton's interpreter")
@pytest.mark.parametrize("which", ["a bundle of two prompts", "all equal"])
def test_shared_pages_are_read_once_for_a_bundle(which, bundles, monkeypatch):
    case, counted, load_keys = batch(which), [], triton_kernels._load_keys

    def recorded(base, start, more, is_inside, *sizes):
        counted.append(int(is_inside.handle.data.sum()))
        return load_keys(base, start, more, is_inside, *sizes)

    monkeypatch.setattr(triton_kernels, "_load_keys", recorded)
    case.solve("split_kv")
    lengths, (found,) = case.paged.lengths, bundles
    assert sum(counted) == 2 * 2 * keys_to_read(found, lengths)  # keys and values of two heads
    monkeypatch.setattr(sharing, "LEAST_BYTES", 2**30)
    counted.clear()
    case.solve("split_kv")
    assert sum(counted) == 2 * 2 * int(lengths.sum())
    if which == "all equal":
        assert keys_to_read(found, lengths) == 96


def test_lengths_and_pages_that_change_between_calls_are_seen(bundles):
    case = batch("one prompt")
    case.check("split_kv")
    case.paged.lengths[5] = 40
    table = case.paged.table
    table[2, 1], spare = table[-1, -1].clone(), table[2, 1].clone()  # sequence 2 gets a page of its own
    for pool in case.pools:
        pool[table[2, 1]] = pool[spare] + 1
    case.repack()
    case.check("split_kv")
    assert bundles[0].first_keys[:8].tolist() == [48] * 8
    assert bundles[1].first_keys[:8].tolist() == [48, 48, 0, 48, 48, 0, 48, 48]


def test_wrong_lengths_and_pages_give_nan_in_their_sequences(bundles):
    case = batch("two prompts")
    want, _ = case.solve("split_kv")
    for wrong in (-1, 10_000):
        case.paged.lengths[6] = wrong
        out, lse = case.solve("split_kv")
        assert out[6].isnan().all()
        assert lse[6].isnan().all()
        rest = torch.arange(16, device=DEVICE) != 6
        torch.testing.assert_close(out[rest], want[rest], rtol=1e-5, atol=1e-5)
    case.paged.lengths[6] = EIGHT[6]
    case.paged.table[:8, 1] = -1  # a shared page
    out, _ = case.solve("split_kv")
    assert out[:8].isnan().all()
    torch.testing.assert_close(out[8:], want[8:], rtol=1e-5, atol=1e-5)
    assert all(found.keys.lengths.all() for found in bundles)


def test_no_queries(bundles):
    case = batch("one prompt", [0, 1, 0, 1, 0, 0, 2, 0])
    case.check("split_kv")
    assert bundles
    case.layout = nta.SequenceLayout.from_lengths([0] * 8, device=DEVICE)
    out, lse = case.solve("split_kv")
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_more_chunks_than_splits(monkeypatch, bundles):
    monkeypatch.setattr(launches, "_MOST_SPLITS", 2)
    case = make([1] * 9, [700, 650, 800, 660, 640, 641, 900, 655, 20], **FEW_HEADS)
    case.share(0, 7, 40)
    case.check("split_kv", is_causal=True)
    assert int(bundles[0].keys.lengths[0]) == 640


@pytest.mark.gpu
def test_captured_while_lengths_grow_and_pages_are_no_longer_shared(bundles):
    case = batch("a bundle of two prompts", spare=4)
    for pool in case.pools:
        pool.nan_to_num_()
    lengths, table = case.paged.lengths, case.paged.table
    case.solve("split_kv")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.solve("split_kv", is_causal=True)
    for step in range(20):
        lengths.add_(1)
        if step % 5 == 0:
            table[step // 5, 0] = table[step // 5, 5]
        graph.replay()
        want, want_lse = case.solve("split_kv", is_causal=True)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
        case.repack()
        case.check("split_kv", is_causal=True)
