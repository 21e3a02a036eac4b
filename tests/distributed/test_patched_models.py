"""`patch(model, mesh=...)`: a padded batch over several ranks, against the model in one process."""

import pytest
import torch
from processes import run_in_processes
from ranks import DECODER, NO_DROPOUT, SMALL, average, check_same, mesh_of_all, padded_batch, run_in_float64, whole
from sweeps import sweep_except
from torch.distributed.fsdp import fully_shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import nt_attention as nta

LENGTHS = [23, 1, 5, 12, 40]


def bert(kind, **more):
    return lambda: kind(BertConfig(**{**SMALL, **NO_DROPOUT, **more}))


def decoder(kind, config, **more):
    return lambda: kind(config(**{**DECODER, **more}))


MODELS = {
    "bert": bert(BertModel),
    "bert masked": bert(BertForMaskedLM),
    "bert tokens": bert(BertForTokenClassification, num_labels=5),
    "bert answers": bert(BertForQuestionAnswering),
    "bert sequences": bert(BertForSequenceClassification, num_labels=3),
    "modernbert": lambda: ModernBertForMaskedLM(
        ModernBertConfig(**SMALL, local_attention=8, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
    ),
    "llama": decoder(LlamaForCausalLM, LlamaConfig),
    "llama sequences": decoder(LlamaForSequenceClassification, LlamaConfig, num_labels=3),
    "mistral": decoder(MistralForCausalLM, MistralConfig, sliding_window=7),
}
ONE_LAYER = {  # they compile faster
    "llama, one layer": decoder(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1),
    "bert masked, one layer": bert(BertForMaskedLM, num_hidden_layers=1),
}


def make(name):
    torch.manual_seed(3)
    return (MODELS | ONE_LAYER)[name]().double()


def batch_of(name, lengths=LENGTHS):
    batch, rows = padded_batch(lengths), len(lengths)
    ids, mask = batch.values()
    if name == "bert":
        return batch
    if name == "bert answers":
        return batch | {"start_positions": torch.zeros(rows).long(), "end_positions": torch.tensor(lengths) // 2}
    if "sequences" in name:
        return batch | {"labels": torch.arange(rows) % 3}
    labels = ids % 5 if name == "bert tokens" else ids.clone()
    kept = torch.rand(ids[1:].shape, generator=torch.Generator().manual_seed(6)) < 0.6
    labels[1:] = labels[1:].where(kept, -100)
    labels[mask == 0] = -100
    labels[-1] = -100  # most tokens of some ranks have no labels
    return batch | {"labels": labels}


def step(model, batch, mean=None):
    """The loss and the gradients of a training step. `mean` averages a gradient over ranks."""
    out = run_in_float64(model, batch)
    loss = out.loss if "loss" in out else (out.last_hidden_state.square() * batch["attention_mask"][..., None]).mean()
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **{n: x if mean is None else mean(x) for n, x in gradients.items()}}


def infer(model, batch):
    with torch.no_grad():
        out = run_in_float64(model, batch, output_hidden_states=True)
    mask = batch["attention_mask"].bool()
    found = {name: out[name] for name in ("last_hidden_state", "logits", "loss") if name in out}
    found["hidden"] = out.hidden_states[-1]
    return {n: x.masked_fill(~mask[..., None], 0) if x.shape[:2] == mask.shape else x for n, x in found.items()}


def in_one_process(name, lengths=LENGTHS, **more):
    model, batch = make(name), batch_of(name, lengths)
    if name == "bert answers":  # a padded batch has logits at padding in its loss
        nta.patch(model)
    return infer(model.eval(), batch), step(model.train(), batch | more)


def on_each_rank(name, engine, more):
    mesh = mesh_of_all()
    model, batch = make(name), batch_of(name)
    if engine == "checkpointed":
        model.gradient_checkpointing_enable()
    if engine == "fsdp":
        for part in model.base_model.encoder.layer if name[:4] == "bert" else model.base_model.layers:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    handle = nta.patch(model, mesh=mesh)
    inferred = infer(model.eval(), batch)
    stepped = step(model.train(), batch | more, whole if engine == "fsdp" else average)
    assert handle.calls == {None: 2}, handle.calls
    return inferred, stepped


def check(world, name, engine="plain", **more):
    wants = in_one_process(name, **more)
    for founds in run_in_processes(world, on_each_rank, name, engine, more):
        for want, found in zip(wants, founds, strict=True):
            check_same(found, want)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name):
    check(2, name)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("modernbert", "plain"), *sweep_except([("llama", "checkpointed"), ("llama", "fsdp")])],
)
def test_four_ranks(name, engine):
    check(4, name, engine)


@pytest.mark.parametrize("name", ["llama", "bert masked"])  # BERT's loss ignores it
def test_number_of_items_in_the_batch(name):
    check(2, name, num_items_in_batch=torch.tensor(17))
