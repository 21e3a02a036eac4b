"""Inputs of every family: logits_to_keep, embeddings, token types, learned positions, pooling, holes in the mask."""

import inspect

import pytest
import tiny
import torch
import transformers
from family_models import LAYOUT, check_outputs, close, families, heads_ending_in, labels_for, run, sides
from sweeps import covering, sweep_except
from tiny import EVERY, LENGTH, LENGTHS, PAD

import nt_attention as nta

CAUSAL_HEADS = heads_ending_in("ForCausalLM", "LMHeadModel")
SOME = ("Gemma2ForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM")
some_causal_heads = pytest.mark.parametrize(("model_type", "name"), heads_ending_in(*SOME))


@covering(
    {
        "model_type, name": CAUSAL_HEADS,
        "keep": [1, 3, 40, torch.tensor([0, 5, -1, 9])],
        "side": ["left", "right", "right"],
    }
)
def test_logits_to_keep_are_positions_of_the_padded_rows(model_type, name, keep, side):
    model = tiny.make(model_type, name)
    want = tiny.pad(tiny.alone(model_type, name)["logits"], side)
    want = want[:, -keep:] if isinstance(keep, int) else want[:, keep]
    with nta.patch(model):
        close(run(model, **tiny.batch_of(model_type, side), logits_to_keep=keep).logits, want)


@sides
@some_causal_heads
def test_logits_to_keep_with_other_positions_in_each_row(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    want = tiny.pad(tiny.alone(model_type, name)["logits"], side)
    places = torch.tensor([[3, 10], [16, 0], [8, 12], [9, 2]])
    with nta.patch(model):
        close(run(model, **batch, logits_to_keep=places).logits, want[torch.arange(4)[:, None], places])


@pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "slice_logits_to_keep"), reason="this version takes no mask"
)
@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
@sides
@some_causal_heads
def test_logits_to_keep_as_a_mask(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    shown = tiny.mask_of(side) & (torch.arange(LENGTH) % 3 == 1)
    want = run(model, **batch, logits_to_keep=shown).logits
    with nta.patch(model):
        close(run(model, **batch, logits_to_keep=shown).logits, want)


@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
@sides
@some_causal_heads
def test_labels_of_kept_logits(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    labels = labels_for(name, side)["labels"][:, -9:]
    want = run(model, **batch, labels=labels, logits_to_keep=9).loss
    with nta.patch(model):
        close(run(model, **batch, labels=labels, logits_to_keep=9).loss, want, 2e-5)


@pytest.mark.parametrize(("model_type", "name"), sweep_except(EVERY, *EVERY[1::2]))
def test_inputs_embeds(model_type, name):
    # without ids, a decoder classifies a row by its last position
    side = "left" if tiny.per_sequence(name) and model_type not in tiny.ENCODERS else "right"
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    embed = model.get_input_embeddings()
    with torch.no_grad():
        want = tiny.run_alone(model, [{"inputs_embeds": embed(ids[None])} for ids in tiny.sequences()])
        embeds = embed(batch.pop("input_ids"))
    with nta.patch(model):
        check_outputs(run(model, inputs_embeds=embeds, **batch, output_hidden_states=True), want, side)
        as_tuple = run(model, inputs_embeds=embeds, **batch, return_dict=False)
        as_dict = run(model, inputs_embeds=embeds, **batch)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(as_dict)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple, as_dict.to_tuple(), strict=True))


WITH_TOKEN_TYPES = [
    (model_type, name)
    for model_type, name in EVERY
    if "token_type_ids" in inspect.signature(getattr(transformers, name).forward).parameters
]


