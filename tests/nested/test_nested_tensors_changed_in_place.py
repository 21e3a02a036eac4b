"""NestedTensors that are changed in place around a call: right gradients, or an error.

Dimensions: T tokens, H heads, D head dim, E embed dim.
"""

import pytest
import torch

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

LENGTHS, TOKENS = [5, 9], 14

MODIFIED = "modified by an inplace operation"


def offsets(dtype=torch.int64):
    return torch.tensor([0, 5, 14], dtype=dtype)


def nested(values):
    return torch.nested.nested_tensor_from_jagged(values, offsets(), min_seqlen=5, max_seqlen=9)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def module():
    return nta.VarlenMultiheadAttention(22, 2, batch_first=True, dtype=torch.float64)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_layouts_with_other_bounds_do_not_share_the_maximum(mode):
    given, values = offsets(), torch.randn(TOKENS, 3)
    with mode():
        made = [SequenceLayout.from_offsets(given, max_seqlen=most).to_nested(values) for most in (17, None, 11)]
    assert [x._maybe_max_seqlen for x in made] == [17, 9, 11]


def test_changed_layout_of_a_nested_tensor_with_holes():
    x = torch.nested.nested_tensor_from_jagged(torch.randn(14, 3, 7), offsets(), lengths=torch.tensor([4, 6]))
    want = varlen_attention(x, x, x).values()
    SequenceLayout.from_nested(x).cu_seqlens.add_(1)
    assert SequenceLayout.from_nested(x).pad(torch.randn(10, 3)).shape == (2, 6, 3)
    torch.testing.assert_close(varlen_attention(x, x, x).values(), want)


class TestNestedTensorsChangedInPlace:
    """They raise where packed tensors do, because tensors saved for the backward were changed."""

    def test_residual_added_in_place_to_the_input(self, module):
        hidden = nested(leaf(TOKENS, 22)) * 1
        hidden += module(hidden, hidden, hidden)[0]
        with pytest.raises(RuntimeError, match=MODIFIED):
            hidden.values().pow(2).sum().backward()

    def test_residual_added_in_place_to_the_output(self, module):
        values = leaf(TOKENS, 22)
        hidden = nested(values) * 1
        out = module(hidden, hidden, hidden)[0]
        out += hidden
        want = values + module(values, values, values, layout=SequenceLayout.from_lengths(LENGTHS))[0]
        found = torch.autograd.grad(out.values().pow(2).sum(), values)[0]
        torch.testing.assert_close(found, torch.autograd.grad(want.pow(2).sum(), values)[0])

    @pytest.mark.parametrize("wants_gradient", [True, False], ids=["non-leaf", "no gradient of its own"])
    @pytest.mark.parametrize("through", ["itself", "its values"])
    def test_input_of_the_module_changed_in_place(self, module, wants_gradient, through):
        hidden = nested(leaf(TOKENS, 22) * 1 if wants_gradient else torch.randn(TOKENS, 22, dtype=torch.float64))
        out = module(hidden, hidden, hidden)[0]
        (hidden if through == "itself" else hidden.values()).mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            out.values().sum().backward()

    @pytest.mark.parametrize("changed", ["query", "key", "value", "out", "lse"])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_inputs_and_outputs_of_the_function_changed_in_place(self, changed, transposed):
        given = {name: nested(leaf(TOKENS, 3, 7)) * 1 for name in ("query", "key", "value")}
        if transposed:
            given = {name: x.transpose(1, 2) for name, x in given.items()}
        out, lse = varlen_attention(**given, return_lse=True)
        {**given, "out": out, "lse": lse}[changed].mul_(3)
        with pytest.raises(RuntimeError, match=MODIFIED):
            out.values().sum().backward()

    def test_query_without_gradient_changed_in_place(self):
        query, key = nested(torch.randn(TOKENS, 3, 7, dtype=torch.float64)), nested(leaf(TOKENS, 3, 7)) * 1
        out = varlen_attention(query, key, key)
        query.mul_(3)
        with pytest.raises(RuntimeError, match=MODIFIED):
            out.values().sum().backward()

    def test_to_nested_is_a_view(self):
        layout, start = SequenceLayout.from_lengths(LENGTHS), leaf(TOKENS, 3)
        tokens = start * 1
        layout.to_nested(tokens).mul_(2)
        (tokens * tokens).sum().backward()
        torch.testing.assert_close(start.grad, 8 * start.detach())

    def test_nested_inference_tensors(self, module):
        with torch.inference_mode():
            hidden = nested(torch.randn(TOKENS, 22, dtype=torch.float64))
        with torch.no_grad():
            first = module(hidden, hidden, hidden)[0].values()
            torch.testing.assert_close(module(hidden, hidden, hidden)[0].values(), first)
