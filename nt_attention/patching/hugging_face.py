"""``patch`` for Hugging Face models: one packed row from the model's entry to its exit, head and loss included.

Dimensions: B rows of a padded batch, L places in a row, T tokens.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss
from transformers.utils import ModelOutput

from ..hf import models
from ..hf.interface import NAME_OVER, attention, bypass_mask, register
from ..hf.models import Family, Head
from .packing import Packing
from .patch import PatchedForward, PatchHandle

Logits = Literal["padded"] | None

# What a caller may ask for that packing can't give; the call then runs as it did before.
_STEPS_ASIDE = {
    "past_key_values": "it continues from a cache.",
    "use_cache": "it asks for a cache.",
    "output_attentions": "it asks for attention weights.",
    "output_router_logits": "it asks for router logits, which are counted with a padded mask.",
    "encoder_hidden_states": "it attends across to another model's states.",
    "cu_seq_lens_q": "it is packed already.",
}
# Vision towers that are handed all images in one row make one call of it under a name with "flash" in it alone.
_VISION_NAME = "nt_attention_flash_for_packed_images"


def patch_model(name: str, model: nn.Module, handle: PatchHandle, padding_free: bool, logits: Logits) -> bool:
    """Patch a model of the tables, or say why not. False if ``model`` is no Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        return False
    kind, family = models.kind(model), models.family_of(model)
    refusal = _refusal(model, kind, family, padding_free)
    if refusal is not None:
        handle.leave(name, refusal)
        return True
    before = _set_attention(model, handle)
    how = "runs rows that are packed with cu_seq_lens or position_ids"
    if padding_free and family is not None:
        _make_padding_free(model, family, handle, logits)
        how = "packed at the entry, padded at the exit"
    elif padding_free:
        how = f"runs as it is called: {models.NOT_PACKED[kind]}"
    handle.change(name, f"{type(model).__name__}, attention {before!r} before, {how}")
    handle.change_layers(name, _attention_layers(model))
    for path, module in model.named_modules():
        if _takes_packed_images(module):
            _one_call_for_all_images(module, handle)
            handle.change(f"{name}.{path}" if name else path, "one call for all images")
    return True


def _refusal(model: PreTrainedModel, kind: str, family: Family | None, padding_free: bool) -> str | None:
    what = type(model).__name__
    if kind in models.NOT_ROUTED or not model._can_set_attn_implementation():
        why = models.NOT_ROUTED.get(kind)
        return f"{what} does not route its attention through transformers' interface{f': {why}' if why else ''}."
    if not padding_free or kind in models.NOT_PACKED:
        return None
    if family is None:
        return (
            f"{what} is in no family of nt_attention.hf.models yet (there are {', '.join(models.FAMILIES)}): "
            "padding_free=False swaps its attention alone, for rows that you pack."
        )
    try:
        models.head_of(model, family)
    except KeyError:
        where = next(path for path, part in model.named_modules() if part is models.base_model(model, family))
        return (
            f"{what} has a head that is not in nt_attention.hf.models yet, and may read padded positions: patch its "
            f"base model, .{where}, by itself."
        )
    return None


def _set_attention(model: PreTrainedModel, handle: PatchHandle) -> str:
    """Put our name into the model's configs, and on the handle what puts theirs back."""
    before = model.config._attn_implementation
    if before in NAME_OVER.values():
        patched = [m.__dict__.get("forward") for m in model.modules()]
        handles = [p.handle for p in patched if isinstance(p, PatchedForward)]
        if not handles or any(h.active for h in handles):
            raise ValueError(
                f"{type(model).__name__} runs {before!r} already: remove() the handle of that patch first."
            )
        before = next(over for over, name in NAME_OVER.items() if name == before)  # a copy that outlived its patch
    kept = [(config, {k: v for k, v in vars(config).items() if k.startswith("_attn")}) for config in _configs(model)]
    # what is not packed runs as before: on eager, which each model has its own of, or on sdpa
    model.set_attn_implementation(register("eager" if before == "eager" else "sdpa"))
    handle.on_remove(functools.partial(_put_back_configs, kept, before))
    return before


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    yield from found.values()


