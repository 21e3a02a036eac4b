"""The adapters around a kernel: the gradient of lse, padded head dims, and rewrites of unsupported calls."""

import dataclasses
from functools import partial

import pytest
import torch
from attention_table import WITHOUT_WINDOW, fields_of_fake
from calls import call
from oracle import Problem, assert_same, problem

from nt_attention.kernels.backend import COMMON, HeadDims
from nt_attention.kernels.backends import cpu


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


# Rewrites: that a kernel gets calls that it supports is tested in the attention table.

CROSS = {"lengths": [5, 0, 1, 31, 17, 13, 3, 0], "key_lengths": [11, 3, 0, 17, 29, 13, 1, 0]}
APART = {"lengths": [5, 0, 1, 31, 13], "key_lengths": [5, 0, 1, 31, 13]}
LOWER_RIGHT = {"traits": {"lower_right_only"}}


@pytest.fixture
def rewritten(registered_variant):
    """Registers a variant of the CPU backend, and returns the lengths of queries and keys of each kernel call."""

    def make(**changes):
        fields = fields_of_fake(changes)
        layouts = []

        def run(name, *inputs):
            layouts.append([x.host_offsets.diff().tolist() for x in inputs[-1][:2]])
            offsets.append([x.offsets for x in inputs[-1][:2]])
            return fields[name](*inputs)

        both = {name: partial(run, name) for name in ("forward", "backward")}
        registered_variant(cpu.BACKEND, "fake", **fields | both)
        return layouts

    offsets = []
    make.offsets = offsets
    return make


@pytest.mark.parametrize(
    ("changes", "lengths", "options"),
    [
        (LOWER_RIGHT, CROSS, {"is_causal": True}),
        (LOWER_RIGHT, CROSS, {"window_size": (7, 3)}),
        (LOWER_RIGHT, CROSS, {"causal_alignment": "upper_left"}),  # full attention has no diagonal to align
        (LOWER_RIGHT, APART, {"is_causal": True, "causal_alignment": "upper_left"}),
        ({}, CROSS, {"is_causal": True}),
        ({}, CROSS, {}),
    ],
    ids=str,
)
def test_calls_that_need_no_rewrite(rewritten, changes, lengths, options):
    layouts = rewritten(**changes)
    case = problem("self", "full", "gqa", **lengths, options=options)
    case.solve(call(case, "fake"))
    assert layouts == [[lengths["lengths"], lengths["key_lengths"]]] * 2


def test_only_fully_masked_rows_are_removed(rewritten):
    layouts = rewritten(**WITHOUT_WINDOW)
    case = problem("self", "causal", "plain", lengths=[5, 0, 7, 3, 2], key_lengths=[3, 2, 7, 11, 0])
    case.solve(call(case, "fake"))
    assert layouts == [[[3, 0, 7, 3, 0], [3, 2, 7, 11, 0]]] * 2


@pytest.mark.parametrize("key_lengths", [[0, 0, 0], [0, 3, 0]], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_kernel_runs_if_no_query_sees_a_key(rewritten, is_causal, key_lengths):
    """Keys of sequences without queries do not count."""
    layouts = rewritten(**WITHOUT_WINDOW)
    case = Problem([5, 0, 7], key_lengths, 6, 3, past=(3, 2), options={"is_causal": is_causal})
    assert_same(case.solve(call(case, "fake")), case.truth(), 0)
    assert not layouts


@pytest.mark.parametrize("changes", [LOWER_RIGHT, WITHOUT_WINDOW], ids=["lower right", "no masked rows"])
def test_rewritten_layouts_are_cached(rewritten, changes):
    rewritten(**changes)
    case = problem("self", "causal-upper_left", "gqa", **CROSS)
    function = call(case, "fake")
    case.solve(function)
    case.solve(function)
    assert len(rewritten.offsets) == 4
    assert [len({id(x) for x in side}) for side in zip(*rewritten.offsets, strict=True)] == [1, 1]


def test_a_backend_with_windows_must_support_fully_masked_rows():
    with pytest.raises(ValueError, match="'no_fully_masked_rows' is not supported together with 'window'"):
        dataclasses.replace(cpu.BACKEND, traits={"no_fully_masked_rows"}, features=COMMON | {"window"})
