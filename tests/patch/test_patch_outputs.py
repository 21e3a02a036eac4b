"""Outputs of patched models: padded again however deep they are, and falls back where they are not known."""

import pytest
import tiny
import torch
from packed_rows import LENGTHS, MASK, PACKED, close, make, make_batch
from transformers import LlamaModel
from transformers.utils import ModelOutput

import nt_attention as nta
from nt_attention import NotPackedWarning
from nt_attention.hf.pack import outputs, routes
from nt_attention.hf.pack.packing import Packing


def test_unknown_output_comes_back_padded(monkeypatch):
    model, batch = make(), make_batch()
    want = model(**batch, output_hidden_states=True)
    monkeypatch.setattr(outputs.families, "TOKEN_OUTPUTS", set())
    with nta.patch(model) as handle:
        got = model(**batch, output_hidden_states=True)
    assert handle.calls == {None: 1}
    close(got.logits[MASK], want.logits[MASK])
    for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        close(mine[MASK], theirs[MASK])


def test_nested_outputs_are_padded():
    packing = Packing.of(MASK.long(), None, *MASK.shape)
    token, other = torch.randn(*PACKED, 3), torch.randn(5)
    out = ModelOutput(new=(token, [None, {"inner": token}], other))
    outputs.pad_outputs(out, packing)
    (first, (none, inner), last), want = out["new"], packing.pad(token)
    assert torch.equal(first, want)
    assert torch.equal(inner["inner"], want)
    assert none is None
    assert last is other


@pytest.mark.parametrize("shape", [(sum(LENGTHS), 3), (3, 1, sum(LENGTHS)), (2 * sum(LENGTHS),)])
def test_output_of_an_unknown_shape_raises(shape):
    packing = Packing.of(MASK.long(), None, *MASK.shape)
    with pytest.raises(outputs.UnknownOutputError, match="'new'"):
        outputs.pad_outputs(ModelOutput(new=(torch.zeros(shape),)), packing)


def test_call_with_an_output_of_an_unknown_shape_falls_back(monkeypatch):
    model, batch = make("bert", "BertModel"), make_batch()
    real = outputs.pad_outputs

    def with_more(out, packing, kept, names):
        out["flat"] = out["last_hidden_state"][0]  # (T, E), as router logits are
        real(out, packing, kept, names)

    want = model(**batch)
    nta.patch(model).remove()  # makes the proof if there is none, without the change below
    monkeypatch.setattr(routes, "pad_outputs", with_more)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="its output 'flat' is not known"):
        got = model(**batch)
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)
    assert handle.calls["its output 'flat' is not known, and may have a value for each token"] == 1


@pytest.mark.parametrize("wanted", [[0, 2], [1]])
def test_output_of_some_hidden_states(wanted):
    model, batch = make(), make_batch()
    want = model(**batch, output_hidden_states=wanted).hidden_states
    with nta.patch(model):
        got = model(**batch, output_hidden_states=wanted).hidden_states
    assert [part is None for part in got] == [part is None for part in want]
    assert any(part is None for part in got)
    for mine, theirs in zip(got, want, strict=True):
        if theirs is not None:
            close(mine[MASK], theirs[MASK])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_sparse_prediction_has_the_logits_of_its_labels(training):
    model = make("modernbert", "ModernBertForMaskedLM", sparse_prediction=True).train(training)
    batch = make_batch(labels=True)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(MASK.shape) > 0.4, -100)
    want = model(**batch)
    with nta.patch(model) as handle:
        got = model(**batch)
        assert handle.calls == {None: 1}
        close(model(**without_labels(batch)).logits[MASK], logits_unpatched(model, handle, batch)[MASK])
    assert got.logits.shape == want.logits.shape == ((batch["labels"] != -100).sum(), tiny.VOCABULARY)
    close(got.logits, want.logits)
    close(got.loss, want.loss)


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def logits_unpatched(model, handle, batch):
    handle.active = False
    try:
        return model(**without_labels(batch)).logits
    finally:
        handle.active = True


def test_config_that_asks_for_attention_weights_is_refused(tmp_path):
    model = make("bert", "BertForMaskedLM", "eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="the config asks for attention weights"):
        nta.patch(model)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path, attn_implementation="eager").config.output_attentions


class ShortModel(LlamaModel):
    """Cuts its rows, as some models do at the length that they were trained with."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        cut = {"attention_mask": attention_mask, "position_ids": position_ids}
        whole = {name: x if x is None or x.dim() != 2 else x[:, :80] for name, x in cut.items()}
        return super().forward(input_ids=input_ids[:, :80], **whole, **more)


def test_model_that_cuts_its_rows_falls_back():
    """A packed row is longer than each of its rows."""
    short = ShortModel(make().config).eval()
    mask = torch.arange(40) < torch.tensor([[40], [35], [21]])
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    want = short(**batch).last_hidden_state
    with nta.patch(short) as handle, pytest.warns(NotPackedWarning, match="has 80 tokens, but the packed row has 96"):
        close(short(**batch).last_hidden_state, want)
    assert len(handle.calls) == 2


def test_the_gradient_of_padded_logits_is_not_that_of_the_loss():
    model, batch = make(), make_batch(labels=True)
    with nta.patch(model):
        out = model(**batch)
        with pytest.warns(NotPackedWarning, match="without the loss"):
            out.logits.retain_grad()
        (out.loss + out.logits.sum()).backward()
    assert torch.equal(out.logits.grad, torch.ones_like(out.logits.grad))
