"""Batches that are too small to gain from packing.

The host queues the kernels of a model. If the device is faster than the host, as with small batches, skipping padding
saves nothing, and reading the mask and packing take time. Such a batch runs the original forward.

Dimensions: B rows of a padded batch, L positions in a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...layouts.known import SequenceLayout
from .. import families
from .padded_on_read import Padding


class Costs(NamedTuple):
    """Measured times of a kind of GPU and its host, with `python benchmarks/small_batches.py --packing always`.

    Attributes:
        host_us: the host time of a packed forward, in µs for each kernel launch (`Size.launches`).
        host_us_training: the same of a training step.
        tflops: 10¹² floating-point operations per second in matrix products in float16 and bfloat16.
        tflops_float32: the same in float32.
        terabytes: 10¹² bytes per second that other kernels read and write.
    """

    host_us: float
    host_us_training: float
    tflops: float
    tflops_float32: float
    terabytes: float


# Compute capability of the device → costs. On other devices every batch is packed.
# Host times of seven models on an H200's host were 26 to 107 µs a launch, and 110 to 230 in training, because hosts
# change their speed by a factor of two. With these numbers, the expected times of padded batches of 64 × 512 tokens are
# 0.5 to 1.0 × what the models took. Float32 was not measured; the number is two thirds of its peak.
MEASURED = {(9, 0): Costs(host_us=60, host_us_training=160, tflops=650, tflops_float32=45, terabytes=4.3)}


@functools.cache
def costs_of(device: torch.device) -> Costs | None:
    """The measured costs of a device, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return MEASURED.get(torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        weights: the number of weights in matrix products. Experts are left out, because most of them do not run.
        attention: the width of all heads, summed over the layers.
        launches: the number of kernels that a packed forward launches, estimated.
        width: the number of values of a token that such a kernel writes.
        longest: the length of the longest row, with its padding, for which the model has positions.
    """

    weights: int
    attention: int
    launches: int
    width: int
    longest: int = 2**31

    @classmethod
    def of(cls, model: PreTrainedModel, layers: int, first_position: int = 0) -> Size:
        """The size of a model with this number of attention modules, which counts positions from `first_position`."""
        config: Any = model.config.get_text_config()
        times = max(1, getattr(config, "num_hidden_layers", 1) // max(1, layers))  # layers may share modules (ALBERT)
        parts = list(model.modules())
        leaves = [x for x in parts if not any(x.children())]
        products = (p for x in leaves if not isinstance(x, nn.Embedding) for p in x.parameters(recurse=False))
        weights = sum(p.numel() for p in products if p.dim() == 2)
        has_rotary = any("Rotary" in type(x).__name__ for x in parts)
        launches = sum(map(_launches_of, leaves)) + layers * (15 if has_rotary else 6)
        width = getattr(config, "hidden_size", 0)
        most = (getattr(model.config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        longest = min([number for number in most if number is not None], default=2**31) - first_position
        return cls(times * weights, times * layers * width, times * launches, width, longest)

    def is_too_small(self, rows: int, length: int, dtype: torch.dtype, costs: Costs, training: bool) -> bool:
        """Whether the device computes the padded batch (B, L) before the host would have queued a packed one."""
        if length > self.longest:
            return False
        tokens = rows * length
        operations = 2 * tokens * (self.weights + 2 * length * self.attention)
        moved = 3 * tokens * self.width * self.launches * dtype.itemsize  # kernels read two tensors, and write one
        tflops = costs.tflops if dtype.itemsize == 2 else costs.tflops_float32
        device_us = operations / (1e6 * tflops) + moved / (1e6 * costs.terabytes)
        if training:
            return 3 * device_us < costs.host_us_training * self.launches
        return device_us < costs.host_us * self.launches


def _launches_of(leaf: nn.Module) -> int:
    """About how many kernels a module without children launches. Norms that are not of PyTorch have one for each step.

    With this, estimates for 15 models were 0.7 to 1.1 × what they launched.
    """
    if isinstance(leaf, nn.Dropout | nn.Identity):
        return 0
    parameters = list(leaf.parameters(recurse=False))
    is_norm = bool(parameters) and all(p.dim() == 1 for p in parameters)
    return 7 if is_norm and not isinstance(leaf, nn.LayerNorm | nn.RMSNorm) else 1


# Arguments with which a small batch is packed: positions may show several sequences in a row, and the logits of some
# positions do not show which of them are padding.
_READ = ("position_ids", "cu_seq_lens_q", "logits_to_keep")


def may_run_padded(arguments: dict[str, Any]) -> bool:
    """Whether `PaddedPacking` can write the padding of the outputs of a call with these arguments."""
    mask = arguments.get("attention_mask")
    is_plain = arguments.keys().isdisjoint(_READ)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not is_plain:
        return False
    shapes = [arguments[key].shape[:2] for key in families.TOKEN_INPUTS & arguments.keys()]
    return all(shape == mask.shape for shape in shapes)


@dataclass(frozen=True)
class PaddedPacking(Padding):
    """The rows of a padded batch, of which the host does not know the lengths.

    Attributes:
        is_padding: (B, L) bool.
    """

    is_padding: Tensor

    @property
    def token_shape(self) -> tuple[int, int]:
        """(B, L), the first two dimensions of outputs with a value for each token."""
        rows, length = self.is_padding.shape
        return rows, length

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.token_shape

    def unpad(self, gradient: Tensor) -> Tensor:
        return self.pad(gradient)

    def tokens_of(self, packed: Tensor) -> tuple[Tensor, Any]:
        layout = SequenceLayout.from_attention_mask(~self.is_padding)
        return layout.pack(packed), layout

    def pad(self, padded: Tensor, value: float = 0.0) -> Tensor:
        """Write `value` to the padding of (B, L, …)."""
        return padded.masked_fill(self.is_padding.view(*self.token_shape, *[1] * (padded.dim() - 2)), value)
