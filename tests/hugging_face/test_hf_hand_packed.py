"""Rows that the caller packed, with `cu_seq_lens_q`, with restarting `position_ids`, or both: right or refused."""

import copy
import functools
import warnings

import pytest
import rows_matrix
import tiny
import torch
import transformers
from sweeps import sweep_except
from transformers import DataCollatorWithFlattening
from transformers.models.auto import modeling_auto

import nt_attention as nta
from nt_attention.hf.route import by_name
from nt_attention.patching.handle import NotPackedWarning

LENGTHS = (7, 1, 13, 5)
LAYOUT = nta.SequenceLayout.from_lengths(LENGTHS)
OFFSETS = LAYOUT.cu_seqlens

close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)

# Type, class → what happens to rows packed by hand: patched, and registered. A word for all forms, or one for each.
FORMS = rows_matrix.FORMS[1:]
NO_POSITIONS = {"cu_seq_lens_q": "refused"}
CASES = {
    ("gptj", "GPTJForCausalLM"): ("right", "refused"),
    ("gptj", "GPTJForSequenceClassification"): ("right", "refused"),
    ("deberta-v2", "DebertaV2ForTokenClassification"): ("right", None),
    ("bloom", "BloomForSequenceClassification"): ("right", "refused"),
    ("squeezebert", "SqueezeBertModel"): ("right", None),
    ("tapas", "TapasModel"): ("right", "refused"),
    ("esm", "EsmModel"): ("right", "refused"),
    ("llama", "LlamaForCausalLM"): ("right", "right"),
    ("bert", "BertModel"): ("right", NO_POSITIONS),
    ("roberta", "RobertaForMaskedLM"): ("right", NO_POSITIONS),
    ("distilbert", "DistilBertModel"): ("right", "refused"),
    ("gpt_bigcode", "GPTBigCodeForCausalLM"): ("right", "refused"),
    ("persimmon", "PersimmonModel"): ("right", "refused"),
    ("ctrl", "CTRLModel"): ("right", "refused"),
    ("markuplm", "MarkupLMModel"): ("right", "refused"),
    ("layoutlm", "LayoutLMModel"): ("right", "refused"),
    ("llama4_text", "Llama4TextModel"): ("right", "refused"),
    ("bart", "BartForCausalLM"): ("right", "refused"),
    ("t5", "T5Model"): ("refused", NO_POSITIONS),
    ("git", "GitModel"): ("refused", "refused"),
    ("jamba", "JambaModel"): ("right", "refused"),
}


SELECTED = ("gptj", "esm", "llama", "bert", "distilbert", "bart", "t5", "bloom", "squeezebert")


@pytest.mark.parametrize(("model_type", "name"), sweep_except(CASES, *[x for x in CASES if x[0] in SELECTED]))
def test_every_form_is_right_or_refused(model_type, name):
    with warnings.catch_warnings():
        entry = rows_matrix.outcome_of((model_type, name, ""))
    assert "not built" not in entry
    for way, want in zip(rows_matrix.WAYS, CASES[model_type, name], strict=True):
        if want is None:
            continue  # transformers runs the class with its own attention, without asking ours
        for form in FORMS:
            each = want.get(form, "right") if isinstance(want, dict) else want
            assert entry[way][form].startswith(each), (way, form, entry[way][form])


def make(model_type="gptj", name="GPTJForCausalLM", **more):
    """A small model of a family that `tiny` may not have."""
    if model_type in tiny.CONFIGS:
        return tiny.make(model_type, name, **more)
    kind = getattr(transformers, name)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 64, "vocab_size": tiny.VOCABULARY}
    torch.manual_seed(0)
    return kind(kind.config_class(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more)).eval()


