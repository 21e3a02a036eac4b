"""Which route a call of a patched Hugging Face model takes: an ordered table of rules, each with its reason.

The first rule with a reason decides. A call for which no rule has one runs packed. Both the head and its base model
have a patched `forward`, because some callers do not call the head's `forward`: TRL, Liger, prefix tuning of PEFT, and
`model.model(...)`. So a rule may also be about the head only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...patching.forwards import (
    CONTEXT_PARALLEL,
    CONTINUES_FROM_CACHE,
    GRADIENTS_PER_SAMPLE,
    has_gradients_per_sample,
    is_context_parallel,
)
from .. import families
from ..route.attention import NAMES
from ..transformers_private import ATTENTION, attention_of, has_other_loss
from .inputs import has_axes, padding_id, points_at_padding
from .routes import FallsBack, HeadFallsBack, ModelCall, SmallBatch, Unpatched
from .sharded_packing import why_call_not_sharded
from .shared_prefixes import may_share
from .tensor_parallel import DIVIDES_TOKENS, divides_tokens

NO_PADDING = "there is no padding to skip"
WEIGHTS = "it asks for attention weights"
TOO_SMALL = "the batch is too small to gain from packing"
NO_MASK = "it has no attention_mask, so all positions count as tokens"
Rule = tuple[Callable[[Any], str | None], type[Unpatched]]


def route_of(call: Any, rules: tuple[Rule, ...]) -> Unpatched | None:
    """The route that a table gives a call, counted. None if no rule has a reason."""
    for reason_of, route in rules:
        reason = reason_of(call)
        if reason is not None:
            return route.take(call, reason)
    return None


def is_divided_by_context_parallel(call: ModelCall) -> str | None:
    """PyTorch or accelerate has divided the rows."""
    return CONTEXT_PARALLEL if call.entry.handle.mesh is None and is_context_parallel() else None


def needs_samples(call: ModelCall) -> str | None:
    """Opacus takes the rows for samples."""
    return GRADIENTS_PER_SAMPLE if has_gradients_per_sample(call.model) else None


def was_given_other_attention(call: ModelCall) -> str | None:
    """Its attention is not ours any more."""
    name = vars(call.model.config).get(ATTENTION)  # the __getattribute__ of a config is a Python function: it takes µs
    if not call.entry.is_routed or name in NAMES:
        return None
    return f"its attention was set to {attention_of(call.model.config)!r} after the patch"


def has_other_arguments(call: ModelCall) -> str | None:
    """An argument or the config asks for what a packed row can't give."""
    base = None if call.entry.head is None else call.base
    return why_arguments_not_packed(call.arguments, call.model, call.entry.is_routed, base)


def has_no_padding_id(call: ModelCall) -> str | None:
    """Its positions are counted by an id that is not known."""
    if call.entry.plan.positions == "ids" and "position_ids" not in call.arguments and padding_id(call.base) is None:
        return "its positions depend on pad_token_id, which its config has not set"
    return None


def head_needs_rows(call: ModelCall) -> str | None:
    """The head can't run packed though its base model can."""
    if call.entry.head is None:
        return None
    model, arguments = call.model, call.arguments
    if unknown := arguments.keys() - families.INPUTS:
        return _NOT_KNOWN.format(unknown.pop())
    labels = arguments.get("labels", arguments.get("shift_labels"))
    if has_other_loss(model) or (labels is not None and not _has_usual_loss(model)):
        return "its loss_function was replaced, and may need padded rows"
    keep = arguments.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) and keep.dtype == torch.bool:
        return "its logits_to_keep is a mask"
    if labels is not None and (isinstance(keep, Tensor) or keep):
        return "it asks for a loss with logits_to_keep"
    return None


def is_too_small(call: ModelCall) -> str | None:
    """The device computes the padding before the host has packed it."""
    return TOO_SMALL if call.entry.is_small(call) else None


def has_holes(call: ModelCall) -> str | None:
    """A row has padding between its tokens."""
    if call.packing is None or not call.packing.has_holes:
        return None
    if call.entry.head == "next token" and "labels" in call.arguments:
        return "its rows have padding between tokens, and labels are shifted over it"
    return "its rows have padding between tokens, which its windows count" if call.entry.has_windows else None


