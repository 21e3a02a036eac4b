"""Tables: what is special about some families of Hugging Face models, and what arguments and outputs mean."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layouts.protocol import Layout
from ..torch_private import children_of, inside_compiled, parameters_of
from .plan import Positions
from .transformers_private import asks_for_attention, can_set_attention


def pool_first(base: Any, first: Tensor) -> Tensor | None:
    """The pooled output (B, E), from the first token of each row (B, E)."""
    return base.pooler(first.unsqueeze(1)) if base.pooler is not None else None


def _pool_albert(base: Any, first: Tensor) -> Tensor | None:
    return base.pooler_activation(base.pooler(first)) if base.pooler is not None else None


def _pool_big_bird(base: Any, first: Tensor) -> Tensor | None:
    return base.activation(base.pooler(first)) if base.pooler is not None else None


def _embed_esm(base: Any, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor | None:
    """The embeddings (1, T, E) of a packed row. ESM-2 scales them by the share of masked tokens in a sequence."""
    embeddings = base.embeddings
    if not embeddings.token_dropout:
        return None
    masked = input_ids == embeddings.mask_token_id
    in_sequence = layout.fill_past_end(masked[0].float(), 0.0)
    count = torch.zeros(layout.batch_size, device=input_ids.device).index_add_(0, layout.sequence_ids, in_sequence)
    in_training = 1 - 0.15 * 0.8  # the share of tokens that were not masked when ESM-2 was trained
    lengths = layout.lengths.clamp(min=1)  # rows past the last token must be finite, or their gradients are NaN
    scale = (in_training / (1 - count / lengths))[layout.sequence_ids]
    embeds = embeddings.word_embeddings(input_ids).masked_fill(masked.unsqueeze(2), 0.0)
    return embeddings(inputs_embeds=(embeds * scale[:, None]).to(embeds.dtype), position_ids=position_ids)


Pool = Callable[[Any, Tensor], Tensor | None]
Embed = Callable[[Any, Tensor, Tensor, Layout], Tensor | None]


@dataclass(frozen=True)
class Family:
    """How to pack a family of models.

    Attributes:
        positions: how the model computes positions if the caller passes none. "padded": the index in the padded row;
            "tokens": the number of tokens before it in the attention mask (OPT); "ids": the number of input ids up to
            it that are not the padding id, plus the padding id (RoBERTa). None: the check finds out.
        pool: computes the pooled output from the first token of each row. None: the check tries the base model's
            `pooler`.
        embed: computes the embeddings of a packed row if those of a token depend on other tokens of its sequence.
        needs_token_types: whether a packed row needs `token_type_ids`, because those that the model makes are only as
            long as its longest sequence.
    """

    positions: Positions | None = None
    pool: Pool | None = None
    embed: Embed | None = None
    needs_token_types: bool = False


# config.model_type → what the check can't find by itself. `add_family` adds to it.
FAMILIES = {
    "albert": Family(pool=_pool_albert),
    "big_bird": Family(pool=_pool_big_bird, needs_token_types=True),
    "convbert": Family(needs_token_types=True),
    "esm": Family(embed=_embed_esm),
}

# config.model_type → why the model is not packed, though its attention can be replaced.
NOT_PACKED = {
    "clip": "its images have equal lengths, and its text is pooled at a position of the padded row",
    "cpmant": "it takes no attention_mask, and adds the tokens of a prompt to each row",
    "siglip": "its rows have equal lengths",
    "vit": "its images have equal lengths",
}
# config.model_type → what is special about attention that can't be replaced through transformers' interface.
OWN_ATTENTION = {
    **dict.fromkeys(("led", "longformer"), "it has its own code for blocks of a sliding window"),
    "layoutlmv3": "its attention adds two position terms",
    "wavlm": "its attention adds a gated position bias",
    "xlnet": "its attention has two streams",
}

# Inputs with a value for each token, except position_ids.
TOKEN_INPUTS = {"input_ids", "inputs_embeds", "token_type_ids", "shift_labels", "labels"}
# The sequences of rows that the caller packed, as transformers' DataCollatorWithFlattening gives them.
ROW_INPUTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
SPANS = ("start_positions", "end_positions")
CACHE = {"past_key_values", "cache"}  # its names as an argument and as an output; the second since transformers 5.24
# Arguments of a model. A call with any other one can't run packed.
INPUTS = TOKEN_INPUTS | ROW_INPUTS | CACHE | {
    "attention_mask", "position_ids", "logits_to_keep", "start_positions", "end_positions", "next_sentence_label",
    "num_items_in_batch", "ignore_index", "encoder_hidden_states", "encoder_attention_mask",
    "return_dict", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
}  # fmt: skip
# Arguments that models ignore, unless they name them. sentence-transformers adds them to a dict of features, which may
# be used again.
IGNORED = {"token_embeddings", "sentence_embedding", "all_layer_embeddings"}
# Outputs with a value for each token. Those in LOWEST_AT_PADDING have the lowest number at padding, the others 0.
TOKEN_OUTPUTS = {"last_hidden_state", "hidden_states", "logits", "start_logits", "end_logits"}
LOWEST_AT_PADDING = {"start_logits", "end_logits"}
# Other outputs. An output in no table is padded if its shape is (1, T, …); if not, the call may fall back.
OTHER_OUTPUTS = CACHE | {"loss", "pooler_output", "attentions", "aux_loss"}


def add_family(
    model_type: str, *, positions: Positions | None = None, pool: Pool | None = None, embed: Embed | None = None
) -> None:
    """Say what is special about a family of models. Most models do not need it: `nta.patch` finds how to pack them.

    A model of the family is still checked, so a wrong family is refused.

    Args:
        model_type: the `config.model_type` of its models.
        positions: how the models compute positions if the caller passes none. "padded": the index in the padded row;
            "tokens": the number of tokens before it in the attention mask (OPT); "ids": the number of input ids up to
            it that are not the padding id, plus the padding id (RoBERTa). None tries all three.
        pool: `pool(base_model, first)` computes the pooled output (B, E) from the first token of each row, (B, E). None
            tries the `pooler` of the base model.
        embed: `embed(base_model, input_ids, position_ids, layout)` computes the embeddings (1, T, E) of a packed row,
            if those of a token depend on other tokens of its sequence. `input_ids` and `position_ids` are (1, T), and
            `layout` is the `SequenceLayout` of the row. It returns None if the model's own embeddings are right.

    Raises:
        ValueError: `positions` has another value.

    Example:
        >>> import nt_attention as nta
        >>> nta.hf.add_family("my_model", positions="tokens")
    """
    if positions not in (None, "padded", "tokens", "ids"):
        raise ValueError(f'positions must be "padded", "tokens", "ids" or None, got {positions!r}.')
    FAMILIES[model_type] = Family(positions, pool, embed)


def model_type(module: nn.Module) -> str:
    """The `config.model_type` of a module, or "" if it has none."""
    return getattr(getattr(module, "config", None), "model_type", "")


def family_of(module: Any) -> Family:
    """What is known about the family of a model."""
    return FAMILIES.get(model_type(module), Family())


def routes_attention(module: Any) -> bool:
    """Whether the attention of a model runs through transformers' interface, so that it can be replaced by name."""
    return why_not_routed(module) is None


