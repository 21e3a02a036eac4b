"""`RelativeBias` beside the rows of the attention table: NaN and −inf, strides of 32 bits, gradients, graphs.

Dimensions: T query tokens, S key tokens, H query heads, N buckets.
"""

import dataclasses
import itertools

import pytest
import torch
from calls import call
from oracle import Problem, assert_same, problem
from sweeps import covering, pairwise, sweep_except
from token_tiled_cases import DEVICE, IGNORED_WARNINGS, case_of, device_of, on_tiles, placed, truth

from nt_attention import RelativeBias, SequenceLayout, varlen_attention
from nt_attention.kernels import custom_ops, relative
from nt_attention.kernels.backends import cpu

pytestmark = IGNORED_WARNINGS

TERMS = ("bias", "query_bias", "key_bias")
BOTH = pytest.mark.parametrize("backend", ["cpu", "reference"])


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
@pytest.mark.parametrize("name", TERMS)
def test_nan_in_a_bias_is_propagated(backend, name):
    """A NaN in every bucket of one row or head, in a call without other NaN."""
    with device_of(backend) as device:
        x, buckets, expected = torch.zeros(5, 2, 16), torch.arange(-1, 2) + 1, torch.zeros(5, 2, dtype=torch.bool)
        biases = {"bias": torch.zeros(2, 3), "query_bias": torch.zeros(5, 2, 3), "key_bias": torch.zeros(5, 2, 3)}
    biases[name][(1,) if name == "bias" else (4, 1)] = torch.nan
    bias, layout = RelativeBias(buckets, **biases), SequenceLayout.from_lengths([2, 3], device=device)
    out, lse = varlen_attention(x, x, x, layout, relative=bias, return_lse=True, backend=backend)
    expected[slice(None) if name == "bias" else slice(4, 5) if name == "query_bias" else slice(2, 5), 1] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected)


