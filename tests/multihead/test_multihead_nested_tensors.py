"""NestedTensors in VarlenMultiheadAttention give what nn.MultiheadAttention gives one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from multihead_ragged import (
    EMBED,
    TOLERANCE,
    assert_same_results,
    inputs_of,
    one_at_a_time,
    pair,
    random_masks,
)

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
