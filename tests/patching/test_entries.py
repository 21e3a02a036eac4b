"""Where a patched Hugging Face model packs: at the head, at the base model, or not at all, and then with the reason."""

import copy
import functools
import types
import warnings
from collections import Counter

import pytest
import tiny
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

import nt_attention as nta
from nt_attention.hf import packed_forward
from nt_attention.hf.packing import Packing
from nt_attention.patching.patch import NotPackedError, NotPackedWarning

LENGTHS, LENGTH = [7, 1, 13, 19], 23
MASK = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]


def make(model_type="llama", name="LlamaForCausalLM", implementation="sdpa", **more):
    return tiny.make(model_type, name, implementation, **more)


def make_batch(labels=False):
    ids = torch.randint(5, tiny.VOCABULARY, MASK.shape).masked_fill(~MASK, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": MASK.long()}
    return {**batch, "labels": ids.masked_fill(~MASK, -100)} if labels else batch


def rows_seen(model):
    """The rows and columns (B, L) of the hidden states that the base model's layers see, without those seen twice."""
    seen = []

    def look(module, inputs):
        shape = tuple(inputs[0].shape[:2])
        if inputs[0].dim() == 3 and shape not in seen:
            seen.append(shape)

    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_pre_hook(look)
    return seen


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


PACKED = (1, sum(LENGTHS))


# The base model's entry


BASES = [(kind, name) for kind, name in tiny.EVERY if name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel"))]


@pytest.mark.filterwarnings("ignore::nt_attention.kernels.select.SlowBackendWarning")  # softcap on a CPU
@pytest.mark.parametrize(("model_type", "name"), BASES, ids=lambda value: value)
def test_the_base_model_of_a_patched_head_packs_when_it_is_called_by_itself(model_type, name):
    model, batch = make(model_type, name, "eager"), make_batch()
    seen = rows_seen(model)
    with torch.no_grad():
        want = model.base_model(**batch).last_hidden_state
        seen.clear()
        with nta.patch(model) as handle:
            got = model.base_model(**batch).last_hidden_state
            assert handle.calls == {None: 1}
            model(**batch)
            assert handle.calls == {None: 2}  # the head counts, and the base model beneath it passes through
    assert seen == [PACKED]
    close(got[MASK], want[MASK])
    assert not got[~MASK].any()


def test_a_batch_without_padding_is_counted_once_and_read_once(monkeypatch):
    model, batch = make(), make_batch()
    made = []
    of = Packing.of.__func__
    monkeypatch.setattr(Packing, "of", classmethod(lambda cls, *given: made.append(1) or of(cls, *given)))
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with nta.patch(model) as handle:
        model(**batch)
    assert handle.calls == {"there is no padding to skip": 1}
    assert len(made) == 1


@pytest.mark.parametrize("asked", [{"use_cache": True}, {"output_attentions": True}])
def test_a_reason_that_holds_for_both_is_counted_once(asked):
    model, batch = make(implementation="eager"), make_batch()
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning) as said:
        model(**batch, **asked)
        model(**batch, **asked)
    (count,) = handle.calls.values()
    assert count == 2
    assert len([w for w in said if w.category is NotPackedWarning]) == 1


def test_a_reason_of_the_head_alone_leaves_the_base_model_packing():
    model, batch = make(), make_batch(labels=True)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits[:, 0].sum() + logits[:, 6].sum(1)[0]
    want, seen = model(**batch).loss, rows_seen(model)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="loss_function was replaced"):
        close(model(**batch).loss, want)
    assert seen == [PACKED]
    assert handle.calls == {"its loss_function was replaced, and may need padded rows": 1, None: 1}


