"""Models and tokenizers of a folder or a name, for the command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel


def load_model(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The base model of a folder or a name, in evaluation mode. If there are no weights, they are random.

    Raises:
        OSError: there is no config.
        ValueError: transformers does not know the type of the model.
    """
    config: Any = AutoConfig.from_pretrained(name)
    with suppress(OSError):
        return AutoModel.from_pretrained(name, config=config, dtype=dtype).to(device).eval()
    with torch.device(device):
        return AutoModel.from_config(config, dtype=dtype).eval()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or a name. It can pad.

    Raises:
        OSError, ValueError: there is none.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one
        raise ValueError(f"{name} has no tokenizer: pass --lengths.")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer
