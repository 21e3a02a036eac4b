"""A model whose forward, loss or index was replaced: whatever reads rows gets padded rows."""

import copy
import functools
import types
import warnings
from collections import Counter

import pytest
import tiny
import torch
from packed_rows import PACKED, close, make, make_batch, rows_seen
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

import nt_attention as nta
from nt_attention import NotPackedWarning


def replacement(module, **batch):
    """Reads the rows of a padded batch, which one packed row does not have."""
    hidden = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    last = batch["attention_mask"].sum(1) - 1
    return CausalLMOutputWithPast(logits=module.lm_head(hidden[torch.arange(len(last)), last]))


def declared_to_wrap(model):
    """As in TRL: it uses functools.wraps on the forward of the class, but never calls it."""

    @functools.wraps(type(model).forward)
    def forward(module, **batch):
        return replacement(module, **batch)

    return types.MethodType(forward, model)


FORWARD_REPLACEMENTS = {
    "method": lambda model: types.MethodType(replacement, model),
    "partial": lambda model: functools.partial(replacement, model),
    "functools.wraps": declared_to_wrap,
    "closure": lambda model: lambda **batch: replacement(model, **batch),
}


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", FORWARD_REPLACEMENTS)
def test_forward_set_on_the_instance_gets_padded_rows(way, when):
    model, batch = make(), make_batch()
    want = replacement(model, **batch).logits
    if when == "before":
        model.forward = FORWARD_REPLACEMENTS[way](model)
    with nta.patch(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)
        if when == "after":
            model.forward = FORWARD_REPLACEMENTS[way](model)
        shapes = rows_seen(model)
        close(model(**batch).logits, want)
        assert handle.calls == {None: 1}
    assert shapes == [PACKED]
    assert when == "after" or torch.equal(model(**batch).logits, want)


def test_forward_set_on_a_base_model_that_mixes_its_tokens_is_refused():
    model = make("bert", "BertModel")

    def swapped(module, *args, **kwargs):
        out = type(module).forward(module, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state.flip(1)
        return out

    model.forward = types.MethodType(swapped, model)
    with pytest.raises(ValueError, match="the model mixes the sequences of a packed row"):
        nta.patch(model)


def test_forward_replaced_on_the_class_gets_padded_rows(monkeypatch):
    """As Liger does. The check runs the class as it is now."""
    model, batch = make(), make_batch()
    monkeypatch.setattr(type(model), "forward", replacement)
    want = model(**batch).logits
    with nta.patch(model) as handle:
        close(model(**batch).logits, want)
    assert handle.calls[None] == 1


def test_wrapper_around_a_removed_patch_stays_outside_of_the_next_patch():
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
        rows.clear()
        model(**batch)
    model(**batch)
    assert rows == [4, 4]
    assert (first.calls, second.calls) == (Counter(), {None: 1})


def without_first(forward):
    def minus_the_first(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state - out.last_hidden_state[:, :1]
        return out

    return minus_the_first


def test_forward_set_on_the_base_model_of_a_head_is_checked_or_compared(monkeypatch):
    model, batch = make().double(), tiny.batch_of("llama", "right")
    real = batch["attention_mask"] == 1
    stock = copy.deepcopy(model)
    stock.model.forward = without_first(stock.model.forward)
    with pytest.raises(ValueError, match="the model mixes the sequences of a packed row"):
        nta.patch(stock)
    with nta.patch(model), pytest.warns(NotPackedWarning, match="its first batch gave other values packed than padded"):
        model.model.forward = without_first(model.model.forward)
        torch.testing.assert_close(model(**batch).logits[real], stock(**batch).logits[real])


def test_loss_type_of_the_caller_is_found_by_its_value(monkeypatch):
    from transformers.loss.loss_utils import LOSS_MAPPING

    def mean_of_rows(logits, labels, vocab_size, **_):
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (each.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()

    monkeypatch.setitem(LOSS_MAPPING, "mean of rows", mean_of_rows)
    model, batch = make().double(), tiny.batch_of("llama", "right")
    model.loss_type = "mean of rows"
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    want = model(**batch, labels=labels).loss
    with nta.patch(model):
        torch.testing.assert_close(model(**batch, labels=labels).loss, want)


@pytest.mark.parametrize("bound", ["logits_to_keep", "position_ids"])
def test_forward_that_is_a_partial_with_options(bound):
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


@pytest.mark.parametrize("change", ["remove", "set_attn_implementation"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reentrant_checkpoint_recomputed_with_other_attention_raises(change):
    model, batch = make().double().train(), tiny.batch_of("llama", "right")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    handle = nta.patch(model)
    loss = model(**batch, labels=labels).loss
    handle.remove() if change == "remove" else model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.usefixtures("uncompared")
def test_an_argument_that_the_forward_of_a_head_takes_leaves_the_base_model_packed():
    """As TRL's `fused_lm_head`."""
    model, batch = make(), make_batch()
    forward = model.forward

    def scaled(*args, scale=1.0, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * scale
        return out

    model.forward = scaled
    want = model(**batch, scale=2.0).logits
    with nta.patch(model) as handle, pytest.warns(NotPackedWarning, match="the head of this call runs padded"):
        shapes = rows_seen(model)
        got = model(**batch, scale=2.0).logits
        assert handle.calls[None] == 1
    tokens = batch["attention_mask"].bool()
    close(got[tokens], want[tokens])
    assert shapes == [PACKED]


def test_no_memory_for_the_comparison():
    """The error reaches the caller, who may pass a smaller batch. Later batches are packed."""
    model, batch = make(), tiny.batch_of("llama", "right")

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with nta.patch(model, on_fallback="raise") as handle:
        hook = model.model.layers[0].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(**batch)
        hook.remove()
        model(**batch)
    assert handle.calls == {None: 1}
