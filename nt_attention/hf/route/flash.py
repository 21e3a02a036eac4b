"""The attention implementation "nt_attention/flash": transformers' code for flash attention, on our functions.

Libraries pack batches by themselves if the name of the implementation contains "flash". transformers loads the
functions of flash-attn by that name, and gets those of `compat.flash_attn`, which also run and train on a CPU.
Where packed sequences begin is read once in a forward, not in each layer, and also for models that do not pass it on.

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
from ...compiler import is_in_jit_trace, is_tracing
from ...layouts.protocol import Layout
from .masks import is_plain, keeper
from .running_call import running_call

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
        attention_mask: (B, S), or what `mask` returns for packed rows, or None.
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
    layout: Layout | None = None if attention_mask is None else getattr(keeper(attention_mask), _ROWS, None)
    if layout is not None:
        attention_mask = None
        options |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), layout.cu_seqlens)
        options |= dict.fromkeys(("max_length_q", "max_length_k"), layout.max_seqlen)
    elif attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"flash attention takes an attention mask (B, S), but got {tuple(attention_mask.shape)}: {_ADVICE}"
        )
    elif attention_mask is not None and _may_be_cross(module):  # transformers takes it for the mask of the queries too
        raise ValueError(
            f"{type(module).__name__} may be cross-attention, in which transformers' flash attention is wrong beside "
            f"padding: call nt_attention.patch(model), or {_ADVICE}"
        )
    forward = flash_attention.flash_attention_forward
    out: tuple[Tensor, None] = forward(module, query, key, value, attention_mask, **options)
    return out


_ROWS = "_nt_attention_rows"


def _may_be_cross(module: Any) -> bool:
    is_cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    return is_cross or getattr(getattr(module, "config", None), "is_encoder_decoder", False)


def mask(**arguments: Any) -> Tensor | None:
    """transformers' `flash_attention_mask` (B, S), or None; or, for rows that the caller packed, what has their layout.

    Raises:
        ValueError: the model's mask is not only made of causality, a window, packed rows and padding; or the model
            would mix the sequences of a row; or such a row has padding.
    """
    config, token_mask = arguments.get("config"), arguments.get("attention_mask")
    if arguments.get("use_vmap") or not is_plain(arguments.get("mask_function", causal_mask_function)):
        model = getattr(config, "model_type", "this model")
        raise ValueError(f"flash attention can't compute the attention mask of {model}: {_ADVICE}")
    made: Tensor | None = flash_attention_mask(**arguments)
    rows, length, offset = arguments["batch_size"], arguments["q_length"], arguments.get("q_offset", 0)
    is_whole = isinstance(offset, int) and offset == 0 and length == arguments["kv_length"]
    call = running_call() if is_whole and not (is_tracing() or is_in_jit_trace()) else None
    if call is None:
        return made
    call.check("flash")
    if (layout := call.layout(rows, length, token_mask)) is not None:
        if made is not None:
            raise ValueError("a row with several sequences has padding: pack rows without padding, or one in each row.")
        made = torch.ones(rows, 1, 1, length, dtype=torch.bool, device=layout.device)  # refused if it is changed
        setattr(keeper(made), _ROWS, layout)
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