def has_named_attention(module: Any) -> bool:
    """Whether a model has attention that can be replaced by name. Mamba may get a name, but has no attention."""
    return routes_attention(module) and asks_for_attention(class_of(module))


def why_not_routed(module: Any) -> str | None:
    """Why the attention of a model can't be replaced by name, or None."""
    if can_set_attention(module):
        return None
    if class_of(module).__module__ == "__main__":
        return "has no source that transformers could read, which it does before it replaces attention: use a file"
    reason = f": {OWN_ATTENTION[kind(module)]}" if kind(module) in OWN_ATTENTION else ""
    return f"does not route its attention through transformers' interface{reason}"


def why_not_packed(module: Any) -> str | None:
    """Why a model is not packed, whatever a check would find, or None."""
    if kind(module) in NOT_PACKED:
        return NOT_PACKED[kind(module)]
    sparse = (x for x in base_model(module).modules() if getattr(x, "attention_type", None) == "block_sparse")
    if (found := next(sparse, None)) is not None:
        how = f"call set_attention_type('original_full') on its {type(found).__name__} before the patch"
        return f"its attention is block sparse, which mixes sequences: {how}"
    cls: Any = class_of(module)
    parameters = inspect.signature(cls.forward).parameters.values()
    main, names = module.main_input_name, [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    if names and main not in names and "attention_mask" not in names:  # as in the vision towers of Qwen-VL
        main = names[0]
    return None if main == "input_ids" else f"its input is {main}, and only the tokens of input_ids are packed"


def may_pack(module: Any) -> bool:
    """Whether a model in another one may be packed by itself. One that attends to an encoder may not."""
    names = inspect.signature(cast(Any, class_of(module)).forward).parameters
    attends = module.config.is_encoder_decoder or getattr(module.config, "add_cross_attention", False)
    return why_not_packed(module) is None and not ("encoder_hidden_states" in names and attends)


def is_encoder_decoder(module: Any) -> bool:
    """Whether a model has a decoder beside its encoder. The encoder alone may have the config of both."""
    return module.config.is_encoder_decoder and any(
        "decoder_input_ids" in inspect.signature(type(part).forward).parameters for part in (module, base_model(module))
    )


def config_of(module: Any) -> Any:
    """The config of a model, with the kind of attention that it has now. BigBird changes it, but not its config."""
    kind, config = getattr(base_model(module), "attention_type", None), module.config
    if not isinstance(kind, str) or kind == getattr(config, "attention_type", kind):
        return config
    config = copy.deepcopy(config)
    config.attention_type = kind
    return config


def base_model(module: Any) -> PreTrainedModel:
    """The base model of a model with a head, or the model itself if it has no head."""
    inner = getattr(module, "base_model", module)  # the encoder of FSMT is a plain module
    inner = inside_compiled(inner)  # it was replaced by torch.compile(inner)
    return inner if isinstance(inner, PreTrainedModel) else module


# Packages of adapters that compute something for each row of a batch, which a packed row does not have.
_OF_ROWS = ("peft.tuners.poly", "peft.tuners.shadow", "peft.tuners.xlora")


def adapter_of_rows(model: nn.Module) -> str | None:
    """Why a model with an adapter for rows can't be packed, or None."""
    for path, module in model.named_modules():
        owners = type(module), type(getattr(vars(module).get("forward"), "__self__", None))
        package = next((x.__module__ for x in owners if x.__module__.startswith(_OF_ROWS)), None)
        if package is not None:
            where = path or type(model).__name__
            return f"{where} has an adapter of PEFT ({package.split('.')[2]}) that computes with the rows of a batch"
    return None


def first_parameter(module: nn.Module) -> Tensor | None:
    """What `next(module.parameters(), None)` is, in an eighth of its time."""
    for parameter in parameters_of(module).values():
        if parameter is not None:
            return parameter
    for child in children_of(module).values():
        if child is not None and (found := first_parameter(child)) is not None:
            return found
    return None


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype in which a model computes."""
    parameter = first_parameter(model)
    if parameter is None:
        return torch.float32
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def kind(module: nn.Module) -> str:
    """The model type of a model as in NOT_PACKED and OWN_ATTENTION, for example "clip" also for the parts of a CLIP."""
    return re.sub("_(text|vision)(_model)?$", "", model_type(module))


def is_of_transformers(kind: type) -> bool:
    """Whether a class is from transformers."""
    return kind.__module__.startswith("transformers.")


def class_of(module: nn.Module) -> type:
    """The class of a module, without the subclass that FSDP2 adds."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]
