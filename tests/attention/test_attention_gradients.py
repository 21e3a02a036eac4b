"""Gradients of `varlen_attention` on the CPU: of each output, second derivatives, torch.func, empty batches."""

from functools import partial

import pytest
import torch
from calls import call
from oracle import Problem, assert_same, attention, problem

from nt_attention import SequenceLayout, varlen_attention

CASES = [
    pytest.param(lengths, geometry, id=f"{lengths}-{geometry}")
    for lengths, geometry in [
        ("self", "causal"),
        ("cross", "full"),
        ("cross", "causal-window"),
        ("cross", "both-sides-upper_left"),
    ]
]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("which", ["out", "lse", "both"])
@pytest.mark.parametrize(("lengths", "geometry"), CASES)
def test_gradient_of_out_and_of_lse_alone(lengths, geometry, which, backend):
    case = problem(lengths, geometry, "all")

    def chosen(function):
        leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
        out, lse = function(**leaves, **case.options)
        loss = torch.zeros(())
        if which != "lse":
            loss = loss + (out * case.grads[0]).sum()
        if which != "out":
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * case.grads[1]).sum()
        loss.backward()
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}

    want = chosen(partial(attention, lengths=case.lengths, key_lengths=case.key_lengths))
    assert_same(chosen(call(case, backend)), want, 1e-9)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nan_gradient_of_lse_in_fully_masked_rows_is_ignored(backend):
    case = problem("cross", "causal", "plain")
    want = case.truth()
    fully_masked = want["lse"] == -torch.inf
    assert fully_masked.any()
    case.grads = (case.grads[0], case.grads[1].masked_fill(fully_masked, torch.nan))
    assert_same(case.solve(call(case, backend)), want, 1e-9)


def test_sinks_of_minus_infinity_change_nothing():
    case = problem("cross", "causal", "plain")
    fully_masked = case.truth()["lse"] == -torch.inf
    case.grads = (case.grads[0], case.grads[1].masked_fill(fully_masked, 0.0))  # lse is the sink there
    want = case.solve(call(case, "cpu"))
    case.inputs["sinks"] = torch.full((5,), -torch.inf, dtype=torch.float64)
    got = case.solve(call(case, "cpu"))
    torch.testing.assert_close(got.pop("d sinks"), torch.zeros(5, dtype=torch.float64))
    assert_same(got, want, 1e-9)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
class TestNoVisibleKeys:
    def problem(self, dtype=torch.float64, rows=3):
        return Problem([rows, 0], [0, 0], 3, 1, 5, 7, past=(2, 3), dtype=dtype)

    def test_rows_past_the_end_are_never_read(self, backend):
        case = self.problem()
        for x in case.inputs.values():
            x[-2:] = torch.nan
        out, lse = call(case, backend)(**case.inputs)
        assert torch.equal(out, torch.zeros(5, 3, 7, dtype=torch.float64))
        assert torch.equal(lse, torch.full((5, 3), -torch.inf, dtype=torch.float64))

    def test_no_visible_keys_large_queries_do_not_overflow(self, backend):
        case = self.problem(torch.float16, rows=127)
        case.inputs["query"].fill_(1000)
        out, _ = call(case, backend)(**case.inputs)
        assert torch.equal(out, torch.zeros(129, 3, 7, dtype=torch.float16))

    def test_no_visible_keys_output_is_writable(self, backend):
        case = self.problem()
        out, _ = call(case, backend)(**case.inputs)
        out += torch.ones_like(out)
        assert out.sum() == out.numel()

    def test_no_visible_keys_lse_gradient_is_0(self, backend):
        case = self.problem()
        query = case.inputs["query"].requires_grad_()
        _, lse = call(case, backend)(**case.inputs)
        lse.masked_fill(lse == -torch.inf, 0.0).sum().backward()
        assert torch.equal(query.grad, torch.zeros_like(query))


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("extra", ["plain", "gqa", "all"])
def test_torch_func_grad_agrees_with_the_oracle_and_autograd(extra, backend):
    case = problem("cross", "causal", extra)
    function = call(case, backend)

    def loss(inputs):
        out, lse = function(**inputs, **case.options)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        return (out * case.grads[0]).sum() + (lse * case.grads[1]).sum()

    found = torch.func.grad(loss)(case.inputs)
    want = case.truth()
    assert_same({f"d {name}": g for name, g in found.items()}, {f"d {name}": want[f"d {name}"] for name in found}, 1e-9)
    leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    for name, grad in zip(leaves, torch.autograd.grad(loss(leaves), tuple(leaves.values())), strict=True):
        assert torch.equal(found[name], grad) or backend == "reference", name


@pytest.mark.parametrize("how", ["torch.func", "autograd.grad"])
def test_second_derivatives_that_would_be_0_raise(how):
    layout = SequenceLayout.from_lengths([5, 7])
    q, k, v = torch.randn(3, 12, 3, 11).unbind()

    def loss(q):
        return varlen_attention(q, k, v, layout, backend="cpu").square().sum()

    with pytest.raises(RuntimeError, match=r"differentiate twice.* backend='reference'"):
        if how == "torch.func":
            torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)
        else:
            q.requires_grad_()
            (grad,) = torch.autograd.grad(loss(q), q, create_graph=True)
            torch.autograd.grad(q.sum() + grad.square().sum(), q)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_inputs_are_not_changed(backend):
    case = problem("cross", "causal-window", "all")
    before = {name: x.clone() for name, x in case.inputs.items()}
    case.solve(call(case, backend))
    assert all(torch.equal(case.inputs[name], x) for name, x in before.items())


def test_gradient_of_key_alone():
    case = problem("cross", "causal", "gqa")
    key = case.inputs["key"].requires_grad_()
    want = case.truth()["d key"]
    out, lse = call(case, "cpu")(**case.inputs, **case.options)
    (grad,) = torch.autograd.grad((out, lse), key, case.grads)
    torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize(("lengths", "geometry"), CASES)
def test_negative_and_zero_scale(lengths, geometry, scale, backend):
    case = problem(lengths, geometry, "gqa", options={"scale": scale})
    assert_same(case.solve(call(case, backend)), case.truth(), 1e-9)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradient_of_a_batch_of_no_sequences(backend):
    nothing = torch.zeros(0, 3, 11, requires_grad=True)
    layout = SequenceLayout.from_lengths([])
    varlen_attention(nothing, nothing, nothing, layout, backend=backend).sum().backward()
    assert nothing.grad.shape == nothing.shape
