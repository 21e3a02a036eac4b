"""`RelativeBias`: values and gradients against the float64 oracle on every backend that supports it, graphs, errors.

Dimensions: T query tokens, S key tokens, H query heads, N buckets.
"""

import dataclasses
import itertools
import re

import pytest
import torch
from calls import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import GEOMETRIES, LENGTHS, Problem, assert_same, attention, problem
from sweeps import sweep_except, sweep_product
from test_random_calls import lengths, problems
from token_tiled_cases import DEVICE, GPU, IGNORED_WARNINGS, case_of, cases_of, check, on_tiles, placed, truth

import nt_attention as nta
from nt_attention import RelativeBias, SequenceLayout, varlen_attention
from nt_attention.kernels import custom_ops, relative
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.select import BACKENDS

pytestmark = IGNORED_WARNINGS

TERMS = ("bias", "query_bias", "key_bias")
SUBSETS = [chosen for count in (1, 2, 3) for chosen in itertools.combinations(TERMS, count)]
BOTH = pytest.mark.parametrize("backend", ["cpu", "reference"])
exact = pytest.mark.usefixtures("uninitialized_is_nan")
# Few tokens for Triton's interpreter, some of them in two tiles of 32 or 64 rows.
tiled_lengths = lengths if GPU else st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 31, 33, 41, 65]))


class TestAgreesWithTheOracle:
    """Outputs, log-sum-exp and all six gradients."""

    @sweep_product("backend, terms, lengths, geometry", ["cpu", "reference"], SUBSETS, LENGTHS, GEOMETRIES, strength=2)
    def test_on_the_cpu(self, backend, terms, lengths, geometry):
        case = problem(lengths, geometry, "gqa", relative=terms)
        assert_same(case.solve(call(case, backend)), case.truth(), 1e-9)

    @exact
    @cases_of("terms, lengths, geometry, options", 17, SUBSETS, LENGTHS, GEOMETRIES, ["", "ordered", "invariant"])
    def test_on_token_tiled(self, terms, lengths, geometry, options):
        case = case_of(lengths, geometry, "gqa", relative=terms, dtype=torch.float32)
        check(case, deterministic=options == "ordered", batch_invariant=options == "invariant")

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_in_16_bits(self, backend, dtype):
        case = problem("cross", "causal-window", "relative", dtype=dtype)
        got = case.solve(call(case, backend))
        assert all(got[f"d {name}"].dtype == dtype for name in TERMS)
        assert_same(got, case.truth(), 8 * torch.finfo(dtype).eps)

    @exact
    def test_in_16_bits_on_token_tiled(self):
        check(case_of("cross", "both-sides", "relative", dtype=torch.float16), slack=2)

    @pytest.mark.parametrize("backend", ["reference", "token_tiled"])
    def test_after_softcap_with_alibi_and_sinks(self, backend):
        case = case_of("cross", "causal", "all", relative=TERMS, dtype=torch.float32, options={"softcap": 1.3})
        assert_same(case.solve(call(case, backend)), truth(case), 1e-4)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(problems(), st.sampled_from(SUBSETS), st.integers(0, 30), st.integers(1, 20))
    def test_in_random_calls(self, case, terms, radius, buckets):
        case = dataclasses.replace(case, relative=terms, buckets=(radius, buckets))
        for backend in ("cpu", "reference") if case.lengths else ("cpu",):  # else lse has no gradient on the reference
            assert_same(case.solve(call(case, backend)), case.truth(), 1e-9)

    @pytest.mark.sweep
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(problems(tiled_lengths), st.sampled_from(SUBSETS), st.integers(0, 30), st.integers(1, 20), st.booleans())
    def test_in_random_calls_on_token_tiled(self, case, terms, radius, buckets, deterministic):
        case = dataclasses.replace(case, relative=terms, buckets=(radius, buckets), dtype=torch.float32)
        check(placed(case), slack=2, deterministic=deterministic)

    @pytest.mark.parametrize("lengths", [([3, 2], [0, 0]), ([0, 0], [5, 2]), ([0, 3, 0], [5, 0, 7])])
    @pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
    def test_without_queries_or_keys(self, lengths, backend):
        case = placed(Problem(*lengths, heads=2, kv_heads=1, past=(3, 2), relative=TERMS, dtype=torch.float32))
        assert_same(case.solve(call(case, backend)), truth(case), 1e-5)