def test_rows_that_the_caller_packed_are_counted_once():
    model = make()
    ids = torch.randint(5, tiny.VOCABULARY, (1, 11))
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = {"input_ids": ids, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    packed["position_ids"] = torch.tensor([[*range(4), *range(7)]])
    with nta.patch(model) as handle:
        got = model(**packed).logits
        close(got[:, 4:], model(ids[:, 4:]).logits)
        model.model(**packed)
    assert handle.calls["it was packed already"] == 2


# A forward that is not the class's own


def replacement(module, **batch):
    """Reads rows, as nobody who gets one packed row can."""
    hidden = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    last = batch["attention_mask"].sum(1) - 1
    return CausalLMOutputWithPast(logits=module.lm_head(hidden[torch.arange(len(last)), last]))


def declared_to_wrap(model):
    """As TRL's: it says that it wraps the class's forward, and never calls it."""

    @functools.wraps(type(model).forward)
    def forward(module, **batch):
        return replacement(module, **batch)

    return types.MethodType(forward, model)


REPLACEMENTS = {
    "method": lambda model: types.MethodType(replacement, model),
    "partial": lambda model: functools.partial(replacement, model),
    "functools.wraps": declared_to_wrap,
    "closure": lambda model: lambda **batch: replacement(model, **batch),
}


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_a_forward_that_was_set_on_the_instance_before_the_patch_gets_padded_rows(way):
    model, batch = make(), make_batch()
    model.forward = REPLACEMENTS[way](model)
    want, seen = model(**batch).logits, rows_seen(model)
    with nta.patch(model) as handle:
        with pytest.warns(NotPackedWarning, match=r"replaces LlamaForCausalLM\.forward") as said:
            got = model(**batch).logits
        assert [w.filename for w in said if w.category is NotPackedWarning] == [__file__]
        assert handle.calls[None] == 1
        assert sum(handle.calls.values()) == 2
    close(got, want)
    assert seen == [PACKED]
    assert torch.equal(model(**batch).logits, want)


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_a_forward_that_is_set_on_the_instance_after_the_patch_gets_padded_rows(way):
    model, batch = make(), make_batch()
    want = replacement(model, **batch).logits
    seen = rows_seen(model)
    with nta.patch(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)
        model.forward = REPLACEMENTS[way](model)
        close(model(**batch).logits, want)
        assert handle.calls == {None: 1}
    assert seen == [PACKED]


def test_a_forward_that_was_set_on_a_base_model_falls_back_with_the_reason():
    model, batch = make("bert", "BertModel"), make_batch()

    def swapped(module, input_ids, attention_mask):
        assert input_ids.shape == MASK.shape
        return type(module).forward(module, input_ids, attention_mask).last_hidden_state.flip(1)

    model.forward = types.MethodType(swapped, model)
    want = model(**batch)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match=r"swapped replaces BertModel"):
        close(model(**batch), want)
    assert list(handle.calls) == [next(iter(handle.calls))] != [None]


def test_a_class_whose_forward_was_replaced_falls_back(monkeypatch):
    """As Liger does for all models of a class."""
    model, batch = make(), make_batch()
    monkeypatch.setattr(type(model), "forward", replacement)
    want = model(**batch).logits
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="replacement replaces"):
        close(model(**batch).logits, want)
    assert handle.calls[None] == 1


def test_a_wrapper_around_a_removed_patch_stays_outside_of_the_next_one():
    model, batch, rows = make(), make_batch(), []
    first = nta.patch(model)
    inner = model.forward

    @functools.wraps(inner)
    def logged(*args, **kwargs):
        out = inner(*args, **kwargs)
        rows.append(len(out.logits))
        return out

    model.forward = logged
    first.remove()
    with nta.patch(model) as second:
        model(**batch)
    model(**batch)
    assert rows == [4, 4]
    assert (first.calls, second.calls) == (Counter(), {None: 1})


# on_fallback


def test_calls_that_can_not_run_packed_raise_where_that_is_asked_for():
    model, batch = make(), make_batch()
    with nta.patch(model, on_fallback="raise") as handle:
        model(**batch)
        for count in (1, 2):
            with pytest.raises(NotPackedError, match=r'it asks for a cache.*on_fallback="warn"'):
                model(**batch, use_cache=True)
            assert handle.calls == {None: 1, "it asks for a cache": count}
        model(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]))  # nothing to pack
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(12, 2, 7, batch_first=True), 1)
    mask = torch.randn(LENGTH, LENGTH)
    with nta.patch(encoder, on_fallback="raise"), pytest.raises(NotPackedError, match="neither None nor causal"):
        encoder(torch.randn(4, LENGTH, 12), mask, ~MASK)


