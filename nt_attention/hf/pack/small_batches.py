"""Which batches are too small to gain from packing.

The host queues the kernels of a model. If the device computes a layer of the padded batch before the host would have
queued a packed one, packing saves nothing. Such a batch runs the original forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import families

HOST_MS = 1.08  # of a packed layer, in inference and, for a third of a training step, in training
BYTES_PER_MS = 4.3e9
OPERATIONS_PER_MS = {2: 650e9, 4: 45e9}  # by the bytes of a number
# Positions of padding × width². Measured on a CPU with wav2vec2 of widths from 64 to 768, in training with one thread.
LEAST_SAVED = 2**22
# Arguments with which a small batch is packed: positions may show several sequences in a row, and the logits of some
# positions do not show which of them are padding.
_READ = ("position_ids", "cu_seq_lens_q", "logits_to_keep")


def is_measured(device: torch.device) -> bool:
    """Whether the numbers above hold for a device: an H100 or H200. On other devices every batch is packed."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) == (9, 0)


class Size(NamedTuple):
    """The width of a model, and the longest row, with its padding, for which it has positions."""

    width: int
    longest: int = 2**31

    @classmethod
    def of(cls, model: PreTrainedModel, first_position: int = 0) -> Size:
        """The size of a model that counts positions from `first_position`."""
        config: Any = model.config
        most = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        longest = min([number for number in most if number is not None], default=2**31)
        return cls(getattr(config.get_text_config(), "hidden_size", 2**31), longest - first_position)

    def is_too_small(self, rows: int, length: int, itemsize: int) -> bool:
        """Whether the device computes a layer of a padded batch before the host would have queued a packed one."""
        operations = 24 * self.width + 4 * length  # for each value of a hidden state: matrix products and attention
        ms = operations / OPERATIONS_PER_MS.get(itemsize, 45e9) + 45 * itemsize / BYTES_PER_MS  # 15 kernels
        return length <= self.longest and rows * length * self.width * ms < HOST_MS


def saves_little(positions: int, tokens: int, width: int, device: torch.device) -> bool:
    """Whether packed layers of an encoder of audio or images would gain nothing: on a CPU they cost a few ms a call."""
    return device.type == "cpu" and (positions - tokens) * width**2 < LEAST_SAVED


def may_run_padded(arguments: dict[str, Any]) -> bool:
    """Whether the padding of the outputs of a call with these arguments can be written."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not arguments.keys().isdisjoint(_READ):
        return False
    return all(arguments[key].shape[:2] == mask.shape for key in families.TOKEN_INPUTS & arguments.keys())