@pairwise(
    {"backend": ["cpu", "token_tiled", "reference"], "name": TERMS, "needs_grad": [True, False]}
    | {"window_size": [(-1, -1), (2, 1)]}
)
def test_rows_whose_biases_are_minus_infinity_see_no_key(backend, name, window_size, needs_grad):
    """Of head 1: all rows, row 4, or the rows of the second sequence. Everything is finite, and 0 in these rows."""
    device = device_of(backend)
    layout, buckets = SequenceLayout.from_lengths([3, 5], device=device), torch.tensor([0, 0, 1, 2, 2], device=device)
    hidden = {"bias": slice(None), "query_bias": slice(4, 5), "key_bias": slice(3, 8)}[name]

    def run(backend):
        torch.manual_seed(0)
        query, key, value = (torch.randn(8, 2, 16, device=device, requires_grad=True) for _ in range(3))
        biases = {x: torch.randn((2, 3) if x == "bias" else (8, 2, 3), device=device) for x in TERMS}
        biases[name][1 if name == "bias" else (hidden, 1)] = -torch.inf
        relative = RelativeBias(buckets, **{x: y.requires_grad_(needs_grad) for x, y in biases.items()})
        options = {"relative": relative, "window_size": window_size, "return_lse": True, "backend": backend}
        out, lse = varlen_attention(query, key, value, layout, **options)
        loss = (out * torch.randn_like(out)).sum() + lse.masked_fill(lse.isinf(), 0.0).square().sum()
        inputs = [query, key, value, *(relative.tensors if needs_grad else ())]
        return out, lse, *torch.autograd.grad(loss, inputs)

    out, lse, *grads = results = run(backend)
    assert (lse[hidden, 1] == -torch.inf).all()
    assert not out[hidden, 1].any()
    assert all(x.isfinite().all() for x in (out, *grads))
    for got, want in zip(results, run("reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart", ["rows", "heads"])
def test_offsets_of_biases_exceed_32_bits(apart):
    """As in DeBERTa with very many tokens. Here the memory between rows or heads is never touched."""
    case = placed(Problem([5, 4], None, 3, 3, 16, 16, relative=TERMS, dtype=torch.float16))
    count, far = case.buckets[1], 2**28 + 16 if apart == "rows" else 2**30 + 16
    strides = (far, count, 1) if apart == "rows" else (count, far, 1)
    size = 9 * far + 3 * count if apart == "rows" else 3 * far + 9 * count
    memory = torch.empty(size, dtype=torch.float16, device=case.inputs["query"].device)

    def strided(at, relative, **arguments):
        def spread(x):
            return memory.as_strided(x.shape, strides).copy_(x)

        with torch.no_grad():
            changed = dataclasses.replace(relative, **{at: spread(getattr(relative, at))})
        return on_tiles(case)(relative=changed, **arguments)[0]

    arguments = case.arguments(case.inputs)
    for at in ("query_bias", "key_bias"):
        torch.testing.assert_close(strided(at, **arguments), on_tiles(case)(**arguments)[0])


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
def test_buckets_out_of_range_count_as_the_nearest(backend, monkeypatch):
    """As on a GPU, where the host does not read them. On a CPU they raise an error before the call runs."""
    case = case_of("self", "full", "relative", device_of(backend), dtype=torch.float32)
    case.bucket_table = torch.randint(-5, 25, case.bucket_table.shape)
    monkeypatch.setattr(relative, "can_be_read", lambda _: False)
    got = case.solve(call(case, backend))
    case.bucket_table = case.bucket_table.clamp(0, case.buckets[1] - 1)
    assert_same(got, truth(case), 1e-4)


class TestGradients:
    @covering(
        {"backend": ["cpu", "reference", "token_tiled"]}
        | {"wanted": [("bias",), ("key_bias", "query"), ("query_bias",), ("value",)]}
    )
    def test_only_those_that_are_needed(self, backend, wanted):
        case = case_of("cross", "causal", "relative", device_of(backend), dtype=torch.float32)
        want = truth(case)
        leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in case.inputs.items()}
        out, lse = call(case, backend)(**case.arguments(leaves), **case.options)
        loss = (out * case.grads[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * case.grads[1]).sum()
        loss.backward()
        found = {f"d {name}": x.grad for name, x in leaves.items() if x.grad is not None}
        assert found.keys() == {f"d {name}" for name in wanted}
        assert_same(found, {name: want[name] for name in found}, 1e-4)

    @pytest.mark.parametrize("trained", [False, True])
    def test_kernel_of_the_backward_runs_if_no_bias_needs_a_gradient(self, trained, monkeypatch):
        ran = []
        inner = cpu.cpu_scores.backward
        monkeypatch.setattr(cpu.cpu_scores, "backward", lambda *args: ran.append(args) or inner(*args))
        case = problem("self", "causal", "relative")
        leaves = {name: x.requires_grad_(name not in TERMS or trained) for name, x in case.inputs.items()}
        call(case, "cpu")(**case.arguments(leaves), **case.options)[0].sum().backward()
        assert bool(ran) == trained

    @covering({"backend": ["cpu", "token_tiled"], "which": ["buckets", *TERMS]})
    def test_in_place_change_before_the_backward(self, backend, which):
        case = case_of("self", "causal", "relative", device_of(backend), dtype=torch.float32)
        leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
        arguments = case.arguments({name: x * 1 for name, x in leaves.items()})
        out, _ = call(case, backend)(**arguments)
        getattr(arguments["relative"], which).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    @BOTH
    def test_gradients_are_summed_in_float32(self, backend):
        """Many small addends of a float16 bias, which float16 sums would lose."""
        layout = SequenceLayout.from_lengths([1] * 2100)
        x = torch.ones(2100, 1, 8, dtype=torch.float16)
        bias = torch.zeros(1, 1, dtype=torch.float16, requires_grad=True)
        relative = RelativeBias(torch.zeros(1, dtype=torch.int64), bias)
        _, lse = varlen_attention(x, x, x, layout, relative=relative, return_lse=True, backend=backend)
        lse.sum().backward()
        assert bias.grad.item() == 2100


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_that_no_visible_pair_uses_does_not_reach_the_gradient_of_bias(deterministic):
    """Key 63 of 70 has NaN for distances up to −8. No query comes 8 tokens after it, so no pair uses the NaN."""
    layout = SequenceLayout.from_lengths([70], device=DEVICE)
    with DEVICE:
        q, k, v = torch.randn(3, 70, 1, 16, requires_grad=True).unbind()
        bias, key_bias = torch.zeros(1, 17, requires_grad=True), torch.zeros(70, 1, 17)
        key_bias[63, 0, 0] = torch.nan
        buckets = torch.arange(17)
    results = []
    for options in ({"backend": "reference"}, {"backend": "token_tiled", "deterministic": deterministic}):
        relative = RelativeBias(buckets, bias=bias, key_bias=key_bias)
        out = varlen_attention(q, k, v, layout, relative=relative, **options)
        results.append(torch.autograd.grad(out.square().sum(), bias)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
class TestGraphs:
    @pytest.mark.parametrize(
        ("terms", "compiler", "backend"),
        sweep_except(
            itertools.product([("bias",), TERMS], ["aot_eager", "inductor"], ["cpu", "auto"]),
            *((("bias",), "aot_eager", "auto"), (TERMS, "aot_eager", "cpu")),
        ),
    )
    def test_one_graph_for_any_lengths(self, terms, compiler, backend):
        def attend(x, bias, rows, buckets, offsets):
            given = {"bias": bias, "query_bias": rows, "key_bias": rows.flip(-1)}
            relative = RelativeBias(buckets, **{name: given[name] for name in terms})
            layout = SequenceLayout.from_offsets(offsets)
            return varlen_attention(x, x, x, layout, relative=relative, is_causal=True, backend=backend)

        graph = torch.compile(attend, fullgraph=True, dynamic=True, backend=compiler)
        for offsets in ([0, 5, 14], [0, 3, 3, 20]):
            x, bias = torch.randn(offsets[-1], 3, 8), torch.randn(3, 7)
            rows, buckets = torch.randn(offsets[-1], 3, 7), torch.randint(7, (9,))
            leaves = [y.requires_grad_() for y in (x, bias, rows)]
            outs = [f(*leaves, buckets, torch.tensor(offsets)) for f in (graph, attend)]
            grads = [torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) for out in outs]
            torch.testing.assert_close(outs[0], outs[1])
            for one, two in zip(*grads, strict=True):
                assert (one is None) == (two is None)
                assert one is None or torch.allclose(one, two, atol=1e-5)

    def test_operator_refuses_biases_that_do_not_fit(self):
        x, offsets = torch.randn(14, 3, 8), torch.tensor([0, 5, 14], dtype=torch.int32)
        function = torch.ops.nt_attention.attention_forward.default
        options = (0.3, False, "lower_right", (-1, -1), 0.0, 0.0, False, False, False, False)
        more = (None, None, None, [], *options, [], "cpu")  # no pools, and no bounds
        biases = (torch.zeros(9, dtype=torch.int64), None, torch.randn(13, 3, 7), None)
        with pytest.raises(ValueError, match=r"query_bias must be floating-point numbers \(14, 3, 7\)"):
            function(x, x, x, offsets, offsets, None, *biases, *more)
        assert custom_ops.Arguments(*[None] * 10, *more).relative_grad is False
