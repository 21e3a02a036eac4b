"""`patch` for Hugging Face models: changes a model, and lets the handle undo the changes.

The attention implementation in the model's configs is set to ours. A model of a known family also gets a `forward` that
packs (`packed_forward.py`). A vision tower that gets several images in one row runs one attention call for all of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from .._forwards import CALL_REMOVE_FIRST, Handle, PatchedForward, override_forward
from .._tracing import can_be_read, outside_of_graphs
from . import families
from .attention import NAME_OVER, attention, register
from .families import Family, Head
from .packed_forward import Logits, PackedCall
from .rope import rotate_per_sequence, scales_by_length

# Vision towers that get all images in one row only run them in one call if the name contains "flash".
_VISION_NAME = "nt_attention_flash_for_packed_images"


def patch_model(name: str, model: nn.Module, handle: Handle, padding_free: bool, logits: Logits) -> bool:
    """Patch a Hugging Face model, or tell the handle why not. Returns False if `model` is not a Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        return False
    kind, family = families.kind(model), families.family_of(model)
    reason = _not_supported(model, kind, family, padding_free)
    if reason is not None:
        handle.leave(name, f"{type(model).__name__} {reason}")
        return True
    before = _set_attention(model, handle)
    how = "supports rows that you pack, with cu_seq_lens or position_ids"
    if padding_free and family is not None:
        _make_padding_free(model, family, handle, logits)
        how = "packed at the entry, padded at the exit"
        if logits is None and families.head_of(model, family) in ("token", "next token"):
            how += "; in training with labels its logits stay packed"
    elif padding_free:
        how = f"not packed, because {families.NOT_PACKED[kind]}"
        names = tuple(inspect.signature(model.forward).parameters)
        if any(name.endswith("attention_mask") for name in names):
            override_forward(model, functools.partial(_run_padded, handle, families.NOT_PACKED[kind], names), handle)
    handle.change(name, f"{type(model).__name__}, {how}; attn_implementation was {before!r}")
    handle.change_layers(name, _attention_layers(model))
    for path, module in model.named_modules():
        if _takes_packed_images(module):
            # only this module's copy of the config gets the special name
            handle.on_remove(functools.partial(setattr, module, "config", module.config))
            module.config = copy.copy(cast(Any, module.config))
            module.config._attn_implementation_internal = _VISION_NAME
            handle.change(f"{name}.{path}" if path else name, "one call for all images")
    return True


