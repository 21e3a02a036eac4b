"""Layouts that are made inside of a graph or from fake tensors.

Dimensions: T tokens, H heads, D head dim, E embed dim.
"""

import pytest
import torch
from calls import OFFSETS, attend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention


def test_graph_of_a_value_with_more_rows_than_the_key():
    torch._dynamo.reset()
    key, value = torch.randn(14, 3, 7), torch.randn(17, 3, 7)

    def run(key, value, offsets):
        return varlen_attention(key, key, value, SequenceLayout.from_offsets(offsets))

    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(key, value, OFFSETS), run(key, value, OFFSETS))
    with pytest.raises(ValueError, match="key and value must have the same tokens"):
        graph(torch.randn(16, 3, 7), value, OFFSETS)


def test_layout_made_in_a_graph_checks_rows_in_eager_calls():
    torch._dynamo.reset()
    layout = torch.compile(lambda x: SequenceLayout.from_offsets(x), backend="eager")(torch.tensor([0, 4, 9]))
    x = torch.randn(9, 3, 7)
    want = attend(x, torch.tensor([0, 4, 9]))
    torch.testing.assert_close(varlen_attention(x, x, x, layout, is_causal=True), want)
    with pytest.raises(ValueError, match="have 9 tokens"):
        varlen_attention(x[:5], x[:5], x[:5], layout)


@pytest.mark.parametrize("options", [{}, {"rotary": nta.Rotary(dims=4)}], ids=["plain", "rotary"])
def test_fake_tensors_have_the_shapes_of_real_ones(options):
    module = nta.VarlenMultiheadAttention(24, 3, **options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, offsets = torch.randn(14, 24), torch.tensor([0, 5, 14])
        out, _ = module(x, x, x, layout=SequenceLayout.from_offsets(offsets))
    assert isinstance(out, FakeTensor)
    assert out.shape == (14, 24)
