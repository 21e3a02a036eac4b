"""A plugin for Axolotl: `plugins: [nt_attention.integrations.axolotl.Plugin]` in its config."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from torch import nn

from .trainer import PackingCallback

__all__ = ["Plugin"]


class Plugin(BasePlugin):
    """Patches the model with its adapters, and adds `packed_tokens` and `padding_saved` to the logs.

    See `nt_attention.integrations.trainer.PackingCallback`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callback = PackingCallback()

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patch the model."""
        self.callback.saved.start(model)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[PackingCallback]:
        """The callback that logs."""
        return [self.callback]
