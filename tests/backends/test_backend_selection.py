"""Which backend runs a call: "auto", a name, `use_backend`."""

import asyncio
import threading
import warnings
from functools import partial

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels.backends import cpu, reference
from nt_attention.kernels.select import BACKENDS, SlowBackendWarning


@pytest.fixture
def inputs():
    return {name: torch.randn(7, 3, 5) for name in ("query", "key", "value")} | {
        "layout": nta.SequenceLayout.from_lengths([4, 0, 3])
    }


@pytest.fixture
def ran(registered_variant):
    """The names of the backends that ran, in order."""
    names = []
    for backend in (cpu.BACKEND, reference.BACKEND):

        def forward(*args, backend=backend):
            names.append(backend.name)
            return backend.forward(*args)

        registered_variant(backend, backend.name, forward=forward)
    return names


def chosen(inputs, **options):
    return nta.explain(**inputs, **options).chosen


def test_auto_selects_the_fastest_backend_that_can_run(inputs, ran):
    nta.varlen_attention(**inputs)
    assert ran == [chosen(inputs)] == ["cpu"]


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_named_backend_runs(inputs, ran, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the reference is no surprise to those who ask for it
        nta.varlen_attention(**inputs, backend=name)
    assert ran == [chosen(inputs, backend=name)] == [name]


def test_cpu_and_reference_backends_agree(inputs):
    outs = [nta.varlen_attention(**inputs, is_causal=True, backend=name) for name in ("cpu", "reference")]
    torch.testing.assert_close(*outs)


def test_named_backend_never_falls_back(inputs, ran):
    with pytest.raises(ValueError, match="leave softcap at 0") as error:
        nta.varlen_attention(**inputs, softcap=2.0, backend="cpu")
    assert ran == []
    assert str(error.value) == str(nta.explain(**inputs, softcap=2.0, backend="cpu"))


@pytest.mark.parametrize("function", [nta.varlen_attention, nta.explain], ids=["varlen_attention", "explain"])
def test_unknown_backend_lists_the_known_ones(inputs, function):
    with pytest.raises(ValueError, match=r"no backend 'flash_attn_9'.*'auto'.*'cpu', 'reference'"):
        function(**inputs, backend="flash_attn_9")
    with pytest.raises(ValueError, match=r"no backend 'flash_attn_9'.*'auto'.*'cpu', 'reference'"):
        nta.use_backend("flash_attn_9").__enter__()


def test_auto_warns_if_only_the_reference_can_run(inputs, ran):
    with pytest.warns(SlowBackendWarning, match=r"slow .* softcap is not supported.*backend='reference'") as caught:
        nta.varlen_attention(**inputs, softcap=2.0)
    assert ran == ["reference"]
    assert [w.filename for w in caught] == [__file__], "the warning points at the caller"


def test_batch_invariant_is_not_supported_on_a_cpu(inputs):
    assert nta.explain(**inputs, batch_invariant=True).chosen is None
    for name in ("cpu", "reference"):
        with pytest.raises(ValueError, match=f"{name} .* leave batch_invariant at False"):
            nta.varlen_attention(**inputs, batch_invariant=True, backend=name)


def test_missing_backend_says_what_is_missing(inputs, monkeypatch):
    gone = type(cpu.BACKEND)(**{**vars(cpu.BACKEND), "missing": lambda: "the kernel is on holiday."})
    monkeypatch.setitem(BACKENDS, "cpu", gone)
    assert nta.available_backends()["cpu"] == "the kernel is on holiday."
    with pytest.raises(ValueError, match="the kernel is on holiday"):
        nta.varlen_attention(**inputs, backend="cpu")


class TestUseBackend:
    def test_decides_what_auto_means(self, inputs, ran):
        with nta.use_backend("reference"):
            nta.varlen_attention(**inputs)
            nta.varlen_attention(**inputs, backend="auto")
            nta.varlen_attention(**inputs, backend="cpu")
        nta.varlen_attention(**inputs)
        assert ran == ["reference", "reference", "cpu", "cpu"]

    def test_use_backend_raises_if_the_backend_cannot_run(self, inputs, ran):
        with nta.use_backend("cpu"):
            with pytest.raises(ValueError, match="leave softcap at 0") as error:
                nta.varlen_attention(**inputs, softcap=2.0)
            assert str(error.value) == str(nta.explain(**inputs, softcap=2.0))
        assert ran == []

    def test_nested_contexts(self, inputs):
        with nta.use_backend("reference"):
            with nta.use_backend("cpu"):
                assert chosen(inputs) == "cpu"
                with nta.use_backend("auto"):
                    assert chosen(inputs, softcap=2.0) == "reference"
                assert chosen(inputs, softcap=2.0) is None
            assert chosen(inputs) == "reference"
        assert chosen(inputs) == "cpu"

    def test_context_ends_with_an_exception(self, inputs):
        with pytest.raises(KeyError), nta.use_backend("reference"):
            raise KeyError("anything")
        assert chosen(inputs) == "cpu"

    def test_use_backend_as_a_decorator(self, inputs):
        decorated = nta.use_backend("reference")(partial(chosen, inputs))
        assert [decorated(), decorated(), chosen(inputs)] == ["reference", "reference", "cpu"]

    def test_use_backend_is_local_to_a_thread(self, inputs):
        found = []
        with nta.use_backend("reference"):
            thread = threading.Thread(target=lambda: found.append(chosen(inputs)))
            thread.start()
            thread.join()
        assert found == ["cpu"]

    def test_use_backend_is_local_to_an_asyncio_task(self, inputs):
        async def inside(name):
            with nta.use_backend(name):
                await asyncio.sleep(0)
                return chosen(inputs)

        async def both():
            return await asyncio.gather(inside("reference"), inside("cpu"), inside("reference"))

        assert asyncio.run(both()) == ["reference", "cpu", "reference"]
