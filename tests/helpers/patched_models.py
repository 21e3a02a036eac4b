"""Tiny Hugging Face models to patch, copy and wrap, with batches, losses and gradients."""

import pytest
import tiny
import torch

LENGTHS, LENGTH = [7, 1, 13, 19], 23

KINDS = {
    "base": ("bert", "BertModel"),
    "causal": ("llama", "LlamaForCausalLM"),
    "sequence": ("bert", "BertForSequenceClassification"),
}

every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind="causal", implementation="sdpa", **more):
    return tiny.make(*KINDS[kind], implementation, **more)


def make_batch(kind="causal", lengths=LENGTHS, length=LENGTH):
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, tiny.VOCABULARY, mask.shape).masked_fill(~mask, tiny.PAD)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if kind == "causal":
        batch["labels"] = ids.masked_fill(~mask, -100)
    if kind == "sequence":
        batch["labels"] = torch.arange(len(lengths)) % 3
    return batch


def loss_of(model, batch):
    out = model(**batch)
    if "loss" in out:
        return out.loss
    return out.last_hidden_state[batch["attention_mask"].bool()].square().sum() + out.pooler_output.sum()


def gradients(model, batch):
    return torch.autograd.grad(loss_of(model, batch), list(model.parameters()))


def scale(model, factor=1.5):
    """Change the weights, so that a copy that runs another model's weights fails."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def handle_of(model):
    return next(h.handle for m in model.modules() if (h := vars(m).get("forward")) is not None)


def assert_plain(model, like):
    """The model has no attributes of a patch."""
    attributes, theirs = ({name: set(vars(m)) for name, m in of.named_modules()} for of in (model, like))
    assert attributes == theirs
    assert model.config._attn_implementation == like.config._attn_implementation


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
