"""Which backend runs a call, and why: "auto", a name, `use_backend`, NT_ATTENTION_BACKEND; `explain`."""

import asyncio
import dataclasses
import threading
import warnings
from functools import partial

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.select import BACKENDS, ENVIRONMENT_VARIABLE, SlowBackendWarning, selection_key

FUNCTIONS = pytest.mark.parametrize("function", [nta.varlen_attention, nta.explain], ids=["call", "explain"])


def learned(score, *_):
    """A score_mod that only the reference supports on a CPU."""
    return score * torch.ones((), requires_grad=True)


def chosen(inputs, **options):
    return nta.explain(**inputs, **options).chosen


@pytest.fixture
def variable(monkeypatch):
    """Sets the environment variable, or removes it if the value is None."""

    def put(value):
        if value is None:
            monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)

    put(None)
    return put


@pytest.fixture
def ran(attention_inputs, backends_that_ran):
    """`ran(**options)`: the backend that runs the call without a warning, which is the one that `explain` names."""

    def run(**options):
        backends_that_ran.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nta.varlen_attention(**attention_inputs, **options)
        assert backends_that_ran == [chosen(attention_inputs, **options)]
        return backends_that_ran[0]

    return run


def test_names_use_backend_and_the_environment_variable(ran, variable, attention_inputs):
    """In this order. The variable is read in every call, also with one layout, which caches the selected backend."""
    assert ENVIRONMENT_VARIABLE == "NT_ATTENTION_BACKEND"
    for value in (None, "cpu", "reference", "", "auto", "reference"):
        variable(value)
        usual = value if value in ("cpu", "reference") else "cpu"
        assert nta.explain(**attention_inputs).asked == (value or "auto")
        assert ran() == ran(backend="auto") == usual
        for name, other in (("cpu", "reference"), ("reference", "cpu")):
            assert ran(backend=name) == name  # the reference is no surprise to those who ask for it
            with nta.use_backend(name):
                assert ran() == ran(backend="auto") == name
                assert ran(backend=other) == other
                with nta.use_backend(other):
                    assert ran() == other
                with nta.use_backend("auto"):
                    assert ran() == usual
                assert ran() == name
            assert ran() == usual
    variable("flash_attn_9")
    assert ran(backend="cpu") == "cpu"
    with nta.use_backend("cpu"):
        assert ran() == "cpu"


@FUNCTIONS
@pytest.mark.parametrize("name", ["flash_attn_9", "CPU", " cpu"])
def test_unknown_names(attention_inputs, variable, function, name):
    known = r"'auto' or one of 'token_tiled', .*'cpu', 'reference'"
    with pytest.raises(ValueError, match=rf"^there is no backend '{name}': pass {known}"):
        function(**attention_inputs, backend=name)
    with pytest.raises(ValueError, match=rf"no backend '{name}'"):
        nta.use_backend(name).__enter__()
    variable(name)
    with pytest.raises(ValueError, match=rf"NT_ATTENTION_BACKEND: there is no backend '{name}': pass {known}"):
        function(**attention_inputs)


@pytest.mark.parametrize("how", ["name", "use_backend", "variable"])
@pytest.mark.parametrize("why", ["option", "missing"])
def test_a_backend_that_was_asked_for_never_falls_back(
    attention_inputs, backends_that_ran, variable, how, why, monkeypatch
):
    inputs, words = attention_inputs | {"batch_invariant": True}, "leave batch_invariant at False"
    if why == "missing":
        inputs, words = attention_inputs, "the kernel is not installed."
        monkeypatch.setitem(BACKENDS, "cpu", dataclasses.replace(cpu.BACKEND, missing=lambda: words))
        assert nta.available_backends()["cpu"] == words
    inputs |= {"backend": "cpu"} if how == "name" else {}
    variable("cpu" if how == "variable" else None)
    with nta.use_backend("cpu" if how == "use_backend" else "auto"):
        explanation = nta.explain(**inputs)
        with pytest.raises(ValueError, match=rf"(?s)backend='cpu': it cannot run this call.*{words}") as error:
            nta.varlen_attention(**inputs)
    assert (explanation.asked, explanation.chosen, str(explanation)) == ("cpu", None, str(error.value))
    assert backends_that_ran == []


def test_the_environment_variable_is_part_of_the_cache_key(variable):
    keys = set()
    for name in (None, *BACKENDS):
        variable(name)
        keys.add(selection_key("auto"))
    assert len(keys) == 1 + len(BACKENDS)
    assert selection_key("cpu") == selection_key("cpu")


