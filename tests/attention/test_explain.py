"""`explain` and `available_backends`."""

import warnings

import pytest
import torch

import nt_attention as nta
from nt_attention.kernels.select import BACKENDS


def chosen(inputs, **options):
    return nta.explain(**inputs, **options).chosen


def learned(score, *_):
    """A score_mod that only the reference supports on a CPU."""
    return score * torch.ones((), requires_grad=True)


def test_explain_does_not_warn(attention_inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(attention_inputs, score_mod=learned) == "reference"


def test_explain_lists_every_backend_with_its_reasons(attention_inputs, backends_that_ran):
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


def test_explain_lists_other_backends_that_can_run(attention_inputs):
    lines = str(nta.explain(**attention_inputs)).splitlines()
    assert lines[0] == "backend='auto': cpu runs this call."
    assert any(line.split()[:3] == ["reference", "can", "run"] for line in lines)


def test_explain_of_a_backend_that_cannot_run_the_call(attention_inputs):
    explanation = nta.explain(**attention_inputs, batch_invariant=True, backend="cpu")
    assert explanation.chosen is None
    assert str(explanation).startswith("backend='cpu': it cannot run this call.")


def test_explain_refuses_what_varlen_attention_refuses(attention_inputs):
    with pytest.raises(TypeError, match="windw_size"):
        nta.explain(**attention_inputs, windw_size=(3, 3))
    with pytest.raises(ValueError, match="softcap must be"):
        nta.explain(**attention_inputs, softcap=-1.0)


def test_available_backends():
    state = nta.available_backends()
    assert state["cpu"] is None
    assert state["reference"] is None
    assert all(reason is None or reason.endswith(".") for reason in state.values())
