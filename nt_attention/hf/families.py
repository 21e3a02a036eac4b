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
    """What a family of models does in its own way.

    Attributes:
        prefix: of its class names, "Bert" of BertModel and BertForMaskedLM.
        counts: what its positions count if the caller passes none: "places" in the padded row; "tokens" that the
            attention mask shows (OPT); or "ids" that are not the padding id, from that id on (RoBERTa).
        position_ids_arrive: whether its attention is handed ``position_ids``.
        pool: what its base model makes of each row's first token, if anything.
        embed: the embeddings of a packed row, where those of a token depend on the rest of its sequence.
        base: the ending of the base model's class name.
        apart_under: a flag of the config under which its attention is not told what its mask says.
    """

    prefix: str
    counts: Literal["places", "tokens", "ids"] = "places"
    position_ids_arrive: bool = True
    pool: Callable[[Any, Tensor], Tensor | None] | None = None
    embed: Callable[[Any, Tensor, Tensor, SequenceLayout], Tensor | None] | None = None
    base: str = "Model"
    apart_under: str = ""


# By config.model_type. All hand their attention cu_seq_lens, and sliding_window where a layer has one.
FAMILIES = {
    "albert": Family("Albert", pool=_pool_albert),
    "bert": Family("Bert", pool=_pool),
    "deepseek_v3": Family("DeepseekV3"),
    "distilbert": Family("DistilBert", position_ids_arrive=False),
    "electra": Family("Electra"),
    "esm": Family("Esm", counts="ids", position_ids_arrive=False, pool=_pool, embed=_embed_esm),
    "eurobert": Family("EuroBert"),
    "gemma2": Family("Gemma2", apart_under="use_bidirectional_attention"),
    "gemma3_text": Family("Gemma3", base="TextModel"),
    "gpt2": Family("GPT2"),
    "gpt_neox": Family("GPTNeoX"),
    "gpt_oss": Family("GptOss"),
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "modernbert": Family("ModernBert", position_ids_arrive=False),
    "opt": Family("OPT", counts="tokens"),
    "phi3": Family("Phi3"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "roberta": Family("Roberta", counts="ids", pool=_pool),
    "xlm-roberta": Family("XLMRoberta", counts="ids", pool=_pool),
}

# What a head works on, by the ending of its class name: each "token", packed, its loss included; "next token", where
# the first of a sequence follows none; a "span" of tokens, packed up to its logits, whose loss is over rows; or the
# whole "sequence", padded as it was.
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

# Their attention runs as it was asked for, but nothing is packed; why.
NOT_PACKED = {
    "bart": "one cu_seq_lens reaches self-attention and cross-attention alike, which have other lengths",
    "clip": "its images have one length, and its text is pooled by place in the padded row",
    "siglip": "its rows have one length",
    "t5": "its position bias is made for whole rows, and cu_seq_lens reaches cross-attention as well",
    "vit": "its images have one length",
    "whisper": "its rows have one length, padding included",
    "qwen2_vl": "its positions have three axes",
    "qwen2_5_vl": "its positions have three axes",
}
# Parts of the above that configurations know by names of their own.
PARTS = {
    "clip_text_model": "clip",
    "clip_vision_model": "clip",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_5_vl_vision": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_vl_vision": "qwen2_vl",
    "siglip_text_model": "siglip",
    "siglip_vision_model": "siglip",
}

# Why attention that does not go through transformers' interface can't be reached, and the way round where there is one.
NOT_ROUTED = {
    "big_bird": "its attention is block sparse",
    "bloom": "it adds ALiBi inside its own attention; varlen_attention takes alibi_slopes, so a layer can be rewritten",
    "codegen": "its attention is its own",
    "deberta": "its disentangled attention adds two terms that no flash kernel has",
    "deberta-v2": "its disentangled attention adds two terms that no flash kernel has",
    "falcon": "its attention is its own; varlen_attention takes alibi_slopes, so a layer can be rewritten",
    "gptj": "its attention is its own",
    "layoutlmv3": "its attention adds two position terms that no flash kernel has",
    "led": "its attention is a sliding window in blocks of its own",
    "longformer": "its attention is a sliding window in blocks of its own",
    "luke": "its attention has queries of its own for words and entities",
    "mpnet": "it adds a relative position bias inside its own attention; a model such as bert runs packed",
    "mpt": "it adds ALiBi inside its own attention; varlen_attention takes alibi_slopes, so a layer can be rewritten",
    "wavlm": "it adds a gated position bias inside its own attention",
    "xlnet": "its attention has two streams",
}

# Inputs with a place for every token, besides position_ids, packed where they are given.
TOKEN_INPUTS = {"input_ids", "inputs_embeds", "token_type_ids", "shift_labels", "labels"}
# Outputs with a place for every token, padded again, with what stands where there is none: 0, or a logit of no weight.
TOKEN_OUTPUTS = {
    "last_hidden_state": 0,
    "hidden_states": 0,
    "logits": 0,
    "start_logits": "lowest",
    "end_logits": "lowest",
}
# Outputs without one. Any other is padded if its form says that it has one, or the call falls back.
OTHER_OUTPUTS = {"loss", "pooler_output", "past_key_values", "attentions", "aux_loss"}


def family_of(module: nn.Module) -> Family | None:
    """The row of a Hugging Face model, by its config, if its class is transformers' own and one of the family's."""
    family = FAMILIES.get(getattr(getattr(module, "config", None), "model_type", ""))
    if family is None or not _kind(module).__module__.startswith("transformers."):
        return None
    return family if re.match(f"{family.prefix}(Text)?(Model|For|LMHead)", _name(module)) else None


def head_of(module: nn.Module, family: Family) -> Head | None:
    """What the head of a family's model works on.

    Returns:
        None for the base model.

    Raises:
        KeyError: a head that is not in the table.
    """
    ending = _name(module).removeprefix(family.prefix)
    return None if ending == family.base else HEADS[ending.removeprefix("Text")]


def base_model(module: nn.Module, family: Family) -> nn.Module:
    """The base model of a family's model: itself, or what its head stands on."""
    return module if _name(module) == family.prefix + family.base else module.base_model  # type: ignore[return-value]


def kind(module: nn.Module) -> str:
    """The model type by which the tables know a model."""
    model_type = getattr(getattr(module, "config", None), "model_type", "")
    return PARTS.get(model_type, model_type)


def _kind(module: nn.Module) -> type:
    """Its class; that beneath FSDP2's, which stands in for it."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


def _name(module: nn.Module) -> str:
    return _kind(module).__name__