def packed_row(labels=False):
    ids = torch.randint(5, tiny.VOCABULARY, (1, LAYOUT.total), generator=torch.Generator().manual_seed(3))
    row = {"input_ids": ids, "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 13, "max_length_k": 13}
    return {**row, "labels": ids} if labels else row


def padded(row):
    ids = LAYOUT.pad(row["input_ids"][0])
    mask = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    return {**batch, "labels": ids.masked_fill(~mask, -100)} if "labels" in row else batch


@pytest.mark.parametrize(("model_type", "name"), [("gptj", "GPTJForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_loss_and_gradients_are_those_of_the_padded_batch(model_type, name):
    model, row = make(model_type, name).train(), packed_row(labels=True)
    by_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": ids.tolist()} for ids in row["input_ids"][0].split(LENGTHS)]
    )
    want = model(**padded(row)).loss
    gradients = torch.autograd.grad(want, list(model.parameters()), allow_unused=True)
    with nta.patch(model) as handle:
        for inputs in (row, by_collator):
            out = model(**inputs)
            assert out.logits.shape[:2] == (1, LAYOUT.total)
            close(out.loss, want)
            close(torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True), gradients)
    assert handle.calls == {None: 2}


@pytest.mark.parametrize("name", ["BertModel", "GPTJForCausalLM"])
def test_a_mask_hides_tokens_of_the_row(name):
    model = make("bert" if name == "BertModel" else "gptj", name)
    row = {name: x for name, x in packed_row().items() if not name.startswith("max")}
    mask = torch.ones_like(row["input_ids"])
    mask[0, 7:9] = mask[0, 23:] = 0  # all of the second sequence, and the first and last tokens of others
    kept = [row["input_ids"][:, 0:7], row["input_ids"][:, 9:21], row["input_ids"][:, 21:23]]
    positions = [torch.arange(7), torch.arange(1, 13), torch.arange(2)]
    alone = [model(x, position_ids=at[None])[0] for x, at in zip(kept, positions, strict=True)]
    with nta.patch(model):
        got = model(**row, position_ids=LAYOUT.position_ids[None], attention_mask=mask)[0]
    close(got[mask.bool()], torch.cat(alone, 1)[0])
    assert not got[~mask.bool()].any()


def wrong_inputs():
    row, positions = packed_row(), LAYOUT.position_ids[None]
    two = {"input_ids": row["input_ids"].view(2, 13)}
    return {
        "too short": ({**row, "cu_seq_lens_q": OFFSETS[:-1]}, "cu_seq_lens_q ends at 21, but the input is"),
        "a list": ({**row, "cu_seq_lens_q": OFFSETS.tolist()}, "must be a tensor of offsets, got list"),
        "keys": ({**row, "cu_seq_lens_k": torch.tensor([0, 5, 26])}, "cu_seq_lens_k differs"),
        "a restart": (
            {**row, "position_ids": torch.cat([positions[:, :3], positions[:, :23]], 1)},
            "token 3 has position 0 after 2, but cu_seq_lens_q has no sequence that begins there",
        ),
        "no restart": (
            {**row, "position_ids": torch.arange(26)[None]},
            "token 7 has position 7 after 6, but cu_seq_lens_q has a sequence that begins there",
        ),
        "over two rows": ({**row, **two}, "begins in one row of 13 tokens and ends in another"),
    }


@pytest.mark.parametrize("which", wrong_inputs())
def test_inputs_that_contradict_each_other_raise(which):
    inputs, message = wrong_inputs()[which]
    model = make()
    with nta.patch(model), pytest.raises(ValueError, match=message):
        model(**inputs)


def test_positions_may_jump_inside_of_a_sequence_of_the_lengths():
    model, row = make("llama", "LlamaForCausalLM"), packed_row()
    positions = LAYOUT.position_ids[None].clone()
    positions[0, 10:21] += 9
    parts = zip(row["input_ids"].split(LENGTHS, 1), positions.split(LENGTHS, 1), strict=True)
    want = torch.cat([model(ids, position_ids=at, attention_mask=torch.ones_like(ids)).logits for ids, at in parts], 1)
    with nta.patch(model):
        close(model(**row, position_ids=positions).logits, want)


@pytest.mark.parametrize("form", ["cu_seq_lens_q", "position_ids"])
def test_a_call_that_falls_back_does_not_mix_sequences(form):
    row = packed_row() if form == "cu_seq_lens_q" else {"input_ids": packed_row()["input_ids"]}
    row["position_ids"] = LAYOUT.position_ids[None]
    model = make()
    with (
        nta.patch(model),
        pytest.raises(ValueError, match="would mix them, because this call can't run packed: it asks"),
    ):
        model(**row, output_attentions=True)
    model = make("llama", "LlamaForCausalLM")
    want = [model(ids).logits for ids in row["input_ids"].split(LENGTHS, 1)]
    with nta.patch(model), pytest.warns(NotPackedWarning, match="it asks for a cache"):
        close(model(**row, use_cache=True).logits, torch.cat(want, 1))


def test_head_that_falls_back_passes_the_rows_to_its_base_model():
    model, row = make(), packed_row(labels=True)
    want = torch.cat([model(ids).logits for ids in row["input_ids"].split(LENGTHS, 1)], 1)
    with nta.patch(model), pytest.warns(NotPackedWarning, match="logits_to_keep"):
        close(model(**row, logits_to_keep=LAYOUT.total).logits, want)


def test_axes_with_positions_of_text_first():
    """As in Qwen2-VL: the first of four axes has the positions in the text, which restart."""
    from nt_attention.hf.pack import inputs

    ids, mask = torch.zeros(1, 26, dtype=torch.int64), torch.ones(1, 26)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": LAYOUT.position_ids.expand(4, 1, -1)}
    assert inputs.read_packing(given, False).layout.lengths.tolist() == list(LENGTHS)


def with_copied_layer(model_type="llama", name="LlamaForCausalLM"):
    model = tiny.make(model_type, name, "sdpa")
    layers = model.model.layers if model_type == "llama" else model.encoder.layer
    layers.append(copy.deepcopy(layers[-1]))  # with a copy of the config
    model.config.num_hidden_layers = len(layers)
    return model


@pytest.mark.parametrize(("model_type", "name"), [("llama", "LlamaForCausalLM"), ("bert", "BertModel")])
def test_layer_that_was_copied_before(model_type, name):
    model, row = with_copied_layer(model_type, name), packed_row()
    row["position_ids"] = LAYOUT.position_ids[None]
    want = torch.cat([model(ids, use_cache=False)[0] for ids in row["input_ids"].split(LENGTHS, 1)], 1)
    for padding_free in (True, False):
        with nta.patch(model, padding_free=padding_free):
            close(model(**row, use_cache=False)[0], want)
            close(model(**padded(row), use_cache=False)[0][padded(row)["attention_mask"].bool()], want[0])
        implementations = {x.config._attn_implementation for x in model.modules() if hasattr(x, "config")}
        assert implementations == {"sdpa"}
    with pytest.raises(ValueError, match=r"layer.*has a config of its own, with the attention 'sdpa'"):
        model.set_attn_implementation(nta.hf.register())


def test_layer_that_is_appended_to_a_patched_model():
    model, row = tiny.make("llama", "LlamaForCausalLM", "sdpa"), packed_row()
    row["position_ids"] = LAYOUT.position_ids[None]
    with nta.patch(model):
        model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
        model.config.num_hidden_layers += 1
        got = model(**row).logits
    want = torch.cat([model(ids, use_cache=False).logits for ids in row["input_ids"].split(LENGTHS, 1)], 1)
    close(got, want)


def test_models_of_the_lists_are_models_of_transformers():
    known = set(modeling_auto.MODEL_MAPPING_NAMES) | set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    lists = by_name.MIX_ROWS | by_name.NEED_EAGER | by_name.NOT_SUPPORTED
    assert lists - known <= {"t5gemma2_decoder", "encoder-decoder"}


@pytest.mark.parametrize(("model_type", "name"), [("gptj", "GPTJForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_seq_idx_of_a_collator_is_that_of_the_row(model_type, name):
    model = make(model_type, name)
    row = torch.randint(5, tiny.VOCABULARY, (1, LAYOUT.total))
    given = {"input_ids": row, "position_ids": LAYOUT.position_ids[None], "use_cache": False}
    with torch.no_grad(), nta.patch(model, on_fallback="raise") as handle:
        want = model(**given).logits
        close(model(**given, seq_idx=LAYOUT.sequence_ids.int()[None]).logits, want)
    assert handle.calls == {None: 2}


def test_left_padding_with_a_static_cache_is_no_packed_row():
    config = transformers.Llama4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_chunk_size=4, num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config).eval()
    ids = torch.randint(5, tiny.VOCABULARY, (2, 9))
    mask = (torch.arange(9) >= torch.tensor([[4], [0]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(ids, **options)
    with nta.patch(model):
        assert torch.equal(model.generate(ids, **options), want)


class Smoothed(transformers.LlamaForCausalLM):
    """Its head mixes the tokens of a row, so only its base model packs."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        out = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        return transformers.utils.ModelOutput(logits=out.logits + 0.1 * out.logits.cumsum(1))


def test_head_that_mixes_the_tokens_of_a_row_refuses_packed_rows():
    model = Smoothed(tiny.make("llama", "LlamaForCausalLM").config).eval()
    row = torch.randint(5, tiny.VOCABULARY, (1, LAYOUT.total))
    nta.patch(model)
    with pytest.raises(ValueError, match="its head computes with whole rows: pass a padded batch"):
        model(input_ids=row, position_ids=LAYOUT.position_ids[None])


class Extended(transformers.BertPreTrainedModel):
    """It adds a token to each row for its base model, which counts positions by itself."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.first = torch.nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.classifier = torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None):
        embeds = self.bert.get_input_embeddings()(input_ids)
        embeds = torch.cat([self.first.expand(len(embeds), -1, -1), embeds], 1)
        if attention_mask is not None:
            attention_mask = torch.nn.functional.pad(attention_mask, (1, 0), value=1)
        states = self.bert(inputs_embeds=embeds, attention_mask=attention_mask).last_hidden_state[:, 1:]
        return transformers.utils.ModelOutput(logits=self.classifier(states))


def test_positions_of_a_head_are_not_those_of_longer_rows():
    model = Extended(tiny.config_of("bert")).eval()
    ids = torch.randint(5, tiny.VOCABULARY, (2, 6))
    mask = (torch.arange(6) < torch.tensor([[6], [3]])).long()
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(6)[None]}
    want = model(**given).logits
    with nta.patch(model) as handle:
        close(model(**given).logits[mask.bool()], want[mask.bool()])
    assert handle.calls == {None: 1}