def has_no_padding(call: ModelCall) -> str | None:
    """Packing saves nothing. With a mesh, each rank has fewer tokens than the batch; and rows may share prefixes."""
    packing, entry = call.packing, call.entry
    if packing is not None and packing.layout.total > 0:
        if entry.handle.mesh is not None or not packing.saves_nothing:
            return None
        if entry.shares and may_share(entry.handle.prefixes, call.arguments, packing.rows):
            return None
    return NO_PADDING if "attention_mask" in call.arguments else NO_MASK


def is_not_sharded(call: ModelCall) -> str | None:
    """The call can't be divided over the ranks of the mesh."""
    if call.entry.handle.mesh is None:
        return None
    if (reason := why_call_not_sharded(call.model, call.entry.head, call.arguments)) is not None:
        return reason
    return "it has too few tokens for the ranks of the mesh" if 0 in call.sharded.sharded.sizes else None


def answers_at_padding(call: ModelCall) -> str | None:
    """An answer of question answering points at padding."""
    assert call.packing is not None
    if call.entry.head != "span" or not points_at_padding(call.arguments, call.packing):
        return None
    return "its start_positions or end_positions point at padding, which has no logits"


def differs_from_padded(call: ModelCall) -> str | None:
    """The first batch of its kind was compared, and gave other values packed than padded."""
    first = call.entry.first_batches
    return None if first is None else first.why_padded(call)


# The rules before a call is tried as a CUDA graph, which has rules of its own, and those after it.
BEFORE_GRAPH: tuple[Rule, ...] = (
    (is_divided_by_context_parallel, FallsBack),
    (needs_samples, FallsBack),
    (has_other_arguments, FallsBack),
    (was_given_other_attention, FallsBack),
    (has_no_padding_id, FallsBack),
    (head_needs_rows, HeadFallsBack),
)
AFTER_GRAPH: tuple[Rule, ...] = (
    (is_too_small, SmallBatch),
    (has_holes, FallsBack),
    (has_no_padding, Unpatched),
    (is_not_sharded, FallsBack),
    (answers_at_padding, FallsBack),
    (differs_from_padded, FallsBack),
)

# Argument → why a call with it falls back to the padded forward.
_NOT_PACKED = {
    **dict.fromkeys((*families.CACHE, "cache_params"), CONTINUES_FROM_CACHE),
    "use_cache": "it asks for a cache",
    "output_attentions": WEIGHTS,
    "output_router_logits": "it asks for router logits, whose loss needs the padded mask",
    "encoder_hidden_states": "it has encoder_hidden_states for cross-attention",
}
_NOT_KNOWN = "its argument {!r} is not known, and may depend on padded rows"


def why_arguments_not_packed(
    arguments: dict[str, Any], model: PreTrainedModel, is_routed: bool, base: Any = None
) -> str | None:
    """Why a call with these arguments can't be packed, or None.

    An argument that is not known may be one of the head, if `base` is passed and its class does not name it.
    """
    config = model.config
    of_config = vars(config)
    is_ours = of_config.get(ATTENTION) in NAMES
    if not (is_routed and is_ours) and config.output_attentions:  # transformers allows it with its eager attention only
        return "the config asks for attention weights"
    if model.training and _has_noise(model):
        return "NEFTune scales its noise by the length of a row"
    if of_config.get("output_router_logits"):
        return _NOT_PACKED["output_router_logits"]
    for name, x in arguments.items():
        if name in _NOT_PACKED and x is not False:  # not its truth value: an empty cache is falsy
            return _NOT_PACKED[name]
        if name not in families.INPUTS and (base is None or name in inspect.signature(type(base).forward).parameters):
            return _NOT_KNOWN.format(name)
    mask, position_ids = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its attention_mask is not (batch, length)"
    if position_ids is not None and position_ids.dim() != 2 and not has_axes(position_ids, mask):
        return "its position_ids are not (batch, length)"
    if divides_tokens(model):
        return DIVIDES_TOKENS
    return None


def _has_noise(model: PreTrainedModel) -> bool:
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # a class need not say what they are
        return False
    return bool(getattr(embeddings, "neftune_noise_alpha", None))


def _has_usual_loss(model: PreTrainedModel) -> bool:
    """Whether the loss is that of the class: transformers finds it by the class name."""
    module = getattr(model.loss_function, "__module__", "")
    return module.startswith("transformers.") and (model.loss_type or "") in type(model).__name__
