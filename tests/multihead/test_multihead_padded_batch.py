"""Padded batches with a boolean key_padding_mask: padded queries are not computed and give 0."""

import pytest
import torch
from multihead_ragged import EMBED, pair


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_padded_queries_give_zero_and_real_ones_what_nn_multihead_attention_gives(cross, batch_first):
    stock, ours = pair()
    stock.batch_first = ours.batch_first = batch_first
    x, memory = (torch.randn(3, n, EMBED, dtype=torch.float64) for n in (7, 11))
    keys = memory if cross else x
    padding = torch.arange(keys.shape[1]) >= torch.tensor([2, keys.shape[1], 3])[:, None]
    if not batch_first:
        x, keys = x.transpose(0, 1), keys.transpose(0, 1)
    keys = keys if cross else x
    want = stock(x, keys, keys, key_padding_mask=padding, need_weights=False)[0]
    got, weights = ours(x, keys, keys, key_padding_mask=padding, need_weights=False)
    assert weights is None
    if not batch_first:
        want, got = want.transpose(0, 1), got.transpose(0, 1)
    if cross:  # every query is real
        torch.testing.assert_close(got, want)
    else:
        torch.testing.assert_close(got[~padding], want[~padding])
        assert torch.equal(got[padding], torch.zeros_like(got[padding]))


def test_padded_tokens_are_not_projected():
    _, ours = pair()
    rows = []
    ours.out_proj.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    x = torch.randn(2, 9, EMBED, dtype=torch.float64)
    ours(x, x, x, key_padding_mask=torch.arange(9) >= torch.tensor([2, 4])[:, None], need_weights=False)
    assert rows == [6]


def test_sequence_of_padding_alone_gives_zero_and_finite_gradients():
    _, ours = pair()
    x = torch.randn(2, 5, EMBED, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    out, _ = ours(x, x, x, key_padding_mask=padding, need_weights=False)
    out.sum().backward()
    assert torch.equal(out[1], torch.zeros(5, EMBED, dtype=torch.float64))
    assert x.grad.isfinite().all()
