"""accelerate's loop: losses as unpatched, patched before the model is handed over and after."""

from __future__ import annotations

import accelerate
import pytest
import torch
from shared_data import llama_config, padded_batch, paragraphs
from sweeps import covering
from transformers import LlamaForCausalLM, set_seed

import nt_attention as nta

TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 24))]
BATCHES = [padded_batch(TEXTS[i : i + 4]) for i in range(0, 24, 4)]


def make():
    set_seed(0)
    return LlamaForCausalLM(llama_config(32)).train()


@pytest.fixture
def fresh_state():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def with_accelerate(when, precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = make()
    handle = nta.patch(model) if when == "before" else None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
    handle = nta.patch(model) if when == "after" else handle
    losses = []
    for batch in BATCHES:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses), handle


@covering({"precision": ["no", "bf16"], "when": ["before", "after"]})
@pytest.mark.usefixtures("fresh_state")
def test_accelerate_loop_losses(precision, when, record):
    want, _ = with_accelerate(None, precision)
    got, handle = with_accelerate(when, precision)
    record(f"accelerate {accelerate.__version__}", f"loop, mixed_precision={precision!r}", when, handle)
    tolerance = 1e-5 if precision == "no" else 1e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert handle.calls == {None: len(BATCHES)}