def _run_padded(
    handle: Handle,
    reason: str,
    names: tuple[str, ...],
    model: nn.Module,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a model that can't be packed, and count the call as a fallback if its batch has padding.

    `names` are the names of the model's arguments. Syncs with the device once for each mask.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    masks = (x for name, x in given.items() if name.endswith("attention_mask"))
    if any(isinstance(mask, Tensor) and mask.dim() == 2 and _has_padding(mask) for mask in masks):
        handle.fall_back(reason)
    return original(*args, **kwargs)


@outside_of_graphs
def _has_padding(mask: Tensor) -> bool:
    return can_be_read(mask) and not bool(mask.all())


def _not_supported(model: PreTrainedModel, kind: str, family: Family | None, padding_free: bool) -> str | None:
    """Why a model can't be patched, or None."""
    if kind in families.NOT_ROUTED or not model._can_set_attn_implementation():
        reason = f": {families.NOT_ROUTED[kind]}" if kind in families.NOT_ROUTED else ""
        return f"does not route its attention through transformers' interface{reason}."
    if not padding_free or kind in families.NOT_PACKED:
        return None
    inner = model.base_model
    if family is None and inner is not model and families.family_of(inner) is not None:
        return (
            f"is a custom class around {type(inner).__name__}, and may need padded rows: patch its base model, "
            f".{model.base_model_prefix}, alone."
        )
    if family is None:
        return (
            f"is in no family of nt_attention.hf.families ({', '.join(families.FAMILIES)}): pass padding_free=False to "
            "replace only its attention, for rows that you pack."
        )
    try:
        families.head_of(model, family)
    except KeyError:
        base = families.base_model(model, family)
        path = next(path for path, part in model.named_modules() if part is base)
        return (
            "has a head that is not in nt_attention.hf.families, and may need padded rows: patch its base model, "
            f".{path}, alone."
        )
    return None


@dataclass(frozen=True)
class _Renaming:
    """A patch that has set our name in a config: its handle, its model, and the attributes that the config had."""

    handle: weakref.ref[Handle]
    model: weakref.ref[nn.Module]
    before: dict[str, Any]


# Config → renamings. Models may share a config, so there may be several.
_renamings = WeakIdKeyDictionary()


def _other_renamings(config: Any, handle: Handle) -> list[_Renaming]:
    """The other active patches that have set our name in a config."""
    found = [(renaming, renaming.handle()) for renaming in _renamings.get(config, ())]
    return [renaming for renaming, other in found if other is not None and other.active and other is not handle]


def _set_attention(model: PreTrainedModel, handle: Handle) -> str:
    """Set our name in the model's configs, let the handle undo it, and return the name that was there."""
    configs = _configs(model)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    handles = [forward.handle for forward in forwards if isinstance(forward, PatchedForward)]
    _check_not_patched(model, configs, handles, handle)
    before: str = model.config._attn_implementation
    over = next((over for over, name in NAME_OVER.items() if name == before), None)
    if over is not None and handles:
        before = over  # the model is a copy, made before the patch of the original was removed
    kept = []
    for config in configs:
        others = _other_renamings(config, handle)  # patches of other models with this config
        attributes = {name: value for name, value in vars(config).items() if name.startswith("_attn")}
        if others:
            attributes = others[0].before
            before = attributes["_attn_implementation_internal"] if config is model.config else before
        kept.append((config, attributes))
        _renamings[config] = [*others, _Renaming(weakref.ref(handle), weakref.ref(model), attributes)]
    handle.on_remove(functools.partial(_restore_configs, handle, kept, over and before))
    if not model.config.output_attentions:  # if set, no call is packed, and transformers only saves an eager config
        # calls that are not packed run on the implementation that the model had, eager or sdpa
        model.set_attn_implementation(
            register(over or ("sdpa" if before != "eager" and model._supports_sdpa else "eager"))
        )
    return before


def _check_not_patched(model: PreTrainedModel, configs: list[Any], handles: list[Handle], handle: Handle) -> None:
    renamings = [renaming for config in configs for renaming in _other_renamings(config, handle)]
    owners = [owner for renaming in renamings if (owner := renaming.model()) is not None]
    is_inside = any(part is model for owner in owners for part in owner.modules())
    if is_inside or any(other.active and other is not handle for other in handles):
        raise ValueError(
            f"{type(model).__name__} or a part of it is already patched: {CALL_REMOVE_FIRST} "
            "For a copied or loaded model, it is model.forward.handle."
        )


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs of a model and its parts, without duplicates."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return list(found.values())


def _restore_configs(handle: Handle, kept: list[tuple[Any, dict[str, Any]]], replace_ours: str | None) -> None:
    for config, attributes in kept:
        if _other_renamings(config, handle):
            continue  # the last of the patches that share the config restores it
        for key in [key for key in vars(config) if key.startswith("_attn") and key not in attributes]:
            del config.__dict__[key]
        config.__dict__.update(attributes)
        if replace_ours and config._attn_implementation_internal in NAME_OVER.values():
            config._attn_implementation_internal = replace_ours


def _attention_layers(model: nn.Module) -> dict[str, str]:
    """The innermost attention modules, by name. They are the modules that call the attention function."""
    layers = {
        path: module
        for path, module in model.named_modules()
        if "Attention" in type(module).__name__ and not isinstance(module, nn.MultiheadAttention)
    }
    windows = {path: getattr(module, "sliding_window", None) for path, module in layers.items()}
    return {
        path: type(module).__name__ + (f", window {windows[path]}" if isinstance(windows[path], int) else "")
        for path, module in layers.items()
        if not any(other.startswith(f"{path}.") for other in layers)
    }


def _takes_packed_images(module: nn.Module) -> bool:
    if not hasattr(module, "config") or "Attention" not in type(module).__name__:
        return False
    return "cu_seqlens" in inspect.signature(type(module).forward).parameters


def _make_padding_free(model: PreTrainedModel, family: Family, handle: Handle, logits: Logits) -> None:
    """Make the model pack, and also its base model, because callers may call it directly."""
    head, base = families.head_of(model, family), cast(PreTrainedModel, families.base_model(model, family))
    rotary = [module for module in base.modules() if scales_by_length(module)]
    for module in rotary:
        override_forward(module, rotate_per_sequence, handle)
    entries: list[tuple[PreTrainedModel, Head | None]] = [(base, "sequence" if head == "sequence" else None)]
    if model is not base and head != "sequence":
        entries.append((model, head))
    for entry, works_on in entries:
        parameters = inspect.signature(entry.forward).parameters.values()
        names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
        call = PackedCall(handle, family, works_on, logits, names, bool(rotary))
        override_forward(entry, call, handle)
        if works_on == "sequence":  # replaces the entry that another head with the same base model has made
            cast(PatchedForward, entry.forward).forward = call


for _over in NAME_OVER:  # a patched model that is unpickled needs the names, and unpickling imports this file
    register(_over)
AttentionInterface.register(_VISION_NAME, functools.partial(attention, over="sdpa"))
