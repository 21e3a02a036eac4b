"""Dispatch modes and tensor subclasses see the custom operators; other calls skip them."""

import pytest
import torch
from calls import PassThrough
from operators import BACKWARD, FORWARD, call, case_of, only
from oracle import assert_same

from nt_attention.kernels import autograd


@pytest.mark.parametrize("backend", ["cpu", "auto"])
@pytest.mark.parametrize("extra", ["wide-values-gqa", "all"])
def test_dispatch_mode_sees_operators_with_the_same_bits(backend, extra):
    case = case_of("cross", "causal", extra, dtype=torch.float32)
    function = call(case, backend)
    alone = case.solve(lambda **inputs: function(**{name: inputs[name] for name in case.inputs}))
    with PassThrough() as mode:
        watched = case.solve(lambda **inputs: function(**{name: inputs[name] for name in case.inputs}))
    assert mode.operators == [FORWARD, BACKWARD]
    for name in alone:
        assert torch.equal(alone[name], watched[name]), name
        assert alone[name].stride() == watched[name].stride(), name


def test_dispatch_mode_around_the_backward_alone():
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    out, lse = call(case, "cpu")(*leaves)
    grads = torch.autograd.grad((out, lse), leaves, case.grads, retain_graph=True)
    with PassThrough() as mode:
        again = torch.autograd.grad((out, lse), leaves, case.grads)
    assert mode.operators == [BACKWARD]
    assert all(map(torch.equal, grads, again))


def test_operators_are_skipped_without_a_dispatch_mode(monkeypatch):
    def refused(*_):
        raise AssertionError("called as an operator")

    monkeypatch.setattr(autograd, "_operator", refused)
    case = case_of("cross", "causal", "gqa")
    function = call(case, "cpu")
    assert_same(case.solve(lambda **inputs: function(**only(inputs))), case.truth(), 1e-9)
    function(*map(torch.nn.Parameter, case.inputs.values()))[0].sum().backward()
    with pytest.raises(AssertionError, match="called as an operator"), PassThrough():
        function(**case.inputs)


class Wrapper(torch.Tensor):
    """A tensor subclass that lists the operators it is passed to."""

    @staticmethod
    def __new__(cls, inner, operators):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)

    def __init__(self, inner, operators):
        self.inner, self.operators = inner, operators

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, cls):
                x.operators.append(function)
        args = [x.inner if isinstance(x, cls) else x for x in args]
        return function(*args, **(kwargs or {}))


def test_tensor_subclass_sees_the_operator():
    case = case_of("cross", "causal", "gqa", dtype=torch.float32)
    want = call(case, "cpu")(**case.inputs)
    operators = []
    got = call(case, "cpu")(**{name: Wrapper(x, operators) for name, x in case.inputs.items()})
    assert operators.count(FORWARD) == 3  # once for each of query, key and value
    assert all(map(torch.equal, got, want))
