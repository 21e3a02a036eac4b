"""`explain` and `available_backends`."""

import warnings

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels.backends import cpu, reference
from nt_attention.kernels.select import BACKENDS


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


def test_explain_does_not_warn(inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(inputs, softcap=2.0) == "reference"


def test_explain_lists_every_backend_with_its_reasons(inputs, ran):
    told = nta.explain(**inputs, softcap=2.0, dropout_p=0.5, return_lse=True)
    assert ran == []
    assert told.chosen == "reference"
    assert list(told.reasons) == list(nta.available_backends()) == list(BACKENDS)
    assert told.reasons["cpu"] == (
        "softcap is not supported: leave softcap at 0.",
        "dropout is not supported: leave dropout_p at 0.",
    )
    assert told.reasons["reference"] == ()
    lines = str(told).splitlines()
    assert lines[0] == "backend='auto': reference runs this call."
    assert [line.split()[0] for line in lines[1:]] == list(BACKENDS)
    assert (
        "cannot run  softcap is not supported: leave softcap at 0. dropout is" in lines[1 + list(BACKENDS).index("cpu")]
    )
    assert " chosen " in lines[1 + list(BACKENDS).index("reference")]


def test_explain_lists_other_backends_that_can_run(inputs):
    lines = str(nta.explain(**inputs)).splitlines()
    assert lines[0] == "backend='auto': cpu runs this call."
    assert any(line.split()[:3] == ["reference", "can", "run"] for line in lines)


def test_explain_of_a_backend_that_cannot_run_the_call(inputs):
    told = nta.explain(**inputs, softcap=2.0, backend="cpu")
    assert told.chosen is None
    assert str(told).startswith("backend='cpu': it cannot run this call.")


def test_explain_refuses_what_varlen_attention_refuses(inputs):
    with pytest.raises(TypeError, match="windw_size"):
        nta.explain(**inputs, windw_size=(3, 3))
    with pytest.raises(ValueError, match="softcap must be"):
        nta.explain(**inputs, softcap=-1.0)


def test_available_backends():
    state = nta.available_backends()
    assert state["cpu"] is None
    assert state["reference"] is None
    assert all(reason is None or reason.endswith(".") for reason in state.values())