@covering({"model_type, name": WITH_TOKEN_TYPES, "side": ["right", "left"]})
def test_token_type_ids(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    types = torch.randint(2, (LAYOUT.total,))
    rows = zip(tiny.sequences(), types.split(LENGTHS), strict=True)
    want = tiny.run_alone(model, [{"input_ids": ids[None], "token_type_ids": kinds[None]} for ids, kinds in rows])
    with nta.patch(model):
        out = run(model, **batch, token_type_ids=tiny.pad(types, side), output_hidden_states=True)
    check_outputs(out, want, side)


@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
@pytest.mark.parametrize("holes", ["padding ids", "other ids"])
@families(*tiny.CONFIGS)
def test_padding_between_tokens(model_type, name, holes):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, "right")
    mask = batch["attention_mask"]
    mask[0, [2, 5]] = mask[2, 3:6] = mask[3, 8] = 0
    if holes == "padding ids":
        batch["input_ids"] = batch["input_ids"].masked_fill(mask == 0, PAD)
    want = run(model, **batch).last_hidden_state[mask.bool()]
    with nta.patch(model):
        close(run(model, **batch).last_hidden_state[mask.bool()], want)


LEARNED = ("albert", "bert", "distilbert", "electra", "gpt2", "opt", "roberta", "xlm-roberta")


@sides
@pytest.mark.parametrize("given", ["ids", "embeddings"])
@families(*LEARNED)
def test_learned_positions_are_those_of_the_padded_row(model_type, name, given, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    batch.pop("position_ids", None)
    if given == "embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    want = run(model, **batch).last_hidden_state[tiny.mask_of(side)]
    with nta.patch(model) as handle:
        close(run(model, **batch).last_hidden_state[tiny.mask_of(side)], want)
    assert handle.calls == {None: 1}


@families(*LEARNED)
def test_batch_with_more_tokens_than_learned_positions(model_type, name):
    model = tiny.make(model_type, name, max_position_embeddings=LENGTH + PAD + 1)
    batch = tiny.batch_of(model_type, "right")
    assert LAYOUT.total > LENGTH + PAD + 1
    want = run(model, **batch).last_hidden_state[tiny.mask_of("right")]
    with nta.patch(model) as handle:
        close(run(model, **batch).last_hidden_state[tiny.mask_of("right")], want)
    assert handle.calls == {None: 1}


POOLING = [
    ("eurobert", "bos"),
    ("eurobert", "late"),
    ("eurobert", "mean"),
    ("modernbert", "cls"),
    ("modernbert", "mean"),
]


@sides
@pytest.mark.parametrize(("model_type", "pooling"), POOLING)
def test_sequence_classifiers_pool_real_tokens(model_type, pooling, side):
    name = f"{tiny.CONFIGS[model_type][0]}ForSequenceClassification"
    model = tiny.make(model_type, name, classifier_pooling=pooling)
    want = tiny.run_alone(model, [{"input_ids": ids[None]} for ids in tiny.sequences()])["logits"]
    with nta.patch(model):
        close(run(model, **tiny.batch_of(model_type, side)).logits, want)


ESM = {
    "ESM-2": {},
    "ESM-1b": {"position_embedding_type": "absolute", "emb_layer_norm_before": True},
    "without token dropout": {"token_dropout": False},
}


@pytest.mark.parametrize("form", ["right", "left", "packed"])
@pytest.mark.parametrize("kind", ESM)
def test_esm_token_dropout(kind, form):
    model, ids = tiny.make("esm", "EsmModel", **ESM[kind]), [ids.clone() for ids in tiny.sequences()]
    ids[0][[1, 4]] = ids[2][[0, 3, 6, 7, 12]] = ids[3][5] = 4
    want = tiny.run_alone(model, [{"input_ids": one[None]} for one in ids])
    with nta.patch(model):
        if form == "packed":
            first = PAD + 1 if kind == "ESM-1b" else 0
            row = {"input_ids": torch.cat(ids)[None], "position_ids": LAYOUT.position_ids[None] + first}
            close(run(model, **row).last_hidden_state[0], want["last_hidden_state"])
        else:
            batch = {**tiny.batch_of("esm", form), "input_ids": tiny.pad(torch.cat(ids), form, PAD)}
            check_outputs(run(model, **batch, output_hidden_states=True), want, form)
