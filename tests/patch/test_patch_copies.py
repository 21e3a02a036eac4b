"""Copies of patched Hugging Face models: deepcopy, pickle, torch.save, save_pretrained; each runs its own weights."""

import copy
import functools
import io
import json
import pickle
import subprocess
import sys
import weakref

import pytest
import tiny
import torch
from freeing import without_garbage_collector
from patched_models import (
    KINDS,
    assert_plain,
    close,
    every_kind,
    gradients,
    handle_of,
    loss_of,
    make,
    make_batch,
    scale,
)

import nt_attention as nta
from nt_attention.hf.check import plans


@every_kind
def test_deepcopy_runs_its_own_weights(kind):
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model):
        copied = copy.deepcopy(model)
        before = gradients(copied, batch)
        want = gradients(scale(copy.deepcopy(make(kind))), batch)
        close(gradients(scale(copied), batch), want)
        close(gradients(model, batch), before)
    close(gradients(copied, batch), want)  # as before the patch of the original was removed
    with nta.patch(copied):
        close(gradients(copied, batch), want)
    assert copied.config._attn_implementation == "sdpa"


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_kind
@pytest.mark.parametrize("tried_before", [True, False])
def test_patched_model_is_freed_without_the_garbage_collector(kind, tried_before, monkeypatch):
    if not tried_before:
        monkeypatch.setattr(plans, "_kept", {})
    model = make(kind)
    handle = nta.patch(model)
    model(**make_batch(kind))
    freed = weakref.ref(model)
    with without_garbage_collector():
        del model
        assert freed() is None
    handle.remove()


@every_kind
@pytest.mark.parametrize("through", [pickled, torch_saved])
def test_pickled_and_saved_models_run_packed_with_their_own_weights(through, kind):
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model) as handle:
        loaded = scale(through(model))
    want = gradients(scale(model), batch)
    close(gradients(loaded, batch), want)
    own = handle_of(loaded)
    assert own is not handle
    assert own.calls == {None: 1}
    assert not handle.calls
    own.remove()
    assert_plain(loaded, model)
    assert [torch.equal(a, b) for a, b in zip(gradients(loaded, batch), want, strict=True)]
    assert own.calls == {None: 1}


@pytest.mark.sweep
def test_saved_patched_model_runs_in_another_process(tmp_path):
    model, batch = make(), make_batch()
    with nta.patch(model):
        torch.save((model, batch), tmp_path / "model.pt")
    code = (
        "import torch; model, batch = torch.load('model.pt', weights_only=False); loss = model(**batch).loss.item();"
        "handle = model.forward.handle; handle.remove(); print(loss, handle.calls[None], model(**batch).loss.item())"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loss, packed, plain = map(float, ran.stdout.split())
    assert packed == 1
    close(torch.tensor([loss, plain]), torch.full((2,), model(**batch).loss.item()))


@every_kind
def test_save_pretrained_of_a_patched_model_is_unpatched(kind, tmp_path):
    model, batch = make(kind), make_batch(kind)
    with nta.patch(model):
        model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [KINDS[kind][1]]
    assert "nt_attention" not in json.dumps(config)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loss_of(loaded, batch), loss_of(model, batch))


@every_kind
def test_remove_also_restores_the_config_of_a_copy(kind):
    model = make(kind)
    handle = nta.patch(model)
    copied = copy.deepcopy(model)
    assert copied.config._attn_implementation == "nt_attention"
    handle.remove()
    assert copied.config._attn_implementation == "sdpa"
    nta.patch(copied).remove()
    assert_plain(copied, make(kind))


@pytest.mark.parametrize(("model_type", "name"), [("llama", "LlamaModel"), ("gemma3_text", "Gemma3TextModel")])
def test_an_equal_model_is_not_checked_again(model_type, name):
    """The activation of Gemma is a functools.partial."""
    model = tiny.make(model_type, name)
    model.first = {0, 8}
    nta.patch(model).remove()
    equal, other = copy.deepcopy(model), copy.deepcopy(model)
    equal.first, other.second = {8, 0}, functools.partial(torch.relu)  # a set in another order
    assert "checked before" in str(nta.patch(equal))
    assert "checked on this" in str(nta.patch(other))
