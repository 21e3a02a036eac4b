"""Every family and head, patched and registered: each form of batch, against each sequence by itself under eager.

A new family or head is a line in `tiny.CONFIGS` or `tiny.ENDINGS`, a new form of batch one in `forms_of`.
"""

import copy
import functools
import inspect

import pytest
import tiny
import torch
import transformers
from cuda_graphs import DEVICE, cuda_graphs  # noqa: F401
from sweeps import sweep_except
from tiny import EVERY, LENGTH, LENGTHS, PAD
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import nt_attention as nta
from nt_attention.hf.families import CACHE
from nt_attention.hf.pack.rules import NO_PADDING
from nt_attention.hf.route.by_name import MIX_ROWS

pytestmark = pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")
LAYOUT = nta.SequenceLayout.from_lengths(LENGTHS)
OFFSETS = {"cu_seq_lens_q": LAYOUT.cu_seqlens, "cu_seq_lens_k": LAYOUT.cu_seqlens}
OFFSETS |= {"max_length_q": LAYOUT.max_seqlen, "max_length_k": LAYOUT.max_seqlen}
LOWEST = torch.finfo(torch.float32).min
NO_SDPA = ("gemma2", "gpt_oss")
WITHOUT_POSITION_IDS = ("distilbert", "esm", "modernbert")  # their attention is passed none
NEXT = ("ForCausalLM", "LMHeadModel")
TOKENS = (*NEXT, "ForMaskedLM", "ForTokenClassification")
HEADS = [(model_type, name) for model_type, name in EVERY if name.endswith(tiny.ENDINGS[2:])]
# All heads of these types and one of each other type run in `make test`: the others run the same code.
ALL_HEADS = ("llama", "roberta")
LAST = [(model_type, tiny.classes(model_type)[-1 - number % 2]) for number, model_type in enumerate(tiny.CONFIGS)]
every = pytest.mark.parametrize(
    ("model_type", "name"), sweep_except(EVERY, *LAST, *[x for x in EVERY if x[0] in ALL_HEADS])
)
# These have code for positions, masks, windows, sinks, experts or heads of their own.
KINDS = ("bert", "deepseek_v3", "distilbert", "esm", "gemma2", "gpt2", "gpt_oss", "modernbert", "opt")
SELECTED = [x for x in LAST if x[0] in KINDS] + [x for x in EVERY if x[0] in ALL_HEADS]
selected = pytest.mark.parametrize(("model_type", "name"), sweep_except(EVERY, *SELECTED))