def test_another_value_for_on_fallback_is_refused():
    with pytest.raises(ValueError, match=r'on_fallback must be "warn" or "raise", got \'ignore\''):
        nta.patch(make(), on_fallback="ignore")


# Outputs


def test_an_output_that_no_table_knows_comes_back_padded(monkeypatch):
    model, batch = make(), make_batch()
    want = model(**batch, output_hidden_states=True)
    monkeypatch.setattr(packed_forward.families, "TOKEN_OUTPUTS", set())
    with nta.patch(model) as handle:
        got = model(**batch, output_hidden_states=True)
    assert handle.calls == {None: 1}
    close(got.logits[MASK], want.logits[MASK])
    for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        close(mine[MASK], theirs[MASK])


def test_outputs_are_padded_however_deep_they_are():
    packing = Packing.of(MASK.long(), None, *MASK.shape)
    token, other = torch.randn(*PACKED, 3), torch.randn(5)
    out = ModelOutput(new=(token, [None, {"inner": token}], other))
    packed_forward._pad_outputs(out, packing, None, set())
    (first, (none, inner), last), want = out["new"], packing.pad(token)
    assert torch.equal(first, want)
    assert torch.equal(inner["inner"], want)
    assert none is None
    assert last is other


@pytest.mark.parametrize("shape", [(sum(LENGTHS), 3), (3, 1, sum(LENGTHS)), (2 * sum(LENGTHS),)])
def test_a_form_that_can_not_be_told_is_no_answer(shape):
    packing = Packing.of(MASK.long(), None, *MASK.shape)
    with pytest.raises(packed_forward._UnknownOutput, match="'new'"):
        packed_forward._pad_outputs(ModelOutput(new=(torch.zeros(shape),)), packing, None, set())


def test_a_call_with_such_an_output_falls_back(monkeypatch):
    model, batch = make("bert", "BertModel"), make_batch()
    real = packed_forward._pad_outputs

    def with_more(out, packing, kept, done):
        out["flat"] = out["last_hidden_state"][0]  # (T, E), as router logits are
        real(out, packing, kept, done)

    want = model(**batch)
    monkeypatch.setattr(packed_forward, "_pad_outputs", with_more)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="its output 'flat' is not known"):
        got = model(**batch)
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)
    assert handle.calls["its output 'flat' is not known, and may have a value for each token"] == 1


@pytest.mark.parametrize("wanted", [[0, 2], [1]])
def test_some_hidden_states_only(wanted):
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
@pytest.mark.parametrize("logits", [None, "padded"])
def test_a_sparse_prediction_has_the_logits_of_its_labels(logits, training):
    model = make("modernbert", "ModernBertForMaskedLM", sparse_prediction=True).train(training)
    batch = make_batch(labels=True)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(MASK.shape) > 0.4, -100)
    want = model(**batch)
    with nta.patch(model, logits=logits) as handle:
        got = model(**batch)
        assert handle.calls == {None: 1}
        close(model(**make_without_labels(batch)).logits[MASK], model_without_patch(model, handle, batch)[MASK])
    assert got.logits.shape == want.logits.shape == ((batch["labels"] != -100).sum(), tiny.VOCABULARY)
    close(got.logits, want.logits)
    close(got.loss, want.loss)


def make_without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def model_without_patch(model, handle, batch):
    handle.active = False
    try:
        return model(**make_without_labels(batch)).logits
    finally:
        handle.active = True


def test_a_config_that_asks_for_attention_weights_is_saved(tmp_path):
    model, batch = make("bert", "BertForMaskedLM", "eager"), make_batch()
    model.config.output_attentions = True
    want = model(**batch)
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="the config asks for attention weights"):
        got = model(**batch)
        model.save_pretrained(tmp_path)
    assert torch.equal(got.logits, want.logits)
    torch.testing.assert_close(got.attentions, want.attentions)
    assert handle.calls == {"the config asks for attention weights": 1}
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.output_attentions
    assert torch.equal(loaded(**batch).logits, want.logits)


