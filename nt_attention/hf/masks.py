"""The mask function that transformers calls by name: no mask where our kernels know what it would say.

Dimensions: B rows, L positions of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as stock
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .families import FAMILIES

MaskFunction = Callable[..., Any]

# What attention also gets as is_causal, sliding_window, cu_seq_lens and position_ids.
_PLAIN = {
    part.__code__
    for part in (
        stock.causal_mask_function,
        stock.bidirectional_mask_function,
        stock.sliding_window_overlay(1),
        stock.sliding_window_bidirectional_overlay(1),
        stock.packed_sequence_mask_function(torch.empty(0)),
    )
}
_AND = stock.and_masks().__code__
_REMAP = {  # older versions of transformers have none
    remap(stock.causal_mask_function, torch.empty(0)).__code__
    for name, remap in vars(stock).items()
    if name == "remap_positions_for_packed_sequence"
}


def mask(*, over: str, **given: Any) -> Tensor | None:
    """transformers' mask function: a (B, 1, L, L) mask, or None where the attention function needs none.

    None stands for whole rows without padding under causality, a window or neither, in a family that passes these to
    its attention; packed rows among them, which the attention function finds by their positions or ``cu_seq_lens``.
    Every other pattern (padding, caches, chunks, images, a caller's masks) is what the implementation ``over`` makes of
    it. Where padding is in question the device is read once, as it is there.

    Args:
        given: what transformers passes to every mask function, among it q_length, kv_length, q_offset (int or Tensor),
            mask_function, attention_mask (B, L) and config.
    """
    token_mask, offset = given.get("attention_mask"), given.get("q_offset", 0)
    whole = isinstance(offset, int) and offset == 0 and given["q_length"] == given["kv_length"]
    if (
        whole
        and not given.get("use_vmap")  # set where a caller combined a mask of its own with the model's
        and _passes_geometry(given.get("config"), given.get("device"))
        and is_plain(given.get("mask_function", stock.causal_mask_function))
        and (token_mask is None or bool(token_mask.all()))
    ):
        return None
    made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[over](**given)
    if whole and isinstance(made, Tensor) and not _is_traced(made):
        setattr(made.untyped_storage(), _SOURCE, Source(token_mask))
    return made


class Source(NamedTuple):
    """What a mask was made from: the token mask (B, L), None without padding."""

    token_mask: Tensor | None = None


# The attribute of a mask's storage that holds its Source. Of the storage, since checkpoints detach masks. It lives as
# long as the storage, and no two threads share it.
_SOURCE = "_nt_attention_source"


def source_of(attention_mask: Tensor | None) -> Source | None:
    """What a mask of ours was made from; None for a mask of the caller's."""
    return Source() if attention_mask is None else getattr(attention_mask.untyped_storage(), _SOURCE, None)


def is_plain(mask_function: MaskFunction) -> bool:
    """Whether a mask function combines causality, a window and packed rows, and nothing else."""
    code = getattr(mask_function, "__code__", None)
    if code is _AND:
        return all(map(is_plain, inspect.getclosurevars(mask_function).nonlocals["mask_functions"]))
    if code in _REMAP:
        return is_plain(inspect.getclosurevars(mask_function).nonlocals["mask_function"])
    return code in _PLAIN


def _passes_geometry(config: Any, device: Any) -> bool:
    """Whether the model passes window and positions on to its attention; not known while a graph is traced."""
    # such a Gemma calls its attention as not causal, and its masks may be
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    is_family = getattr(config, "model_type", None) in FAMILIES
    return is_family and not bidirectional and not _is_traced(torch.empty(0, device=device))


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or is_tracing(tensor)
