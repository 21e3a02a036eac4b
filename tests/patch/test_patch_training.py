"""Training of patched Hugging Face models: activation checkpoints, torch.compile and autocast."""

from contextlib import nullcontext

import pytest
import torch
from patched_models import RAGGED, close, every_kind, gradients, loss_of, make, make_batch
from torch.utils.checkpoint import checkpoint

import nt_attention as nta


@every_kind
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(reentrant, kind):
    model, batch = make(kind).train(), make_batch(kind)
    want = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with nta.patch(model) as handle:
        loss_of(model, batch).backward()
        assert handle.calls == {None: 1}
    close([parameter.grad for parameter in model.parameters()], list(want))


def test_checkpoint_around_the_whole_model():
    model, batch = make().train(), make_batch()
    want = gradients(model, batch)
    with nta.patch(model) as handle:
        loss = checkpoint(lambda: loss_of(model, batch), use_reentrant=False)
        close(torch.autograd.grad(loss, list(model.parameters())), want)
        assert handle.calls == {None: 2}


@every_kind
def test_bfloat16_autocast_trains_as_the_padded_model_does(kind):
    batches = [make_batch(kind, lengths) for lengths in RAGGED]

    def train(patched):
        model = make(kind).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        with nta.patch(model) if patched else nullcontext():
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batch) / (1 if "labels" in batch else batch["attention_mask"].sum())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        return torch.tensor(losses)

    torch.testing.assert_close(train(True), train(False), rtol=1e-2, atol=1e-2)
