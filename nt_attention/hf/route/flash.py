"""The attention implementation "nt_attention/flash": transformers' code for flash attention, on our functions.

Libraries pack batches by themselves if the name of the implementation contains "flash". transformers loads the
functions of flash-attn by that name, and gets those of `compat.flash_attn`, which also run and train on a CPU.

Dimensions: B rows, T query and S key tokens of a row, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations import flash_attention, hub_kernels
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, flash_attention_mask

from ...compat import flash_attn
from ...compiler import is_traced
from . import positions
from .masks import is_plain

FLASH_NAME = "nt_attention/flash"
_LEFT_OUT = ("position_bias", "s_aux", "sinks", "indices", "block_indices")
_PAGED = "paged|"
_ADVICE = "use attn_implementation=nt_attention.hf.register() instead."


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' `flash_attention_forward`, with errors for what it would leave out.

    Args:
        module: the attention module of the model.
        query, key, value: (B, H, T, D), (B, G, S, D) and (B, G, S, Dv).
        attention_mask: (B, S), or None.
        options: the options of `flash_attention_forward`.

    Returns:
        The output (B, T, H, Dv), and None.

    Raises:
        ValueError: the model passes an option that flash attention does not have, or a mask of other dimensions, or the
            mask of padding to cross-attention.
    """
    for name in _LEFT_OUT:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name}, which flash attention does not have: {_ADVICE}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"flash attention takes an attention mask (B, S), but got {tuple(attention_mask.shape)}: {_ADVICE}"
        )
    if attention_mask is not None and _may_be_cross(module):  # transformers takes it for the mask of the queries too
        raise ValueError(
            f"{type(module).__name__} may be cross-attention, in which transformers' flash attention is wrong beside "
            f"padding: call nt_attention.patch(model), or {_ADVICE}"
        )
    ids = options.get("position_ids")
    if attention_mask is None and ids is not None and options.get("cu_seq_lens_q") is None and not is_traced(query):
        options |= _lengths_of(ids, module, query, key)
    forward = flash_attention.flash_attention_forward
    out: tuple[Tensor, None] = forward(module, query, key, value, attention_mask, **options)
    return out


def _lengths_of(ids: Tensor, module: nn.Module, query: Tensor, key: Tensor) -> dict[str, Any]:
    """The lengths of the sequences, if positions begin again in a row. They are read once in a forward."""
    which = ids, len(query), getattr(module, "layer_idx", None), None
    if not positions.may_show_sequences(ids, module, query, key) or not positions.can_read_layout(*which):
        return {}
    if (layout := positions.read_layout(*which)) is None:
        return {}
    offsets = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), layout.cu_seqlens)
    return offsets | dict.fromkeys(("max_length_q", "max_length_k"), layout.max_seqlen)


def _may_be_cross(module: Any) -> bool:
    is_in_both = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return is_in_both or positions.is_cross_attention(module)


def mask(**arguments: Any) -> Tensor | None:
    """transformers' `flash_attention_mask` (B, S), or None.

    Raises:
        ValueError: the model's mask is not only made of causality, a window, packed rows and padding.
    """
    if arguments.get("use_vmap") or not is_plain(arguments.get("mask_function", causal_mask_function)):
        model = getattr(arguments.get("config"), "model_type", "this model")
        raise ValueError(f"flash attention can't compute the attention mask of {model}: {_ADVICE}")
    made: Tensor | None = flash_attention_mask(**arguments)
    return made


def register_flash() -> None:
    """Register the implementation with transformers, which then takes its name like those of its own."""
    AttentionInterface.register(FLASH_NAME, attention)
    AttentionMaskInterface.register(FLASH_NAME, mask)
    _wrap(hub_kernels, "load_and_register_attn_kernel", _load_functions)
    _wrap(flash_attention, "get_target_dtype", _target_dtype)


def _wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function of transformers. In a version without it, only this attention implementation does not run."""
    if (original := getattr(module, name, None)) is not None:
        setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _load_functions(
    original: Callable[..., Any], name: str, wrapper: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    if name.removeprefix(_PAGED) != FLASH_NAME:
        return original(name, wrapper, *args, **kwargs)
    if name.startswith(_PAGED):  # set by continuous batching of older versions, such as 5.17
        AttentionInterface.register(name, wrapper or attention)
        AttentionMaskInterface.register(name, flash_attention_mask)
    return flash_attn


def _target_dtype(original: Callable[..., Any], query: Tensor, module: nn.Module) -> torch.dtype | None:
    try:
        dtype: torch.dtype | None = original(query, module)
    except StopIteration:  # it reads the dtype of an nn.Linear, and the attention of GPT-2 has none
        return None
    return dtype
