"""make_fx records calls that are right for other lengths.

Dimensions: T tokens, H heads, D head dim, E embed dim.
"""

import pytest
import torch
from calls import OFFSETS, OTHER_OFFSETS, attend
from torch.fx.experimental.proxy_tensor import make_fx

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

every_mode = pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])


def gradient(x, offsets):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(attend(x, offsets).pow(2).sum(), x)[0]


@every_mode
@pytest.mark.parametrize("function", [attend, gradient])
def test_make_fx_records_an_operator_for_any_lengths(mode, function):
    x, other = torch.randn(2, 14, 3, 7, dtype=torch.float64).unbind()
    graph = make_fx(function, tracing_mode=mode)(x, OFFSETS.clone())
    assert any("nt_attention" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(other, OTHER_OFFSETS), function(other, OTHER_OFFSETS))


def test_make_fx_records_the_module():
    module, x = nta.VarlenMultiheadAttention(21, 3, rotary=nta.Rotary(dims=4)), torch.randn(14, 21)

    def run(x, offsets):
        return module(x, x, x, layout=SequenceLayout.from_offsets(offsets))[0]

    with torch.no_grad():
        graph = make_fx(run)(x, OFFSETS.clone())
        torch.testing.assert_close(graph(x, OTHER_OFFSETS), run(x, OTHER_OFFSETS))


def test_make_fx_with_a_layout_from_outside():
    layout, x = SequenceLayout.from_offsets(OFFSETS), torch.randn(14, 3, 7)
    graph = make_fx(lambda x: varlen_attention(x, x, x, layout))(torch.randn(14, 3, 7))
    torch.testing.assert_close(graph(x), varlen_attention(x, x, x, layout))


@every_mode
@pytest.mark.parametrize("made_from", ["lengths", "a mask", "positions"])
def test_make_fx_refuses_lengths_that_would_be_constants(mode, made_from):
    make = {
        "lengths": lambda given: SequenceLayout.from_lengths(given),
        "a mask": lambda given: SequenceLayout.from_attention_mask(torch.arange(9) < given[:, None]),
        "positions": lambda given: SequenceLayout.from_position_ids(torch.arange(14) % given[0]),
    }[made_from]
    with pytest.raises(ValueError, match=r"would be read while make_fx is tracing|has no values to read"):
        make_fx(lambda x, given: varlen_attention(x, x, x, make(given)), tracing_mode=mode)(
            torch.randn(14, 3, 7), torch.tensor([5, 9])
        )


@every_mode
def test_make_fx_refuses_calls_that_no_operator_supports(mode):
    x = torch.randn(14, 3, 7)

    def run(x, offsets):
        return varlen_attention(x, x, x, SequenceLayout.from_offsets(offsets), mask_mod=lambda b, h, q, k: q >= k)

    with pytest.raises(ValueError, match="make_fx can't trace it"):
        make_fx(run, tracing_mode=mode)(x, OFFSETS.clone())
