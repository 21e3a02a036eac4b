"""The mask function that transformers calls for our `attn_implementation`. It returns None if no mask is needed.

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

from ...compiler import can_be_read, is_captured, is_in_jit_trace, is_traced, is_tracing
from ...layouts.sequence import new_forward_token
from ...torch_private import is_transformed
from .packed_row import runs_padded

MaskFunction = Callable[..., Any]
# Models that pass is_causal, sliding_window, cu_seq_lens and position_ids to every attention call.
_PASS_GEOMETRY = {
    "afmoe", "albert", "apertus", "arcee", "axk1", "beam", "bert", "bert-generation", "bitnet", "camembert",
    "cohere", "cohere2", "cohere2_moe", "cwm", "data2vec-text", "deepseek_v2", "deepseek_v3", "diffllama",
    "distilbert", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "esm", "eurobert", "exaone4", "exaone_moe",
    "flex_olmo", "flint", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "kolibri1", "laguna", "llama",
    "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "mistral", "mixtral",
    "modernbert", "modernbert-decoder", "nanochat", "nomic_bert", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "roberta", "roberta-prelayernorm", "roc_bert", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma", "xlm-roberta", "xlm-roberta-xl", "youtu",
}  # fmt: skip

# Mask functions whose masks attention can compute from is_causal, sliding_window, cu_seq_lens and position_ids.
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


def mask(*, over: str, **arguments: Any) -> Tensor | None:
    """The mask (B, 1, L, L), or None if the attention function needs no mask.

    It is None for rows without padding and without a cache, if the model is in `_PASS_GEOMETRY` and the mask is only
    made of causality, a window and packed rows. In a graph it is then a forward token. The attention function then
    finds packed sequences by their positions or `cu_seq_lens`. For all other masks (padding, caches, chunks, images,
    masks of the caller), the result is that of the implementation `over`. Syncs with the device once if there is an
    attention mask, as that implementation does.

    Args:
        over: "sdpa" or "eager", the underlying implementation.
        arguments: those that transformers passes to every mask function. They include q_length, kv_length, q_offset
            (int or Tensor), mask_function, attention_mask (B, L) and config.
    """
    token_mask, offset = arguments.get("attention_mask"), arguments.get("q_offset", 0)
    whole = isinstance(offset, int) and offset == 0 and arguments["q_length"] == arguments["kv_length"]
    if (
        whole
        and not arguments.get("use_vmap")  # set if the caller combined another mask with the model's
        and _passes_geometry(arguments.get("config"))
        and is_plain(arguments.get("mask_function", stock.causal_mask_function))
        and not is_in_jit_trace()  # torch.jit.trace can't record packed rows
    ):
        if token_mask is None or is_all_true(token_mask):
            return new_forward_token(arguments.get("device") or torch.device("cpu")) if is_tracing() else None
        arguments |= _NO_SKIPS  # which would read the mask once more
    made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[over](**arguments)
    if whole and isinstance(made, Tensor):
        function = arguments.get("mask_function", stock.causal_mask_function)
        sees_all = function is stock.bidirectional_mask_function and not arguments.get("use_vmap")
        setattr(keeper(made), _SOURCE, Source(token_mask, not runs_padded(), sees_all))
    return made


_NO_SKIPS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


class Source(NamedTuple):
    """What a mask was made from: the token mask (B, L), or None without padding.

    `may_be_packed`: whether rows may have several sequences. If not, the model has made its `position_ids` itself.
    `sees_all`: whether each query sees all tokens of its row.
    """

    token_mask: Tensor | None = None
    may_be_packed: bool = True
    sees_all: bool = False


# The attribute that stores the Source of a mask. It is set on the mask's storage, because checkpointing detaches masks.
# It is freed with the storage, and no two threads share it. In a graph, and in torch.func, it is set on the mask.
_SOURCE = "_nt_attention_source"


def keeper(mask: Tensor) -> Any:
    """The object on which attributes of a mask are set."""
    return mask if is_traced(mask) or is_transformed() else mask.untyped_storage()


def source_of(attention_mask: Tensor | None) -> Source | None:
    """What a mask of this file was made from. None for a mask of the caller."""
    if attention_mask is None:
        return Source()
    return getattr(keeper(attention_mask), _SOURCE, None)


def is_plain(mask_function: MaskFunction) -> bool:
    """Whether a mask function is only made of causality, a window and packed rows."""
    code = getattr(mask_function, "__code__", None)
    if torch.compiler.is_dynamo_compiling() and (code is _AND or code in _REMAP):
        return True  # it can't read closures; models in `_PASS_GEOMETRY` combine no other masks, or set use_vmap
    if code is _AND:
        return all(map(is_plain, inspect.getclosurevars(mask_function).nonlocals["mask_functions"]))
    if code in _REMAP:
        return is_plain(inspect.getclosurevars(mask_function).nonlocals["mask_function"])
    return code in _PLAIN


def _passes_geometry(config: Any) -> bool:
    """Whether the model passes window and positions to its attention."""
    # With this option, Gemma calls attention with is_causal=False, though its masks may be causal.
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    return getattr(config, "model_type", None) in _PASS_GEOMETRY and not bidirectional


def is_all_true(token_mask: Tensor) -> bool:
    """Whether there is no padding. False if the host can't read the mask, in a graph or the capture of a CUDA graph."""
    return can_be_read(token_mask) and not is_captured(token_mask) and bool(token_mask.all())
