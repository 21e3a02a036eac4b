"""NestedTensors in VarlenMultiheadAttention give what nn.MultiheadAttention gives one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from multihead_ragged import (
    EMBED,
    KEY_LENGTHS,
    LENGTHS,
    TOLERANCE,
    as_jagged,
    assert_same_results,
    inputs_of,
    one_at_a_time,
    pair,
    random_masks,
    random_sequences,
)
from sweeps import covering

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_reach_a_nested_tensor_that_is_a_leaf(need_weights, masked):
    stock, ours = pair()
    parts = inputs_of(stock, cross=False)
    nested = torch.nested.nested_tensor(parts[0], layout=torch.jagged, requires_grad=True)
    masks = random_masks(parts, None, torch.bool) if masked else None
    out, _ = ours(nested, nested, nested, None, need_weights, masks)
    (got,) = torch.autograd.grad(out.values().square().sum(), nested)
    want = torch.autograd.grad(one_at_a_time(stock, parts, masks)[0].square().sum(), parts[0], materialize_grads=True)
    torch.testing.assert_close(got.values(), torch.cat(want), rtol=TOLERANCE, atol=TOLERANCE)


def test_nested_tensors_with_holes():
    stock, ours = pair(add_bias_kv=True)
    padded = torch.randn(3, 7, EMBED, dtype=torch.float64, requires_grad=True)
    starts, lengths = torch.tensor([2, 0, 4]), torch.tensor([5, 1, 2])
    nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    masks = [torch.rand(n, n) < 0.4 for n in lengths.tolist()]
    out, weights = ours(nested, nested, nested, need_weights=True, attn_mask=masks, average_attn_weights=False)
    parts = [[x[s : s + n] for x, s, n in zip(padded, starts, lengths, strict=True)]] * 3
    want = one_at_a_time(stock, parts, masks)
    assert_same_results((torch.cat(list(out.unbind())), weights), want, [padded, *stock.parameters()])


STOCK_OPTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 22, "vdim": 26},
    {"kdim": 22, "vdim": 26, "add_bias_kv": True, "bias": False},
]


def outputs_one_at_a_time(module, queries, keys, values, causal):
    outs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).triu(1) if causal else None
        outs.append(module(q, k, v, attn_mask=mask, need_weights=False)[0] if len(q) else q * 1)
    return torch.cat(outs)


@covering(
    {
        "options": STOCK_OPTIONS,
        "cross": [True, False, True],
        "causal": [False, True],
        "dtype": [torch.float64, torch.float32],
    }
)
def test_jagged_nested_tensors_give_what_one_sequence_gives(options, cross, causal, dtype):
    if "kdim" in options and not cross:
        pytest.skip("keys of another width are not the queries")
    stock, ours = pair(dtype=dtype, **options)
    with torch.no_grad():  # numbers of about the size of initial ones, for the tolerance in float32
        for parameter in stock.parameters():
            parameter.mul_(0.3)
    queries = random_sequences(LENGTHS, EMBED, dtype)
    keys = random_sequences(KEY_LENGTHS, stock.kdim, dtype) if cross else queries
    values = random_sequences(KEY_LENGTHS, stock.vdim, dtype) if cross else queries
    want = outputs_one_at_a_time(stock, queries, keys, values, causal)
    query = as_jagged(queries)
    out, weights = ours(
        query, as_jagged(keys) if cross else query, as_jagged(values) if cross else query, is_causal=causal
    )
    assert weights is None
    assert out.offsets() is query.offsets()
    assert (query + out).shape == query.shape
    got = out.values()
    incoming = torch.randn_like(want)
    inputs = [*queries, *keys, *values] if cross else queries
    grads = [
        torch.autograd.grad(x, [*inputs, *module.parameters()], incoming, allow_unused=True)
        for x, module in ((got, ours), (want, stock))
    ]
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 3e-5, "atol": 3e-5}
    torch.testing.assert_close(got, want, **tolerance)
    for mine, theirs in zip(*grads, strict=True):
        if theirs is not None:  # of a sequence without tokens, which the stock module never saw
            torch.testing.assert_close(mine, theirs, **tolerance)
