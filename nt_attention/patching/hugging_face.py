"""``patch`` for Hugging Face models: one packed row from the model's entry to its exit, head and loss included.

Dimensions: B sequences, L positions of a padded row, T tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..hf.interface import NAME_OVER, bypass_mask, register
from ..hf.models import FAMILIES, TOKEN_INPUTS, TOKEN_OUTPUTS, Head, base_model, known
from ..layout import SequenceLayout
from .patch import PatchedForward, PatchHandle

# The layout of the packed row that is running, for a pooler, which is handed nothing but the hidden states.
_running: ContextVar[SequenceLayout | None] = ContextVar("nt_attention_running", default=None)

# What a caller may ask for that packing can't give; the call then runs as it did before.
_NOT_PACKED = {
    "past_key_values": "it continues from a cache.",
    "use_cache": "it asks for a cache.",
    "output_attentions": "it asks for attention weights.",
    "encoder_hidden_states": "it attends across to another model's states.",
    "logits_to_keep": "it asks for the logits of some positions only.",
    "cu_seq_lens_q": "it is packed already.",
}


def patch_model(name: str, model: nn.Module, handle: PatchHandle, padding_free: bool) -> bool:
    """Patch a model of the table, or say why not. False if ``model`` is no Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        return False
    row = known(model)
    if row is None:
        inside = next((path for path, child in model.named_modules() if known(child)), None)
        why = f"is in no family of nt_attention.hf.models yet (there are {', '.join(FAMILIES)})."
        if inside is not None:  # a head may read padded positions, as some losses do, so it is not taken on trust
            why = f"has a head that is not in nt_attention.hf.models yet: patch its base model, .{inside}, by itself."
        handle.leave(name, f"{type(model).__name__} {why}")
        return True
    family, head = row
    before = model.config._attn_implementation
    if before in NAME_OVER.values():
        patched = model.__dict__.get("forward")
        if not isinstance(patched, PatchedForward) or patched.handle.active:
            raise ValueError(
                f"{type(model).__name__} runs {before!r} already: remove() the handle of that patch first."
            )
        before = next(over for over, name in NAME_OVER.items() if name == before)  # a copy that outlived its patch
    if not model._can_set_attn_implementation():
        handle.leave(name, f"{type(model).__name__} does not route its attention through transformers' interface.")
        return True
    # what is not packed runs as before: on eager, which each model has its own of, or on sdpa
    model.set_attn_implementation(register("eager" if before == "eager" else "sdpa"))
    handle.on_remove(lambda: model.set_attn_implementation(before))
    if padding_free:
        pooler = getattr(base_model(model), family.pooler, None) if family.pooler else None
        if pooler is not None:
            handle.override_forward(pooler, _pool_first_tokens)
        forward = functools.partial(_packed_forward, handle, head, inspect.signature(model.forward))
        handle.override_forward(model, forward)
    done = "packed at the entry, padded at the exit" if padding_free else "runs rows packed with cu_seq_lens_q"
    handle.change(name, f"{type(model).__name__}, attention {before!r} before, {done}")
    return True


def _packed_forward(
    handle: PatchHandle,
    head: Head | None,
    signature: inspect.Signature,
    model: PreTrainedModel,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = signature.bind(*args, **kwargs).arguments
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    given = {**given, **given.pop(rest, {})}
    mask = given.get("attention_mask")
    why = _why_not(given, model)
    if why is not None:
        handle.not_packed(why)
    if why is not None or mask is None:
        return original(*args, **kwargs)
    _check_mask(mask, given)
    layout = SequenceLayout.from_attention_mask(mask.bool())
    if layout.total in (0, mask.numel()):
        return original(*args, **kwargs)  # no padding to skip, or nothing but padding

    as_dict = given.pop("return_dict", None)
    per_token = {*TOKEN_INPUTS, "labels"} if head is not None and head.per != "sequence" else {*TOKEN_INPUTS}
    packed = {key: _pack(key, value, layout, head) if key in per_token else value for key, value in given.items()}
    packed.update(_packed_row(layout, mask, packed.get("position_ids")), use_cache=False, return_dict=True)
    with _running_layout(layout):
        out = original(**packed)
    _pad_outputs(out, layout, head)
    wants_dict = model.config.return_dict if as_dict is None else as_dict
    return out if wants_dict else out.to_tuple()


def _check_mask(mask: Tensor, given: dict[str, Any]) -> None:
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if isinstance(tokens, Tensor) and tokens.shape[:2] != mask.shape:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}, but the input is {tuple(tokens.shape[:2])} (batch, length). To "
            "decode on from a cache, pass use_cache=True in the first call: a packed call returns none."
        )


def _why_not(given: dict[str, Any], model: PreTrainedModel) -> str | None:
    if model.config.output_attentions:
        return "the config asks for attention weights."
    for name, why in _NOT_PACKED.items():
        value = given.get(name)
        if isinstance(value, Tensor) or value:
            return why
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its attention_mask is not (batch, length)."
    return None


def _packed_row(layout: SequenceLayout, mask: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
    """The keywords that make (1, T) tokens a packed row to transformers.

    A token keeps the position that it had in its padded row, which is what the model would have counted.
    """
    if position_ids is None:
        assert layout.padded_index is not None
        position_ids = (layout.padded_index % mask.shape[1]).unsqueeze(0)
    return {
        "attention_mask": bypass_mask(mask.device),
        "position_ids": position_ids,
        "cu_seq_lens_q": layout.cu_seqlens,
        "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": layout.max_seqlen,
        "max_length_k": layout.max_seqlen,
    }


def _pack(name: str, value: Any, layout: SequenceLayout, head: Head | None) -> Any:
    """(B, L, …) to (1, T, …)."""
    if value is None:
        return None
    if name == "position_ids" and value.shape[0] == 1 != layout.batch_size:
        value = value.expand(layout.batch_size, -1)
    packed = layout.pack(value)
    if name == "labels" and head is not None and head.per == "next token":
        # the first token of a sequence follows no token of it
        packed = packed.masked_fill(layout.position_ids == 0, -100)
    return packed.unsqueeze(0)


def _pad_outputs(out: ModelOutput, layout: SequenceLayout, head: Head | None) -> None:
    """Give every output with a place for each token, (1, T, …), its padded form (B, L, …)."""
    names = TOKEN_OUTPUTS if head is None or head.per == "sequence" else (*TOKEN_OUTPUTS, "logits")
    for name in names:
        value = out.get(name)
        if isinstance(value, tuple):
            out[name] = tuple(layout.pad(part.squeeze(0)) for part in value)
        elif value is not None:
            out[name] = layout.pad(value.squeeze(0))


@contextmanager
def _running_layout(layout: SequenceLayout) -> Iterator[None]:
    token = _running.set(layout)
    try:
        yield
    finally:
        _running.reset(token)


def _pool_first_tokens(_: nn.Module, original: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    """A pooler that reads ``hidden_states[:, 0]``, given the first token of every packed sequence instead."""
    layout = _running.get()
    if layout is None:
        return original(hidden_states)
    first = layout.offsets[:-1].clamp(max=layout.total - 1)  # a sequence without tokens has none: any will do
    return original(hidden_states[0].index_select(0, first).unsqueeze(1))
