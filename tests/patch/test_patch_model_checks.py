"""The checks of transformers' ModelTesterMixin, on patched models.

Each check runs on bert, llama and modernbert with every head, and compares with the unpatched model where there is one.
"""

import copy

import pytest
import tiny
import torch
from sweeps import sweep_except
from torch import nn

import nt_attention as nta
from nt_attention.hf.families import CACHE

LENGTHS, LENGTH = [7, 2, 13, 5], 17
MASK = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
FAMILIES = ("bert", "llama", "modernbert")
ALL = [(model_type, name) for model_type, name in tiny.EVERY if model_type in FAMILIES]
some_classes = pytest.mark.parametrize(("model_type", "name"), sweep_except(ALL, *ALL[::2]))
every_class = pytest.mark.parametrize(("model_type", "name"), ALL, ids=lambda value: value)


def make(model_type, name, **more):
    return tiny.make(model_type, name, "sdpa", **more)


def make_batch(name, labels=False):
    ids = torch.randint(5, tiny.VOCABULARY, MASK.shape).masked_fill(~MASK, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": MASK.long()}
    if labels and name.endswith(("ForCausalLM", "ForMaskedLM")):
        batch["labels"] = ids.masked_fill(~MASK, -100)
    elif labels and name.endswith("ForTokenClassification"):
        batch["labels"] = (ids % 3).masked_fill(~MASK, -100)
    elif labels and name.endswith("ForSequenceClassification"):
        batch["labels"] = torch.tensor([0, 1, 2, 1])
    elif labels and name.endswith("ForQuestionAnswering"):
        batch |= {"start_positions": torch.tensor([1, 0, 3, 2]), "end_positions": torch.tensor([3, 1, 9, 4])}
    return batch


def real_tokens(value):
    return value[MASK] if value.shape[:2] == MASK.shape else value


def assert_same_outputs(got, want, **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    assert {key for key in want if key not in CACHE} <= {*got.keys()}
    for key in want:
        if key in CACHE:
            continue
        mine, theirs = ((x if isinstance(x, tuple) else (x,)) for x in (got[key], want[key]))
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            if key == "loss" and tolerance and b.isfinite():
                torch.testing.assert_close(a, b, **tolerance)
            elif a is None or b is None:
                assert a is b
            else:
                assert a.shape == b.shape
                assert a.dtype == b.dtype
                torch.testing.assert_close(real_tokens(a), real_tokens(b), **tolerance)


@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
@some_classes
def test_retain_grad_on_hidden_states_and_attentions(model_type, name):
    model, batch = tiny.make(model_type, name, "eager"), make_batch(name)
    with nta.patch(model):
        out = model(**batch, output_hidden_states=True, output_attentions=True)
        kept = [out.hidden_states[0], out.attentions[0]]
        for tensor in kept:
            tensor.retain_grad()
        out[0].flatten()[0].backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in kept)


@some_classes
def test_resize_token_embeddings(model_type, name):
    model, batch = make(model_type, name), make_batch(name)
    with torch.no_grad(), nta.patch(model) as handle:
        model.resize_token_embeddings(tiny.VOCABULARY + 10, mean_resizing=False)
        got = model(**batch)
        handle.active = False
        assert_same_outputs(got, model(**batch))
        handle.active = True
    if name.endswith(("ForCausalLM", "ForMaskedLM")):
        assert got.logits.shape[2] == tiny.VOCABULARY + 10


@every_class
def test_tied_embeddings_stay_tied(model_type, name):
    if not name.endswith(("ForCausalLM", "ForMaskedLM")):
        pytest.skip("it has no output embeddings")
    model, batch = make(model_type, name, tie_word_embeddings=True), make_batch(name, labels=True)
    with nta.patch(model):
        model(**batch).loss.backward()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        copied = copy.deepcopy(model)
        assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


@some_classes
def test_bfloat16_forward(model_type, name):
    model, batch = make(model_type, name).bfloat16(), make_batch(name)
    with torch.no_grad():
        want = model(**batch)
        with nta.patch(model):
            assert_same_outputs(model(**batch), want, rtol=0.1, atol=0.1)


@some_classes
def test_removed_layers_are_not_run(model_type, name):
    """As when layers are pruned."""
    model, batch = make(model_type, name), make_batch(name)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    with torch.no_grad(), nta.patch(model) as handle:
        del layers[1]
        model.config.num_hidden_layers = 1
        got = model(**batch)
        handle.remove()
        assert_same_outputs(got, model(**batch))
