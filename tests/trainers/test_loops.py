"""accelerate's and Lightning's loops: losses as unpatched, patched before the model is handed over and after."""

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


def with_lightning(when, folder):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-2)

    model = make()
    handle = nta.patch(model) if when == "before" else None
    module = Module(model)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    handle = nta.patch(module) if when == "after" else handle
    module.train()
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return torch.tensor(module.losses), handle, lightning.__version__


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("when", ["before", "after"])
def test_lightning_fit_losses(when, record, tmp_path):
    want, _, version = with_lightning(None, tmp_path)
    got, handle, _ = with_lightning(when, tmp_path)
    record(f"Lightning {version}", "Trainer.fit", when, handle)
    assert len(got) == 5
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert handle.calls == {None: 5}
