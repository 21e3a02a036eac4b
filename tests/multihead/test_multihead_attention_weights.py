"""need_weights=True on ragged inputs: each sequence's weights, and zeros outside."""

from __future__ import annotations

import pytest
import torch
from multihead_ragged import (
    EMBED,
    FORMS,
    HEADS,
    KEY_LENGTHS,
    LENGTHS,
    STOCK_OPTIONS,
    added_keys,
    assert_same_results,
    call,
    causal_masks,
    inputs_of,
    leaves_of,
    one_at_a_time,
    pair,
)
from sweeps import covering

import nt_attention as nta

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


@covering({"form": FORMS, "options": STOCK_OPTIONS.values(), "cross": [True, False], "causal": [False, True, True]})
def test_attention_weights_are_those_of_one_sequence_at_a_time(form, options, cross, causal):
    stock, ours = pair(**options)
    parts = inputs_of(stock, cross)
    want, each = one_at_a_time(stock, parts, causal_masks(parts) if causal else None)
    leaves = leaves_of(stock, parts)
    got = call(form, ours, parts, need_weights=True, average_attn_weights=False, is_causal=causal)
    keys = KEY_LENGTHS if cross else LENGTHS
    assert got[1].shape == (len(LENGTHS), HEADS, max(LENGTHS), max(keys) + added_keys(stock))
    assert_same_results(got, (want, each), leaves)
    got = call(form, ours, parts, need_weights=True, is_causal=causal)
    assert got[1].shape == (len(LENGTHS), max(LENGTHS), max(keys) + added_keys(stock))
    assert_same_results(got, (want, each.mean(1)), leaves)
    assert_same_results(call(form, ours, parts, is_causal=causal), (want, None), leaves)


@pytest.mark.parametrize("form", FORMS)
def test_attention_weights_with_kdim_and_vdim(form):
    stock, ours = pair(kdim=22, vdim=26, add_bias_kv=True)
    parts = inputs_of(stock, cross=True)
    got = call(form, ours, parts, need_weights=True, average_attn_weights=False)
    assert_same_results(got, one_at_a_time(stock, parts), leaves_of(stock, parts))


def test_attention_weights_are_zero_outside_and_sum_to_one_inside():
    _, ours = pair()
    parts = inputs_of(ours, cross=True)
    _, weights = call("packed", ours, parts, need_weights=True)
    for x, queries, keys in zip(weights, LENGTHS, KEY_LENGTHS, strict=True):
        torch.testing.assert_close(x[:queries].sum(-1), torch.full((queries,), float(keys > 0), dtype=torch.float64))
        assert not x[queries:].any()
        assert not x[:, keys:].any()


def test_attention_weights_have_the_longest_length_not_max_seqlen():
    _, ours = pair()
    layout = nta.SequenceLayout.from_offsets(torch.tensor([0, 3, 3, 7]), max_seqlen=11)
    x = torch.randn(7, EMBED, dtype=torch.float64)
    assert ours(x, x, x, layout=layout, need_weights=True)[1].shape == (3, 4, 4)
