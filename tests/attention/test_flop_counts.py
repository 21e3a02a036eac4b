"""FlopCounterMode counts the products of the visible keys.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

import pytest
import torch
from oracle import visible_pairs
from torch.utils.flop_counter import FlopCounterMode

from nt_attention import SequenceLayout, varlen_attention

LENGTHS, KEY_LENGTHS = [5, 0, 1, 127, 13], [11, 3, 0, 31, 13]
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "upper_left": {"is_causal": True, "causal_alignment": "upper_left"},
    "window": {"window_size": (7, 3)},
    "window-upper_left": {"window_size": (-1, 3), "causal_alignment": "upper_left"},
    "causal-window": {"is_causal": True, "window_size": (7, 19)},
}


@pytest.mark.parametrize("backend", ["cpu", "auto"])
@pytest.mark.parametrize("rows_past_the_end", [0, 2])
@pytest.mark.parametrize("key_lengths", [LENGTHS, KEY_LENGTHS], ids=["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_flops_are_those_of_the_visible_keys(options, key_lengths, rows_past_the_end, backend):
    layout = SequenceLayout.from_lengths(LENGTHS)
    key_layout = None if key_lengths is LENGTHS else SequenceLayout.from_lengths(key_lengths)
    rows, keys = sum(LENGTHS) + rows_past_the_end, sum(key_lengths) + rows_past_the_end
    heads, kv_heads, head_dim, value_dim = 10, 5, 7, 3
    tensors = [
        torch.randn(rows, heads, head_dim, requires_grad=True),
        torch.randn(keys, kv_heads, head_dim, requires_grad=True),
        torch.randn(keys, kv_heads, value_dim, requires_grad=True),
    ]
    products = 2 * heads * visible_pairs(LENGTHS, key_lengths, **options)
    with FlopCounterMode(display=False) as counter:
        out = varlen_attention(*tensors, layout, key_layout, backend=backend, **options)
    assert counter.get_total_flops() == products * (head_dim + value_dim)
    with FlopCounterMode(display=False) as counter:
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == products * (3 * head_dim + 2 * value_dim)
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.nt_attention.attention_backward}
