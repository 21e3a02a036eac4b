"""`varlen_attention` of NestedTensors in every form, compared with each sequence alone; and changed in place.

Dimensions: T tokens, H heads, D head dim, E embed dim.
"""

import pytest
import torch
from nested_forms import (
    ANY_LENGTHS,
    LENGTHS,
    H,
    as_list,
    assert_all_close,
    begins_later,
    from_jagged,
    heads_first,
    jagged,
    narrowed,
    random_parts,
    sequences,
    strided,
    strided_heads_first,
    with_holes,
)
from oracle import attention
from sweeps import covering

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention

MADE = [(make, name) for make in ANY_LENGTHS for name in LENGTHS]
MADE += [(narrowed, name) for name in LENGTHS if name != "no-sequences"]
MADE += [(make, "mixed") for make in (as_list, strided, strided_heads_first)]


@covering({"make, name": MADE, "causal": [False, True]})
def test_nested_tensor_attention_of_each_sequence_alone(make, name, causal):
    parts = random_parts(LENGTHS[name])
    x = make(parts)
    out, lse = varlen_attention(x, x, x, is_causal=causal, return_lse=True)
    assert (out.is_nested, out.layout, out.dim(), lse.dim()) == (True, x.layout, 4, 3)
    if x.layout == torch.jagged:
        assert out.offsets() is lse.offsets() is x.offsets()
        assert out.lengths() is x.lengths()
        assert out.shape == x.shape
        assert lse._ragged_idx == 1
    outs, lses, sums = sequences(out), sequences(lse), sequences(x + out)
    if make is strided_heads_first:
        outs, sums = ([part.transpose(0, 1) for part in each] for each in (outs, sums))
    alone = [attention(part, part, part, [len(part)], is_causal=causal) for part in parts]
    assert_all_close(outs, [out for out, _ in alone])
    assert_all_close(lses, [lse for _, lse in alone])
    assert_all_close(sums, [part + out for part, (out, _) in zip(parts, alone, strict=True)])
    if not parts:
        return
    weights = [(torch.randn_like(part), torch.randn_like(part[..., 0])) for part in parts]
    found, wanted = (
        torch.autograd.grad(
            sum((o * w).sum() + (s * u).sum() for (o, s), (w, u) in zip(pairs, weights, strict=True)), parts
        )
        for pairs in (list(zip(outs, lses, strict=True)), alone)
    )
    assert_all_close(found, wanted)


@covering(
    {
        "make": [from_jagged, heads_first, with_holes, strided],
        "make_key": [from_jagged, heads_first, with_holes, begins_later],
        "make_value": [heads_first, with_holes, from_jagged],
    }
)
def test_nested_tensor_cross_attention(make, make_key, make_value):
    lengths, key_lengths = [5, 0, 3, 1], [2, 3, 0, 7]
    parts, keys, values = random_parts(lengths), random_parts(key_lengths), random_parts(key_lengths)
    x = make(parts)
    out = varlen_attention(x, make_key(keys), make_value(values), is_causal=True)
    alone = [
        attention(q, k, v, [len(q)], [len(k)], is_causal=True)[0] for q, k, v in zip(parts, keys, values, strict=True)
    ]
    assert_all_close(sequences(out), alone)
    if x.layout == torch.jagged:
        assert out.offsets() is x.offsets()


def test_heads_first_nested_tensors_with_grouped_heads_and_another_value_dim():
    offsets = torch.tensor([0, 5, 5, 8])
    query, key, value = (jagged(torch.randn(8, heads, dim), offsets) for heads, dim in ((6, 5), (3, 5), (3, 7)))
    want = varlen_attention(query, key, value)
    got = varlen_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    assert (got._ragged_idx, got.size(1), got.size(3)) == (2, 6, 7)
    assert torch.equal(got.transpose(1, 2).values(), want.values())
    assert (want._maybe_max_seqlen, want._maybe_min_seqlen) == (5, 0)


