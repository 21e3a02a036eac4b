"""Heads of users that compute with padded hidden states: those that read padding run padded, or are told."""

import copy
import dataclasses
import threading
import warnings

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, BertPreTrainedModel

import nt_attention as nta
from nt_attention.hf.check import first_batches, running_again


class Head(BertPreTrainedModel):
    """A model whose head is a function of the hidden states (B, L, E) and the mask (B, L)."""

    def __init__(self, config, pool, loss=None):
        super().__init__(config)
        self.bert, self.classifier = BertModel(config, add_pooling_layer=False), nn.Linear(config.hidden_size, 3)
        self.pool, self.loss = pool, loss
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.classifier(self.pool(hidden, attention_mask))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels) + (self.loss(hidden, attention_mask) if self.loss else 0)
        return {"loss": loss, "logits": logits}


def masked_mean(x, mask):
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def first(x, mask):
    return x[:, 0]


PADDED, PACKED, TOLD = "reads padding, by which", "", "reads padding in the padded run"
HEADS = {
    "mean over all positions": (lambda x, mask: x.mean(1), None, PADDED),
    "largest of all positions": (lambda x, mask: x.amax(1), None, TOLD),
    "sum of all positions": (lambda x, mask: x.sum(1), None, PADDED),
    "mean of tokens": (masked_mean, None, PACKED),
    "first position": (first, None, PACKED),
    "last position": (lambda x, mask: x[:, -1], None, TOLD),
    "last token": (lambda x, mask: x[torch.arange(len(x)), mask.sum(1) - 1], None, PACKED),
    "a loss of all positions": (first, lambda x, mask: x[..., 0].mean(), PADDED),
    "a loss of tokens": (first, lambda x, mask: masked_mean(x, mask)[:, 0].mean(), PACKED),
}


def batch_of(lengths, seed=0):
    random = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 90, mask.shape, generator=random) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths)) % 3}


def inputs_of(lengths):
    return {name: x for name, x in batch_of(lengths).items() if name != "labels"}


def model_of(pool, loss=None, kind=Head):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return kind(config, pool, loss)


def gradients(model):
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_padded_states(name):
    pool, loss, expected = HEADS[name]
    model = model_of(pool, loss)
    stock = copy.deepcopy(model)
    handle = nta.patch(model)
    for lengths in ([12, 3, 7, 9], [5, 11, 4], [40, 6, 21]):
        batch = batch_of(lengths)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            got = model(**batch)
        want = stock(**batch)
        if expected == TOLD:  # as each row alone
            ids, mask = batch["input_ids"], batch["attention_mask"]
            rows = [stock(ids[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(lengths)]
            torch.testing.assert_close(got["logits"], torch.cat([x["logits"] for x in rows]))
        else:
            torch.testing.assert_close(dict(got), dict(want))
            for each in (model, stock):
                each.zero_grad()
            got["loss"].backward()
            want["loss"].backward()
            torch.testing.assert_close(gradients(model), gradients(stock), rtol=1e-3, atol=1e-5)
    if expected == PADDED:
        assert handle.calls[None] == 0
        assert all(PADDED in why for why in handle.calls if why)
    else:
        assert handle.calls == {None: 3}
        assert handle.counts.compared == 2  # the base model, twice as long once; a head is a part of its call
    assert (TOLD in str(handle)) == (expected == TOLD)


def test_a_head_is_told_once_and_raises_on_request():
    model = model_of(HEADS["mean over all positions"][0])
    handle = nta.patch(model)
    with pytest.warns(nta.NotPackedWarning, match="reads padding, by which logits differs") as told:
        for _ in range(3):
            model(**batch_of([12, 3, 7]))
    assert len(told) == 1
    assert handle.calls.total() == 3
    handle.remove()
    nta.patch(model, on_fallback="raise")
    with pytest.raises(nta.NotPackedError, match="reads padding"):
        model(**batch_of([12, 3, 7]))


class HeadWithPositions(Head):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None):
        hidden = self.bert(input_ids, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
        return {"logits": self.classifier(self.pool(hidden, attention_mask))}


def test_a_head_that_reads_padding_also_takes_position_ids():
    model = model_of(HEADS["mean over all positions"][0], kind=HeadWithPositions)
    stock, batch = copy.deepcopy(model), inputs_of([12, 3, 7])
    handle = nta.patch(model, on_fallback="silent")
    for more in ({}, {"position_ids": torch.arange(12).expand(3, -1)}, {"position_ids": torch.arange(12)[None]}):
        torch.testing.assert_close(model(**batch, **more)["logits"], stock(**batch, **more)["logits"])
    assert handle.calls[None] == 0
    packed = {"input_ids": batch["input_ids"][:1], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])}
    with pytest.raises(ValueError, match="HeadWithPositions got rows with several sequences"):
        model(**packed)


