"""What a proof once did not compare, found by trying to break it."""

import functools
import os
from contextlib import nullcontext

import pytest
import torch
import transformers
from proof_cases import BATCH, MASK, SIZES
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    RobertaConfig,
    RobertaModel,
)

import nt_attention as nta
from nt_attention.hf.prove import store
from nt_attention.hf.prove.text_models import on_meta_device
from nt_attention.hf.prove.twin import build_twin, isolated
from nt_attention.patching.handle import NotPackedWarning

pytestmark = pytest.mark.usefixtures("cache")


def refused(model, match):
    with pytest.raises(ValueError, match=match):
        nta.patch(model)


def shifted(x):
    """Each token sees the one before it."""
    return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def doubled(*args, **kwargs):
    out, weights = transformers.integrations.sdpa_attention.sdpa_attention_forward(*args, **kwargs)
    return 2 * out, weights


def test_attention_function_that_is_not_from_transformers_is_refused():
    transformers.AttentionInterface.register("doubled", doubled)
    transformers.AttentionMaskInterface.register("doubled", transformers.masking_utils.sdpa_mask)
    model = BertModel(BertConfig(**SIZES, attn_implementation="doubled"))
    refused(model, "'doubled' is not an attention implementation of transformers")
    assert nta.patch(model, padding_free=False)


@pytest.mark.parametrize("how", ["loss_type", "loss_function"])
def test_another_loss_of_transformers_gets_padded_rows(how):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    loss = transformers.loss.loss_utils.ForMaskedLMLoss
    setattr(model, how, "ForMaskedLM" if how == "loss_type" else loss)
    labels = BATCH["input_ids"].masked_fill(~MASK, -100)
    want = model(**BATCH, labels=labels).loss
    with nta.patch(model), pytest.warns(NotPackedWarning, match="loss_function was replaced"):
        torch.testing.assert_close(model(**BATCH, labels=labels).loss, want)


def test_padding_id_changed_in_the_config_after_construction():
    """Positions are counted with the padding id that the embeddings have."""
    model = RobertaModel(RobertaConfig(**{**SIZES, "pad_token_id": 1})).eval()
    model.config.pad_token_id = 0
    want = model(**BATCH).last_hidden_state
    with nta.patch(model, on_fallback="raise"):
        torch.testing.assert_close(model(**BATCH).last_hidden_state[MASK], want[MASK])


class LastLogits(LlamaForCausalLM):
    """In evaluation, logits of the last position only."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        keep = {} if labels is not None or self.training else {"logits_to_keep": 1}
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **keep, **kwargs)


class Smoothed(BertForTokenClassification):
    """In evaluation, neighboring tokens are mixed."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if not self.training:
            out.logits = (out.logits + shifted(out.logits)) / 2
        return out


@pytest.mark.parametrize(("kind", "config"), [(LastLogits, LlamaConfig), (Smoothed, BertConfig)])
def test_heads_are_compared_in_evaluation(kind, config):
    """Their base model is packed, and the head gets padded rows."""
    model = kind(config(**SIZES)).eval()
    want = model(**BATCH).logits
    with nta.patch(model, on_fallback="raise") as handle:
        got = model(**BATCH).logits
    assert handle.calls == {None: 1}
    at = MASK if got.shape[:2] == MASK.shape else slice(2, 3)  # the row without padding
    torch.testing.assert_close(got[at], want[at])


class WithNumbers(BertForTokenClassification):
    """A number of all positions of the batch, with padding."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out["z_loss"] = out.logits.logsumexp(-1).square().mean()
        return out


class Counting(BertModel):
    """Counts positions in training, with padding."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.training:
            self.seen += out.last_hidden_state[..., 0].numel()
        return out


def test_numbers_and_buffers_of_all_positions_are_refused():
    refused(WithNumbers(BertConfig(**SIZES)), "its z_loss is a number of all positions")
    refused(Counting(BertConfig(**SIZES)), "training updates its buffer seen from all positions")


class Switched(LlamaModel):
    def forward(self, *args, per_token=True, factor=2.0, **kwargs):
        out = super().forward(*args, **kwargs)
        x = out.last_hidden_state
        out.last_hidden_state = (x if per_token else x + shifted(x)) * (1 if factor is None else factor)
        return out


