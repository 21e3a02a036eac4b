"""Padded batches with a boolean key_padding_mask: padded queries are not computed and give 0."""

import torch
from multihead_ragged import EMBED, pair


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
