"""The backends that have all options on a CPU against the float64 oracle: score_mod, mask_mod, softcap and dropout."""

from functools import partial

import pytest
import torch
from calls import PassThrough, call
from oracle import EXTRAS, GEOMETRIES, LENGTHS, Problem, assert_same, attention, problem
from sweeps import sweep_product
from torch.nn.attention.flex_attention import flex_attention

from nt_attention import SequenceLayout, varlen_attention


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return request.param


@sweep_product(
    "backend, lengths, geometry, extra, softcap",
    ["reference", "cpu"],
    LENGTHS,
    GEOMETRIES,
    EXTRAS,
    [0.0, 1.7],
    strength=2,
)
def test_agrees_with_the_oracle(backend, lengths, geometry, extra, softcap):
    case = problem(lengths, geometry, extra, options={"softcap": softcap})
    assert_same(case.solve(call(case, backend)), case.truth(), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computes_in_float32_and_returns_the_input_dtype(backend, dtype):
    case = problem("cross", "causal-window", "all", dtype=dtype, options={"softcap": 1.7})
    got, want = case.solve(call(case, backend)), case.truth()
    assert got["out"].dtype == got["d query"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    assert_same(got, want, {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype])


def test_rows_past_the_end_are_never_read(backend):
    case = problem("cross", "causal", "all")
    want = case.truth()
    for name in ("query", "key", "value"):
        case.inputs[name][-2:] = torch.nan
    assert_same(case.solve(call(case, backend)), want, 1e-9)


LONGEST = 130  # no sequence is longer, so q_idx - kv_idx + LONGEST is a valid index of a table of 2 × LONGEST rows


def relative_bias(table, score, b, h, q_idx, kv_idx):
    return score + table[h, q_idx - kv_idx + LONGEST]


def by_sequence(gains, score, b, h, q_idx, kv_idx):
    return score * gains[b, h]


def nonlinear(_, score, b, h, q_idx, kv_idx):
    return torch.where(q_idx > 2 * kv_idx, torch.tanh(score), score * score)


@pytest.mark.parametrize(
    ("mod", "shape"),
    [(relative_bias, (5, 2 * LONGEST)), (by_sequence, (7, 5)), (nonlinear, (1,))],
    ids=["relative-bias", "by-sequence", "nonlinear"],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_score_mod_gets_positions_within_the_sequence(backend, lengths, mod, shape):
    captured = torch.randn(shape, dtype=torch.float64)
    case = problem(lengths, "causal-window", "sinks", options={"score_mod": partial(mod, captured), "softcap": 2.3})
    assert_same(case.solve(call(case, backend)), case.truth(), 1e-9)


def test_gradient_of_a_tensor_captured_by_score_mod():
    table = torch.randn(5, 2 * LONGEST, dtype=torch.float64, requires_grad=True)
    case = problem("cross", "full", "plain", options={"score_mod": partial(relative_bias, table)})
    found = []
    for function in (call(case, "reference"), partial(attention, lengths=case.lengths, key_lengths=case.key_lengths)):
        out, lse = function(**case.inputs, **case.options)
        found.append(torch.autograd.grad((out, lse), table, case.grads)[0])
    assert found[1].abs().max() > 0.1
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def every_third(b, h, q_idx, kv_idx):
    return (q_idx + 2 * kv_idx + h + b) % 3 != 0


def by_document(documents, b, h, q_idx, kv_idx):
    return documents[q_idx] == documents[kv_idx]


def nothing_for_odd_heads(b, h, q_idx, kv_idx):
    return (h % 2 == 0).expand(torch.broadcast_shapes(h.shape, q_idx.shape, kv_idx.shape))


@pytest.mark.parametrize(
    "mod",
    [every_third, partial(by_document, torch.arange(LONGEST) // 17), nothing_for_odd_heads],
    ids=["every-third", "by-document", "fully-masked-heads"],
)
@pytest.mark.parametrize("geometry", ["full", "causal", "both-sides-upper_left"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_mask_mod_together_with_other_masks(backend, lengths, geometry, mod):
    case = problem(lengths, geometry, "gqa", options={"mask_mod": mod})
    assert_same(case.solve(call(case, backend)), case.truth(), 1e-9)


def test_mask_mod_that_returns_a_constant(backend):
    case = problem("self", "full", "plain")
    all_of_it = call(case, backend, mask_mod=lambda b, h, q_idx, kv_idx: b.new_ones((), dtype=torch.bool))
    assert_same(case.solve(all_of_it), case.truth(), 1e-9)


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


class TestDropout:
    LENGTHS = (127, 0, 131)

    def weights(self, backend: str, p: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, H, 131), the weights of each query after dropout, read with one-hot values."""
        case = Problem(self.LENGTHS, heads=3, kv_heads=3)
        total = sum(self.LENGTHS)
        case.inputs["value"] = torch.cat([torch.eye(131)[:n] for n in self.LENGTHS])[:, None].repeat(1, 3, 1).double()
        out, lse = call(case, backend, dropout_p=p)(**case.inputs)
        assert out.shape == (total, 3, 131)
        return out, lse

    def test_dropout_keeps_its_share_and_rescales_it(self, backend):
        p = 0.3
        whole, lse = self.weights(backend, 0.0)
        dropped, lse_dropped = self.weights(backend, p)
        real = whole > 0
        kept = dropped[real] > 0
        assert real.sum() > 90_000
        assert kept.double().mean().item() == pytest.approx(1 - p, abs=5 * (p * (1 - p) / len(kept)) ** 0.5)
        torch.testing.assert_close(dropped[real][kept], whole[real][kept] / (1 - p), rtol=1e-9, atol=0)
        torch.testing.assert_close(lse_dropped, lse)

    def test_dropout_is_determined_by_the_seed(self, backend):
        torch.manual_seed(3)
        first = self.weights(backend, 0.5)[0]
        torch.manual_seed(3)
        again = self.weights(backend, 0.5)[0]
        other = self.weights(backend, 0.5)[0]
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_dropout_gradient_uses_the_same_weights(self, backend):
        case = Problem((7, 3))
        value = case.inputs["value"].requires_grad_()
        out, _ = call(case, backend, dropout_p=0.5)(**case.inputs)
        (grad,) = torch.autograd.grad((out * case.grads[0]).sum(), value)
        # out is linear in value, so this holds only where both passes drop the same weights
        torch.testing.assert_close((grad * value).sum(), (out * case.grads[0]).sum())


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"dropout_p": 0.5}])
def test_gradients_of_an_empty_batch_are_0(backend, lengths, options):
    layout = SequenceLayout.from_lengths(lengths)
    tensors = [torch.randn(rows, 3, 7, requires_grad=True) for rows in (0, 2, 2)]  # with rows past the end
    out, lse = varlen_attention(*tensors, layout, return_lse=True, backend=backend, **options)
    (out.sum() + lse.sum()).backward()
    for x in tensors:
        torch.testing.assert_close(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(
    "options", [{"softcap": 0.7}, {"is_causal": True, "scale": 0.3}, {"window_size": (2, 1)}], ids=str
)
def test_operator_has_the_gradients_of_autograd(options):
    """Under a dispatch mode, the backend runs as an operator, with a backward of its own."""
    layout, key_layout = (SequenceLayout.from_lengths(x) for x in ([3, 0, 5], [4, 2, 6]))
    leaves = [
        torch.randn(x.total, n, 8, dtype=torch.float64, requires_grad=True) for x, n in ((layout, 4), (key_layout, 2))
    ]

    def results():
        out, lse = varlen_attention(
            leaves[0], leaves[1], leaves[1], layout, key_layout, backend="reference", return_lse=True, **options
        )
        loss = (out * out.detach().cos()).sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
        return out, lse, *torch.autograd.grad(loss, leaves)

    want = results()
    with PassThrough():
        torch.testing.assert_close(results(), want)
