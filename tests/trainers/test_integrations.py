"""The callbacks for Trainer and Lightning, and the plugin for Axolotl: they patch, and log what padding was."""

import functools
import sys
from importlib.util import find_spec
from types import ModuleType

import lightning
import pytest
import torch
from test_loops import BATCHES, make
from test_transformers import ROWS, causal, make_trainer
from training import assert_same, run

import nt_attention as nta
from nt_attention.integrations.lightning import PackingCallback as LightningCallback
from nt_attention.integrations.trainer import PackingCallback


def with_callback(folder, model, callback):
    trainer = make_trainer(folder, model, max_steps=2, logging_steps=1)
    trainer.add_callback(callback)
    return trainer


def assert_logged(trainer):
    """Each step logs its tokens, and the padding to its longest row. The trainer's rows come in a random order."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [len(row["input_ids"]) for row in ROWS]
    for entry in entries:
        assert 4 * min(lengths) < entry["packed_tokens"] < 4 * max(lengths)
        assert (entry["packed_tokens"] + entry["padding_saved"]) / 4 in lengths
    assert len(entries) == 2


@pytest.mark.parametrize("patched", [False, True])
def test_trainer(patched, tmp_path):
    trainers = []

    def keep(folder, model):
        handle = nta.patch(model, packing="always") if patched else None
        trainers.append((with_callback(folder, model, PackingCallback(packing="always")), handle))
        return trainers[0][0]

    want = run(causal, functools.partial(make_trainer, tmp_path / "want", max_steps=2), None)
    assert_same(run(causal, functools.partial(keep, tmp_path / "got"), None), want)
    trainer, handle = trainers[0]
    assert_logged(trainer)
    assert handle is None or handle.calls[None] == 2


@pytest.fixture
def axolotl(monkeypatch):
    """Axolotl can't be installed beside the versions of torch and transformers that are needed here."""
    if find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})
    from nt_attention.integrations.axolotl import Plugin

    return Plugin()


def test_axolotl(axolotl, tmp_path):
    model = causal()
    axolotl.post_model_load({}, model)  # the order in which Axolotl calls a plugin
    trainer = make_trainer(tmp_path, model, max_steps=2)
    for callback in axolotl.add_callbacks_post_trainer({}, trainer):
        trainer.add_callback(callback)
    trainer.train()
    assert_logged(trainer)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make()

    def training_step(self, batch):
        return self.model(**batch).loss

    def validation_step(self, batch):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightning(tmp_path):
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[LightningCallback(packing="always")],
        val_check_interval=2,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(BATCHES, batch_size=None)
    trainer.fit(module, batches, batches)
    mask = BATCHES[2]["attention_mask"]
    assert trainer.callback_metrics["packed_tokens"] == mask.sum()
    assert trainer.callback_metrics["padding_saved"] == (mask == 0).sum() > 0
