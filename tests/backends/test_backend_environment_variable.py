"""NT_ATTENTION_BACKEND selects the backend of "auto", unless a name or `use_backend` does."""

import dataclasses
import os
import subprocess
import sys
import warnings

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels.backends import cpu
from nt_attention.kernels.select import BACKENDS, ENVIRONMENT_VARIABLE, SlowBackendWarning, selection_key


@pytest.fixture
def inputs():
    return {name: torch.randn(7, 3, 5) for name in ("query", "key", "value")} | {
        "layout": nta.SequenceLayout.from_lengths([4, 0, 3])
    }


@pytest.fixture
def variable(monkeypatch):
    """Sets it, or with None takes it away, until the test ends."""

    def put(value):
        if value is None:
            monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)

    put(None)
    return put


def chosen(inputs, **options):
    return nta.explain(**inputs, **options).chosen


def ran(inputs, **options):
    """By what autograd calls it: the reference is made of plain operations, any other is one node."""
    inputs = inputs | {"query": inputs["query"].clone().requires_grad_()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = nta.varlen_attention(**inputs, **options)
    return "cpu" if "Attention" in out.grad_fn.name() else "reference"


def test_environment_variable_name():
    assert ENVIRONMENT_VARIABLE == "NT_ATTENTION_BACKEND"


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_decides_what_auto_means(inputs, variable, name):
    variable(name)
    assert nta.explain(**inputs).asked == name
    assert chosen(inputs) == chosen(inputs, backend="auto") == ran(inputs) == name


def test_environment_variable_reference_does_not_warn(inputs, variable):
    variable("reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nta.varlen_attention(**inputs, softcap=2.0)
    variable(None)
    with pytest.warns(SlowBackendWarning):
        nta.varlen_attention(**inputs, softcap=2.0)


@pytest.mark.parametrize("value", [None, "", "auto"])
def test_environment_variable_unset_empty_and_auto(inputs, variable, value):
    variable(value)
    told = nta.explain(**inputs)
    assert (told.asked, told.chosen) == ("auto", "cpu")
    assert chosen(inputs, softcap=2.0) == "reference"
    assert ran(inputs) == "cpu"


def test_environment_variable_is_read_at_every_call(inputs, variable):
    """On one layout too, which keeps what was chosen."""
    names = ["cpu", "reference", None, "reference", ""]
    got = []
    for name in names:
        variable(name)
        got.append(ran(inputs))
    assert got == [name or "cpu" for name in names]


def test_named_backend_overrides_the_environment_variable(inputs, variable):
    variable("reference")
    assert chosen(inputs, backend="cpu") == ran(inputs, backend="cpu") == "cpu"


def test_use_backend_overrides_the_environment_variable(inputs, variable):
    variable("reference")
    with nta.use_backend("cpu"):
        assert chosen(inputs) == ran(inputs) == "cpu"
        assert ran(inputs, backend="reference") == "reference"
        with nta.use_backend("auto"):  # which gives the choice back
            assert chosen(inputs) == ran(inputs) == "reference"
    assert ran(inputs) == "reference"


@pytest.mark.parametrize("function", [nta.varlen_attention, nta.explain], ids=["varlen_attention", "explain"])
@pytest.mark.parametrize("name", ["flash_attn_9", "CPU", " cpu"])
def test_unknown_backend_in_the_environment_variable(inputs, variable, function, name):
    variable(name)
    known = r"'auto' or one of 'token_tiled', .*'cpu', 'reference'"
    with pytest.raises(ValueError, match=rf"NT_ATTENTION_BACKEND: there is no backend '{name}': pass {known}"):
        function(**inputs)


def test_unknown_backend_in_the_environment_variable_is_ignored_if_another_is_named(inputs, variable):
    variable("flash_attn_9")
    assert ran(inputs, backend="cpu") == "cpu"
    with nta.use_backend("reference"):
        assert ran(inputs) == "reference"
    with pytest.raises(ValueError, match=r"^there is no backend 'flash_attn_8'"):
        nta.varlen_attention(**inputs, backend="flash_attn_8")


def test_environment_variable_with_a_backend_that_cannot_run_raises(inputs, variable):
    variable("cpu")
    told = nta.explain(**inputs, softcap=2.0)
    assert (told.asked, told.chosen) == ("cpu", None)
    with pytest.raises(ValueError, match="backend='cpu': it cannot run this call") as error:
        nta.varlen_attention(**inputs, softcap=2.0)
    assert str(error.value) == str(told)
    assert chosen(inputs, softcap=2.0, backend="reference") == "reference"


def test_environment_variable_with_a_missing_backend_raises(inputs, variable, monkeypatch):
    gone = dataclasses.replace(cpu.BACKEND, missing=lambda: "the kernel is on holiday.")
    monkeypatch.setitem(BACKENDS, "cpu", gone)
    variable("cpu")
    with pytest.raises(ValueError, match=r"(?s)backend='cpu': it cannot run this call.*the kernel is on holiday\."):
        nta.varlen_attention(**inputs)


def test_environment_variable_is_part_of_the_cache_key(variable):
    kinds = set()
    for name in (None, *BACKENDS):
        variable(name)
        kinds.add(selection_key("auto"))
    assert len(kinds) == 1 + len(BACKENDS)
    assert selection_key("cpu") == selection_key("cpu")


def test_environment_variable_of_the_process():
    script = (
        "import torch, nt_attention as nta; x = torch.ones(2, 1, 3); "
        "print(nta.explain(x, x, x, nta.SequenceLayout.from_lengths([2])).chosen)"
    )
    environment = os.environ | {ENVIRONMENT_VARIABLE: "reference"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["reference"]