@dataclasses.dataclass
class Parts:
    logits: torch.Tensor
    more: dict


FORMS = {
    "a tensor": lambda hidden: hidden.mean(1),
    "a tuple": lambda hidden: (hidden[:, 0], hidden.mean(1)),
    "a list in a mapping": lambda hidden: {"logits": hidden[:, 0], "more": [hidden, {"mean": hidden.mean(1)}]},
    "a mapping in a dataclass": lambda hidden: Parts(hidden[:, 0], {"mean": hidden.mean(1)}),
}


class HeadWithForm(Head):
    def forward(self, input_ids=None, attention_mask=None):
        return self.pool(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state)


@pytest.mark.parametrize("form", FORMS)
def test_all_tensors_in_outputs_are_compared(form):
    model, batch = model_of(FORMS[form], kind=HeadWithForm), inputs_of([12, 3, 7])
    want = model(**batch)
    with nta.patch(model, on_fallback="silent") as handle:
        got = model(**batch)
    assert handle.calls[None] == 0
    assert any("reads padding, by which" in reason for reason in handle.calls if reason)
    got, want = ([vars(x) if isinstance(x, Parts) else x] for x in (got, want))
    torch.testing.assert_close(got, want)


def test_heads_with_a_state_are_packed():
    """A queue of embeddings, which each call changes and returns."""
    model, batch = model_of(masked_mean), inputs_of([12, 3, 7])
    queue = torch.zeros(5, 32)

    def pool(x, mask):
        model.queue = torch.cat([masked_mean(x, mask), model.queue])[:5]
        return model.queue

    model.pool, model.queue = pool, queue
    first_two = [model(**batch)["logits"] for _ in range(2)]
    model.queue = queue
    with torch.no_grad(), nta.patch(model, on_fallback="raise") as handle:
        for want in first_two:
            torch.testing.assert_close(model(**batch)["logits"], want)
    assert handle.calls == {None: 2}


def test_threads_wait_for_the_comparison():
    model, batch, results = model_of(HEADS["mean over all positions"][0]), inputs_of([12, 3, 7]), []
    want = model(**batch)["logits"].detach()
    handle = nta.patch(model, on_fallback="silent")
    start = threading.Barrier(4)

    def run():
        start.wait()
        with torch.no_grad():
            results.append(model(**batch)["logits"])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(results) == 4
    for got in results:
        torch.testing.assert_close(got, want)
    assert handle.calls[None] == 0


def test_a_forward_that_waits_for_other_threads_ends(monkeypatch):
    """Its parts run in threads while it is compared, and would wait for the end of the comparison."""
    monkeypatch.setattr(running_again, "LONGEST_WAIT", 0.1)
    model, batch = model_of(masked_mean), inputs_of([12, 3, 7])
    part = model_of(masked_mean)
    model.pool = lambda x, mask: masked_mean(x, mask) + in_a_thread(lambda: part(**batch)["logits"]).sum()
    with torch.no_grad(), nta.patch(model, on_fallback="silent"), nta.patch(part, on_fallback="silent"):
        assert model(**batch)["logits"].isfinite().all()


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_which_calls_of_heads_are_compared(monkeypatch):
    """The first one, and one in so many, because a head may read padding under a condition, here after some calls."""
    monkeypatch.setattr(first_batches, "SHARE", 4)
    calls, reads_padding = [], False

    def pool(x, mask):
        calls.append(1)
        return x.mean(1) if reads_padding else first(x, mask)

    model, batch, of_call = model_of(pool), inputs_of([12, 3, 7]), []
    handle = nta.patch(model, on_fallback="silent")
    for number in range(12):
        reads_padding = number >= 5
        before = len(calls)
        model(**batch)
        of_call.append(len(calls) - before)
    # a comparison runs the head twice more, and if something differs, for each row alone
    assert of_call == [3, 1, 1, 3, 1, 1, 1, 6, 1, 1, 1, 1]
    assert handle.calls[None] == 7
    assert sum(n for why, n in handle.calls.items() if why) == 5
