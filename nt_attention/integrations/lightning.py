"""A callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ._saved import Saved

__all__ = ["PackingCallback"]


class PackingCallback(Callback):
    """Patches the models in a LightningModule, and logs `packed_tokens` and `padding_saved` with each training batch.

    Both are of this process: the number of tokens in packed calls, and the number of positions of padding that were not
    computed. Models that are patched already stay as they are. The patch stays after training. Lightning calls
    `configure_model` later: patch models that it makes in it, with `nta.patch`.

    Args:
        options: those of `nta.patch`, such as `packing="always"`.

    Raises:
        ValueError: when the trainer starts: nothing in the module can be patched, as `nta.patch`.

    Example:
        >>> import lightning
        >>> from nt_attention.integrations.lightning import PackingCallback
        >>> trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[PackingCallback()])
    """

    def __init__(self, **options: Any) -> None:
        self.saved = Saved(options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch the models, before a strategy has wrapped them."""
        self.saved.start(pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        """Leave out what ran since the last batch, such as a validation."""
        self.saved.metrics()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the numbers."""
        pl_module.log_dict(self.saved.metrics())
