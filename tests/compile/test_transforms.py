"""What kernels refuse: transforms other than torch.func.grad, for which `reference` is, and tracers.

Dimensions: T tokens, H heads, D head dim.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import nt_attention as nta

LAYOUT = nta.SequenceLayout.from_lengths([2, 0, 1])


def in_forward_ad(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def batch_of_gradients(function, x):
    y = function(x.requires_grad_())
    identity = torch.eye(y.numel()).view(-1, *y.shape)
    return torch.autograd.grad(y, x, identity, is_grads_batched=True)[0].view(*y.shape, *x.shape)


# Each with the same, computed from the outputs, Jacobians and gradients of x and 2x, which are computed one by one.
TRANSFORMS = {
    "vmap": (lambda f, x: torch.vmap(f)(torch.stack([x, 2 * x])), lambda outs, jacobian, grads: outs),
    "vmap of grad": (
        lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(torch.stack([x, 2 * x])),
        lambda outs, jacobian, grads: grads,
    ),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), lambda outs, jacobian, grads: jacobian),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), lambda outs, jacobian, grads: jacobian),
    "jvp": (
        lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        lambda outs, jacobian, grads: jacobian.sum((-1, -2, -3)),
    ),
    "compiled jvp": pytest.param(
        lambda f, x: torch.compile(lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1], backend="eager")(x),
        lambda outs, jacobian, grads: jacobian.sum((-1, -2, -3)),
        marks=pytest.mark.sweep,
    ),
    "dual tensors": (in_forward_ad, lambda outs, jacobian, grads: jacobian.sum((-1, -2, -3))),
    "is_grads_batched": (batch_of_gradients, lambda outs, jacobian, grads: jacobian),
    "functionalize": (lambda f, x: torch.func.functionalize(f)(x), lambda outs, jacobian, grads: outs[0]),
}


@pytest.fixture(params=["function", "module"])
def attend(request):
    """Attention of x (T, H, D) to itself."""
    torch.compiler.reset()
    module = nta.VarlenMultiheadAttention(8, 2).requires_grad_(False)
    if request.param == "function":
        return lambda x: nta.varlen_attention(x, x.cos(), x, LAYOUT, is_causal=True)
    return lambda x: module(*[x.flatten(1)] * 3, layout=LAYOUT, is_causal=True)[0].unflatten(1, (2, 4))


@pytest.mark.parametrize(("transform", "expected"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_name_the_reference_which_supports_them(attend, transform, expected):
    x = torch.randn(3, 2, 4)
    with pytest.raises(NotImplementedError, match=r"backend='reference'.*nta\.use_backend\('reference'\)"):
        transform(attend, x.clone())
    jacobian = torch.autograd.functional.jacobian(attend, x)  # of single calls
    leaves = [x.clone().requires_grad_(), (2 * x).requires_grad_()]
    grads = torch.stack([torch.autograd.grad(attend(y).square().sum(), y)[0] for y in leaves])
    with nta.use_backend("reference"):
        got = transform(attend, x.clone())
    want = expected(torch.stack([attend(x), attend(2 * x)]), jacobian, grads)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


TRACERS = {
    "torch.jit.trace": lambda f, x: torch.jit.trace(f, x, check_trace=False),
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx, symbolic": lambda f, x: make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x),
    "torch.func.linearize": lambda f, x: torch.func.linearize(f, x),  # it runs make_fx
}
FORMS = {
    "packed": lambda x: nta.varlen_attention(x, x, x, LAYOUT),
    "reference": lambda x: nta.varlen_attention(x, x, x, LAYOUT, backend="reference"),
    "nested": lambda x: nta.varlen_attention(*[LAYOUT.to_nested(x)] * 3).values(),
    "offsets": lambda x: nta.varlen_attention(x, x, x, nta.SequenceLayout.from_offsets(torch.tensor([0, 2, 3]))),
    "lengths": lambda x: nta.varlen_attention(x, x, x, nta.SequenceLayout.from_lengths(torch.tensor([1, 2]))),
    "mask": lambda x: nta.SequenceLayout.from_attention_mask(torch.ones(1, 3, dtype=torch.bool)).pack(x[None]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("form", FORMS)
def test_tracers_that_keep_lengths_are_refused(form, tracer):
    with pytest.raises(RuntimeError, match=r"keeps the lengths of its example inputs.*use torch\.export"):
        TRACERS[tracer](FORMS[form], torch.randn(3, 2, 4))