def close(got, want, tolerance=5e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def run(model, **inputs):
    return model(**inputs)


def parts(want, sequences):
    """The outputs of some sequences, from those of all: (T, …) for tokens, (B, …) for sequences."""

    def some(x):
        if len(x) != LAYOUT.total:
            return x[sequences]
        of_each = x.split(LENGTHS)
        return torch.cat([of_each[n] for n in sequences])

    return {name: [some(y) for y in x] if name == "hidden_states" else some(x) for name, x in want.items()}


def check(out, want, tokens):
    """Compare the outputs at the tokens (B, L), and that they are 0, or the lowest number, at padding."""
    assert want.keys() <= out.keys()
    for key, theirs in want.items():
        for mine, there in zip(out[key], theirs, strict=True) if key == "hidden_states" else [(out[key], theirs)]:
            if mine.shape[:2] != tokens.shape:
                close(mine, there)
                continue
            close(mine[tokens], there)
            if key != "last_hidden_state" or "logits" not in want:
                assert (mine[~tokens] == (LOWEST if key.startswith(("start", "end")) else 0)).all(), key


def packed_forms(model_type, name):
    """Rows that the caller packed, as `forms_of`."""
    if tiny.per_sequence(name):
        return {}
    first = PAD + 1 if "roberta" in model_type else 0
    ids, positions = torch.cat(tiny.sequences())[None], LAYOUT.position_ids[None] + first
    row, ones, mask = {"input_ids": ids, "position_ids": positions}, torch.ones_like(ids), torch.ones(1, 0)
    forms = {
        "positions": row,
        "offsets": row | OFFSETS,
        "positions and a mask": row | {"attention_mask": ones},
        "several rows": {"input_ids": ids.expand(2, -1), "position_ids": positions},
    }
    mask = torch.cat([ones, torch.zeros(1, 3, dtype=torch.int64)], 1)
    ids, positions = nn.functional.pad(ids, (0, 3), value=PAD), torch.cat([positions, positions[:, :3]], 1)
    forms["padding"] = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    all_, made = [*range(len(LENGTHS))], {}
    for form, given in forms.items():
        rows, length = given["input_ids"].shape
        tokens = (torch.arange(length) < LAYOUT.total).expand(rows, -1)
        made[form] = given, {"sequences": all_ * rows, "tokens": tokens}
    return made


def forms_of(model_type, name):
    """Form → its arguments, and which sequences there are at which positions (B, L)."""
    right, left = (tiny.batch_of(model_type, side) for side in ("right", "left"))
    forms = {
        "right": (right, [0, 1, 2, 3]),
        "left": (left, [0, 1, 2, 3]),
        "fewer rows": ({key: x[[2, 0]] for key, x in right.items()}, [2, 0]),
        "one row": ({key: x[[3]] for key, x in right.items()}, [3]),
        "no padding": ({key: x[[0], : LENGTHS[0]] for key, x in right.items()}, [0]),
        "another number for tokens": (right | {"attention_mask": 3 * right["attention_mask"]}, [0, 1, 2, 3]),
    }
    if not tiny.per_sequence(name):
        forms["a row without tokens"] = ({key: torch.cat([0 * x[:1], x]) for key, x in right.items()}, [0, 1, 2, 3])
    return {
        form: (given, {"sequences": sequences, "tokens": given["attention_mask"].bool()})
        for form, (given, sequences) in forms.items()
    }


def linears_of(model, name):
    """The number of tokens that each linear layer of the last call got, by its path."""
    seen = {}
    for path, module in (model.base_model if tiny.per_sequence(name) else model).named_modules():
        # an expert sees the tokens that are sent to it, a pooler the first of each sequence
        if isinstance(module, nn.Linear | Conv1D) and "pooler" not in path and ".experts." not in path:
            module.register_forward_pre_hook(lambda _, x, path=path: seen.update({path: x[0].shape[:-1].numel()}))
    return seen


def state_of(model):
    modules = {path: set(vars(module)) for path, module in model.named_modules()}
    return modules, dict(vars(model.config)), list(model.state_dict())


@pytest.mark.usefixtures("uncompared")
@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")  # position_ids that restart beside a mask
@every
def test_patched(model_type, name):
    model = tiny.make(model_type, name, "eager" if model_type in NO_SDPA or "Token" in name else "sdpa")
    seen, want = linears_of(model, name), tiny.alone(model_type, name)
    right = tiny.batch_of(model_type, "right")
    before, state = run(model, **right, output_hidden_states=True), state_of(model)
    with nta.patch(model, packing="always") as handle:
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
        forms = forms_of(model_type, name) | packed_forms(model_type, name)
        for form, (given, there) in forms.items():
            seen.clear()
            out = run(model, **given, output_hidden_states=True)
            expected = parts(want, there["sequences"])
            if form in packed_forms(model_type, name):
                expected.pop("pooler_output", None)
            if form == "a row without tokens" and "pooler_output" in out:
                out["pooler_output"] = out.pooler_output[1:]
            check(out, expected, there["tokens"])
            assert set(seen.values()) == {int(there["tokens"].sum())}, (form, seen)
            assert "lm_head" in seen or not name.endswith(NEXT)
        assert handle.calls == {None: len(forms) - 1, NO_PADDING: 1}
        assert out.keys() - {"pooler_output"} == want.keys() - {"pooler_output"}
        if model.base_model is not model and "For" in name:  # as TRL does
            model.base_model(**right)
            assert handle.calls[None] == len(forms)
        assert list(model.state_dict()) == state[2]
    assert state_of(model) == state
    after = run(model, **right, output_hidden_states=True)
    assert all(torch.equal(after[key], before[key]) for key in before.keys() - {*CACHE, "hidden_states"})


def refuses_the_name(model):
    """It does not pass on where sequences begin, so its attention alone can't keep them apart."""
    for refused in (
        lambda: nta.patch(model, padding_free=False),
        lambda: model.set_attn_implementation(nta.hf.register()),
    ):
        with pytest.raises(ValueError, match="would mix the sequences of rows"):
            refused()


@every
def test_registered(model_type, name):
    model = tiny.make(model_type, name)
    if model_type in MIX_ROWS:
        refuses_the_name(model)
        return
    want = tiny.alone(model_type, name)
    forms = {form: x for form, x in forms_of(model_type, name).items() if form in ("right", "left")}
    packed = packed_forms(model_type, name)
    if model_type in WITHOUT_POSITION_IDS:
        packed = {form: x for form, x in packed.items() if form == "offsets"}

    def check_all():
        for form, (given, there) in {**forms, **packed}.items():
            expected = parts(want, there["sequences"])
            if form in packed or (form == "left" and model_type in tiny.ENCODERS):
                expected.pop("pooler_output", None)  # stock heads read the first position, even if it is padding
                if tiny.per_sequence(name):
                    continue
            out = run(model, **given, output_hidden_states=True, **({"use_cache": False} if "mask" in form else {}))
            for key, theirs in expected.items():
                for mine, x in zip(out[key], theirs, strict=True) if key == "hidden_states" else [(out[key], theirs)]:
                    close(mine[there["tokens"]] if mine.shape[:2] == there["tokens"].shape else mine, x)

    with nta.patch(model, padding_free=False):
        check_all()
    for over in ("sdpa", "eager"):
        model.set_attn_implementation(nta.hf.register(over))
        check_all()


def labels_for(name, side):
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
    if side == "left" and name.endswith(NEXT):
        labels = labels.masked_fill(LAYOUT.position_ids == 0, -100)
    return {"labels": tiny.pad(labels, side, -100)}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {path: parameter.grad for path, parameter in model.named_parameters() if parameter.grad is not None}


@functools.cache
def padded_loss_and_gradients(model_type, name):
    """The loss and the gradients of the padded batch under eager attention, padded on the right."""
    model, labels = tiny.make(model_type, name).train(), labels_for(name, "right")
    out = model(**tiny.batch_of(model_type, "right"), **labels)
    loss = out.loss
    if name.endswith("ForQuestionAnswering"):  # the stock loss includes padding in its softmax
        hidden = ~tiny.mask_of("right")
        starts, ends = (logits.masked_fill(hidden, -torch.inf) for logits in (out.start_logits, out.end_logits))
        entropy = nn.functional.cross_entropy
        loss = (entropy(starts, labels["start_positions"]) + entropy(ends, labels["end_positions"])) / 2
    return loss.detach(), gradients(model, loss)


@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")  # the loss of question answering, and pools
@pytest.mark.parametrize(("model_type", "name"), sweep_except(HEADS, *SELECTED))
def test_training(model_type, name):
    """Losses, gradients and logits, with and without checkpoints; under our name too, on padded and packed rows."""
    model = tiny.make(model_type, name).train()
    right, left = ({**tiny.batch_of(model_type, side), **labels_for(name, side)} for side in ("right", "left"))
    want, wanted = padded_loss_and_gradients(model_type, name)

    def compare(loss):
        close(loss, want, 2e-5)
        found = gradients(model, loss)
        largest = max(float(x.abs().max()) for x in wanted.values())
        for path in found.keys() | wanted.keys():
            mine, theirs = (x.get(path, torch.zeros(1)) for x in (found, wanted))
            assert float((mine - theirs).abs().max()) < 2e-4 * max(1.0, largest), path

    with nta.patch(model) as handle:
        for batch in (right, left):
            compare(model(**batch).loss)
        for reentrant in (False, True) if model.supports_gradient_checkpointing else ():
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            compare(model(**right).loss)
            model.gradient_checkpointing_disable()
        compare(checkpoint(lambda: model(**right).loss, use_reentrant=False))
        out = run(model, **right)
        assert handle.calls.keys() == {None}
    if name.endswith(TOKENS):
        values, layout = nta.hf.packed(out.logits)
        close(values, tiny.alone(model_type, name)["logits"])
        close(layout.pack(out.logits), values)
        assert not out.logits[~tiny.mask_of("right")].any()
    if name.endswith(NEXT) and model_type not in MIX_ROWS:
        model.set_attn_implementation(nta.hf.register())
        compare(model(**right).loss)
        labels = labels_for(name, "right")["labels"][tiny.mask_of("right")][None]
        labels = labels.masked_fill(LAYOUT.position_ids == 0, -100)
        row = {"input_ids": torch.cat(tiny.sequences())[None], "position_ids": LAYOUT.position_ids[None]}
        compare(model(**row, **OFFSETS, labels=labels).loss)


def arguments_of(model, model_type, name, side):
    """Further arguments of a padded batch → the same of each row alone, or None for the padded batch unpatched."""
    takes = inspect.signature(model.forward).parameters
    types = torch.randint(2, (LAYOUT.total,), generator=torch.Generator().manual_seed(2))
    batch, rows = tiny.batch_of(model_type, side), [{"input_ids": ids[None]} for ids in tiny.sequences()]
    if "token_type_ids" in takes:
        own = [row | {"token_type_ids": x[None]} for row, x in zip(rows, types.split(LENGTHS), strict=True)]
        yield batch | {"token_type_ids": tiny.pad(types, side)}, own
    # Without ids, a decoder classifies a row by its last position, and RoBERTa counts padding.
    if (side == "left") == (tiny.per_sequence(name) and model_type not in tiny.ENCODERS):
        embed = model.get_input_embeddings()
        with torch.no_grad():
            own = [{"inputs_embeds": embed(row["input_ids"])} for row in rows]
            embeds = {"inputs_embeds": embed(batch["input_ids"])}
        yield {key: x for key, x in batch.items() if key != "input_ids"} | embeds, own
    if "token_type_ids" not in takes and not tiny.per_sequence(name):  # learned positions are those of the padded row
        yield {key: x for key, x in batch.items() if key != "position_ids"}, None


@selected
@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
def test_further_arguments(model_type, name):
    model, mask = tiny.make(model_type, name), tiny.mask_of("right")
    cases = []
    for side in ("right", "left"):
        for given, rows in arguments_of(model, model_type, name, side):
            if rows is None:
                out = run(model, **given, output_hidden_states=True)
                want = {"hidden_states": [x[tiny.mask_of(side)] for x in out.hidden_states]}
            else:
                want = tiny.run_alone(model, rows)
            cases.append((given, want, tiny.mask_of(side)))
    holes = tiny.batch_of(model_type, "right")
    holes["attention_mask"][0, [2, 5]] = holes["attention_mask"][2, 3:6] = holes["attention_mask"][3, 8] = 0
    mask, base, with_holes = holes["attention_mask"].bool(), model.base_model, []
    for ids in (holes["input_ids"], holes["input_ids"].masked_fill(~mask, PAD)):
        given = {**holes, "input_ids": ids}
        with_holes.append((given, run(base, **given).last_hidden_state[mask]))
    with nta.patch(model):
        for given, want, tokens in cases:
            out = run(model, **given, output_hidden_states=True)
            check(out, want, tokens)
        as_tuple, as_dict = run(model, **given, return_dict=False), run(model, **given)
        assert isinstance(as_tuple, tuple)
        assert all(torch.equal(a, b) for a, b in zip(as_tuple, as_dict.to_tuple(), strict=True))
        for given, want in with_holes:
            close(run(base, **given).last_hidden_state[mask], want)


CAUSAL_HEADS = [(model_type, name) for model_type, name in EVERY if name.endswith(NEXT)]
KEPT = ("Gemma2ForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM")


@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
@pytest.mark.parametrize(("model_type", "name"), sweep_except(CAUSAL_HEADS, *[x for x in CAUSAL_HEADS if x[1] in KEPT]))
def test_logits_to_keep(model_type, name):
    """They are positions of the padded rows; the same for all rows, or others for each."""
    model, places = tiny.make(model_type, name), torch.tensor([[3, 10], [16, 0], [8, 12], [9, 2]])
    for side in ("left", "right"):
        batch, all_ = tiny.batch_of(model_type, side), tiny.pad(tiny.alone(model_type, name)["logits"], side)
        labels = labels_for(name, side)["labels"][:, -9:]
        shown = tiny.mask_of(side) & (torch.arange(LENGTH) % 3 == 1)
        loss = run(model, **batch, labels=labels, logits_to_keep=9).loss
        with nta.patch(model):
            for keep in (1, 3, 40, torch.tensor([0, 5, -1, 9])):
                want = all_[:, -keep:] if isinstance(keep, int) else all_[:, keep]
                close(run(model, **batch, logits_to_keep=keep).logits, want)
            got = run(model, **batch, logits_to_keep=places).logits
            close(got, all_[torch.arange(4)[:, None], places])
            close(run(model, **batch, labels=labels, logits_to_keep=9).loss, loss, 2e-5)
            if hasattr(transformers.modeling_utils, "slice_logits_to_keep"):  # older models take no mask
                close(run(model, **batch, logits_to_keep=shown).logits.flatten(0, -2), all_[shown])


LEARNED = ("albert", "bert", "distilbert", "electra", "gpt2", "opt", "roberta", "xlm-roberta")


@pytest.mark.parametrize("model_type", LEARNED)
def test_learned_positions_are_those_of_the_padded_row(model_type):
    """With ids and with embeddings; and in a batch with more tokens than there are positions."""
    model = tiny.make(model_type, tiny.classes(model_type)[0], max_position_embeddings=LENGTH + PAD + 1)
    assert LAYOUT.total > LENGTH + PAD + 1
    for side in ("right", "left"):
        batch = {key: x for key, x in tiny.batch_of(model_type, side).items() if key != "position_ids"}
        embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
        for given in (batch, {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}):
            want = run(model, **given).last_hidden_state[tiny.mask_of(side)]
            with nta.patch(model) as handle:
                close(run(model, **given).last_hidden_state[tiny.mask_of(side)], want)
            assert handle.calls == {None: 1}


# Families with options of their own: how they pool, and ESM's scale by the share of masked tokens (id 4).
POOLING = "ForSequenceClassification", "classifier_pooling"
OPTIONS = {
    **{f"eurobert {x}": ("eurobert", POOLING[0], {POOLING[1]: x}) for x in ("bos", "late", "mean")},
    **{f"modernbert {x}": ("modernbert", POOLING[0], {POOLING[1]: x}) for x in ("cls", "mean")},
    "ESM-2": ("esm", "Model", {}),
    "ESM-1b": ("esm", "Model", {"position_embedding_type": "absolute", "emb_layer_norm_before": True}),
    "ESM without token dropout": ("esm", "Model", {"token_dropout": False}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_families(name):
    model_type, ending, more = OPTIONS[name]
    model, ids = tiny.make(model_type, tiny.CONFIGS[model_type][0] + ending, **more), torch.cat(tiny.sequences())
    if model_type == "esm":
        ids[[1, 4, 8, 11, 14, 15, 20, 26]] = 4
    want = tiny.run_alone(model, [{"input_ids": x[None]} for x in ids.split(LENGTHS)])
    with nta.patch(model):
        for side in ("right", "left"):
            batch = {**tiny.batch_of(model_type, side), "input_ids": tiny.pad(ids, side, PAD)}
            out = run(model, **batch, output_hidden_states=True)
            close(out.logits, want["logits"]) if "logits" in want else check(out, want, tiny.mask_of(side))
        if model_type == "esm":
            positions = LAYOUT.position_ids[None] + (PAD + 1 if name == "ESM-1b" else 0)
            close(run(model, input_ids=ids[None], position_ids=positions)[0][0], want["last_hidden_state"])


def remove_layer(model):
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    del layers[1]
    model.config.num_hidden_layers = 1


# What users do to a patched model, as in transformers' ModelTesterMixin → the tolerance.
CHANGES = {
    "resized embeddings": (lambda x: x.resize_token_embeddings(tiny.VOCABULARY + 10, mean_resizing=False), 1e-4),
    "16 bits": (lambda model: model.bfloat16(), 0.1),
    "pruned layers": (remove_layer, 1e-4),
}  # fmt: skip
CHANGED = [("bert", "BertForMaskedLM"), ("llama", "LlamaForCausalLM"), ("modernbert", "ModernBertForMaskedLM")]
changed = pytest.mark.parametrize(("model_type", "name"), CHANGED)


@pytest.mark.parametrize("change", CHANGES)
@changed
def test_model_that_is_changed_while_it_is_patched(model_type, name, change):
    model, (apply, tolerance) = tiny.make(model_type, name, "sdpa"), CHANGES[change]
    batch, tokens = tiny.batch_of(model_type, "right"), tiny.mask_of("right")
    with nta.patch(model) as handle:
        apply(model)
        got = run(model, **batch).logits
        handle.active = False
        close(got[tokens], run(model, **batch).logits[tokens], tolerance)
    assert got.shape[2] == tiny.VOCABULARY + 10 * (change == "resized embeddings")


@pytest.mark.filterwarnings("ignore::nt_attention.NotPackedWarning")
@changed
def test_tied_embeddings_and_kept_gradients(model_type, name):
    batch = tiny.batch_of(model_type, "right")
    model = tiny.make(model_type, name, "eager", tie_word_embeddings=True)
    with nta.patch(model):
        model(**batch, **labels_for(name, "right")).loss.backward()
        for each in (model, copy.deepcopy(model)):
            assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
        out = model(**batch, output_hidden_states=True, output_attentions=True)
        kept = [out.hidden_states[0], out.attentions[0]]
        for tensor in kept:
            tensor.retain_grad()
        out[0].flatten()[0].backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in kept)