def _put_back_configs(kept: list[tuple[Any, dict[str, Any]]], before: str) -> None:
    for config, attributes in kept:
        for key in [key for key in vars(config) if key.startswith("_attn") and key not in attributes]:
            del config.__dict__[key]
        config.__dict__.update(attributes)
        if config._attn_implementation_internal in NAME_OVER.values():
            config._attn_implementation_internal = before


def _attention_layers(model: nn.Module) -> dict[str, str]:
    """Modules that look their attention function up, by name."""
    wanted = {path: module for path, module in model.named_modules() if "Attention" in type(module).__name__}
    return {
        path: f"{type(module).__name__}{_window_of(module)}"
        for path, module in wanted.items()
        if not any(other.startswith(f"{path}.") for other in wanted)
    }


def _window_of(module: nn.Module) -> str:
    window = getattr(module, "sliding_window", None)
    return f", window {window}" if isinstance(window, int) else ""


def _takes_packed_images(module: nn.Module) -> bool:
    if not hasattr(module, "config") or "Attention" not in type(module).__name__:
        return False
    return "cu_seqlens" in inspect.signature(type(module).forward).parameters


def _one_call_for_all_images(module: Any, handle: PatchHandle) -> None:
    """Give a vision tower's attention a config of its own, whose name says that lengths may come with one row."""
    AttentionInterface.register(_VISION_NAME, functools.partial(attention, over="sdpa"))
    handle.on_remove(functools.partial(setattr, module, "config", module.config))
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = _VISION_NAME


def _make_padding_free(model: PreTrainedModel, family: Family, handle: PatchHandle, logits: Logits) -> None:
    head = models.head_of(model, family)
    entry: Any = models.base_model(model, family) if head == "sequence" else model
    handle.override_forward(entry, functools.partial(_padding_free, handle, family, head, logits))


