"""patch on Hugging Face models: outputs, losses and gradients as before, from real tokens only; what is refused."""

import pytest
import tiny
import torch
import transformers
from patched_models import LENGTH, LENGTHS, make_batch
from torch import nn
from transformers import BertConfig, BertModel

import nt_attention as nta
from nt_attention import NotPackedWarning
from nt_attention.hf.families import CACHE


def make(name):
    return tiny.make("bert" if name.startswith("Bert") else "llama", name, "sdpa").double()


def with_classes(batch):
    """With a label for each token."""
    return {**batch, "labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)}


def assert_same_outputs(got, want, mask):
    """At tokens. The config asks for a cache by default; a packed call makes none."""
    for name in want.keys() - set(CACHE):
        values = [x[mask.bool()] if x.shape[:2] == mask.shape else x for x in (got[name], want[name])]
        torch.testing.assert_close(*values)


def test_next_sentence_prediction_runs_on_real_tokens_only():
    """tests/hugging_face tests the other heads."""
    model, rows = make("BertForNextSentencePrediction"), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: rows.update({name: inputs[0].shape[:-1].numel()})
            )
    with nta.patch(model):
        model(**make_batch("base"))
    assert rows.pop("bert.pooler.dense") == rows.pop("cls.seq_relationship") == 4
    assert set(rows.values()) == {sum(LENGTHS)}


@torch.inference_mode()
def test_model_made_in_inference_mode():
    model, batch = make("BertModel").eval(), make_batch("base")
    want = model(**batch)
    with nta.patch(model, packing="always") as handle:
        assert_same_outputs(model(**batch), want, batch["attention_mask"])
    assert handle.calls == {None: 1}


def test_attention_mask_of_another_width_is_refused():
    model, batch = make("LlamaForCausalLM"), make_batch("base")
    with nta.patch(model), pytest.raises(ValueError, match=r"is \(4, 23\), but the input is \(4, 1\).*use_cache=True"):
        model(batch["input_ids"][:, -1:], attention_mask=batch["attention_mask"])


def test_model_inside_of_another_module_is_patched():
    class Embedder(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = make("BertModel")
            self.project = nn.Linear(48, 5)

    with nta.patch(Embedder()) as handle:
        assert list(handle.changed) == ["backbone"]


@pytest.mark.parametrize("padding_free", [True, False])
def test_models_that_share_a_config(padding_free):
    """One patch may change both, or each has its own. The config is restored with the last one."""
    config = BertConfig(**tiny.TEXT, **tiny.NO_DROPOUT)
    models = nn.ModuleList([BertModel(config).double().eval() for _ in range(2)])
    kept, batch = dict(vars(config)), make_batch("base")
    want = [model(**batch) for model in models]
    for first in (0, 1):
        handles = [nta.patch(model, padding_free) for model in models]
        with pytest.raises(ValueError, match="already patched"):
            nta.patch(models[0], padding_free, packing="always")
        handles[first].remove()
        assert config._attn_implementation == "nt_attention"
        assert_same_outputs(models[1 - first](**batch), want[1 - first], batch["attention_mask"])
        assert handles[1 - first].calls == ({None: 1} if padding_free else {})
        handles[1 - first].remove()
        assert vars(config) == kept
    with nta.patch(models, padding_free):
        for model, before in zip(models, want, strict=True):
            assert_same_outputs(model(**batch), before, batch["attention_mask"])
    assert vars(config) == kept


def test_sequence_classification_of_embeddings_reads_the_last_token():
    model = tiny.make("llama", "LlamaForSequenceClassification", "sdpa").double()
    batch = make_batch("base")
    embeds = torch.randn(4, LENGTH, 48, dtype=torch.float64, requires_grad=True)
    want = torch.cat([model(inputs_embeds=embeds[b : b + 1, :n]).logits for b, n in enumerate(LENGTHS)])
    with nta.patch(model):
        got = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(got.sum(), embeds)
    assert all(grad[b, n - 1].abs().max() > 0 for b, n in enumerate(LENGTHS))


def test_heads_that_share_a_base_model():
    of_rows = "BertForSequenceClassification"
    first, second, third = map(make, (of_rows, "BertForTokenClassification", of_rows))
    second.bert = third.bert = first.bert
    batches = [make_batch("sequence"), with_classes(make_batch("base")), make_batch("sequence")]
    want = [model(**batch) for model, batch in zip((first, second, third), batches, strict=True)]
    with nta.patch(nn.ModuleList([first, second, third])) as handle:
        assert str(handle).count("whose base model packs by itself") == 2
        for model, batch, before in zip((first, second, third), batches, want, strict=True):
            assert_same_outputs(model(**batch), before, batch["attention_mask"])
    assert "forward" not in vars(first.bert)


def test_handle_lists_layers_and_calls():
    model, batch = make("LlamaForCausalLM"), make_batch()
    with nta.patch(model) as handle:
        told = str(handle)
        assert "model.layers.0.self_attn … model.layers.1.self_attn: LlamaAttention" in told
        assert "no calls yet" in told
        model(**batch)
        model(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]))
        model(**batch)
        tokens, positions = 2 * int(batch["attention_mask"].sum()), 2 * batch["attention_mask"].numel()
        assert f"2 calls ran packed: {tokens} tokens in {positions} positions, pad ratio" in str(handle)
        assert (handle.counts.tokens, handle.counts.positions) == (tokens, positions)
        assert handle.counts.pad_ratio == pytest.approx(positions / tokens)


def test_model_on_meta_gives_shapes():
    with torch.device("meta"):
        model = make("LlamaForCausalLM")
        nta.patch(model)
        ids = torch.zeros(2, 4, dtype=torch.long)
    assert model(ids).logits.shape == (2, 4, model.config.vocab_size)


def test_labels_of_another_width_are_refused():
    model, batch = make("BertForTokenClassification"), with_classes(make_batch("base"))
    with nta.patch(model), pytest.raises(ValueError, match="batch_size"):
        model(**{**batch, "labels": batch["labels"][:, 1:].contiguous()})


def test_hidden_states_in_another_form_fall_back():
    """Those of Gemma 3n are (4, B, L, E), which can't be padded like (1, T, E)."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    config = transformers.Gemma3nTextConfig(
        **tiny.TEXT | layers, vocab_size_per_layer_input=tiny.VOCABULARY, hidden_size_per_layer_input=8,
        num_key_value_heads=2, head_dim=8, laurel_rank=4, num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    model = transformers.Gemma3nTextModel._from_config(config, attn_implementation="sdpa").eval()
    mask = (torch.arange(9) < torch.tensor([[9], [4]])).long()
    ids = torch.randint(5, tiny.VOCABULARY, mask.shape)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        with nta.patch(model, packing="always") as handle, pytest.warns(NotPackedWarning, match="'hidden_states'"):
            got = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert [x.shape for x in got] == [x.shape for x in want] == [(4, 2, 9, 48)] * 3
    torch.testing.assert_close(got[-1][:, :, :4], want[-1][:, :, :4], rtol=1e-4, atol=2e-5)
    assert any(why and "its output 'hidden_states'" in why for why in handle.calls)
