"""`SequenceLayout.pack`, `pad` and `to_nested`, and their gradients."""

import re

import pytest
import torch
from layouts import LENGTHS, right

from nt_attention import SequenceLayout

MASKS = {
    "right": right(LENGTHS, 7),
    "right-with-room": right(LENGTHS, 11),
    "left": right(LENGTHS, 7).flip(1),
    "scattered": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]).bool(),
    "all-empty": torch.zeros(3, 5, dtype=torch.bool),
    "no-positions": torch.zeros(3, 0, dtype=torch.bool),
    "no-sequences": torch.zeros(0, 5, dtype=torch.bool),
}


class TestPackAndPad:
    @pytest.mark.parametrize(
        ("shape", "shown"),
        [((3, 7, 2), "(3, 7, 2)"), ((4, 6, 2), "(4, 6, 2)"), ((13,), "(13,)")],
        ids=["batch", "positions", "dimensions"],
    )
    def test_pack_refuses_other_shapes(self, shape, shown):
        layout = SequenceLayout.from_lengths(LENGTHS)
        with pytest.raises(ValueError, match=rf"padded must be \(4, 7 or more, …\).*got {re.escape(shown)}"):
            layout.pack(torch.zeros(shape))

    def test_pack_refuses_another_padded_length_than_the_mask(self):
        layout = SequenceLayout.from_attention_mask(MASKS["left"])
        with pytest.raises(ValueError, match=r"padded must be \(4, 7, …\) for this layout, got \(4, 8, 3\)"):
            layout.pack(torch.zeros(4, 8, 3))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_pack_and_pad_derivatives_of_all_orders(mask):
    layout = SequenceLayout.from_attention_mask(mask)
    padded = torch.randn(*mask.shape, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(layout.total, 3, dtype=torch.float64, requires_grad=True)
    (back,) = torch.autograd.grad(layout.pack(padded), padded, grad, create_graph=True)
    assert torch.equal(back, layout.pad(grad))
    torch.autograd.gradcheck(layout.pack, (padded,), check_batched_grad=True)
    torch.autograd.gradcheck(layout.pad, (grad,), check_batched_grad=True)
    torch.autograd.gradgradcheck(layout.pack, (padded,))
    tangent = torch.randn_like(padded)
    pushed = torch.func.jvp(layout.pack, (padded.detach(),), (tangent,))[1]
    assert torch.equal(pushed, layout.pack(tangent))
    assert torch.equal(torch.func.vjp(layout.pack, padded.detach())[1](grad.detach())[0], back)


def test_pack_and_pad_train_with_a_layout_from_inference_mode():
    with torch.inference_mode():
        layout = SequenceLayout.from_attention_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    x = torch.randn(2, 3, 5, requires_grad=True)
    layout.pad(layout.pack(x)).sum().backward()
    assert x.grad.sum() == 25