@pytest.mark.parametrize("given", [{"per_token": False}, {"factor": None}])
def test_unknown_argument_that_is_false_or_none_falls_back(given):
    model = Switched(LlamaConfig(**SIZES)).eval()
    want = model(**BATCH, **given).last_hidden_state
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="is not known"):
        torch.testing.assert_close(model(**BATCH, **given).last_hidden_state, want)
        model(**BATCH, per_token=True)
    assert handle.calls[None] == 1


def mixing(is_mixed):
    def forward(self, x, *args):
        out = self.dense(x)
        return out + shifted(out) if is_mixed else out

    return forward


def test_replaced_functions_are_tried_again(monkeypatch):
    kind = transformers.models.bert.modeling_bert.BertIntermediate
    monkeypatch.setattr(kind, "forward", mixing(False))
    nta.patch(BertModel(BertConfig(**SIZES))).remove()
    monkeypatch.setattr(kind, "forward", mixing(True))
    refused(BertModel(BertConfig(**SIZES)), "depend on sequence 1")


class Compiled:
    """Like a graph that torch.compile has compiled: it can be called, and is no function."""

    def __call__(self, *args):
        return args


def test_compiled_graphs_in_the_file_of_a_class(monkeypatch):
    """torch.compile puts a function that wraps a graph into the namespace of the file."""

    @functools.wraps(mixing)
    def graph(*args):
        return args

    graph.__wrapped__ = Compiled()
    monkeypatch.setattr(transformers.models.bert.modeling_bert, "compiled_graph", graph, raising=False)
    nta.patch(BertModel(BertConfig(**SIZES))).remove()


class OwnConfig(BertConfig):
    model_type = "own_config"
    revision: int = 20
    mix_epsilon: float = 0.5


class ByRevision(BertModel):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.config.revision >= 18:
            out.last_hidden_state = out.last_hidden_state + self.config.mix_epsilon * shifted(out.last_hidden_state)
        return out


def test_fields_of_an_own_config_keep_their_values():
    refused(ByRevision(OwnConfig(**SIZES)), "depend on sequence 1")
    nta.patch(ByRevision(OwnConfig(**SIZES, revision=3))).remove()


@pytest.mark.parametrize("how", ["use_backend", "environment variable"])
def test_requested_backend_that_runs_on_gpus_only(how, monkeypatch):
    """The small model runs on the CPU, so a request for another backend must not refuse the model, nor be kept."""
    monkeypatch.setattr(store, "shipped", dict)
    kind = type("AnotherBert", (BertModel,), {})
    if how == "environment variable":
        monkeypatch.setenv("NT_ATTENTION_BACKEND", "torch_flash")
    with nta.use_backend("torch_flash") if how == "use_backend" else nullcontext():
        handle = nta.patch(kind(BertConfig(**SIZES)))
    assert handle.changed


def test_question_answering_with_one_position_only():
    model = BertForQuestionAnswering(BertConfig(**SIZES)).eval()
    with nta.patch(model):
        assert model(**BATCH, start_positions=torch.tensor([1, 0, 3, 2])).loss is None


def test_cache_directory_without_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert store.cache_directory().parts[-2] == "proofs"
    monkeypatch.delenv("NT_ATTENTION_CACHE")
    assert store.cache_directory().parts[-2] == "proofs"


@pytest.mark.skipif(not hasattr(transformers, "NeoMMEForMaskedLM"), reason="this version of transformers has no NeoMME")
def test_config_with_other_windows_in_some_layers():
    """Reading a field of such a config, of which layers have their own values, raises an error."""
    with isolated():
        model = build_twin(on_meta_device("neomme", "NeoMMEForMaskedLM"))
    assert model.config.to_dict()["per_layer_config"]
    ids = BATCH["input_ids"] % 61  # the vocabulary of a small model
    want = [model(input_ids=x[mask][None]).logits[0] for x, mask in zip(ids, MASK, strict=True)]
    with nta.patch(model, on_fallback="raise") as handle:
        logits = model(input_ids=ids, attention_mask=BATCH["attention_mask"]).logits
    assert handle.calls == {None: 1}
    for n, alone in enumerate(want):
        torch.testing.assert_close(logits[n][MASK[n]], alone, rtol=1e-5, atol=1e-5)
