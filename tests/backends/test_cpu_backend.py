"""The CPU backend against the float64 oracle, and how it divides a batch into kernel calls."""

import gc
import math
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from calls import PassThrough, call
from oracle import Problem, assert_same, problem
from sweeps import sweep_except
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nt_attention import SequenceLayout, varlen_attention
from nt_attention.cli.calls import draw_lengths
from nt_attention.kernels.backends import cpu, cpu_tiles
from nt_attention.kernels.select import SlowBackendWarning


@pytest.mark.parametrize("extra", ["plain", "alibi-each-gqa", "all"])
@pytest.mark.parametrize("geometry", ["full", "causal", "both-sides"])
def test_sequences_of_like_lengths_run_in_one_kernel_call(monkeypatch, geometry, extra):
    monkeypatch.setattr(cpu_tiles, "PAIRS_OF_CALL", 50_000)
    case = problem("self", geometry, extra, lengths=[0, 17, 7, 16, 6] * 7 + [17, 16] * 6, key_lengths=None)
    calls = []
    monkeypatch.setattr(cpu, "_run", lambda *args, run=cpu._run, **kw: calls.append(args[0].shape) or run(*args, **kw))
    assert_same(case.solve(call(case, "cpu")), case.truth(), 1e-9)
    assert sorted((shape[0], shape[2]) for shape in calls) == [(14, 7), (26, 17)]


@pytest.mark.parametrize("longest", sweep_except([64, 512], 512))
@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 30), ({"window_size": (64, 64)}, 40)],
)
def test_few_operations_start_threads(longest, options, most):
    """While another process uses the CPUs, threads that an operation starts wait for milliseconds."""
    lengths = draw_lengths(f"lognormal:{longest}", 8192)
    case = Problem(lengths, None, 12, 12, 64, 64, dtype=torch.bfloat16, options={"backend": "cpu", **options})
    layout = SequenceLayout.from_lengths(lengths)
    varlen_attention(**case.inputs, layout=layout, **case.options)
    with torch.profiler.profile(record_shapes=True) as profile:
        varlen_attention(**case.inputs, layout=layout, **case.options)
    outer = [x for x in profile.events() if x.name in OPERATIONS and getattr(x.cpu_parent, "name", "") != x.name]
    large = [each.name for each in outer if elements_of(each) >= 32768]  # PyTorch's grain size
    assert len(set(lengths)) > 30
    assert 4 < len(large) <= most, len(large)


def elements_of(event):
    sizes = [math.prod(shape) for shape in event.input_shapes]
    return sizes[3] if event.name in ("aten::index_copy_", "aten::index_add_") else max(sizes)  # of the source


OPERATIONS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    *(f"aten::{name}" for name in ("index_select", "index_copy_", "index_add_", "copy_", "add_", "fill_", "where")),
    *(f"aten::{name}" for name in ("bitwise_and", "bitwise_not", "masked_fill_", "any", "amax", "count_nonzero")),
}


def test_window_bounds_the_number_of_scores(monkeypatch):
    scores = []
    monkeypatch.setattr(
        cpu, "_run", lambda q, k, *a, run=cpu._run, **kw: scores.append(q.shape[2] * k.shape[2]) or run(q, k, *a, **kw)
    )
    case = Problem([1999], None, 1, 1, 2, 2, options={"window_size": (16, 0)})
    call(case, "cpu")(**case.inputs, **case.options)
    assert sum(scores) <= 1999 * (cpu_tiles.MASKED_ROWS + 16)


