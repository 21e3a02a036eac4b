"""`patch(model, mesh=...)` and sharded attention on unusual batches, labels and arguments."""

import copy

import numpy as np
import pytest
import torch
from processes import run_in_processes
from ranks import DECODER, NO_DROPOUT, SMALL, average, check_same, mesh_of_all, padded_batch, run_in_float64
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2Model,
    EsmConfig,
    EsmForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import nt_attention as nta

MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT)),
    "bert dropout": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "bert sequences": lambda: BertForSequenceClassification(BertConfig(**SMALL, **NO_DROPOUT)),
    "esm": lambda: EsmForMaskedLM(
        EsmConfig(**SMALL, **NO_DROPOUT, mask_token_id=4, position_embedding_type="rotary", token_dropout=True)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "llama sequences": lambda: LlamaForSequenceClassification(LlamaConfig(**DECODER)),
    "llama tokens": lambda: LlamaForTokenClassification(LlamaConfig(**DECODER, num_labels=5, classifier_dropout=0.0)),
    "window of 1": lambda: MistralForCausalLM(MistralConfig(**DECODER, sliding_window=1)),
}


def compare(name, batch):
    """The loss (or logits) and mean gradients with a mesh, and those in one process."""
    mesh = mesh_of_all()
    torch.manual_seed(3)
    model = MODELS[name]().double()
    sharded = copy.deepcopy(model)
    nta.patch(model)
    nta.patch(sharded, mesh=mesh)
    found = []
    for each in (model, sharded):
        out = run_in_float64(each, batch)
        value = out.loss if "labels" in batch else out.logits
        (value if "labels" in batch else value.square().mean()).backward()
        grads = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        found.append({"value": value.detach(), **grads})
    want, divided = found
    return want, {name: x if name == "value" else average(x) for name, x in divided.items()}


def check(name, batch, world=2):
    for want, found in run_in_processes(world, compare, name, batch):
        check_same(found, want)


@pytest.mark.parametrize(("name", "lengths"), [("bert sequences", [9, 9]), ("llama sequences", [7])])
def test_sequence_head_without_padding(name, lengths):
    check(name, padded_batch(lengths) | {"labels": torch.arange(len(lengths)) % 2})


def test_window_of_one_token():
    """No rank receives keys, though sequences are cut."""
    check("window of 1", padded_batch([23, 1, 5, 12, 40]))


def test_all_labels_ignored():
    """The loss is NaN and the gradients are 0, as in one process."""
    batch = padded_batch([23, 1, 5, 12, 40])
    check("llama", batch | {"labels": torch.full_like(batch["input_ids"], -100)})


def test_rows_of_one_token_have_no_labels():
    batch = padded_batch([1, 1, 1, 1])
    check("llama", batch | {"labels": batch["input_ids"]})


def test_items_of_a_token_head_that_ignores_them():
    batch = padded_batch([23, 1, 5, 12, 40])
    check("llama tokens", batch | {"labels": batch["input_ids"] % 5, "num_items_in_batch": torch.tensor(11)})


def test_ignore_index_that_the_loss_ignores():
    """BERT's loss ignores the argument, so tokens with this label count."""
    batch = padded_batch([23, 1, 5, 12, 40])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    check("bert", batch | {"labels": labels, "ignore_index": 9})


def test_ignore_index_of_zero_and_a_rank_without_labels():
    """The label that replaces those of a rank without labels must not be 0 then."""
    batch = padded_batch([23, 1, 5, 12, 40])
    labels = torch.zeros_like(batch["input_ids"])
    labels[0, 3] = 7
    check("llama", batch | {"labels": labels, "ignore_index": 0})


def test_esm():
    """Its base model gets no mask."""
    check("esm", padded_batch([23, 1, 5, 12, 40]))


def train_with_dropout():
    model = MODELS["bert dropout"]()
    nta.patch(model, mesh=mesh_of_all())
    batch = padded_batch([9, 4])
    try:
        loss = model.train()(**batch, labels=batch["input_ids"]).loss
    except ValueError as error:
        return str(error)
    return f"no error, loss {loss}"


def test_attention_dropout_of_a_model():
    for found in run_in_processes(2, train_with_dropout):
        assert "attention_probs_dropout_prob" in found, found


def shift_labels_alone():
    mesh = mesh_of_all()
    batch, found = padded_batch([9, 4]), []
    for more in ({}, {"mesh": mesh}):
        model = MODELS["llama"]()
        nta.patch(model, **more)
        found.append(model(**batch, shift_labels=batch["input_ids"]).loss is None)
    return found


def test_shift_labels_without_labels():
    """In one process there is no loss then, as in transformers."""
    for alone, sharded in run_in_processes(2, shift_labels_alone):
        assert alone == sharded


def attend(lengths, window, slopes):
    mesh = mesh_of_all()
    layout = nta.SequenceLayout.from_lengths(lengths)
    sharded = layout.shard(mesh)
    x = torch.randn(layout.total, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"is_causal": True, "window_size": window, "alibi_slopes": slopes}
    want = nta.varlen_attention(x, x, x, layout, **options)
    local = sharded.local(x)
    found = nta.varlen_attention(local, local, local, sharded, **options)
    return sharded.local(want), found


def test_window_that_sees_itself():
    for want, found in run_in_processes(2, attend, [100, 7], (0, 0), None):
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)


def test_slopes_of_each_sequence_on_a_rank_without_tokens():
    for want, found in run_in_processes(4, attend, [1] * 5, (-1, -1), torch.rand(5, 4)):
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)


def different_batches(what):
    mesh, rank = mesh_of_all(), torch.distributed.get_rank()
    model, batch = MODELS["llama"](), padded_batch([9, 4] if what == "ids" or not rank else [8, 5])
    if what == "ids" and rank:
        batch["input_ids"][0, 1] += 1
    nta.patch(model, mesh=mesh)
    with pytest.raises(ValueError, match="the ranks of mesh= have different batches"):
        model(**batch)


@pytest.mark.parametrize("what", ["ids", "lengths"])
def test_ranks_with_different_batches(what):
    run_in_processes(2, different_batches, what)


def arguments_of_patch():
    mesh = mesh_of_all()
    for error, match, model, more in (
        (TypeError, "must be a DeviceMesh", "llama", {"mesh": 2}),
        (ValueError, "must have one dimension, got 2", "llama", {"mesh": init_device_mesh("cpu", (1, 2))}),
        (ValueError, "leave out cuda_graphs or mesh", "llama", {"mesh": mesh, "cuda_graphs": True}),
        (ValueError, "leave out padding_free=False or mesh", "llama", {"mesh": mesh, "padding_free": False}),
        (ValueError, "has an encoder and a decoder", "t5", {"mesh": mesh}),
        (ValueError, "all tokens of a sequence on one rank", "deberta", {"mesh": mesh}),
        (ValueError, "patch does not change a single nn.MultiheadAttention", "attention", {"mesh": mesh}),
    ):
        with pytest.raises(error, match=match):
            nta.patch(MORE_MODELS[model](), **more)


MORE_MODELS = {
    **MODELS,
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=61)
    ),
    "deberta": lambda: DebertaV2Model(DebertaV2Config(**SMALL, relative_attention=True)),
    "attention": lambda: torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2)]),
}


def test_arguments_of_patch():
    run_in_processes(2, arguments_of_patch)
