"""`SequenceLayout.pack`, `pad` and `to_nested`, and their gradients."""

import re

import pytest
import torch
from layouts import LENGTHS, right

from nt_attention import SequenceLayout


def padded_with(mask, fill=0.0):
    """(B, L, 3): tokens are numbered from 1 where the mask is set, and the rest is `fill`."""
    padded = torch.full((*mask.shape, 3), fill)
    padded[mask.bool()] = torch.arange(1.0, 1 + int(mask.sum()))[:, None].repeat(1, 3)
    return padded


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
    def test_pack_takes_more_positions_than_the_longest(self):
        packed = SequenceLayout.from_lengths(LENGTHS).pack(padded_with(MASKS["right-with-room"]))
        assert packed[:, 0].tolist() == list(range(1, 14))

    @pytest.mark.parametrize("trailing", [(), (3,), (2, 5)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16], ids=str)
    def test_pack_and_pad_any_shape_and_dtype(self, trailing, dtype):
        layout = SequenceLayout.from_attention_mask(MASKS["scattered"])
        values = torch.randint(0, 2, (layout.total, *trailing)).to(dtype)
        padded = layout.pad(values)
        assert padded.shape == (5, 4, *trailing)
        assert padded.dtype == dtype
        assert torch.equal(layout.pack(padded), values)

    def test_pad_ignores_rows_past_the_total(self):
        layout = SequenceLayout.from_lengths(LENGTHS)
        values = torch.randn(17, 3)
        assert torch.equal(layout.pad(values), layout.pad(values[:13]))

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


def test_to_nested_shares_the_offsets_of_the_layout():
    layout = SequenceLayout.from_lengths(LENGTHS)
    values = torch.randn(13, 3, requires_grad=True)
    made = layout.to_nested(values)
    assert made.offsets() is layout.offsets
    assert [part.shape[0] for part in made.unbind()] == LENGTHS
    made.values().sum().backward()
    assert torch.equal(values.grad, torch.ones(13, 3))
    other = layout.to_nested(torch.ones(13, 3))
    assert torch.equal((made + other).values(), values + 1)