def _padding_free(
    handle: PatchHandle,
    family: Family,
    head: Head | None,
    logits: Logits,
    model: PreTrainedModel,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    signature = inspect.signature(original)
    given = signature.bind(*args, **kwargs).arguments
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    given = {name: value for name, value in {**given, **given.pop(rest, {})}.items() if value is not None}
    why = _why_not(given, model)
    if why is not None:
        handle.not_packed(why)
        return original(*args, **kwargs)
    packing = _packing(given)
    if packing is None or packing.saves_nothing:
        handle.count("there is no padding to skip" if packing is None or packing.layout.total else "it has no token")
        return original(*args, **kwargs)
    handle.count(None)

    as_dict = given.pop("return_dict", None)
    spans = {key: given.pop(key) for key in ("start_positions", "end_positions") if head == "span" and key in given}
    keep = given.pop("logits_to_keep", 0)
    kept = _kept(packing, keep, given) if isinstance(keep, Tensor) or keep else None
    loss_alone = logits is None and model.training and bool({"labels", "shift_labels"} & given.keys())

    packed = _pack_inputs(model, family, head, packing, given)
    if kept is not None:
        packed["logits_to_keep"] = kept[0].flatten()
    out = original(**packed)
    first = packing.first_tokens(out["last_hidden_state"]) if head in (None, "sequence") else None
    _pad_outputs(out, packing, kept, {"logits"} if loss_alone else set())
    if first is not None:
        _redo_first_tokens(model, family, head, packing, out, first)
    if spans:
        loss = ForQuestionAnsweringLoss(out["start_logits"], out["end_logits"], **spans)
        out = out if loss is None else type(out)(**{**out, "loss": loss})
    wants_dict = model.config.return_dict if as_dict is None else as_dict
    return out if wants_dict else out.to_tuple()


def _why_not(given: dict[str, Any], model: PreTrainedModel) -> str | None:
    if model.config.output_attentions:
        return "the config asks for attention weights."
    if getattr(model.config, "output_router_logits", False):
        return _STEPS_ASIDE["output_router_logits"]
    for name, why in _STEPS_ASIDE.items():
        value = given.get(name)
        if isinstance(value, Tensor) or value:
            return why
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its attention_mask is not (batch, length)."
    positions = given.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return "its position_ids are not (batch, length)."
    return None


def _packing(given: dict[str, Any]) -> Packing | None:
    """None if neither mask nor positions tell of anything to pack."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if tokens is None or (mask is None and positions is None):
        return None
    rows, length = tokens.shape[:2]
    for name, of in (("attention_mask", mask), ("position_ids", positions)):
        if of is not None and of.shape != (rows, length) and (name == "attention_mask" or of.shape != (1, length)):
            raise ValueError(
                f"{name} is {tuple(of.shape)}, but the input is {(rows, length)} (batch, length). To decode on from a "
                "cache, pass use_cache=True in the first call: a packed call returns none."
            )
    return Packing.of(mask, positions, rows, length)


def _pack_inputs(
    model: PreTrainedModel, family: Family, head: Head | None, packing: Packing, given: dict[str, Any]
) -> dict[str, Any]:
    """The keywords that make (1, T) tokens a packed row to transformers."""
    layout, mask = packing.layout, given.pop("attention_mask", None)
    base: Any = models.base_model(model, family)
    if "position_ids" not in given:
        given["position_ids"] = _positions(family, base, packing, given.get("input_ids"))
    else:
        given["position_ids"] = packing.pack(given["position_ids"])
    if family.embed is not None and "input_ids" in given and "inputs_embeds" not in given:
        here = torch.ones_like(given["input_ids"]) if mask is None else mask
        embeds = family.embed(base, given["input_ids"], here)
        if embeds is not None:
            given["inputs_embeds"] = embeds
            del given["input_ids"]
    for key in TOKEN_INPUTS_BESIDE_POSITIONS & given.keys():
        given[key] = packing.pack(given[key])
    if head == "next token" and "labels" in given:  # the first token of a sequence follows no token of it
        given["labels"] = given["labels"].masked_fill(layout.position_ids == 0, -100)
    return {
        **given,
        # a model whose embeddings read the mask is handed none
        **({} if family.embed is not None else {"attention_mask": bypass_mask(layout.device)}),
        "cu_seq_lens_q": layout.cu_seqlens,
        "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": layout.max_seqlen,
        "max_length_k": layout.max_seqlen,
        "use_cache": False,
        "return_dict": True,
    }


TOKEN_INPUTS_BESIDE_POSITIONS = {*models.TOKEN_INPUTS} - {"position_ids"}


def _positions(family: Family, base: Any, packing: Packing, input_ids: Tensor | None) -> Tensor:
    """(1, T): what the model would have counted in the padded row."""
    if family.counts == "tokens":
        return packing.layout.position_ids.unsqueeze(0)
    if family.counts == "places":
        return packing.places.unsqueeze(0)
    padding = base.config.pad_token_id
    if input_ids is None:
        return packing.places.unsqueeze(0) + padding + 1
    real = (input_ids != padding).long()
    return packing.pack(real.cumsum(1) * real + padding)


def _kept(packing: Packing, keep: int | Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The tokens whose logits are wanted, (B, K), and where there is one; ``keep`` is the last places, or places."""
    places = torch.arange(packing.length, device=packing.layout.device)
    return packing.tokens_at(places[-keep:] if isinstance(keep, int) else places[keep])


def _pad_outputs(out: ModelOutput, packing: Packing, kept: tuple[Tensor, Tensor] | None, leave: set[str]) -> None:
    """Give every output with a place for each token, (1, T, …), its padded form (B, L, …)."""
    for name, value in models.TOKEN_OUTPUTS.items():
        packed = out.get(name)
        if packed is None or name in leave:
            continue
        if name == "logits" and kept is not None:
            tokens, there = kept
            out[name] = packed.view(*tokens.shape, -1).masked_fill(~there.unsqueeze(2), 0)
        elif isinstance(packed, tuple):
            out[name] = tuple(packing.pad(part) for part in packed)
        else:
            out[name] = packing.pad(packed, 0.0 if value == 0 else torch.finfo(packed.dtype).min)


def _redo_first_tokens(
    base: nn.Module, family: Family, head: Head | None, packing: Packing, out: ModelOutput, first: Tensor
) -> None:
    """Pool each row's first token; and, for a head that reads a row's first place, let it find that token there."""
    if family.pool is not None and out.get("pooler_output") is not None:
        out["pooler_output"] = family.pool(base, first)
    if head == "sequence" and packing.index is not None:
        hidden = out["last_hidden_state"]
        _, there = packing.tokens_at(torch.zeros(1, dtype=torch.int64, device=hidden.device))
        out["last_hidden_state"] = torch.cat([hidden[:, :1].where(there[..., None], first[:, None]), hidden[:, 1:]], 1)
