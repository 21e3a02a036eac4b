"""Every family and head: padded, packed and trained, against each sequence by itself under eager attention."""

import functools
import inspect

import pytest
import tiny
import torch
import transformers
from tiny import EVERY, LENGTH, LENGTHS, PAD
from torch import nn
from transformers.pytorch_utils import Conv1D

import nt_attention as nta

LAYOUT = nta.SequenceLayout.from_lengths(LENGTHS)
LOWEST = torch.finfo(torch.float32).min
NO_SDPA = ("gemma2", "gpt_oss")
BY_ID = ("roberta", "xlm-roberta")
WITHOUT_POSITION_IDS = ("distilbert", "esm", "modernbert")  # their attention is passed none

# on a CPU the reference runs softcap, and says that it is slow
pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")

every = pytest.mark.parametrize(("model_type", "name"), EVERY, ids=[name for _, name in EVERY])
sides = pytest.mark.parametrize("side", ["right", "left"])


def having(*endings):
    """The heads with these endings."""
    some = [(model_type, name) for model_type, name in EVERY if name.endswith(endings)]
    return pytest.mark.parametrize(("model_type", "name"), some, ids=[name for _, name in some])


def families(*which):
    some = {model_type: name for model_type, name in reversed(EVERY) if model_type in which}
    return pytest.mark.parametrize(("model_type", "name"), some.items(), ids=some)


