"""`nta.register_backend`: backends of other packages, from registration to removal."""

import dataclasses
import threading
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import nt_attention as nta
from nt_attention.kernels import registry, support
from nt_attention.kernels.backend import COMMON, Hooks
from nt_attention.kernels.call import AttentionSpec
from nt_attention.kernels.call_size import CallSize
from nt_attention.kernels.select import SlowBackendWarning, automatic_choice, explain_spec, fastest_first, selection_key

LENGTHS, KEY_LENGTHS = [5, 0, 17, 1], [3, 4, 17, 0]


def attend(query, key, value, call):
    """Differentiable attention, one sequence at a time, with SDPA."""
    spec, outs, lses = call.spec, [], []
    offsets, key_offsets = call.layout.host_offsets.tolist(), call.key_layout.host_offsets.tolist()
    for (a, b), (c, d) in zip(pairwise(offsets), pairwise(key_offsets), strict=True):
        q = query[a:b].transpose(0, 1)
        k, v = (x[c:d].repeat_interleave(spec.num_heads // x.shape[1], 1).transpose(0, 1) for x in (key, value))
        visible = spec.window.mask(b - a, d - c, spec.shift(b - a, d - c), query.device)
        scores = q @ k.transpose(1, 2) * spec.scale
        visible = torch.ones(b - a, d - c, dtype=torch.bool) if visible is None else visible
        hidden = ~visible.any(-1)
        scores = scores.masked_fill(~visible & ~hidden[:, None], -torch.inf)
        lse = scores.logsumexp(-1) if d > c else q.new_zeros(spec.num_heads, b - a)
        lses.append(lse.masked_fill(hidden, -torch.inf).T)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | hidden[:, None], scale=spec.scale)
        outs.append((out.masked_fill(hidden[:, None], 0.0) if d > c else torch.zeros_like(out)).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def forward(query, key, value, call):
    with torch.no_grad():
        return attend(query, key, value, call)


def backward(saved, query, key, value, call):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        results, grads = attend(*inputs, call), (saved.grad, saved.grad_lse)
        return torch.autograd.grad(results[: 1 + (grads[1] is not None)], inputs, grads[: 1 + (grads[1] is not None)])


TOY = nta.Backend(
    name="toy",
    about="SDPA, one sequence at a time",
    missing=lambda: None,
    forward=forward,
    backward=backward,
    features=COMMON | {"window"},
    device_type="cpu",
    dtypes=(torch.float32, torch.float64),
    head_dims=nta.HeadDims(equal=True),
    traits={"reads_past_end", "lse_gradient"},
)
DIFFERENTIABLE = dataclasses.replace(TOY, forward=attend, backward=None, traits={"differentiable"})


def variant(backend=TOY, **changes):
    return dataclasses.replace(backend, **changes)


@pytest.fixture
def ran():
    """The numbers of the forwards and backwards of `counting` that ran."""
    return {"forward": 0, "backward": 0}


@pytest.fixture
def counting(ran):
    """TOY with counts in `ran`."""

    def counted(name):
        def run(*arguments):
            ran[name] += 1
            return getattr(TOY, name)(*arguments)

        return run

    return variant(forward=counted("forward"), backward=counted("backward"))


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    yield
    assert not registry.registered


def call(backend, layout=None, key_layout=None, dtype=torch.float64, with_lse=True, **options):
    """out, lse and the gradients of a call in which values have another head dim and queries have no keys."""
    torch.manual_seed(0)
    layout = layout or nta.SequenceLayout.from_lengths(LENGTHS)
    key_layout = key_layout or nta.SequenceLayout.from_lengths(KEY_LENGTHS)
    q, k, v = (torch.randn(n, h, d, dtype=dtype) for n, h, d in ((23, 4, 24), (24, 2, 24), (24, 2, 40)))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = nta.varlen_attention(*inputs, layout, key_layout, return_lse=True, backend=backend, **options)
    loss = (out * torch.randn_like(out)).sum()
    if with_lse:
        loss = loss + lse[lse > -torch.inf].sum()
    return out, lse, *torch.autograd.grad(loss, inputs)


OPTIONS = [{}, {"is_causal": True, "causal_alignment": "upper_left"}, {"window_size": (3, 1)}]


class TestByName:
    @pytest.mark.parametrize("base", [TOY, DIFFERENTIABLE], ids=["backward", "differentiable"])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_equals_the_reference(self, base, options):
        with_lse = base is TOY
        with nta.register_backend(base):
            found = call("toy", with_lse=with_lse, **options)
        torch.testing.assert_close(found, call("reference", with_lse=with_lse, **options))

    def test_a_differentiable_backend_gets_its_head_dims_and_strides(self):
        query, key = (torch.randn(4, 5, 12).permute(2, 0, 1).requires_grad_() for _ in range(2))
        inputs, seen = (query, key, torch.randn(12, 4, 3, requires_grad=True)), []

        def forward(query, key, value, call):
            seen.extend((x.shape[-1], x.stride(-1)) for x in (query, key, value))
            return attend(query, key, value, call)

        def results(backend):
            out = nta.varlen_attention(*inputs, nta.SequenceLayout.from_lengths([5, 7]), backend=backend)
            return out, *torch.autograd.grad(out.square().sum(), inputs)

        head_dims = nta.HeadDims(64, least=16, equal=True)
        with nta.register_backend(variant(DIFFERENTIABLE, forward=forward, head_dims=head_dims)):
            found = results("toy")
        assert seen == [(16, 1)] * 3
        for x, y in zip(found, results("reference"), strict=True):
            torch.testing.assert_close(x, y)

    def test_runs_once_and_nothing_else(self, attention_inputs, backends_that_ran, counting, ran):
        with nta.register_backend(counting):
            nta.varlen_attention(**attention_inputs, backend="toy")
        assert ran == {"forward": 1, "backward": 0}
        assert backends_that_ran == []

    def test_explain_and_available_backends(self, attention_inputs):
        with nta.register_backend(TOY):
            assert nta.available_backends()["toy"] is None
            explanation = nta.explain(**attention_inputs, backend="toy")
            assert explanation.chosen == "toy"
        # the explanation can be printed after the backend was removed
        assert "chosen      SDPA, one sequence at a time" in str(explanation)
        assert "toy" not in nta.available_backends()
        with nta.register_backend(variant(missing=lambda: "the package toy is not installed.")):
            assert nta.available_backends()["toy"] == "the package toy is not installed."
            with pytest.raises(ValueError, match="the package toy is not installed"):
                nta.varlen_attention(**attention_inputs, backend="toy")


def learned(score, *_):
    """A score_mod that only the reference supports on a CPU."""
    return score * torch.ones((), requires_grad=True)


class TestAuto:
    def test_not_without_a_time(self, attention_inputs, backends_that_ran):
        with nta.register_backend(TOY):
            assert nta.explain(**attention_inputs).chosen == "cpu"
            nta.varlen_attention(**attention_inputs)
            with pytest.warns(SlowBackendWarning, match=r"because cpu.* cannot run"):
                nta.varlen_attention(**attention_inputs, score_mod=learned)
        assert backends_that_ran == ["cpu", "reference"]

    def test_before_cpu_with_a_time(self, attention_inputs, counting, ran, backends_that_ran):
        with nta.register_backend(variant(counting, expected_us=lambda spec, size: 12.0)):
            explanation = nta.explain(**attention_inputs)
            assert (explanation.chosen, explanation.expected_us) == ("toy", {"toy": 12.0})
            assert "toy              chosen      SDPA, one sequence at a time; expected time 12 µs" in str(explanation)
            nta.varlen_attention(**attention_inputs)
            assert ran["forward"] == 1
            with pytest.warns(SlowBackendWarning, match=r"because cpu.* cannot run"):
                nta.varlen_attention(**attention_inputs, score_mod=learned)  # which toy does not support
        nta.varlen_attention(**attention_inputs)
        assert ran["forward"] == 1
        assert backends_that_ran == ["reference", "cpu"]

    def test_not_in_checks_of_models(self, attention_inputs):
        with nta.register_backend(variant(expected_us=lambda *_: 1.0)):
            outside = selection_key("auto")
            for _ in range(2):
                assert nta.explain(**attention_inputs).chosen == "toy"
                with automatic_choice():
                    assert nta.explain(**attention_inputs).chosen == "cpu"
                    assert selection_key("auto") != outside

    @pytest.mark.parametrize("time", [float("nan"), -1.0, "fast"], ids=str)
    def test_invalid_times(self, attention_inputs, time):
        with (
            nta.register_backend(variant(expected_us=lambda *_: time)),
            pytest.raises(ValueError, match="expected_us of backend 'toy' must return a time in µs"),
        ):
            nta.varlen_attention(**attention_inputs)

    def test_sorted_with_the_cost_model_on_a_gpu(self, not_verified):
        spec, size = gpu_spec(), CallSize(100, 100_000, 1e8)
        before = explain_spec(spec, size)
        order = fastest_first(spec, size)
        fastest, second = sorted(before.expected_us.values())[:2]
        assert fastest < second
        gpu = variant(device_type="cuda", dtypes=(torch.bfloat16,))
        with nta.register_backend(gpu):
            assert fastest_first(spec, size) == order
        with nta.register_backend(variant(gpu, expected_us=lambda *_: (fastest + second) / 2)):
            assert fastest_first(spec, size) == (order[0], "toy", *order[1:])
        with nta.register_backend(variant(gpu, expected_us=lambda *_: fastest / 2)):
            assert explain_spec(spec, size).chosen == "toy"
        assert fastest_first(spec, size) == order


def gpu_spec(**more):
    return AttentionSpec.of(torch.device("cuda"), torch.bfloat16, ((100, 8, 64),) * 3, {"scale": None}, **more)


def test_support_is_that_of_its_fields_on_a_verified_gpu(fake_gpu):
    assert support.verified_for(torch.device("cuda")) is not None
    spec = gpu_spec(needs_grad=True)
    with nta.register_backend(variant(device_type="cuda", dtypes=(torch.bfloat16,))) as handle:
        assert explain_spec(spec, CallSize(1, 100, 1e4), "toy").chosen == "toy"
        assert support.head_dims(handle.backend, spec) == (64, 64)
        assert explain_spec(spec, CallSize(1, 100, 1e4)).chosen != "toy"
    assert support.head_dims(handle.backend, spec) == (64, 64)  # a backward may still run


class TestRemove:
    def test_by_name_and_with_cached_layouts(self, attention_inputs):
        handle = nta.register_backend(TOY)
        nta.varlen_attention(**attention_inputs, backend="toy")
        handle.remove()
        handle.remove()
        for function in (nta.varlen_attention, nta.explain):
            with pytest.raises(ValueError, match="there is no backend 'toy': pass 'auto' or one of 'token_tiled'"):
                function(**attention_inputs, backend="toy")
        with pytest.raises(ValueError, match="there is no backend 'toy'"):
            nta.use_backend("toy").__enter__()

    def test_a_backward_runs_after_the_removal(self, counting, ran):
        layout = nta.SequenceLayout.from_lengths([3, 4])
        x = torch.randn(7, 2, 8, requires_grad=True)
        with nta.register_backend(counting):
            out = nta.varlen_attention(x, x, x, layout, backend="toy")
        out.sum().backward()
        assert ran["backward"] == 1

    def test_a_handle_does_not_remove_the_next_one(self, attention_inputs):
        first = nta.register_backend(TOY)
        first.remove()
        with nta.register_backend(TOY):
            first.remove()
            nta.varlen_attention(**attention_inputs, backend="toy")

    def test_registered_again_another_kernel_runs(self, attention_inputs, counting, ran):
        """Also with a layout that has cached prepared runs of the first one."""

        def prepared(factor):
            def prepare(query, key, value, call):
                return lambda *inputs: (TOY.forward(*inputs, call)[0] * factor, TOY.forward(*inputs, call)[1])

            return variant(hooks=Hooks(prepare_forward=prepare))

        attention_inputs["query"] = attention_inputs["key"] = attention_inputs["value"]
        outs = []
        for factor in (1, 2, 3):
            with nta.register_backend(prepared(factor)):
                outs.append([nta.varlen_attention(**attention_inputs, backend="toy") for _ in range(3)])
        for factor, found in zip((1, 2, 3), outs, strict=True):
            for out in found:
                torch.testing.assert_close(out, outs[0][0] * factor)


WRONG = {
    "out in half": ("forward", lambda out, lse: (out.half(), lse), r"\(23, 4, 40\), torch.float64.*torch.float16"),
    "out of other rows": ("forward", lambda out, lse: (out[1:], lse), r"got .*22, 4, 40"),
    "lse with heads first": ("forward", lambda out, lse: (out, lse.T), r"got .*4, 23"),
    "no lse": ("forward", lambda out, lse: (out, None), r"got .*None"),
    "two gradients": ("backward", lambda q, k, v: (q, k), "got "),
    "a gradient in half": ("backward", lambda q, k, v: (q.half(), k, v), "got .*torch.float16"),
}


@pytest.mark.parametrize(("of", "change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_results_name_the_backend(of, change, message):
    wrong = variant(**{of: lambda *given: change(*getattr(TOY, of)(*given))})
    with nta.register_backend(wrong), pytest.raises(ValueError, match=f"'toy' must return tensors of .*{message}"):
        call("toy")


class TestGraphs:
    @staticmethod
    def compiled(backend="auto"):
        def function(x, offsets):
            layout = nta.SequenceLayout.from_offsets(offsets)
            return nta.varlen_attention(x, x, x, layout, is_causal=True, backend=backend)

        return torch.compile(function, backend="aot_eager", fullgraph=True)

    offsets = torch.tensor([0, 4, 4, 7])

    def results(self, function):
        x = torch.randn(7, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = function(x, self.offsets)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    def expected(self):
        layout = nta.SequenceLayout.from_offsets(self.offsets)
        return self.results(lambda x, _: nta.varlen_attention(x, x, x, layout, is_causal=True, backend="reference"))

    def test_by_name_and_gone_after_the_removal(self, fresh_compiler, counting, ran):
        function = self.compiled("toy")
        with nta.register_backend(counting):
            found = self.results(function)
        assert ran == {"forward": 1, "backward": 1}
        for x, y in zip(found, self.expected(), strict=True):
            torch.testing.assert_close(x, y)
        with pytest.raises(Exception, match="there is no backend 'toy'"):
            self.results(function)
        assert ran == {"forward": 1, "backward": 1}
        with nta.register_backend(counting):
            self.results(function)
        assert ran == {"forward": 2, "backward": 2}

    def test_a_registration_compiles_no_graph_again(self, fresh_compiler, counting, ran):
        """Under "auto", a backend with a time runs in the graph that is there, and not after its removal."""
        function = self.compiled()
        expected = self.results(function)
        with torch.compiler.set_stance("fail_on_recompile"), nta.register_backend(TOY):
            self.results(function)
        assert ran["forward"] == 0
        with nta.register_backend(variant(counting, expected_us=lambda *_: 1.0)):
            torch.testing.assert_close(self.results(function), expected)
        for _ in range(2):
            assert ran == {"forward": 1, "backward": 1}
            self.results(function)


def test_threads_register_while_others_call(attention_inputs):
    errors, stop = [], threading.Event()

    def run(work):
        try:
            while not stop.is_set():
                work()
        except Exception as error:  # collected for the main thread
            errors.append(error)
            stop.set()

    def register(name):
        with nta.register_backend(variant(name=name, expected_us=lambda *_: 1.0)):
            nta.varlen_attention(**attention_inputs, backend=name)

    def attend():
        nta.varlen_attention(**attention_inputs)
        str(nta.explain(**attention_inputs))
        nta.available_backends()

    work = [lambda: register("first"), lambda: register("second"), attend, attend]
    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    stop.wait(0.3)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_commands_know_it(capsys):
    from nt_attention.__main__ import main

    with nta.register_backend(TOY):
        main([])
        assert "toy              SDPA, one sequence at a time" in capsys.readouterr().out
        main(["check", "--device", "cpu", "--backends", "toy", "--which", "64"])
        assert "right: 64" in capsys.readouterr().out
