"""The mask function that transformers calls by name: no mask where our kernels know what it would say.

Dimensions: B rows, L positions of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as stock
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .families import FAMILIES

MaskFunction = Callable[..., Any]

# What attention is told of besides by is_causal, sliding_window, cu_seq_lens and position_ids.
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


def mask(
    *,
    over: str,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: MaskFunction = stock.causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: a (B, 1, L, L) mask, or None where the attention function needs none.

    None stands for whole rows without padding under causality, a window or neither, in a family that hands its
    attention what it takes to know which; packed rows among them, which the attention function finds by their positions
    or ``cu_seq_lens``. Every other pattern (padding, caches, chunks, images, masks of the caller's) is what the
    implementation ``over`` makes of it. Where padding is in question the device is read once, as it is there.
    """
    whole = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
    if (
        whole
        and not kwargs.get("use_vmap")  # as where a caller laid a mask of its own, maybe a window, over the model's
        and _is_told(config, kwargs.get("device"))
        and is_plain(mask_function)
        and not _has_padding(attention_mask)
    ):
        return None
    made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[over](
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        config=config,
        **kwargs,
    )
    if whole and isinstance(made, Tensor) and not _is_traced(made):
        setattr(made.untyped_storage(), _MADE_FROM, (attention_mask,))
    return made


# An attribute of the storage of a mask of ours: the mask (B, L) that it was made from, None where there is no padding.
# Of the storage, since checkpoints detach masks. It lives and dies with it, and no two threads share it.
_MADE_FROM = "_nt_attention_made_from"


def made_from(attention_mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """Whether a mask is ours, or none at all; and (B, L) where tokens are, if that is not everywhere."""
    if attention_mask is None:
        return True, None
    found: tuple[Tensor | None] | None = getattr(attention_mask.untyped_storage(), _MADE_FROM, None)
    return found is not None, None if found is None else found[0]


def is_plain(mask_function: MaskFunction) -> bool:
    """Whether a mask says causality, a window and packed rows, and nothing else."""
    return all(part is not None and part.__code__ in _PLAIN for part in _parts(mask_function))


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction | None]:
    """The functions that have to hold together; None for one that can't be looked into."""
    code = getattr(mask_function, "__code__", None)
    if code is _AND:
        for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
            yield from _parts(part)
    elif code in _REMAP:
        yield from _parts(inspect.getclosurevars(mask_function).nonlocals["mask_function"])
    else:
        yield mask_function if code is not None else None


def _is_told(config: Any, device: Any) -> bool:
    """Whether the model's attention is handed its window and positions; not known while a graph is traced."""
    # such a Gemma's attention is told that it is not causal, and its masks may be
    told = not getattr(config, "use_bidirectional_attention", False)
    return told and getattr(config, "model_type", None) in FAMILIES and not _is_traced(torch.empty(0, device=device))


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or is_tracing(tensor)


def _has_padding(attention_mask: Tensor | None) -> bool:
    return attention_mask is not None and not bool(attention_mask.all())
