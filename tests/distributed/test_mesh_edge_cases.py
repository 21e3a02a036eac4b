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
    BertForPreTraining,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2Model,
    EsmConfig,
    EsmForMaskedLM,
    JambaConfig,
    JambaForCausalLM,
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


class OwnLoss(LlamaForCausalLM):
    """Shifts labels by itself, as older models do."""

    def forward(self, input_ids, attention_mask=None, labels=None, **more):
        out = super().forward(input_ids, attention_mask=attention_mask, **more)
        if labels is not None:
            out.loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return out


MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT)),
    "bert dropout": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "bert pretraining": lambda: BertForPreTraining(BertConfig(**SMALL, **NO_DROPOUT)),
    "bert sequences": lambda: BertForSequenceClassification(BertConfig(**SMALL, **NO_DROPOUT)),
    "esm": lambda: EsmForMaskedLM(
        EsmConfig(**SMALL, **NO_DROPOUT, mask_token_id=4, position_embedding_type="rotary", token_dropout=True)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "llama, own loss": lambda: OwnLoss(LlamaConfig(**DECODER)),
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


def batch_of(labels=None, lengths=(23, 1, 5, 12, 40), **more):
    """A padded batch. `labels` makes them of the ids."""
    batch = padded_batch([*lengths])
    return batch | ({} if labels is None else {"labels": labels(batch["input_ids"])}) | more


def rare(ids):
    labels = torch.zeros_like(ids)
    labels[0, 3] = 7
    return labels


IGNORED = {"labels": lambda ids: ids.masked_fill(ids == 0, -100)}
CASES = {
    "head of sequences, no padding": ("bert sequences", batch_of(lengths=[9, 9], labels=lambda ids: torch.arange(2))),
    "head of a sequence": ("llama sequences", batch_of(lengths=[7], labels=lambda ids: torch.arange(1))),
    "a window in which no rank receives keys": ("window of 1", batch_of()),
    "all labels ignored: NaN, and gradients of 0": ("llama", batch_of(lambda ids: torch.full_like(ids, -100))),
    "rows of one token, without labels": ("llama", batch_of(lambda ids: ids, [1, 1, 1, 1])),
    "items that a head ignores": ("llama tokens", batch_of(lambda ids: ids % 5, num_items_in_batch=torch.tensor(11))),
    "ignore_index that BERT's loss ignores": ("bert", batch_of(**IGNORED, ignore_index=9)),
    # the label that replaces those of a rank without labels must not be 0
    "ignore_index of 0, a rank without labels": ("llama", batch_of(rare, ignore_index=0)),
    "a base model that gets no mask": ("esm", batch_of()),
    "labels that are shifted": (
        "llama",
        batch_of(**IGNORED, shift_labels=padded_batch([23, 1, 5, 12, 40], 6)["input_ids"]),
    ),
    "a loss that shifts labels": ("llama, own loss", batch_of(**IGNORED)),
    "a loss of sequences too": ("bert pretraining", batch_of(**IGNORED, next_sentence_label=torch.arange(5) % 2)),
    "fewer tokens than ranks": ("bert", batch_of(**IGNORED, lengths=[1])),
    "the last logits alone": ("llama", batch_of(lengths=[9, 9], logits_to_keep=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_as_in_one_process(case):
    for want, found in run_in_processes(2, compare, *CASES[case]):
        check_same(found, want)


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


def logits_beside_a_loss():
    """Their packed form, and the gradients of a loss that reads them padded."""
    batch, model, found = batch_of(**IGNORED), MODELS["llama"]().double(), []
    for more in ({}, {"mesh": mesh_of_all()}):
        with nta.patch(model, **more):
            logits = model(**batch).logits
            values, layout = nta.hf.packed(logits)
            grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
            found.append((values, *grads))
    torch.testing.assert_close(found[1][0], layout.local(found[0][0]), rtol=1e-9, atol=1e-9)
    for x, want in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(average(x), want, rtol=1e-9, atol=1e-9)


def test_logits_beside_a_loss():
    run_in_processes(2, logits_beside_a_loss)


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
    model, batch = MODELS["llama"](), padded_batch([8, 5] if what == "lengths" and rank else [9, 4])
    if what == "ids" and rank:
        batch["input_ids"][0, 1] += 1
    if what == "order" and rank:
        batch["input_ids"][0] = batch["input_ids"][0].flip(0)
    if what == "embeddings":
        batch["inputs_embeds"] = torch.full((*batch.pop("input_ids").shape, 32), 0.1 * rank)
    with nta.patch(model, mesh=mesh):
        model(**padded_batch([9, 4]))
    nta.patch(model, mesh=mesh)  # compares its first batch too
    with pytest.raises(ValueError, match="the ranks of mesh= have different batches"):
        model(**batch)


@pytest.mark.parametrize("what", ["ids", "order", "embeddings", "lengths"])
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
        (ValueError, "keeps a state along the row", "state", {"mesh": mesh}),
        (ValueError, "scales them by the length of sequences", "scaled", {"mesh": mesh}),
        (ValueError, "patch does not change a single nn.MultiheadAttention", "attention", {"mesh": mesh}),
    ):
        with pytest.raises(error, match=match):
            nta.patch(MORE_MODELS[model](), **more)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
MORE_MODELS = {
    **MODELS,
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=61)
    ),
    "deberta": lambda: DebertaV2Model(DebertaV2Config(**SMALL, relative_attention=True)),
    "state": lambda: JambaForCausalLM(JambaConfig(**DECODER, num_experts=1, use_mamba_kernels=False)),
    "scaled": lambda: LlamaForCausalLM(LlamaConfig(**DECODER, rope_parameters=DYNAMIC)),
    "attention": lambda: torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2)]),
}


def test_arguments_of_patch():
    run_in_processes(2, arguments_of_patch)
