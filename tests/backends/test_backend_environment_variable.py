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
def variable(monkeypatch):
    """Sets the variable, or removes it if the value is None, until the test ends."""

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
    """Which backend ran: the reference consists of plain operations, any other backend is one autograd function."""
    inputs = inputs | {"query": inputs["query"].clone().requires_grad_()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = nta.varlen_attention(**inputs, **options)
    return "cpu" if "Attention" in out.grad_fn.name() else "reference"


def learned(score, *_):
    """A score_mod that only the reference supports on a CPU."""
    return score * torch.ones((), requires_grad=True)


def test_environment_variable_decides_what_auto_means(attention_inputs, variable):
    """It is read at every call, also with one layout, which caches the selected backend."""
    assert ENVIRONMENT_VARIABLE == "NT_ATTENTION_BACKEND"
    for name in ("cpu", "reference", None, "reference", "", "auto"):
        variable(name)
        wanted = name if name in ("cpu", "reference") else "cpu"
        assert nta.explain(**attention_inputs).asked == (name or "auto")
        assert chosen(attention_inputs) == chosen(attention_inputs, backend="auto") == ran(attention_inputs) == wanted
        if name != "cpu":
            assert chosen(attention_inputs, score_mod=learned) == "reference"


def test_environment_variable_reference_does_not_warn(attention_inputs, variable):
    variable("reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nta.varlen_attention(**attention_inputs, score_mod=learned)
    variable(None)
    with pytest.warns(SlowBackendWarning):
        nta.varlen_attention(**attention_inputs, score_mod=learned)


@pytest.mark.parametrize("value", ["reference", "flash_attn_9"])
def test_a_name_and_use_backend_come_before_the_environment_variable(attention_inputs, variable, value):
    variable(value)
    assert chosen(attention_inputs, backend="cpu") == ran(attention_inputs, backend="cpu") == "cpu"
    with nta.use_backend("cpu"):
        assert chosen(attention_inputs) == ran(attention_inputs) == "cpu"
        assert ran(attention_inputs, backend="reference") == "reference"
        if value == "reference":
            with nta.use_backend("auto"):  # the environment variable decides again
                assert chosen(attention_inputs) == ran(attention_inputs) == "reference"
    with pytest.raises(ValueError, match=r"^there is no backend 'flash_attn_8'"):
        nta.varlen_attention(**attention_inputs, backend="flash_attn_8")


@pytest.mark.parametrize("function", [nta.varlen_attention, nta.explain], ids=["varlen_attention", "explain"])
@pytest.mark.parametrize("name", ["flash_attn_9", "CPU", " cpu"])
def test_unknown_backend_in_the_environment_variable(attention_inputs, variable, function, name):
    variable(name)
    known = r"'auto' or one of 'token_tiled', .*'cpu', 'reference'"
    with pytest.raises(ValueError, match=rf"NT_ATTENTION_BACKEND: there is no backend '{name}': pass {known}"):
        function(**attention_inputs)


def test_environment_variable_with_a_backend_that_cannot_run_raises(attention_inputs, variable):
    variable("cpu")
    explanation = nta.explain(**attention_inputs, score_mod=learned)
    assert (explanation.asked, explanation.chosen) == ("cpu", None)
    with pytest.raises(ValueError, match="backend='cpu': it cannot run this call") as error:
        nta.varlen_attention(**attention_inputs, score_mod=learned)
    assert str(error.value) == str(explanation)
    assert chosen(attention_inputs, score_mod=learned, backend="reference") == "reference"


def test_environment_variable_with_a_missing_backend_raises(attention_inputs, variable, monkeypatch):
    without_kernel = dataclasses.replace(cpu.BACKEND, missing=lambda: "the kernel is not installed.")
    monkeypatch.setitem(BACKENDS, "cpu", without_kernel)
    variable("cpu")
    with pytest.raises(ValueError, match=r"(?s)backend='cpu': it cannot run this call.*the kernel is not installed\."):
        nta.varlen_attention(**attention_inputs)


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