def close(got, want, tolerance=5e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check(out, want, side=None):
    """``out`` is a padded batch's, or a packed row's if ``side`` is None; padding may hold anything."""
    assert want.keys() <= out.keys()
    for key, theirs in want.items():
        pairs = zip(out[key], theirs, strict=True) if key == "hidden_states" else [(out[key], theirs)]
        for mine, there in pairs:
            if there.shape[0] == LAYOUT.total:
                mine = mine[0] if side is None else mine[tiny.mask_of(side)]
            close(mine, there)


def check_padding(out, name, side):
    for key in ("last_hidden_state", "hidden_states", "logits", "start_logits", "end_logits"):
        if key not in out or (key == "logits" and tiny.per_sequence(name)):
            continue
        for part in out[key] if key == "hidden_states" else [out[key]]:
            assert part.shape[:2] == (4, LENGTH)
            assert (part[~tiny.mask_of(side)] == (LOWEST if key.startswith(("start", "end")) else 0)).all()


@torch.no_grad()
def run(model, **inputs):
    return model(**inputs)


STOCK = [
    (*family, implementation)
    for family in EVERY
    for implementation in ("eager", "sdpa")
    if implementation == "eager" or family[0] not in NO_SDPA
]


@sides
@pytest.mark.parametrize(("model_type", "name", "implementation"), STOCK, ids=[f"{x[1]}-{x[2]}" for x in STOCK])
def test_padded_batches_give_what_each_sequence_gives_alone(model_type, name, implementation, side):
    model = tiny.make(model_type, name, implementation)
    with nta.patch(model) as handle:
        out = run(model, **tiny.batch_of(model_type, side), output_hidden_states=True)
    assert handle.calls == {None: 1}
    assert out.keys() == tiny.alone(model_type, name).keys()
    check(out, tiny.alone(model_type, name), side)
    check_padding(out, name, side)


@sides
@every
def test_swapped_attention_alone_gives_it_too(model_type, name, side):
    want = dict(tiny.alone(model_type, name))
    if side == "left" and model_type in tiny.ENCODERS:  # stock heads read a row's first place, padding or not
        want = {key: value for key, value in want.items() if key != "pooler_output" and not tiny.per_sequence(name)}
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    with nta.patch(model, padding_free=False):
        check(run(model, **batch, output_hidden_states=True), want, side)
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        check(run(model, **batch, output_hidden_states=True), want, side)


def packed(model_type, by):
    """The sequences in one row, told apart by their positions or by their lengths."""
    first = PAD + 1 if model_type in BY_ID else 0
    row = {"input_ids": torch.cat(tiny.sequences())[None], "position_ids": LAYOUT.position_ids[None] + first}
    if by == "cu_seq_lens":
        row |= {"cu_seq_lens_q": LAYOUT.cu_seqlens, "cu_seq_lens_k": LAYOUT.cu_seqlens}
        row |= {"max_length_q": LAYOUT.max_seqlen, "max_length_k": LAYOUT.max_seqlen}
    return row


PACKABLE = [(model_type, name) for model_type, name in EVERY if not tiny.per_sequence(name)]
packable = pytest.mark.parametrize(("model_type", "name"), PACKABLE, ids=[name for _, name in PACKABLE])
MASKS = {"no mask": {}, "a mask of ones": {"attention_mask": torch.ones(1, LAYOUT.total, dtype=torch.int64)}}


def wanted(model_type, name):
    return {key: value for key, value in tiny.alone(model_type, name).items() if key != "pooler_output"}


@pytest.mark.filterwarnings("ignore::nt_attention.patching.patch.NotPackedWarning")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@packable
def test_packed_rows_are_kept_apart(model_type, name, by, mask):
    model, row = tiny.make(model_type, name), {**packed(model_type, by), **MASKS[mask], "output_hidden_states": True}
    want = wanted(model_type, name)
    with nta.patch(model):
        check(run(model, **row), want)
    with nta.patch(model, padding_free=False):
        if by == "cu_seq_lens" or model_type not in WITHOUT_POSITION_IDS:
            check(run(model, **row), want)
    model.set_attn_implementation(nta.hf.register())
    if by == "cu_seq_lens" or model_type not in WITHOUT_POSITION_IDS:
        check(run(model, **row), want)
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            check(run(model, **row, use_cache=False), want)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@families(*[model_type for model_type in tiny.CONFIGS if model_type not in WITHOUT_POSITION_IDS])
def test_packed_rows_with_padding_of_their_own_are_kept_apart(model_type, name, by):
    model, row = tiny.make(model_type, name), packed(model_type, by)
    places = row["position_ids"][:, :3]
    ends = LAYOUT.cu_seqlens.tolist()
    row["attention_mask"] = torch.tensor([[1] * LAYOUT.total + [0] * 3])
    row["input_ids"] = nn.functional.pad(row["input_ids"], (0, 3), value=PAD)
    row["position_ids"] = torch.cat([row["position_ids"], places], 1)
    if by == "cu_seq_lens":
        row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = torch.tensor([*ends, ends[-1] + 3], dtype=torch.int32)
    want = tiny.alone(model_type, name)["last_hidden_state"]
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        close(run(model, **row).last_hidden_state[0, : LAYOUT.total], want)
    if by == "position_ids":
        model.set_attn_implementation("eager")
        with nta.patch(model):
            close(run(model, **row).last_hidden_state[0, : LAYOUT.total], want)


def labels_of(name, side):
    """Labels of a padded batch: none at padding, and none where a causal model would predict from padding."""
    generator = torch.Generator().manual_seed(5)
    if tiny.per_sequence(name):
        return {"labels": torch.tensor([0, 2, 1, 1])}
    if name.endswith("ForQuestionAnswering"):
        first = tiny.mask_of(side).int().argmax(1)
        return {
            "start_positions": torch.tensor([2, 0, 11, 0]) + first,
            "end_positions": first + torch.tensor([6, 0, 12, 9]),
        }
    kinds = 3 if name.endswith("ForTokenClassification") else tiny.VOCABULARY
    labels = torch.randint(kinds, (LAYOUT.total,), generator=generator)
    if side == "left" and name.endswith(("ForCausalLM", "LMHeadModel")):
        labels = labels.masked_fill(LAYOUT.position_ids == 0, -100)
    return {"labels": tiny.pad(labels, side, -100)}


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@functools.cache
def trained(model_type, name):
    """The loss and the gradients of the padded batch under eager attention, padded on the right."""
    model, labels = tiny.make(model_type, name).train(), labels_of(name, "right")
    out = model(**tiny.batch_of(model_type, "right"), **labels)
    loss = out.loss
    if name.endswith("ForQuestionAnswering"):  # the stock loss counts padding among the places that may be chosen
        hidden = ~tiny.mask_of("right")
        starts, ends = (logits.masked_fill(hidden, -torch.inf) for logits in (out.start_logits, out.end_logits))
        entropy = nn.functional.cross_entropy
        loss = (entropy(starts, labels["start_positions"]) + entropy(ends, labels["end_positions"])) / 2
    return loss.detach(), gradients(model, loss)


@sides
@having(*tiny.ENDINGS[2:])
def test_losses_and_gradients_are_those_of_the_padded_batch(model_type, name, side):
    model = tiny.make(model_type, name).train()
    batch = {**tiny.batch_of(model_type, side), **labels_of(name, side)}
    want, want_gradients = trained(model_type, name)
    with nta.patch(model):
        out = model(**batch)
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    close(out.loss, want, 2e-5)
    for (path, _), mine, theirs in zip(
        model.named_parameters(), gradients(model, out.loss), want_gradients, strict=True
    ):
        assert (mine is None) == (theirs is None) or theirs.abs().max() < 1e-12, path
        if mine is not None:
            close(mine, theirs, 2e-4)


@having("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
def test_logits_stay_packed_in_training_unless_they_are_asked_for(model_type, name):
    model = tiny.make(model_type, name).train()
    batch = {**tiny.batch_of(model_type, "right"), **labels_of(name, "right")}
    want = tiny.alone(model_type, name)["logits"]
    with nta.patch(model):
        close(run(model, **batch).logits, want[None])
        check_padding(run(model, **tiny.batch_of(model_type, "right")), name, "right")
        model.eval()
        check_padding(run(model, **batch), name, "right")
        model.train()
    with nta.patch(model, logits="padded"):
        out = run(model, **batch)
    close(out.logits[tiny.mask_of("right")], want)
    check_padding(out, name, "right")


def state_of(model):
    modules = {path: set(vars(module)) for path, module in model.named_modules()}
    return modules, dict(vars(model.config)), list(model.state_dict())


@every
def test_removal_gives_the_very_model_back(model_type, name):
    implementation = "eager" if model_type in NO_SDPA else "sdpa"
    model, batch = tiny.make(model_type, name, implementation), tiny.batch_of(model_type, "right")
    before, state = run(model, **batch), state_of(model)
    with nta.patch(model):
        run(model, **batch)
        assert list(model.state_dict()) == state[2]
    assert state_of(model) == state
    after = run(model, **batch)
    assert all(torch.equal(after[key], before[key]) for key in before.keys() - {"past_key_values"})
    assert after.keys() == before.keys()


@sides
@every
def test_every_linear_sees_real_tokens_only(model_type, name, side):
    model = tiny.make(model_type, name)
    base, seen = model.base_model if tiny.per_sequence(name) else model, {}
    for path, module in base.named_modules():
        # an expert sees the tokens that are sent to it, a pooler the first of each sequence
        if isinstance(module, nn.Linear | Conv1D) and "pooler" not in path and ".experts." not in path:
            module.register_forward_pre_hook(
                lambda _, inputs, path=path: seen.update({path: inputs[0].shape[:-1].numel()})
            )
    with nta.patch(model):
        run(model, **tiny.batch_of(model_type, side))
    assert set(seen.values()) == {LAYOUT.total}, seen
    assert "lm_head" in seen or not name.endswith(("ForCausalLM", "LMHeadModel"))


@sides
@pytest.mark.parametrize("keep", [1, 3, 40, torch.tensor([0, 5, -1, 9])], ids=["1", "3", "40", "places"])
@having("ForCausalLM", "LMHeadModel")
def test_logits_to_keep_are_places_of_the_padded_rows(model_type, name, keep, side):
    model = tiny.make(model_type, name)
    want = tiny.pad(tiny.alone(model_type, name)["logits"], side)
    want = want[:, -keep:] if isinstance(keep, int) else want[:, keep]
    with nta.patch(model):
        close(run(model, **tiny.batch_of(model_type, side), logits_to_keep=keep).logits, want)


SOME = ("Gemma2ForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM")


@sides
@having(*SOME)
def test_logits_to_keep_may_be_other_places_in_each_row(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    want = tiny.pad(tiny.alone(model_type, name)["logits"], side)
    places = torch.tensor([[3, 10], [16, 0], [8, 12], [9, 2]])
    with nta.patch(model):
        close(run(model, **batch, logits_to_keep=places).logits, want[torch.arange(4)[:, None], places])


@pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "slice_logits_to_keep"), reason="this version takes no mask"
)
@pytest.mark.filterwarnings("ignore::nt_attention.patching.patch.NotPackedWarning")
@sides
@having(*SOME)
def test_logits_to_keep_may_be_a_mask(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    shown = tiny.mask_of(side) & (torch.arange(LENGTH) % 3 == 1)
    want = run(model, **batch, logits_to_keep=shown).logits
    with nta.patch(model):
        close(run(model, **batch, logits_to_keep=shown).logits, want)


@pytest.mark.filterwarnings("ignore::nt_attention.patching.patch.NotPackedWarning")
@sides
@having(*SOME)
def test_labels_of_the_kept_logits_give_the_padded_loss(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    labels = labels_of(name, side)["labels"][:, -9:]
    want = run(model, **batch, labels=labels, logits_to_keep=9).loss
    with nta.patch(model):
        close(run(model, **batch, labels=labels, logits_to_keep=9).loss, want, 2e-5)


@every
def test_embeddings_instead_of_ids(model_type, name):
    # without ids, a decoder classifies a row by its last place
    side = "left" if tiny.per_sequence(name) and model_type not in tiny.ENCODERS else "right"
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    embed = model.get_input_embeddings()
    with torch.no_grad():
        want = tiny.run_alone(model, [{"inputs_embeds": embed(ids[None])} for ids in tiny.sequences()])
        embeds = embed(batch.pop("input_ids"))
    with nta.patch(model):
        check(run(model, inputs_embeds=embeds, **batch, output_hidden_states=True), want, side)
        as_tuple = run(model, inputs_embeds=embeds, **batch, return_dict=False)
        as_dict = run(model, inputs_embeds=embeds, **batch)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(as_dict)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple, as_dict.to_tuple(), strict=True))


typed = [
    (model_type, name)
    for model_type, name in EVERY
    if "token_type_ids" in inspect.signature(getattr(transformers, name).forward).parameters
]


@sides
@pytest.mark.parametrize(("model_type", "name"), typed, ids=[name for _, name in typed])
def test_token_type_ids_are_packed(model_type, name, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    types = torch.randint(2, (LAYOUT.total,))
    rows = zip(tiny.sequences(), types.split(LENGTHS), strict=True)
    want = tiny.run_alone(model, [{"input_ids": ids[None], "token_type_ids": kinds[None]} for ids, kinds in rows])
    with nta.patch(model):
        out = run(model, **batch, token_type_ids=tiny.pad(types, side), output_hidden_states=True)
    check(out, want, side)


@pytest.mark.filterwarnings("ignore::nt_attention.patching.patch.NotPackedWarning")
@pytest.mark.parametrize("holes", ["padding ids", "other ids"])
@families(*tiny.CONFIGS)
def test_padding_in_between_gives_what_the_padded_run_gives(model_type, name, holes):
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
def test_learned_positions_stay_those_of_the_padded_row(model_type, name, given, side):
    model, batch = tiny.make(model_type, name), tiny.batch_of(model_type, side)
    batch.pop("position_ids", None)
    if given == "embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    want = run(model, **batch).last_hidden_state[tiny.mask_of(side)]
    with nta.patch(model) as handle:
        close(run(model, **batch).last_hidden_state[tiny.mask_of(side)], want)
    assert handle.calls == {None: 1}


@families(*LEARNED)
def test_a_batch_may_hold_more_tokens_than_there_are_positions(model_type, name):
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
def test_classifiers_pool_real_tokens(model_type, pooling, side):
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
def test_esm_scales_a_sequence_by_its_own_masked_tokens(kind, form):
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
            check(run(model, **batch, output_hidden_states=True), want, form)
