"""Calls of `varlen_attention` on the CPU that no row of the attention table shows."""

from functools import partial

import pytest
import torch
from calls import call
from oracle import Problem, assert_same, attention, problem
from torch.nn.attention.flex_attention import flex_attention

from nt_attention import SequenceLayout, varlen_attention
from nt_attention.functional import plan

LONGEST = 130  # no sequence is longer, so q_idx - kv_idx + LONGEST is a valid index of a table of 2 × LONGEST rows


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return request.param


def test_sinks_of_minus_infinity_change_nothing():
    case = problem("cross", "causal", "plain")
    fully_masked = case.truth()["lse"] == -torch.inf
    case.grads = (case.grads[0], case.grads[1].masked_fill(fully_masked, 0.0))  # lse is the sink there
    want = case.solve(call(case, "cpu"))
    case.inputs["sinks"] = torch.full((5,), -torch.inf, dtype=torch.float64)
    got = case.solve(call(case, "cpu"))
    torch.testing.assert_close(got.pop("d sinks"), torch.zeros(5, dtype=torch.float64))
    assert_same(got, want, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_rows_without_visible_keys(backend, dtype):
    """Large queries do not overflow, and the output can be written to."""
    case = Problem([127, 0], [0, 0], 3, 1, 5, 7, past=(2, 3), dtype=dtype)
    case.inputs["query"].fill_(1000)
    out, _ = call(case, backend)(**case.inputs)
    assert torch.equal(out, torch.zeros(129, 3, 7, dtype=dtype))
    out += torch.ones_like(out)
    assert out.sum() == out.numel()


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


def test_alibi_slopes_changed_before_the_backward():
    x, slopes = torch.randn(14, 3, 7, requires_grad=True), torch.tensor([0.5, 0.25, 0.125])
    out = varlen_attention(x, x, x, SequenceLayout.from_lengths([5, 9]), alibi_slopes=slopes)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
def test_score_mods_may_return_float32_or_less():
    """As in flex_attention, whose score has the dtype of the query when a score_mod with a table is traced."""
    table, layout = torch.randn(4, 4), SequenceLayout.from_lengths([4, 0, 3])
    halves = {name: torch.randn(7, 3, 5).to(torch.bfloat16) for name in ("query", "key", "value")}
    got = varlen_attention(**halves, layout=layout, score_mod=lambda score, b, h, q, k: score + table[q, k])
    wide = {name: x.float() for name, x in halves.items()}
    want = varlen_attention(**wide, layout=layout, score_mod=lambda score, b, h, q, k: score + table[q, k])
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)
    rounded = varlen_attention(**wide, layout=layout, score_mod=lambda score, *_: score.half())
    torch.testing.assert_close(rounded, varlen_attention(**wide, layout=layout), rtol=0.01, atol=0.01)


def test_value_with_more_rows_past_the_end_than_key():
    case = Problem([5, 3], past=(0, 2))
    want = case.truth()
    case.inputs["key"] = case.inputs["key"][:8]
    function = partial(varlen_attention, layout=SequenceLayout.from_lengths([5, 3]), return_lse=True)
    want["d key"] = want["d key"][:8]
    assert_same(case.solve(function), want, 1e-9)


def relative_bias(table, score, b, h, q_idx, kv_idx):
    return score + table[h, q_idx - kv_idx + LONGEST]


def by_sequence(gains, score, b, h, q_idx, kv_idx):
    return score * gains[b, h]


def test_gradient_of_a_tensor_captured_by_score_mod():
    table = torch.randn(5, 2 * LONGEST, dtype=torch.float64, requires_grad=True)
    case = problem("cross", "full", "plain", options={"score_mod": partial(relative_bias, table)})
    found = []
    for function in (call(case, "reference"), partial(attention, lengths=case.lengths, key_lengths=case.key_lengths)):
        out, lse = function(**case.inputs, **case.options)
        found.append(torch.autograd.grad((out, lse), table, case.grads)[0])
    assert found[1].abs().max() > 0.1
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_score_mod_means_the_same_as_in_flex_attention():
    lengths = [5, 13, 1]
    case = Problem(lengths, heads=6, kv_heads=3)
    table, gains = torch.randn(6, 2 * LONGEST, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)

    def mod(score, b, h, q_idx, kv_idx):
        score = by_sequence(gains, relative_bias(table, score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)
        return torch.where(q_idx >= kv_idx, score, -torch.inf)

    out = call(case, "reference", score_mod=mod)(**case.inputs)[0]
    for b, rows in enumerate(torch.arange(sum(lengths)).split(lengths)):
        q, k, v = (x[rows].transpose(0, 1).unsqueeze(0) for x in case.inputs.values())
        # flex_attention gets one sequence as a batch of one, so b is replaced by the index of the sequence
        alone = flex_attention(q, k, v, score_mod=lambda s, _, *where, b=b: mod(s, b, *where), enable_gqa=True)
        torch.testing.assert_close(out[rows], alone[0].transpose(0, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"dropout_p": 0.5}])
def test_gradients_of_an_empty_batch_are_0(backend, lengths, options):
    layout = SequenceLayout.from_lengths(lengths)
    tensors = [torch.randn(rows, 3, 7, requires_grad=True) for rows in (0, 2, 2)]  # with rows past the end
    out, lse = varlen_attention(*tensors, layout, return_lse=True, backend=backend, **options)
    (out.sum() + lse.sum()).backward()
    for x in tensors:
        torch.testing.assert_close(x.grad, torch.zeros_like(x))


def test_batches_of_one_shape_with_other_layouts():
    """What was read of the first one, such as that its lengths are equal, does not hold for the next ones."""
    x = torch.randn(12, 3, 7)
    for lengths in ([5, 7], [7, 5], [12, 0], [5, 7]):
        layouts = SequenceLayout.from_lengths([5, 7]), SequenceLayout.from_lengths(lengths)
        spec = plan(x, x, x, *layouts).spec
        assert (spec.equal_lengths, spec.keyless) == (lengths == [5, 7], 0 in lengths)