def test_training_saves_what_was_patched(tmp_path):
    model = make("bert", "BertForMaskedLM", "eager")
    model.config.output_attentions = True
    with nta.patch(model):
        Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])).save_model()
    assert type(model).from_pretrained(tmp_path, attn_implementation="eager").config.output_attentions


class TestRowsThatAreReadBeneathTheHead:
    """Whatever reads the rows of a padded batch gets padded rows."""

    @staticmethod
    def without_first(forward):
        def minus_the_first(*args, **kwargs):
            out = forward(*args, **kwargs)
            out.last_hidden_state = out.last_hidden_state - out.last_hidden_state[:, :1]
            return out

        return minus_the_first

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_forward_set_on_the_base_model_of_a_head(self, when):
        model, batch = make().double(), tiny.batch_of("llama", "right")
        real = batch["attention_mask"] == 1
        stock = copy.deepcopy(model)
        stock.model.forward = self.without_first(stock.model.forward)
        if when == "before":
            model.model.forward = self.without_first(model.model.forward)
        with pytest.warns(NotPackedWarning, match="replaces LlamaModel.forward"), nta.patch(model):
            if when == "after":
                model.model.forward = self.without_first(model.model.forward)
            torch.testing.assert_close(model(**batch).logits[real], stock(**batch).logits[real])

    def test_a_loss_function_chosen_by_its_name(self, monkeypatch):
        from transformers.loss.loss_utils import LOSS_MAPPING

        def mean_of_rows(logits, labels, vocab_size, **_):
            each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
            return (each.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()

        monkeypatch.setitem(LOSS_MAPPING, "mean of rows", mean_of_rows)
        model, batch = make().double(), tiny.batch_of("llama", "right")
        model.loss_type = "mean of rows"
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        want = model(**batch, labels=labels).loss
        with pytest.warns(NotPackedWarning, match="loss_function was replaced"), nta.patch(model):
            torch.testing.assert_close(model(**batch, labels=labels).loss, want)

    @pytest.mark.parametrize("bound", ["logits_to_keep", "position_ids"])
    def test_options_that_a_partial_has_fixed(self, bound):
        model, batch = make().double(), tiny.batch_of("llama", "right")
        mask = batch["attention_mask"]
        options = {"logits_to_keep": 1, "position_ids": (mask.cumsum(1) - 1).clamp(min=0) + 3}
        want = model(**batch, **{bound: options[bound]}).logits.detach()
        model.forward = functools.partial(model.forward, **{bound: options[bound]})
        with nta.patch(model) as handle:
            found = model(**batch).logits
        assert found.shape == want.shape
        if bound == "position_ids":
            assert handle.calls == {None: 1}
            torch.testing.assert_close(found[mask == 1], want[mask == 1])

    def test_another_index_to_ignore(self):
        model, batch = make().double(), tiny.batch_of("llama", "right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
        want = model(**batch, labels=labels, ignore_index=0).loss
        with nta.patch(model):
            torch.testing.assert_close(model(**batch, labels=labels, ignore_index=0).loss, want)

    def test_an_answer_at_padding(self):
        model, batch = make("bert", "BertForQuestionAnswering"), tiny.batch_of("bert", "left")
        rows = len(batch["input_ids"])
        answers = dict.fromkeys(("start_positions", "end_positions"), torch.zeros(rows, dtype=torch.long))
        want = model(**batch, **answers).loss
        with pytest.warns(NotPackedWarning, match="point at padding"), nta.patch(model):
            torch.testing.assert_close(model(**batch, **answers).loss, want)

    @pytest.mark.parametrize("change", ["remove", "set_attn_implementation"])
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_checkpoint_that_is_recomputed_with_other_attention_is_an_error(self, change):
        model, batch = make().double().train(), tiny.batch_of("llama", "right")
        model.gradient_checkpointing_enable({"use_reentrant": True})
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        handle = nta.patch(model)
        loss = model(**batch, labels=labels).loss
        handle.remove() if change == "remove" else model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError):
            loss.backward()
