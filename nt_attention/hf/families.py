"""What differs between Hugging Face models, in one table.

A model is known by its class name, which is a family's prefix and one of the endings in ``HEADS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..layout import SequenceLayout


def _pool(base: Any, first: Tensor) -> Tensor | None:
    """The pooled output (B, E) of each row's first token (B, E)."""
    return base.pooler(first.unsqueeze(1)) if base.pooler is not None else None


def _pool_albert(base: Any, first: Tensor) -> Tensor | None:
    return base.pooler_activation(base.pooler(first)) if base.pooler is not None else None


def _embed_esm(base: Any, input_ids: Tensor, position_ids: Tensor, layout: SequenceLayout) -> Tensor | None:
    """The embeddings (1, T, E) of a packed row, where they depend on a sequence's masked tokens (ESM-2)."""
    embeddings = base.embeddings
    if not embeddings.token_dropout:
        return None
    masked = input_ids == embeddings.mask_token_id
    count = torch.zeros(layout.batch_size, device=input_ids.device).index_add_(
        0, layout.sequence_ids, masked[0].float()
    )
    in_training = 1 - 0.15 * 0.8  # the share of tokens that ESM-2 saw when it was trained
    scale = (in_training / (1 - count / layout.lengths))[layout.sequence_ids]
    embeds = embeddings.word_embeddings(input_ids).masked_fill(masked.unsqueeze(2), 0.0)
    return embeddings(inputs_embeds=(embeds * scale[:, None]).to(embeds.dtype), position_ids=position_ids)


@dataclass(frozen=True)
class Family:
    """How a family of models differs from the others.

    Attributes:
        prefix: of its class names, "Bert" of BertModel and BertForMaskedLM.
        positions: what its positions count if the caller passes none: all positions of the "padded" row; the "tokens"
            of the attention mask (OPT); or the "ids" that are not the padding id, from that id on (RoBERTa).
        pool: what its base model makes of each row's first token, if anything.
        embed: the embeddings of a packed row, where those of a token depend on the rest of its sequence.
        base: the ending of the base model's class name.
        padded_if: a flag of the config under which only the mask, which packing drops, says which keys are visible.
    """

    prefix: str
    positions: Literal["padded", "tokens", "ids"] = "padded"
    pool: Callable[[Any, Tensor], Tensor | None] | None = None
    embed: Callable[[Any, Tensor, Tensor, SequenceLayout], Tensor | None] | None = None
    base: str = "Model"
    padded_if: str = ""