def sdpa(case: Problem):
    """One scaled_dot_product_attention call for each sequence; the same masks, spelled out. No lse."""
    key_lengths = case.lengths if case.key_lengths is None else case.key_lengths

    def function(query, key, value, is_causal=False, window_size=(-1, -1)):
        outs = []
        for q, k, v in zip(
            query.split(case.lengths), key.split(list(key_lengths)), value.split(list(key_lengths)), strict=True
        ):
            behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
            mask = (behind >= 0) if is_causal else torch.ones_like(behind, dtype=torch.bool)
            mask &= behind <= (window_size[0] if window_size[0] >= 0 else len(k))
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs), torch.zeros(query.shape[:2]) + query.sum() * 0

    return function


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extra", ["plain", "gqa"])
@pytest.mark.parametrize("geometry", ["full", "causal", "causal-window"])
@pytest.mark.parametrize("key_lengths", [None, [7, 1, 131, 67, 13]], ids=["self", "cross"])
def test_16_bit_error_is_at_most_twice_that_of_scaled_dot_product_attention(key_lengths, geometry, extra, dtype):
    case = problem("self", geometry, extra, lengths=[5, 1, 127, 65, 13], key_lengths=key_lengths, dtype=dtype)
    case.grads = (case.grads[0], torch.zeros_like(case.grads[1]))  # SDPA has no lse to differentiate
    got, want, usual = case.solve(call(case, "cpu")), case.truth(), case.solve(sdpa(case))
    assert got["out"].dtype == got["d key"].dtype == dtype
    torch.testing.assert_close(got["lse"].double(), want["lse"], rtol=1e-4, atol=1e-4)

    def error(found, name):
        return (found[name].double() - want[name]).square().mean().sqrt().item()

    for name in ("out", "d query", "d key", "d value"):
        assert error(got, name) <= 2 * error(usual, name), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_alibi_is_not_rounded_to_16_bits(dtype):
    """257 times a slope near 1 would be rounded in bfloat16, and weights would be off by tens of percent."""
    case = Problem([301], None, 3, 3, 5, 5, dtype=dtype)
    case.inputs["query"] *= 0
    case.options["alibi_slopes"] = -torch.tensor([0.993, 0.501, 0.2503])  # grows with the distance
    got, want = case.solve(call(case, "cpu")), case.truth()
    torch.testing.assert_close(got["lse"].double(), want["lse"], rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(got["out"].double(), want["out"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [1e-46, -1e-46, 1e-40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_that_underflows_in_float32(scale, dtype):
    case = problem("self", "causal", "plain", options={"scale": scale})
    inputs = {name: x.to(dtype) for name, x in case.inputs.items()}
    layout = SequenceLayout.from_lengths(case.lengths)
    found, want = (
        varlen_attention(**inputs, layout=layout, is_causal=True, scale=scale, return_lse=True, backend=backend)
        for backend in ("cpu", "reference")
    )
    assert not found[0].isnan().any()
    torch.testing.assert_close(found, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3], [70, 130]], ids=["gathered", "in place"])
def test_nan_in_a_query_propagates_to_out_and_lse(lengths, is_causal):
    layout = SequenceLayout.from_lengths(lengths)
    query, key, value = (torch.randn(layout.total, 3, 7) for _ in range(3))
    key[0] = 0.0  # under causality the first row has an lse of 0 by right
    query[4, 1, 2] = query[layout.total - 1, 0, 0] = torch.nan
    found, want = (
        varlen_attention(query, key, value, layout, is_causal=is_causal, return_lse=True, backend=backend)
        for backend in ("cpu", "reference")
    )
    assert want[1].isnan().sum() == 2
    torch.testing.assert_close(found, want, equal_nan=True)


class Slope:
    value = 1.0

    def __call__(self, score, b, h, q, k):
        return score * self.value


def stride_of(stride):
    """A mask_mod that reads an attribute of an object when it is called."""
    return lambda b, h, q, k: (q - k - stride.kind) % 3 == 0


class TestTilesOfScores:
    """Softcap, score_mod, mask_mod and dropout, whose scores are in memory."""

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_calls_have_few_scores(self, monkeypatch, is_causal):
        monkeypatch.setattr(cpu_tiles, "MOST_SCORES", 30_000)
        scores, run = [], cpu.cpu_scores.forward
        monkeypatch.setattr(
            cpu.cpu_scores,
            "forward",
            lambda q, k, *more: scores.append(q[..., 0].numel() * k.shape[2]) or run(q, k, *more),
        )
        case = Problem([701, *[13] * 100], heads=2, kv_heads=1, options={"is_causal": is_causal, "softcap": 2.0})
        call(case, "cpu")(**case.inputs, **case.options)
        assert 10_000 < max(scores) <= 30_000
        if is_causal:  # keys after the last query of a tile are not computed
            assert sum(scores) < 0.6 * 2 * 701**2 + 100 * 2 * 13**2

    def test_mods_do_not_live_as_long_as_the_layout(self):
        case = Problem([5, 3])
        mods = [lambda b, h, q, k: q >= k, lambda score, b, h, q, k: score * 2]
        alive = [weakref.ref(mod) for mod in mods]
        function = call(case, "cpu", mask_mod=mods.pop(0), score_mod=mods.pop(0))
        function(**case.inputs)
        layout = function.keywords["layout"]
        del function
        gc.collect()
        assert layout.total == 8
        assert [mod() for mod in alive] == [None, None]

    def test_nan_in_a_query_propagates(self):
        case = Problem([5, 130], dtype=torch.float32, options={"softcap": 3.0, "is_causal": True})
        case.inputs["query"][[2, 40]] = torch.nan
        out, lse = call(case, "cpu")(**case.inputs, **case.options)
        assert out.isnan().any(-1).nonzero()[:, 0].unique().tolist() == [2, 40]
        assert lse.isnan().nonzero()[:, 0].unique().tolist() == [2, 40]

    @pytest.mark.parametrize("lengths", [[64, 5, 9, 1, 6, 6], [*draw_lengths("lognormal:512", 6000)]])
    def test_the_first_forward_of_a_checkpoint_drops_the_same_weights(self, lengths):
        """It runs without gradients, which no choice of tiles may depend on."""
        case = Problem(lengths, dtype=torch.float32, options={"dropout_p": 0.4})
        inputs, found = {name: x.requires_grad_() for name, x in case.inputs.items()}, []
        for with_gradients in (False, True):
            torch.manual_seed(5)
            with torch.set_grad_enabled(with_gradients):
                found.append(call(case, "cpu")(**inputs, **case.options))
        torch.testing.assert_close(*[[x.detach() for x in each] for each in found], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("options", [{"softcap": 2.0}, {"dropout_p": 0.0, "score_mod": lambda s, *_: s * 0.5}])
    def test_autocast_changes_no_precision(self, options):
        case = problem("self", "causal", "gqa", dtype=torch.float32)
        function = call(case, "cpu", **options)
        with torch.autocast("cpu", torch.bfloat16):
            found = function(**{name: x.bfloat16() for name, x in case.inputs.items()}, **case.options)
        want = function(**{name: x.bfloat16().float() for name, x in case.inputs.items()}, **case.options)
        torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=1e-5)

    def test_mods_run_in_transforms_and_dispatch_modes(self):
        case = problem("self", "causal", "gqa", lengths=[5, 0, 3])
        function = call(case, score_mod=lambda score, b, h, q, k: score.tanh() + b)

        def loss(query):
            return function(query, case.inputs["key"], case.inputs["value"])[0].square().sum()

        query = case.inputs["query"].requires_grad_()
        (want,) = torch.autograd.grad(loss(query), query)
        with pytest.warns(SlowBackendWarning, match="transforms and dispatch modes"):
            torch.testing.assert_close(torch.func.grad(loss)(query.detach()), want, rtol=1e-9, atol=1e-9)
        with pytest.warns(SlowBackendWarning, match="transforms and dispatch modes"), PassThrough():
            torch.testing.assert_close(loss(query), loss(query.detach()), rtol=1e-9, atol=1e-9)
        out = loss(query)
        with PassThrough():  # only the backward
            torch.testing.assert_close(torch.autograd.grad(out, query)[0], want, rtol=1e-9, atol=1e-9)

    def test_score_mod_that_learns_needs_the_reference(self, backends_that_ran):
        table = torch.randn(5, 9, requires_grad=True)
        case = Problem([5, 3], heads=5, kv_heads=5, dtype=torch.float32)
        options = {"score_mod": lambda score, b, h, q, k: score + table[h, q - k + 4]}
        with pytest.warns(SlowBackendWarning, match="score_mod reads a tensor that requires a gradient"):
            call(case)(**case.inputs, **options)[0].square().sum().backward()
        assert table.grad.abs().max() > 0
        with pytest.raises(ValueError, match=r"requires a gradient: detach it, or pass it in relative"):
            call(case, "cpu")(**case.inputs, **options)
        with torch.no_grad():
            call(case)(**case.inputs, **options)
        assert backends_that_ran == ["reference", "cpu"]

    @pytest.mark.parametrize("scope", ["local", "global"])
    def test_backward_calls_mods_with_the_variables_of_the_forward(self, scope):
        """The functions are made in a loop, and read what changes in it."""
        program = """
def gradient(x, attend):
    y = x
    for i in range(3):
        bias = (i + 1) * torch.arange(12.0, dtype=x.dtype)
        y = y + attend(
            y, y, y,
            score_mod=lambda score, b, h, q, k: score * (i + 1) + sum(bias[j] for j in (q, k)),
            mask_mod=lambda b, h, q, k: (q - k) % (i + 2) == 0,
        )
    return torch.autograd.grad(y.sin().sum(), x)[0]
"""
        if scope == "global":
            program = program.replace("    y = x", "    global i, bias\n    y = x")
        variables = {"torch": torch}
        exec(program, variables)
        case = Problem([5, 12])
        x = case.inputs["query"].requires_grad_()
        layout = SequenceLayout.from_lengths(case.lengths)
        found, want = (
            variables["gradient"](x, partial(varlen_attention, layout=layout, backend=backend))
            for backend in ("cpu", "reference")
        )
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
    @pytest.mark.parametrize("what", ["strides by a helper", "attribute", "documents", "documents, softcap", "heads"])
    def test_gradients_are_of_the_masks_of_the_forward(self, what, autocast):
        """Each of three layers has a mask with as many visible keys in each row and column as the others."""
        layout, documents, found = SequenceLayout.from_lengths([24]), torch.arange(24) % 4, []
        for backend in ("cpu", "reference"):
            torch.manual_seed(0)
            x = torch.randn(24, 2, 8, dtype=torch.float32 if autocast else torch.float64).requires_grad_()
            stride, y = SimpleNamespace(kind=0), x
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for layer in range(3):
                    options = {"softcap": 5.0} if "softcap" in what else {}
                    options["mask_mod"] = self.mask_of(what, layer, stride, documents)
                    y = y + varlen_attention(y, y, y, layout, backend=backend, **options)
            documents.copy_(documents.flip(0) // 2 + documents % 2 * 2)
            stride.kind = 5
            found.append(torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))[0])
            documents.copy_(torch.arange(24) % 4)
        tolerance = 2e-2 * float(found[1].abs().max()) if autocast else 1e-9
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)

    @staticmethod
    def mask_of(what, layer, stride, documents):
        if what == "strides by a helper":

            def same(q, k):
                return (q - k - stride_now) % 3 == 0

            stride_now = layer
            return lambda b, h, q, k: same(q, k)
        if what == "attribute":
            stride.kind = layer
            return stride_of(stride)
        if what == "heads":
            return lambda b, h, q, k: documents[q] == (documents[k] + h + layer) % 4
        return lambda b, h, q, k: documents[q] == documents[k]

    @pytest.mark.parametrize("what", ["helper", "attribute of a callable"])
    def test_backward_calls_score_mod_as_it_was(self, what):
        layout, slope = SequenceLayout.from_lengths([5, 12]), Slope()
        found = []
        for backend in ("cpu", "reference"):
            x = torch.randn(17, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
            y = x
            for slope.value in (0.1, 0.5, 0.9):
                value = slope.value

                def scaled(score, q, k):
                    return score * value + 0.1 * (q - k)  # noqa: B023

                mod = slope if "attribute" in what else lambda score, b, h, q, k: scaled(score, q, k)
                y = y + varlen_attention(y, y, y, layout, score_mod=mod, backend=backend)
            found.append(torch.autograd.grad(y.sin().sum(), x)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("what", ["bias", "attribute", "tiny"])
    def test_score_mods_that_change_before_the_backward_raise_an_error(self, what, dtype):
        case = Problem([50, 0, 3], dtype=dtype)
        bias, slope = torch.zeros(50, 50), SimpleNamespace(value=1.0)
        options = {
            "bias": {"score_mod": lambda score, b, h, q, k: score + bias[q, k]},
            "attribute": {"score_mod": lambda score, b, h, q, k: score * slope.value},
        }
        options["tiny"] = options["bias"]
        query = case.inputs["query"].requires_grad_()

        def loss():
            return call(case, "cpu")(query, case.inputs["key"], case.inputs["value"], **options[what])[0].square().sum()

        before = loss()
        torch.autograd.grad(before, query, retain_graph=True)
        bias[40, 3], slope.value = 1e-4 if what == "tiny" else 1.0, 1.1
        with pytest.raises(RuntimeError, match="gave other values in the backward than in the forward"):
            torch.autograd.grad(before, query)
        torch.autograd.grad(loss(), query)

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_autocast_is_off_in_mods(self, backend):
        x, weight = torch.randn(9, 2, 8, requires_grad=True), torch.randn(4, 4)
        seen = []

        def score_mod(score, b, h, q, k):
            seen.append((weight @ weight).dtype)
            return score + (weight @ weight)[q % 4, k % 4].to(score.dtype)

        def mask_mod(b, h, q, k):
            seen.append((weight @ weight).dtype)
            return (weight @ weight)[q % 4, k % 4] > 0

        with torch.autocast("cpu", torch.bfloat16):
            layout = SequenceLayout.from_lengths([9])
            out = varlen_attention(x, x, x, layout, score_mod=score_mod, mask_mod=mask_mod, backend=backend)
            out.sum().backward()
        assert set(seen) == {torch.float32}

    def test_mods_in_a_graph_have_the_gradients_of_out_and_lse(self, backends_that_ran):
        options = {"score_mod": lambda score, b, h, q, k: score.tanh() + b, "mask_mod": lambda b, h, q, k: q >= k}
        case = problem("self", "causal", "gqa", lengths=[5, 0, 3], options=options)
        function = torch.compile(call(case), backend="aot_eager")
        for _ in range(2):  # plans of the first call are kept
            assert_same(case.solve(function), case.truth(), 1e-9)
        assert set(backends_that_ran) == {"cpu"}

    def test_checkpoint_that_learns_drops_the_same_weights(self):
        gain = torch.ones((), dtype=torch.float64, requires_grad=True)
        case = Problem([5, 3], options={"dropout_p": 0.4, "score_mod": lambda score, b, h, q, k: score * gain})
        function = call(case, **case.options)
        query = case.inputs["query"].requires_grad_()

        def attend(query):
            return function(query, case.inputs["key"], case.inputs["value"])[0].square()

        def gradient(run):
            query.grad = None
            torch.manual_seed(5)
            run(query).sum().backward()
            return query.grad

        with pytest.warns(SlowBackendWarning):
            torch.testing.assert_close(gradient(partial(checkpoint, attend, use_reentrant=True)), gradient(attend))