@exact
def test_gradients_with_dropout():
    """With the identity as values, the output is the weights that were kept. The gradients must be of these weights."""
    length, p = 61, 0.31
    case = placed(Problem([length], None, 4, 2, 11, length, relative=TERMS, dtype=torch.float32))
    eye = torch.eye(length, device=DEVICE)[:, None]
    case.inputs["value"] = eye.repeat(1, 2, 1)
    got = case.solve(on_tiles(case, dropout_p=p))

    def by_hand(value, **arguments):
        with DEVICE:
            weights, lse = attention(value=eye.expand(-1, 2, -1), lengths=[length], **arguments)
        weights = weights * (got["out"].detach() != 0) / (1 - p)
        return torch.einsum("thj,jhd->thd", weights, value.double().repeat_interleave(2, 1)), lse

    assert_same(got, case.solve(by_hand), 1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
def test_rows_past_the_end_are_never_read(backend):
    case = case_of("cross", "causal-window", "relative", dtype=torch.float32)
    want = truth(case)
    for name, past in zip(("query_bias", "key_bias"), case.past, strict=True):
        case.inputs[name][-past:] = torch.nan
    got = case.solve(call(case, backend))
    assert_same(got, want, 1e-4)
    assert not got["d query_bias"][-case.past[0] :].any()
    assert not got["d key_bias"][-case.past[1] :].any()


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
def test_batch_of_no_sequences(backend):
    query, bias = torch.randn(3, 2, 8), torch.randn(2, 5, requires_grad=True)
    relative = RelativeBias(torch.zeros(7, dtype=torch.int64), bias, torch.randn(3, 2, 5, requires_grad=True))
    out = varlen_attention(query, query, query, SequenceLayout.from_lengths([]), relative=relative, backend=backend)
    for x, grad in zip(relative.tensors, torch.autograd.grad(out.sum(), relative.tensors), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
@pytest.mark.parametrize("name", TERMS)
def test_nan_in_a_bias_is_propagated(backend, name):
    """A NaN in every bucket of one row or head, in a call without other NaN."""
    x = torch.zeros(5, 2, 16)
    biases = {"bias": torch.zeros(2, 3), "query_bias": torch.zeros(5, 2, 3), "key_bias": torch.zeros(5, 2, 3)}
    row = (1,) if name == "bias" else (4, 1)
    biases[name][row] = torch.nan
    bias = RelativeBias(torch.arange(-1, 2) + 1, **biases)
    layout = SequenceLayout.from_lengths([2, 3])
    out, lse = varlen_attention(x, x, x, layout, relative=bias, return_lse=True, backend=backend)
    expected = torch.zeros(5, 2, dtype=torch.bool)
    expected[slice(None) if name == "bias" else slice(4, 5) if name == "query_bias" else slice(2, 5), 1] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected)


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
@pytest.mark.parametrize("needs_grad", [True, False], ids=["learned", "fixed"])
@pytest.mark.parametrize("window_size", [(-1, -1), (2, 1)], ids=["open", "window"])
@pytest.mark.parametrize("name", TERMS)
def test_rows_whose_biases_are_minus_infinity_see_no_key(backend, name, window_size, needs_grad):
    """Of head 1: all rows, row 4, or the rows of the second sequence. Everything is finite, and 0 in these rows."""
    device = torch.device("cpu") if backend == "cpu" else DEVICE
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


STRIDES = {
    "heads-first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand_as(x),
    "every-other-bucket": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "buckets-first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
}


@pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides(backend, strides):
    case = case_of("self", "causal", "relative", dtype=torch.float32)

    def strided(relative, **arguments):
        changed = relative.with_tensors([STRIDES[strides](x) for x in relative.tensors])
        changed = dataclasses.replace(changed, buckets=relative.buckets.repeat_interleave(2)[::2].int())
        return call(case, backend)(relative=changed, **arguments)

    def want(relative, **arguments):
        changed = relative.with_tensors([STRIDES[strides](x) for x in relative.tensors])
        return call(case, "reference")(relative=changed, **arguments)

    assert_same(case.solve(strided), case.solve(want), 1e-4)


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
    case = case_of("self", "full", "relative", dtype=torch.float32)
    case.bucket_table = torch.randint(-5, 25, case.bucket_table.shape)
    monkeypatch.setattr(relative, "can_be_read", lambda _: False)
    got = case.solve(call(case, backend))
    case.bucket_table = case.bucket_table.clamp(0, case.buckets[1] - 1)
    assert_same(got, truth(case), 1e-4)


class TestGradients:
    @pytest.mark.parametrize("backend", ["cpu", "reference", "token_tiled"])
    @pytest.mark.parametrize("wanted", [("bias",), ("key_bias", "query"), ("query_bias",), ("value",)])
    def test_only_those_that_are_needed(self, backend, wanted):
        case = case_of("cross", "causal", "relative", dtype=torch.float32)
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

    @pytest.mark.parametrize("backend", ["cpu", "token_tiled"])
    @pytest.mark.parametrize("which", ["buckets", *TERMS])
    def test_in_place_change_before_the_backward(self, backend, which):
        case = case_of("self", "causal", "relative", dtype=torch.float32)
        leaves = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
        arguments = case.arguments({name: x * 1 for name, x in leaves.items()})
        out, _ = call(case, backend)(**arguments)
        getattr(arguments["relative"], which).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    @pytest.mark.parametrize("name", TERMS)
    def test_second_derivatives_raise_or_run_on_the_reference(self, name):
        case = problem("self", "causal", "relative")
        case = dataclasses.replace(case, lengths=[3, 0, 2])
        leaf = case.inputs[name].requires_grad_()

        def gradient(backend):
            out, _ = call(case, backend)(**case.arguments(case.inputs))
            return torch.autograd.grad(out.square().sum(), leaf, create_graph=True)[0]

        with pytest.raises(RuntimeError, match=r"differentiate twice.* backend='reference'"):
            torch.autograd.grad(gradient("cpu").square().sum(), leaf)
        (second,) = torch.autograd.grad(gradient("reference").square().sum(), leaf)
        assert second.abs().sum() > 0

    @pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
    def test_torch_func_grad(self, backend):
        case = problem("cross", "causal-window", "relative")

        def loss(inputs):
            out, lse = call(case, backend)(**case.arguments(inputs), **case.options)
            return (out * case.grads[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * case.grads[1]).sum()

        want = case.truth()
        found = {f"d {name}": grad for name, grad in torch.func.grad(loss)(case.inputs).items()}
        assert_same(found, {name: want[name] for name in found}, 1e-9)

    @BOTH
    def test_gradients_are_summed_in_float32(self, backend):
        """Many small addends of a float16 bias, which float16 sums would lose."""
        layout = SequenceLayout.from_lengths([1] * 5000)
        x = torch.ones(5000, 1, 8, dtype=torch.float16)
        bias = torch.zeros(1, 1, dtype=torch.float16, requires_grad=True)
        relative = RelativeBias(torch.zeros(1, dtype=torch.int64), bias)
        _, lse = varlen_attention(x, x, x, layout, relative=relative, return_lse=True, backend=backend)
        lse.sum().backward()
        assert bias.grad.item() == 5000


def test_deterministic_calls_give_the_same_bits_on_token_tiled():
    case = case_of("self", "causal", "relative", dtype=torch.float32)
    first, second = (case.solve(on_tiles(case, deterministic=True)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("radius", [0, 1, 40])
@pytest.mark.parametrize("terms", [("bias",), TERMS], ids=["bias", "all"])
def test_deterministic_gradients_with_few_and_many_distances(radius, terms):
    case = dataclasses.replace(
        case_of("self", "causal", "relative", dtype=torch.float32), relative=terms, buckets=(radius, 1 + radius // 2)
    )
    check(placed(case), slack=2, deterministic=True)


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
    for backend in ("reference", "token_tiled"):
        relative = RelativeBias(buckets, bias=bias, key_bias=key_bias)
        out = varlen_attention(q, k, v, layout, relative=relative, deterministic=deterministic, backend=backend)
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

    def test_a_bias_from_outside_of_the_graph(self):
        case = problem("cross", "causal", "relative", dtype=torch.float32)
        graph = torch.compile(call(case, "cpu"), fullgraph=True, backend="aot_eager")
        assert_same(case.solve(graph), case.truth(), 1e-4)

    def test_export(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.bias = torch.nn.Parameter(torch.randn(3, 7))
                self.register_buffer("buckets", torch.randint(7, (9,)))

            def forward(self, x, offsets):
                relative = RelativeBias(self.buckets, self.bias)
                return varlen_attention(x, x, x, SequenceLayout.from_offsets(offsets), relative=relative)

        model, x, offsets = Model(), torch.randn(14, 3, 8), torch.tensor([0, 5, 14])
        other, other_offsets = torch.randn(14, 3, 8), torch.tensor([0, 3, 14])
        exported = torch.export.export(model, (x, offsets)).module()
        torch.testing.assert_close(exported(other, other_offsets), model(other, other_offsets))

    def test_operator_refuses_biases_that_do_not_fit(self):
        x, offsets = torch.randn(14, 3, 8), torch.tensor([0, 5, 14], dtype=torch.int32)
        function = torch.ops.nt_attention.attention_forward.default
        options = (0.3, False, "lower_right", (-1, -1), 0.0, 0.0, False, False, False, False)
        more = (None, None, None, [], *options, [], "cpu")  # no pools, and no bounds
        biases = (torch.zeros(9, dtype=torch.int64), None, torch.randn(13, 3, 7), None)
        with pytest.raises(ValueError, match=r"query_bias must be floating-point numbers \(14, 3, 7\)"):
            function(x, x, x, offsets, offsets, None, *biases, *more)
        assert custom_ops.Arguments(*[None] * 10, *more).relative_grad is False


def test_nested_tensors_with_packed_biases():
    case = problem("self", "causal", "relative", dtype=torch.float32)
    layout = SequenceLayout.from_lengths(case.lengths)

    def function(relative, query, key, value, **options):
        nested = map(layout.to_nested, (query, key, value))
        out, lse = varlen_attention(*nested, relative=relative, return_lse=True, **options)
        return out.values(), lse.values()

    assert_same(case.solve(function), case.truth(), 1e-4)


@BOTH
def test_biases_are_not_cast_under_autocast(backend):
    layout = SequenceLayout.from_lengths([300])
    x = torch.zeros(300, 1, 8)
    bias = torch.full((1, 1), 1 + 2**-10)  # bfloat16 would round it
    relative = RelativeBias(torch.zeros(1, dtype=torch.int64), bias)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = varlen_attention(x, x, x, layout, relative=relative, return_lse=True, backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(lse, torch.full((300, 1), 300.0).log() + bias, rtol=0, atol=2e-4)


def fields(**changes):
    return {"buckets": torch.zeros(9, dtype=torch.int64), "bias": torch.zeros(3, 7)} | changes


REFUSED = {
    "no-bias": (fields(bias=None), ValueError, "relative has no bias: pass bias (H, N)"),
    "list": (fields(bias=[1.0]), TypeError, "relative.bias must be a torch.Tensor, got list"),
    "buckets-list": (fields(buckets=[1]), TypeError, "relative.buckets must be a torch.Tensor, got list"),
    "even": (fields(buckets=torch.zeros(8, dtype=torch.int64)), ValueError, "must be (2R+1,) int32 or int64"),
    "float-buckets": (fields(buckets=torch.zeros(9)), ValueError, "got (9,) torch.float32"),
    "bucket-too-large": (fields(buckets=torch.full((9,), 7)), ValueError, "in [0, 7), got values from 7 to 7"),
    "bucket-negative": (fields(buckets=torch.arange(-4, 5)), ValueError, "in [0, 7), got values from -4 to 4"),
    "heads": (fields(bias=torch.zeros(2, 7)), ValueError, "relative.bias must be floating-point numbers (3, 7)"),
    "number": (fields(bias=torch.tensor(1.0)), ValueError, "got () torch.float32"),
    "integers": (fields(bias=torch.zeros(3, 7, dtype=torch.int64)), ValueError, "got (3, 7) torch.int64"),
    "no-buckets": (fields(bias=torch.zeros(3, 0)), ValueError, "relative has no buckets"),
    "rows": (
        fields(query_bias=torch.zeros(6, 3, 7)),
        ValueError,
        "query_bias must be floating-point numbers (5, 3, 7)",
    ),
    "different-N": (fields(key_bias=torch.zeros(5, 3, 8)), ValueError, "(5, 3, 7) for 3 query heads and 7 buckets"),
    "device": (fields(bias=torch.zeros(3, 7, device="meta")), ValueError, "relative.bias is on meta and query on cpu"),
}


@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.parametrize("function", [varlen_attention, nta.explain], ids=["call", "explain"])
def test_invalid_biases_are_refused(which, function):
    given, error, message = REFUSED[which]
    x, layout = torch.randn(5, 3, 8), SequenceLayout.from_lengths([2, 3])
    with pytest.raises(error, match=re.escape(message)):
        function(x, x, x, layout, relative=RelativeBias(**given))


def test_another_type_is_refused():
    x, layout = torch.randn(5, 3, 8), SequenceLayout.from_lengths([2, 3])
    with pytest.raises(TypeError, match=r"relative must be a nta.RelativeBias, got Tensor"):
        varlen_attention(x, x, x, layout, relative=torch.zeros(3, 7))


def test_backends_that_support_it():
    x, layout = torch.randn(5, 3, 8), SequenceLayout.from_lengths([2, 3])
    explanation = nta.explain(x, x, x, layout, relative=RelativeBias(**fields()))
    assert explanation.chosen == "cpu"
    assert {name for name, backend in BACKENDS.items() if "relative bias" in backend.features} == {
        *("token_tiled", "cpu", "reference")
    }
    for name in ("flex", "torch_flash", "torch_efficient", "flash_attn_2", "flash_attn_4"):
        assert "relative biases are not supported" in " ".join(BACKENDS[name].unsupported(_spec(relative=("bias",))))


def _spec(**changes):
    from nt_attention.kernels.call import AttentionSpec

    return AttentionSpec(torch.device("cpu"), torch.bfloat16, 4, 4, 64, 64, 0.125, **changes)
