"""Which backend runs a call: "auto", a name, `use_backend`."""

import asyncio
import threading
import warnings
from functools import partial

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.select import BACKENDS, SlowBackendWarning


def learned(score, *_):
    """A score_mod that only the reference supports on a CPU."""
    return score * torch.ones((), requires_grad=True)


def chosen(inputs, **options):
    return nta.explain(**inputs, **options).chosen


def test_auto_selects_the_fastest_backend_that_can_run(attention_inputs, backends_that_ran):
    nta.varlen_attention(**attention_inputs)
    assert backends_that_ran == [chosen(attention_inputs)] == ["cpu"]


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_named_backend_runs(attention_inputs, backends_that_ran, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the reference is no surprise to those who ask for it
        nta.varlen_attention(**attention_inputs, backend=name)
    assert backends_that_ran == [chosen(attention_inputs, backend=name)] == [name]


def test_cpu_and_reference_backends_agree(attention_inputs):
    outs = [nta.varlen_attention(**attention_inputs, is_causal=True, backend=name) for name in ("cpu", "reference")]
    torch.testing.assert_close(*outs)


def test_named_backend_never_falls_back(attention_inputs, backends_that_ran):
    with pytest.raises(ValueError, match="leave batch_invariant at False") as error:
        nta.varlen_attention(**attention_inputs, batch_invariant=True, backend="cpu")
    assert backends_that_ran == []
    assert str(error.value) == str(nta.explain(**attention_inputs, batch_invariant=True, backend="cpu"))


@pytest.mark.parametrize("function", [nta.varlen_attention, nta.explain], ids=["varlen_attention", "explain"])
def test_unknown_backend_lists_the_known_ones(attention_inputs, function):
    with pytest.raises(ValueError, match=r"no backend 'flash_attn_9'.*'auto'.*'cpu', 'reference'"):
        function(**attention_inputs, backend="flash_attn_9")
    with pytest.raises(ValueError, match=r"no backend 'flash_attn_9'.*'auto'.*'cpu', 'reference'"):
        nta.use_backend("flash_attn_9").__enter__()


def test_auto_warns_if_only_the_reference_can_run(attention_inputs, backends_that_ran):
    with pytest.warns(SlowBackendWarning, match=r"slow .* score_mod reads a tensor.*backend='reference'") as caught:
        nta.varlen_attention(**attention_inputs, score_mod=learned)
    assert backends_that_ran == ["reference"]
    assert [w.filename for w in caught] == [__file__], "the warning points at the caller"


def _in_module(x, layout):
    return nta.VarlenMultiheadAttention(8, 2)(x, x, x, layout=layout, score_mod=learned)


def _in_a_checkpoint(x, layout):
    return torch.utils.checkpoint.checkpoint(_in_module, x, layout, use_reentrant=False)


def _in_a_graph(x, layout):
    x = x.unflatten(1, (2, 4))
    return torch.compile(nta.varlen_attention, backend="aot_eager")(x, x, x, layout, score_mod=learned)


@pytest.mark.parametrize("call", [_in_module, _in_a_checkpoint, _in_a_graph])
def test_the_warning_points_at_the_users_line(call):
    x = torch.randn(5, 8)
    with pytest.warns(SlowBackendWarning) as caught:
        call(x, nta.SequenceLayout.from_lengths([2, 3]))
    assert {w.filename for w in caught if w.category is SlowBackendWarning} == {__file__}


def test_batch_invariant_is_not_supported_on_a_cpu(attention_inputs):
    assert nta.explain(**attention_inputs, batch_invariant=True).chosen is None
    for name in ("cpu", "reference"):
        with pytest.raises(ValueError, match=f"{name} .* leave batch_invariant at False"):
            nta.varlen_attention(**attention_inputs, batch_invariant=True, backend=name)


def test_missing_backend_says_what_is_missing(attention_inputs, monkeypatch):
    without_kernel = type(cpu.BACKEND)(**{**vars(cpu.BACKEND), "missing": lambda: "the kernel is not installed."})
    monkeypatch.setitem(BACKENDS, "cpu", without_kernel)
    assert nta.available_backends()["cpu"] == "the kernel is not installed."
    with pytest.raises(ValueError, match="the kernel is not installed"):
        nta.varlen_attention(**attention_inputs, backend="cpu")


class TestUseBackend:
    def test_decides_what_auto_means(self, attention_inputs, backends_that_ran):
        with nta.use_backend("reference"):
            nta.varlen_attention(**attention_inputs)
            nta.varlen_attention(**attention_inputs, backend="auto")
            nta.varlen_attention(**attention_inputs, backend="cpu")
        nta.varlen_attention(**attention_inputs)
        assert backends_that_ran == ["reference", "reference", "cpu", "cpu"]

    def test_use_backend_raises_if_the_backend_cannot_run(self, attention_inputs, backends_that_ran):
        with nta.use_backend("cpu"):
            with pytest.raises(ValueError, match="leave batch_invariant at False") as error:
                nta.varlen_attention(**attention_inputs, batch_invariant=True)
            assert str(error.value) == str(nta.explain(**attention_inputs, batch_invariant=True))
        assert backends_that_ran == []

    def test_nested_contexts(self, attention_inputs):
        with nta.use_backend("reference"):
            with nta.use_backend("cpu"):
                assert chosen(attention_inputs) == "cpu"
                with nta.use_backend("auto"):
                    assert chosen(attention_inputs, score_mod=learned) == "reference"
                assert chosen(attention_inputs, score_mod=learned) is None
            assert chosen(attention_inputs) == "reference"
        assert chosen(attention_inputs) == "cpu"

    def test_context_ends_with_an_exception(self, attention_inputs):
        with pytest.raises(KeyError), nta.use_backend("reference"):
            raise KeyError("anything")
        assert chosen(attention_inputs) == "cpu"

    def test_use_backend_as_a_decorator(self, attention_inputs):
        decorated = nta.use_backend("reference")(partial(chosen, attention_inputs))
        assert [decorated(), decorated(), chosen(attention_inputs)] == ["reference", "reference", "cpu"]

    def test_use_backend_is_local_to_a_thread(self, attention_inputs):
        found = []
        with nta.use_backend("reference"):
            thread = threading.Thread(target=lambda: found.append(chosen(attention_inputs)))
            thread.start()
            thread.join()
        assert found == ["cpu"]

    def test_use_backend_is_local_to_an_asyncio_task(self, attention_inputs):
        async def inside(name):
            with nta.use_backend(name):
                await asyncio.sleep(0)
                return chosen(attention_inputs)

        async def both():
            return await asyncio.gather(inside("reference"), inside("cpu"), inside("reference"))

        assert asyncio.run(both()) == ["reference", "cpu", "reference"]
