"""The adapters around a kernel: padded head dims, and the gradient of lse."""

import pytest
import torch
from calls import call
from oracle import assert_same, problem

from nt_attention.kernels.backend import HeadDims, Hooks
from nt_attention.kernels.backends import cpu

CASES = [
    pytest.param(lengths, geometry, id=f"{lengths}-{geometry}")
    for lengths, geometry in [
        ("self", "causal"),
        ("cross", "full"),
        ("cross", "causal-window"),
        ("cross", "both-sides-upper_left"),
    ]
]


@pytest.fixture
def fake(registered_variant):
    """Registers a variant of the CPU backend. `calls` gets the head dims of its kernel calls, and every delta."""
    calls = {"forward": [], "backward": [], "delta": []}

    def forward(query, key, value, problem):
        calls["forward"].append((query.shape[-1], key.shape[-1], value.shape[-1]))
        return cpu.forward(query, key, value, problem)

    def backward(known, query, key, value, problem):
        grad, _, out, _, _ = known
        assert grad.shape == out.shape == (*query.shape[:2], value.shape[-1])
        calls["backward"].append((query.shape[-1], key.shape[-1], value.shape[-1]))
        calls["delta"].append((grad.double() * out).sum(-1))
        return cpu.backward(known, query, key, value, problem)

    def make(**changes):
        registered_variant(cpu.BACKEND, "fake", forward=forward, backward=backward, **changes)
        return calls

    return make


@pytest.mark.parametrize("extra", ["plain", "gqa", "narrow-values", "alibi-each-gqa", "all"])
@pytest.mark.parametrize(("lengths", "geometry"), CASES)
def test_lse_gradient_as_an_extra_column_of_the_head_dim(fake, lengths, geometry, extra):
    calls = fake(head_dims=HeadDims(12, equal=True))
    case = problem(lengths, geometry, extra)
    assert_same(case.solve(call(case, "fake")), case.truth(), 1e-9)
    assert calls["forward"] == [(11, 11, 11)]
    # values that are narrower than keys leave a column in their padding
    assert calls["backward"] == [(12, 12, 12) if case.value_dim == 11 else (11, 11, 11)]


@pytest.mark.parametrize("extra", ["plain", "gqa", "alibi-each-gqa"])
@pytest.mark.parametrize(("lengths", "geometry"), CASES)
def test_lse_gradient_by_a_second_kernel_call(fake, lengths, geometry, extra):
    calls = fake(head_dims=HeadDims(11, equal=True))
    case = problem(lengths, geometry, extra)
    assert_same(case.solve(call(case, "fake")), case.truth(), 1e-9)
    assert calls["forward"] == calls["backward"] == [(11, 11, 11)] * 2


def test_no_extra_column_without_a_gradient_of_lse(fake):
    calls = fake(head_dims=HeadDims(12, equal=True))
    case = problem("cross", "causal", "plain")
    query = case.inputs["query"].requires_grad_()
    out, _ = call(case, "fake")(**case.inputs, **case.options)
    out.sum().backward()
    assert query.grad is not None
    assert calls["backward"] == [(11, 11, 11)]


def test_lse_gradient_by_a_second_kernel_call_is_refused_under_softcap(fake):
    fake(head_dims=HeadDims(11, equal=True), features=cpu.BACKEND.features | {"softcap"})
    case = problem("self", "causal", "plain", options={"softcap": 3.0})
    with pytest.raises(
        NotImplementedError, match=r"fake does not support the gradient of lse at head dim 11 .* softcap"
    ):
        case.solve(call(case, "fake"))


@pytest.mark.parametrize("extra", ["plain", "sinks", "all"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(11, 11), (8, 8), (13, 16), (16, 13), (7, 3)])
def test_head_dims_are_padded_to_what_the_kernel_takes(fake, head_dim, value_dim, extra):
    calls = fake(head_dims=HeadDims(multiple=8, equal=True))
    case = problem("cross", "causal", extra, head_dim=head_dim, value_dim=value_dim)
    assert_same(case.solve(call(case, "fake")), case.truth(), 1e-9)
    assert all(d % 8 == 0 for dims in calls["forward"] + calls["backward"] for d in dims)


@pytest.mark.parametrize("change", ["begin", "rows", "heads"])
def test_rows_between_multiples_of_16_bytes_are_copied(registered_variant, change):
    def check(*tensors):
        for x in tensors:
            assert x.data_ptr() % 16 == x.stride(0) * x.itemsize % 16 == x.stride(1) * x.itemsize % 16 == 0

    def forward(query, key, value, problem):
        check(query, key, value)
        return cpu.forward(query, key, value, problem)

    def backward(known, query, key, value, problem):
        check(known.grad, known.out, query, key, value)
        return cpu.backward(known, query, key, value, problem)

    fields = {"forward": forward, "backward": backward, "hooks": Hooks()}
    fields |= {"head_dims": HeadDims(multiple=8, equal=True), "traits": {"aligned_rows"}}
    registered_variant(cpu.BACKEND, "aligned", **fields)
    case = problem("self", "causal", "plain", head_dim=16, value_dim=16)

    def moved(x):
        if change == "begin":
            return torch.nn.functional.pad(x.reshape(-1), (1, 0))[1:].view(x.shape)
        if change == "rows":
            return torch.nn.functional.pad(x.flatten(1), (0, 1))[:, :-1].unflatten(1, x.shape[1:])
        return torch.nn.functional.pad(x, (0, 1))[..., :-1]

    def attend(query, key, value, **options):
        return call(case, "aligned")(query=moved(query), key=moved(key), value=moved(value), **options)

    assert_same(case.solve(attend), case.truth(), 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("room", [64, 11], ids=["column", "second-pass"])
def test_lse_gradient_in_16_bits_is_as_accurate_as_that_of_out(fake, room, dtype):
    """Its relative error is at most twice that of the gradient of out, with the same inputs."""
    fake(head_dims=HeadDims(room, equal=True))
    case = problem("cross", "causal-window", "gqa", dtype=dtype)
    zeros = tuple(torch.zeros_like(g) for g in case.grads)

    def error(grads, name):
        case.grads = grads
        got, want = case.solve(call(case, "fake"))[name].double(), case.truth()[name]
        return ((got - want).norm() / want.norm()).item()

    through_out, through_lse = (case.grads[0], zeros[1]), (zeros[0], case.grads[1])
    for name in ("d query", "d key"):
        assert error(through_lse, name) <= 2 * error(through_out, name), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lse_gradient_is_not_rounded_to_16_bits(fake, dtype):
    """Compared in rowsum(dout · out), as the kernel reads it. Rounding in the kernel would hide the difference."""
    calls = fake()
    case = problem("cross", "causal", "plain", dtype=dtype)
    case.grads = (torch.zeros_like(case.grads[0]), case.grads[1])
    want = case.grads[1].masked_fill(case.truth()["lse"] == -torch.inf, 0.0)
    case.solve(call(case, "fake"))
    assert want.any()
    torch.testing.assert_close(-calls["delta"][0], want, rtol=torch.finfo(dtype).eps ** 2, atol=1e-7)
