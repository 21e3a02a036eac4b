"""A callback for transformers' Trainer, and for the trainers of TRL and sentence-transformers, which extend it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..hf.installed import transformers
from ._saved import Saved

__all__ = ["PackingCallback"]


class PackingCallback(transformers.TrainerCallback):
    """Patches the model of a trainer, and adds `packed_tokens` and `padding_saved` to the trainer's logs.

    Both are of this process, since the last log: the number of tokens in packed calls, and the number of positions of
    padding that were not computed. A model that is patched already stays as it is. The patch stays after training.

    Callbacks get the numbers if they come after this one. Those of `report_to` come before: pass
    `report_to=[], callbacks=[PackingCallback(), TensorBoardCallback()]`.

    Args:
        options: those of `nta.patch`, such as `packing="always"`.

    Raises:
        ValueError: when the trainer is made: the model can't be patched, as `nta.patch`.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> from nt_attention.integrations.trainer import PackingCallback
        >>> sizes = dict(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(BertConfig(**sizes))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = TrainingArguments(folder, use_cpu=True, report_to=[])
        ...     trainer = Trainer(model, arguments, callbacks=[PackingCallback()])
        >>> model.forward.handle.active
        True
    """

    def __init__(self, **options: Any) -> None:
        self.saved = Saved(options)

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Patch the model, before a compiler or another wrapper has it."""
        if model is not None:
            self.saved.start(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Patch the model of a trainer that was made without this callback."""
        self.on_init_end(args, state, control, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the numbers to the logs."""
        metrics = self.saved.metrics()
        for log in (logs, state.log_history[-1] if state.log_history else None):
            if log is not None:
                log.update(metrics)