# By config.model_type. All pass cu_seq_lens to their attention, and sliding_window where a layer has one.
FAMILIES = {
    "albert": Family("Albert", pool=_pool_albert),
    "bert": Family("Bert", pool=_pool),
    "deepseek_v3": Family("DeepseekV3"),
    "distilbert": Family("DistilBert"),
    "electra": Family("Electra"),
    "esm": Family("Esm", positions="ids", pool=_pool, embed=_embed_esm),
    "eurobert": Family("EuroBert"),
    "gemma2": Family("Gemma2", padded_if="use_bidirectional_attention"),
    "gemma3_text": Family("Gemma3", base="TextModel"),
    "gpt2": Family("GPT2"),
    "gpt_neox": Family("GPTNeoX"),
    "gpt_oss": Family("GptOss"),
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "modernbert": Family("ModernBert"),
    "opt": Family("OPT", positions="tokens"),
    "phi3": Family("Phi3"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "roberta": Family("Roberta", positions="ids", pool=_pool),
    "xlm-roberta": Family("XLMRoberta", positions="ids", pool=_pool),
}

# What a head works on, by the ending of its class name: each "token", packed, its loss included; the "next token", of
# which a sequence's first is none; a "span" of tokens, packed up to its logits, with a loss over padded rows; or the
# whole "sequence", padded.
Head = Literal["token", "next token", "sequence", "span"]
HEADS: dict[str, Head] = {
    "ForCausalLM": "next token",
    "LMHeadModel": "next token",
    "ForMaskedLM": "token",
    "ForTokenClassification": "token",
    "ForSequenceClassification": "sequence",
    "ForNextSentencePrediction": "sequence",
    "ForQuestionAnswering": "span",
}

# Why nothing is packed in models whose attention we run.
NOT_PACKED = {
    "bart": "one cu_seq_lens reaches self-attention and cross-attention alike, which have other lengths",
    "clip": "its images have one length, and its text is pooled by its position in the padded row",
    "siglip": "its rows have one length",
    "t5": "its position bias is made for whole rows, and cu_seq_lens reaches cross-attention as well",
    "vit": "its images have one length",
    "whisper": "its rows have one length, padding included",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "its positions have three axes"),
}
# Why attention does not go through transformers' interface, and a workaround where there is one.
_ADDS_ALIBI = "it adds ALiBi inside its own attention; varlen_attention takes alibi_slopes, so a layer can be rewritten"
NOT_ROUTED = {
    **dict.fromkeys(("bloom", "mpt"), _ADDS_ALIBI),
    **dict.fromkeys(("codegen", "gptj"), "its attention is its own"),
    **dict.fromkeys(("deberta", "deberta-v2"), "its disentangled attention adds two terms that no flash kernel has"),
    **dict.fromkeys(("led", "longformer"), "its attention is a sliding window in blocks of its own"),
    "big_bird": "its attention is block sparse",
    "falcon": "its attention is its own; varlen_attention takes alibi_slopes, so a layer can be rewritten",
    "layoutlmv3": "its attention adds two position terms that no flash kernel has",
    "luke": "its attention has queries of its own for words and entities",
    "mpnet": "it adds a relative position bias inside its own attention; a model such as bert runs packed",
    "wavlm": "it adds a gated position bias inside its own attention",
    "xlnet": "its attention has two streams",
}

# Inputs with a value for every token, besides position_ids.
TOKEN_INPUTS = {"input_ids", "inputs_embeds", "token_type_ids", "shift_labels", "labels"}
# Outputs with a value for every token; and those among them that have the lowest logit at padding, where others have 0.
TOKEN_OUTPUTS = {"last_hidden_state", "hidden_states", "logits", "start_logits", "end_logits"}
LOWEST_AT_PADDING = {"start_logits", "end_logits"}
# Other outputs. An unknown one is padded if it has the shape of values for tokens; otherwise the call may fall back.
OTHER_OUTPUTS = {"loss", "pooler_output", "past_key_values", "attentions", "aux_loss"}


def model_type(module: nn.Module) -> str:
    """The ``config.model_type`` of a Hugging Face model, "" without one."""
    return getattr(getattr(module, "config", None), "model_type", "")


def family_of(module: nn.Module) -> Family | None:
    """The family of a Hugging Face model, by its config, if its class is transformers' own and one of the family's."""
    family = FAMILIES.get(model_type(module))
    if family is None or not _class_of(module).__module__.startswith("transformers."):
        return None
    return family if re.match(f"{family.prefix}(Text)?(Model|For|LMHead)", _class_of(module).__name__) else None


def head_of(module: nn.Module, family: Family) -> Head | None:
    """What the head of a family's model works on; None for the base model.

    Raises:
        KeyError: a head that is not in the table.
    """
    ending = _class_of(module).__name__.removeprefix(family.prefix)
    return None if ending == family.base else HEADS[ending.removeprefix("Text")]


def base_model(module: nn.Module, family: Family) -> nn.Module:
    """The base model of a family's model: itself, or the one below its head."""
    is_base = _class_of(module).__name__ == family.prefix + family.base
    return module if is_base else module.base_model  # type: ignore[return-value]


def kind(module: nn.Module) -> str:
    """The model type by which NOT_PACKED and NOT_ROUTED know a model: "clip" also for the parts of a CLIP."""
    return re.sub("_(text|vision)(_model)?$", "", model_type(module))


def _class_of(module: nn.Module) -> type:
    """Its class; the original one of what FSDP2 has given a class of its own."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))
