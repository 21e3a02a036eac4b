"""Which sequences `split_kv` splits, and into how many parts. No GPU is needed."""

import pytest
import torch

from nt_attention import SequenceLayout
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.split_kv import launches, sharing

HEADS, KV_HEADS = 32, 8
GROUP = HEADS // KV_HEADS


@pytest.fixture(autouse=True)
def like_an_h100(monkeypatch):
    monkeypatch.setattr(launches, "_multiprocessors", lambda device: 132)


def tiles(queries, keys, **options):
    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, HEADS, KV_HEADS, 128, 128, 0.1, **options)
    key_layout = SequenceLayout.from_lengths(keys)
    return launches._tiles(SequenceLayout.from_lengths(queries), launches.Keys.packed(key_layout, None), spec)


def test_one_long_sequence_is_split_until_all_multiprocessors_have_work():
    (tile,) = tiles([1], [65536])
    assert (tile.block_m, tile.split_rows, 1 << tile.chunk_bits, tile.splits) == (16, GROUP, 256, 128)
    assert -(-65536 // 256) >> tile.doublings == tile.splits
    (tile,) = tiles([1], [512])
    assert (1 << tile.chunk_bits, tile.splits, tile.doublings) == (64, 8, 0)


@pytest.mark.parametrize(("batch", "keys", "splits"), [(1, 65536, 128), (8, 8192, 32), (256, 512, 2)])
def test_decoding_in_multi_head_latent_attention_loops_over_small_tiles(batch, keys, splits):
    """A key head has 128 rows. Tiles of more than 16 rows of 576 columns do not fit in the memory of small GPUs."""
    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, 128, 1, 576, 512, 0.1)
    where = launches.Keys.packed(SequenceLayout.from_lengths([keys] * batch), None)
    (tile,) = launches._tiles(SequenceLayout.from_lengths([1] * batch), where, spec)
    assert (tile.block_m, tile.split_rows, tile.splits) == (16, 128, splits)


def test_parts_of_large_tiles_are_worth_their_time():
    """They have 2,048 keys, and there are no more than the multiprocessors need."""
    (tile,) = tiles([64] * 32, [512] * 32)
    assert tile.splits == 1
    (tile,) = tiles([64] * 8, [4096] * 8)
    assert (1 << tile.chunk_bits, tile.splits) == (2048, 2)
    (tile,) = tiles([64], [65536])
    assert (1 << tile.chunk_bits + tile.doublings, tile.splits) == (4096, 17)
    (tile,) = tiles([16] * 32, [512] * 32)  # 256 tiles for 264 programs
    assert tile.splits == 1


def test_parts_of_large_batches_have_few_rows():
    for batch in (1, 8, 64, 512, 4096):
        (tile,) = tiles([1] * batch, [65536] * batch)
        assert batch * tile.splits * KV_HEADS * tile.split_rows <= 2**18


@pytest.mark.parametrize(("queries", "is_split"), [(64, True), (512, True), (8192, False)])
def test_sequences_of_several_tiles_are_split_if_there_are_few(queries, is_split):
    (tile,) = tiles([queries], [8192])
    assert tile.block_m == 64
    assert (tile.splits > 1) == is_split
    assert tile.split_rows == (queries * GROUP if is_split else 0)


@pytest.mark.parametrize(("queries", "block_m"), [(4, 16), (16, 64), (64, 64)])
def test_batch_invariant_splits_depend_on_the_sequence_alone(queries, block_m):
    """Alone, in a batch, and beside sequences with more queries."""
    batches = ([queries], [queries] * 700, [queries, 2000])
    found = {
        (tile.split_rows >= queries * GROUP, tile.chunk_bits, tile.splits, tile.doublings)
        for batch in batches
        for tile in tiles(batch, [4096] * len(batch), batch_invariant=True)
        if tile.block_m == block_m
    }
    assert len(found) == 1
    assert found.pop()[:2] == (queries * GROUP <= block_m, 8 if block_m == 16 else 9)


@pytest.mark.parametrize(
    ("batch", "keys", "splits"), [(8, 8192, 32), (16, 8192, 16), (64, 8192, 16), (64, 2048, 4), (4096, 8192, 2)]
)
def test_bundles_of_sequences_are_split_until_all_multiprocessors_have_work(batch, keys, splits):
    """Chunks have 512 keys, or less if there are few bundles. Parts of large batches have few rows."""
    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, HEADS, KV_HEADS, 128, 128, 0.1)
    bundles = batch // sharing.BUNDLE
    lengths = torch.full((bundles,), keys)
    where = launches.Keys(torch.zeros(bundles, keys // 16), torch.arange(bundles), lengths, 16, keys)
    tile = launches.SplitTile.of_bundles(where, sharing.BUNDLE * GROUP, spec)
    assert (tile.block_m, tile.split_rows, tile.splits) == (32, 32, splits)
    assert -(-keys >> tile.chunk_bits) >> tile.doublings == tile.splits
    assert bundles * tile.part_rows(spec) <= 2**18