class TestUseBackend:
    def test_ends_with_an_exception(self, attention_inputs):
        with pytest.raises(KeyError), nta.use_backend("reference"):
            raise KeyError("anything")
        assert chosen(attention_inputs) == "cpu"

    def test_as_a_decorator(self, attention_inputs):
        decorated = nta.use_backend("reference")(partial(chosen, attention_inputs))
        assert [decorated(), decorated(), chosen(attention_inputs)] == ["reference", "reference", "cpu"]

    def test_is_local_to_a_thread_and_to_an_asyncio_task(self, attention_inputs):
        found = []
        with nta.use_backend("reference"):
            thread = threading.Thread(target=lambda: found.append(chosen(attention_inputs)))
            thread.start()
            thread.join()
        assert found == ["cpu"]

        async def inside(name):
            with nta.use_backend(name):
                await asyncio.sleep(0)
                return chosen(attention_inputs)

        async def both():
            return await asyncio.gather(inside("reference"), inside("cpu"), inside("reference"))

        assert asyncio.run(both()) == ["reference", "cpu", "reference"]


def _in_function(x, layout):
    x = x.unflatten(1, (2, 4))
    return nta.varlen_attention(x, x, x, layout, score_mod=learned)


def _in_module(x, layout):
    return nta.VarlenMultiheadAttention(8, 2)(x, x, x, layout=layout, score_mod=learned)


def _in_a_checkpoint(x, layout):
    return torch.utils.checkpoint.checkpoint(_in_module, x, layout, use_reentrant=False)


def _in_a_graph(x, layout):
    x = x.unflatten(1, (2, 4))
    return torch.compile(nta.varlen_attention, backend="aot_eager")(x, x, x, layout, score_mod=learned)


@pytest.mark.parametrize(
    "call", [_in_function, _in_module, _in_a_checkpoint, pytest.param(_in_a_graph, marks=pytest.mark.sweep)]
)
def test_the_warning_of_the_reference_points_at_the_users_line(call):
    x = torch.randn(5, 8)
    with pytest.warns(SlowBackendWarning, match=r"slow .* score_mod reads a tensor.*backend='reference'") as caught:
        call(x, nta.SequenceLayout.from_lengths([2, 3]))
    assert {w.filename for w in caught if w.category is SlowBackendWarning} == {__file__}


def test_the_reference_by_the_environment_variable_does_not_warn(variable, ran):
    variable("reference")
    assert ran(score_mod=learned) == "reference"


class TestExplain:
    def test_lists_every_backend_with_its_reasons_and_does_not_warn(self, attention_inputs, backends_that_ran):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explanation = nta.explain(**attention_inputs, score_mod=learned, softcap=2.0, return_lse=True)
        assert backends_that_ran == []
        assert explanation.chosen == "reference"
        assert list(explanation.reasons) == list(nta.available_backends()) == list(BACKENDS)
        assert explanation.reasons["cpu"] == (
            "score_mod reads a tensor that requires a gradient: detach it, or pass it in relative.",
        )
        assert explanation.reasons["reference"] == ()
        lines = str(explanation).splitlines()
        assert lines[0] == "backend='auto': reference runs this call."
        assert [line.split()[0] for line in lines[1:]] == list(BACKENDS)
        assert "cannot run  score_mod reads a tensor" in lines[1 + list(BACKENDS).index("cpu")]
        assert " chosen " in lines[1 + list(BACKENDS).index("reference")]

    def test_lists_other_backends_that_can_run(self, attention_inputs):
        lines = str(nta.explain(**attention_inputs)).splitlines()
        assert lines[0] == "backend='auto': cpu runs this call."
        assert any(line.split()[:3] == ["reference", "can", "run"] for line in lines)

    def test_no_backend_can_run(self, attention_inputs):
        explanation = nta.explain(**attention_inputs, batch_invariant=True)
        assert explanation.chosen is None
        for name in ("cpu", "reference"):
            with pytest.raises(ValueError, match=f"{name} .* leave batch_invariant at False"):
                nta.varlen_attention(**attention_inputs, batch_invariant=True, backend=name)

    def test_available_backends(self):
        state = nta.available_backends()
        assert state["cpu"] is None
        assert state["reference"] is None
        assert all(reason is None or reason.endswith(".") for reason in state.values())
