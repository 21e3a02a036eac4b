"""Tables of the Hugging Face models that can be packed, and of what differs between them.

The class name of a model is the prefix of its family and an ending, such as one in `HEADS`.
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
    """The pooled output (B, E), from the first token of each row (B, E)."""
    return base.pooler(first.unsqueeze(1)) if base.pooler is not None else None


def _pool_albert(base: Any, first: Tensor) -> Tensor | None:
    return base.pooler_activation(base.pooler(first)) if base.pooler is not None else None


def _embed_esm(base: Any, input_ids: Tensor, position_ids: Tensor, layout: SequenceLayout) -> Tensor | None:
    """The embeddings (1, T, E) of a packed row. ESM-2 scales them by the share of masked tokens in a sequence."""
    embeddings = base.embeddings
    if not embeddings.token_dropout:
        return None
    masked = input_ids == embeddings.mask_token_id
    count = torch.zeros(layout.batch_size, device=input_ids.device).index_add_(
        0, layout.sequence_ids, masked[0].float()
    )
    in_training = 1 - 0.15 * 0.8  # the share of tokens that were not masked when ESM-2 was trained
    scale = (in_training / (1 - count / layout.lengths))[layout.sequence_ids]
    embeds = embeddings.word_embeddings(input_ids).masked_fill(masked.unsqueeze(2), 0.0)
    return embeddings(inputs_embeds=(embeds * scale[:, None]).to(embeds.dtype), position_ids=position_ids)


@dataclass(frozen=True)
class Family:
    """What is special about a family of models.

    Attributes:
        prefix: the beginning of its class names, for example "Bert" in BertModel and BertForMaskedLM.
        positions: how the model computes positions if the caller passes none. "padded": the index in the padded row;
            "tokens": the number of tokens before it in the attention mask (OPT); "ids": the number of input ids up to
            it that are not the padding id, plus the padding id (RoBERTa).
        pool: computes the pooled output from the first token of each row. None if the base model has none.
        embed: computes the embeddings of a packed row if those of a token depend on other tokens of its sequence.
        base: the ending of the base model's class name.
        padded_if: a flag in the config. If it is set, the model can't be packed, because only its mask says which keys
            are visible.
    """

    prefix: str
    positions: Literal["padded", "tokens", "ids"] = "padded"
    pool: Callable[[Any, Tensor], Tensor | None] | None = None
    embed: Callable[[Any, Tensor, Tensor, SequenceLayout], Tensor | None] | None = None
    base: str = "Model"
    padded_if: str = ""


# config.model_type → family. Their models pass cu_seq_lens to attention, and sliding_window in layers that have one.
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

# Ending of a head's class name → what it predicts:
# "token": a value for each token. Head and loss run packed.
# "next token": the same, but the first token of a sequence is not predicted.
# "span": the first and last token of an answer. The head runs packed, its loss on padded logits.
# "sequence": a value for each row. The base model runs packed, the head gets padded hidden states.
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

# config.model_type → why the model is not packed, though its attention can be replaced.
NOT_PACKED = {
    "bart": "self-attention and cross-attention get the same cu_seq_lens, but have different lengths",
    "clip": "its images have equal lengths, and its text is pooled at a position of the padded row",
    "siglip": "its rows have equal lengths",
    "t5": "its position bias is computed for padded rows, and cross-attention gets the same cu_seq_lens",
    "vit": "its images have equal lengths",
    "whisper": "its rows have equal lengths, with padding",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "its positions have three dimensions"),
}
# config.model_type → why attention can't be replaced through transformers' interface.
_ADDS_ALIBI = "it adds ALiBi in its own attention code; varlen_attention has alibi_slopes to rewrite a layer with"
NOT_ROUTED = {
    **dict.fromkeys(("bloom", "mpt"), _ADDS_ALIBI),
    **dict.fromkeys(("codegen", "gptj"), "it has its own attention code"),
    **dict.fromkeys(("deberta", "deberta-v2"), "no flash kernel supports the two terms of its disentangled attention"),
    **dict.fromkeys(("led", "longformer"), "it has its own code for blocks of a sliding window"),
    "big_bird": "its attention is block sparse",
    "falcon": "it has its own attention code; varlen_attention has alibi_slopes to rewrite a layer with",
    "layoutlmv3": "no flash kernel supports the two position terms of its attention",
    "luke": "its attention has separate queries for words and entities",
    "mpnet": "it adds a relative position bias in its own attention code; models such as bert can be packed",
    "wavlm": "it adds a gated position bias in its own attention code",
    "xlnet": "its attention has two streams",
}

# Inputs with a value for each token, except position_ids.
TOKEN_INPUTS = {"input_ids", "inputs_embeds", "token_type_ids", "shift_labels", "labels"}
# Outputs with a value for each token. Those in LOWEST_AT_PADDING have the lowest number at padding, the others 0.
TOKEN_OUTPUTS = {"last_hidden_state", "hidden_states", "logits", "start_logits", "end_logits"}
LOWEST_AT_PADDING = {"start_logits", "end_logits"}
# Other outputs. An output in no table is padded if its shape is (1, T, …); if not, the call may fall back.
OTHER_OUTPUTS = {"loss", "pooler_output", "past_key_values", "attentions", "aux_loss"}


def model_type(module: nn.Module) -> str:
    """The `config.model_type` of a module, or "" if it has none."""
    return getattr(getattr(module, "config", None), "model_type", "")


def family_of(module: nn.Module) -> Family | None:
    """The family of a Hugging Face model. None if it is in no family, or its class is not defined in transformers."""
    family = FAMILIES.get(model_type(module))
    if family is None or not _class_of(module).__module__.startswith("transformers."):
        return None
    return family if re.match(f"{family.prefix}(Text)?(Model|For|LMHead)", _class_of(module).__name__) else None


def head_of(module: nn.Module, family: Family) -> Head | None:
    """What the head of a model predicts, or None for a base model.

    Raises:
        KeyError: the head is not in `HEADS`.
    """
    ending = _class_of(module).__name__.removeprefix(family.prefix)
    return None if ending == family.base else HEADS[ending.removeprefix("Text")]


def base_model(module: nn.Module, family: Family) -> nn.Module:
    """The base model of a model with a head, or the model itself if it has no head."""
    is_base = _class_of(module).__name__ == family.prefix + family.base
    return module if is_base else module.base_model  # type: ignore[return-value]


def kind(module: nn.Module) -> str:
    """The model type of a model as in NOT_PACKED and NOT_ROUTED, for example "clip" also for the parts of a CLIP."""
    return re.sub("_(text|vision)(_model)?$", "", model_type(module))


def _class_of(module: nn.Module) -> type:
    """The class of a module, without the subclass that FSDP2 adds."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))
