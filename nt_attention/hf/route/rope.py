"""Rotary embeddings whose frequencies depend on the sequence length ("dynamic" and "longrope"), for packed rows.

transformers computes the frequencies for the longest position in the batch. Here, each sequence of a packed row gets
the frequencies for its own length.

Dimensions: T tokens of the row, D rotated head dim.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...torch_private import buffers_of, set_buffers
from .packed_row import current_row


def scales_by_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the sequence length."""
    rope_type = getattr(module, "rope_type", None)
    return any(_by_length(x) for x in (rope_type.values() if isinstance(rope_type, dict) else [rope_type]))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rotate_per_sequence(
    rotary: Any, original: Callable[..., Any], x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """The `forward` of such an embedding: cosines and sines (1, T, D), with the frequencies of each sequence's length.

    Needs no sync, because the layout of the row knows the lengths on the host.
    """
    row = current_row()
    options = {} if layer_type is None else {"layer_type": layer_type}
    if row is None or not _by_length(_type_of(rotary, layer_type)):
        return original(x, position_ids, **options)
    parts, end = [], 0
    lengths = row.layout.host.diff().tolist()
    for scaled_length, neighbours in itertools.groupby(lengths, lambda length: scaled_for(rotary, length, layer_type)):
        begin, end = end, end + sum(neighbours)
        fixed = _with_fixed_frequencies(rotary, scaled_length, layer_type, x.device)
        parts.append(type(rotary).forward(fixed, x, position_ids[..., begin:end], **options))
    cosines, sines = zip(*parts, strict=True)
    return torch.cat(cosines, -2), torch.cat(sines, -2)


def _by_length(rope_type: str | None) -> bool:
    return rope_type is not None and ("dynamic" in rope_type or rope_type == "longrope")


def _type_of(rotary: Any, layer_type: str | None) -> str:
    return rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]


def scaled_for(rotary: Any, length: int, layer_type: str | None) -> int:
    """The length to scale a sequence for, or 0 for no scaling. Longrope only distinguishes long and short sequences."""
    if _type_of(rotary, layer_type) != "longrope":
        return length if length > rotary.original_max_seq_len else 0
    parameters = rotary.config.rope_parameters
    trained = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    return trained + 1 if length > trained else 0


def scales_differently(module: Any, shortest: int, longest: int) -> bool:
    """Whether a rotary embedding has other frequencies for a sequence of length `shortest` than for `longest`."""
    if not scales_by_length(module):
        return False
    layer_types = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
    by_length = [x for x in layer_types if _by_length(_type_of(module, x))]
    return any(scaled_for(module, shortest, x) != scaled_for(module, longest, x) for x in by_length)


def _with_fixed_frequencies(rotary: Any, length: int, layer_type: str | None, device: torch.device) -> Any:
    """A copy of the embedding with the frequencies for one length, or with its original frequencies if it is 0."""
    prefix, options = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
    frequencies = getattr(rotary, f"{prefix}original_inv_freq")
    if length:
        make = ROPE_INIT_FUNCTIONS[_type_of(rotary, layer_type)]
        frequencies, _ = make(rotary.config, device, seq_len=length, **options)
    fixed = copy.copy(rotary)
    set_buffers(fixed, {**buffers_of(rotary), f"{prefix}inv_freq": frequencies.to(device)})
    fixed.rope_type = "default" if layer_type is None else {**rotary.rope_type, layer_type: "default"}
    return fixed
