"""The attention implementation "nt_attention_flash": transformers' code for flash attention, on our functions.

Libraries pack batches by themselves if the name of the implementation contains "flash". transformers loads the
functions of flash-attn by that name, and gets those of `compat.flash_attn`, which also run and train on a CPU.

Dimensions: B rows, T query and S key tokens of a row, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations import hub_kernels
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, flash_attention_mask

from ...compat import flash_attn
from .masks import is_plain

FLASH_NAME = "nt_attention_flash"
_LEFT_OUT = ("position_bias", "s_aux", "sinks", "indices", "block_indices")
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
        ValueError: the model passes an option that flash attention does not have, or a mask of other dimensions.
    """
    for name in _LEFT_OUT:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name}, which flash attention does not have: {_ADVICE}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"flash attention takes an attention mask (B, S), but got {tuple(attention_mask.shape)}: {_ADVICE}"
        )
    out: tuple[Tensor, None] = flash_attention_forward(module, query, key, value, attention_mask, **options)
    return out


def mask(**arguments: Any) -> Tensor | None:
    """transformers' `flash_attention_mask`, with an error for masks that it would leave out: (B, S), or None.

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
    load = hub_kernels.load_and_register_attn_kernel

    @functools.wraps(load)
    def load_functions(name: str, *args: Any, **kwargs: Any) -> Any:
        return flash_attn if name == FLASH_NAME else load(name, *args, **kwargs)

    hub_kernels.load_and_register_attn_kernel = load_functions
