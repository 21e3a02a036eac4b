"""First and second derivatives through NestedTensors."""

import pytest
import torch
from nested_forms import D, H, assert_all_close, random_parts, sequences
from oracle import attention

import nt_attention as nta
from nt_attention import SequenceLayout, varlen_attention


def test_nested_tensor_gradient_through_a_projection():
    layout = SequenceLayout.from_lengths([5, 0, 3])
    values = torch.randn(8, 7, requires_grad=True)
    project = torch.nn.Linear(7, 3 * H * D)

    def attend(q, k, v, *rest):
        return varlen_attention(*(part.unflatten(-1, (H, D)) for part in (q, k, v)), *rest)

    want = attend(*project(values).chunk(3, -1), layout).square().sum()
    got = attend(*project(layout.to_nested(values)).chunk(3, -1)).values().square().sum()
    torch.testing.assert_close(got, want)
    leaves = (values, *project.parameters())
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_nested_leaf_gets_a_nested_gradient():
    parts = random_parts([5, 0, 3])
    x = torch.nested.nested_tensor([part.detach() for part in parts], layout=torch.jagged, requires_grad=True)
    varlen_attention(x, x, x).values().sum().backward()
    alone = sum(attention(part, part, part, [len(part)])[0].sum() for part in parts)
    assert_all_close(sequences(x.grad), torch.autograd.grad(alone, parts))


def module_of(backend):
    return nta.VarlenMultiheadAttention(8, 2, backend=backend, dtype=torch.float64)


def test_second_derivative_of_nested_tensors_on_the_reference():
    """A penalty on the gradient gives the same gradients of the parameters as with packed rows."""
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
    for nested, packed in zip(*found, strict=True):
        torch.testing.assert_close(nested, packed)


def test_second_derivative_of_nested_tensors_on_a_kernel_raises():
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, 8, dtype=torch.float64), torch.tensor([0, 5, 8]))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module_of("cpu")(x, x, x)[0].values().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.values().square().sum().backward()


def test_gradcheck_of_nested_tensors():
    module, offsets = module_of("cpu"), torch.tensor([0, 3, 3, 8])

    def function(values):
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return module(x, x, x)[0].values()

    assert torch.autograd.gradcheck(function, torch.randn(8, 8, dtype=torch.float64, requires_grad=True))