def test_nested_leaf_gets_a_nested_gradient_also_through_a_projection():
    layout, project = SequenceLayout.from_lengths([5, 0, 3]), torch.nn.Linear(7, 3 * H * 5).double()
    leaf = torch.nested.nested_tensor([torch.randn(n, 7).double() for n in (5, 0, 3)], layout=torch.jagged)
    leaf.requires_grad_()

    def attend(q, k, v, *rest):
        return varlen_attention(*(part.unflatten(-1, (H, 5)) for part in (q, k, v)), *rest)

    attend(*project(leaf).chunk(3, -1)).values().square().sum().backward()
    values = leaf.detach().values().requires_grad_()
    want = torch.autograd.grad(
        attend(*project(values).chunk(3, -1), layout).square().sum(), (values, *project.parameters())
    )
    assert leaf.grad.is_nested
    torch.testing.assert_close([leaf.grad.values(), *(p.grad for p in project.parameters())], list(want))


def module_of(backend, embed=8):
    return nta.VarlenMultiheadAttention(embed, 2, backend=backend, dtype=torch.float64)


def test_second_derivatives_of_nested_tensors():
    """A penalty on the gradient gives the gradients of the parameters of packed rows; kernels raise an error."""
    module, layout = module_of("reference"), SequenceLayout.from_lengths([5, 3])
    values = torch.randn(8, 8, dtype=torch.float64)
    found = []
    for leaf in (torch.nested.nested_tensor_from_jagged(values, layout.offsets), values.clone()):
        leaf.requires_grad_()
        out = module(leaf, leaf, leaf, layout=None if leaf.is_nested else layout)[0]
        loss = (out.values() if leaf.is_nested else out).square().sum()
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        penalty = (grad.values() if leaf.is_nested else grad).square().sum()
        found.append(torch.autograd.grad(loss + penalty, list(module.parameters())))
    torch.testing.assert_close(*found)
    x = torch.nested.nested_tensor_from_jagged(values.clone(), layout.offsets).requires_grad_()
    (grad,) = torch.autograd.grad(module_of("cpu")(x, x, x)[0].values().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.values().square().sum().backward()


TOKENS, MODIFIED = 14, "modified by an inplace operation"


def nested(values):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 14]), min_seqlen=5, max_seqlen=9)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_layouts_with_other_bounds_do_not_share_the_maximum(mode):
    given, values = torch.tensor([0, 5, 14]), torch.randn(TOKENS, 3)
    with mode():
        made = [SequenceLayout.from_offsets(given, max_seqlen=most).to_nested(values) for most in (17, None, 11)]
    assert [x._maybe_max_seqlen for x in made] == [17, 9, 11]


def test_changed_layout_of_a_nested_tensor_with_holes():
    holes = torch.tensor([4, 6])
    x = torch.nested.nested_tensor_from_jagged(torch.randn(14, 3, 7), torch.tensor([0, 5, 14]), lengths=holes)
    want = varlen_attention(x, x, x).values()
    SequenceLayout.from_nested(x).cu_seqlens.add_(1)
    assert SequenceLayout.from_nested(x).pad(torch.randn(10, 3)).shape == (2, 6, 3)
    torch.testing.assert_close(varlen_attention(x, x, x).values(), want)


def test_what_may_be_changed_in_place():
    module, values, layout = module_of("auto", 22), leaf(TOKENS, 22), SequenceLayout.from_lengths([5, 9])
    hidden = nested(values * 1)
    out = module(hidden, hidden, hidden)[0]
    out += hidden
    want = values + module(values, values, values, layout=layout)[0]
    found = torch.autograd.grad(out.values().pow(2).sum(), values)[0]
    torch.testing.assert_close(found, torch.autograd.grad(want.pow(2).sum(), values)[0])
    start = leaf(TOKENS, 3)
    tokens = start * 1
    layout.to_nested(tokens).mul_(2)  # a view
    (tokens * tokens).sum().backward()
    torch.testing.assert_close(start.grad, 8 * start.detach())


def test_nested_inference_tensors():
    module = module_of("auto", 22)
    with torch.inference_mode():
        hidden = nested(torch.randn(TOKENS, 22, dtype=torch.float64))
    with torch.no_grad():
        first = module(hidden, hidden, hidden)[0].values()
        torch.testing.assert_close(module(hidden, hidden, hidden)[0].values(), first)
