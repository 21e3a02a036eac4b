"""``patch`` for Hugging Face models: what is set on a model, and taken off again.

Every attention module is given our name through the model's configs; a model of a known family also gets a ``forward``
that packs (``padding_free.py``), and a vision tower whose images come in one row makes one call of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from .._forwards import PatchedForward
from ..patching.patch import PatchHandle
from . import families
from .attention import NAME_OVER, attention, register
from .families import Family, Head
from .packed_forward import Logits, PackedCall
from .rope import rotate_apart, scales_by_length

# Vision towers that are handed all images in one row make one call of it under a name with "flash" in it alone.
_VISION_NAME = "nt_attention_flash_for_packed_images"


def patch_model(name: str, model: nn.Module, handle: PatchHandle, padding_free: bool, logits: Logits) -> bool:
    """Patch a model of the tables, or say why not. False if ``model`` is no Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        return False
    kind, family = families.kind(model), families.family_of(model)
    refusal = _refusal(model, kind, family, padding_free)
    if refusal is not None:
        handle.leave(name, refusal)
        return True
    before = _set_attention(model, handle)
    how = "runs rows that are packed with cu_seq_lens or position_ids"
    if padding_free and family is not None:
        _make_padding_free(model, family, handle, logits)
        how = "packed at the entry, padded at the exit"
        if logits is None and families.head_of(model, family) in ("token", "next token"):
            how += "; in training with labels its logits stay packed"
    elif padding_free:
        how = f"runs as it is called: {families.NOT_PACKED[kind]}"
    handle.change(name, f"{type(model).__name__}, attention {before!r} before, {how}")
    handle.change_layers(name, _attention_layers(model))
    for path, module in model.named_modules():
        if _takes_packed_images(module):
            _one_call_for_all_images(module, handle)
            handle.change(f"{name}.{path}" if name else path, "one call for all images")
    return True


def _refusal(model: PreTrainedModel, kind: str, family: Family | None, padding_free: bool) -> str | None:
    what = type(model).__name__
    if kind in families.NOT_ROUTED or not model._can_set_attn_implementation():
        why = families.NOT_ROUTED.get(kind)
        return f"{what} does not route its attention through transformers' interface{f': {why}' if why else ''}."
    if not padding_free or kind in families.NOT_PACKED:
        return None
    inner = model.base_model
    if family is None and inner is not model and families.family_of(inner) is not None:
        return (
            f"{what} is a class of its own over {type(inner).__name__}, and may read padded positions: patch that, "
            f".{model.base_model_prefix}, by itself."
        )
    if family is None:
        return (
            f"{what} is in no family of nt_attention.hf.families yet (there are {', '.join(families.FAMILIES)}): "
            "padding_free=False swaps its attention alone, for rows that you pack."
        )
    try:
        families.head_of(model, family)
    except KeyError:
        where = next(path for path, part in model.named_modules() if part is families.base_model(model, family))
        return (
            f"{what} has a head that is not in nt_attention.hf.families yet, and may read padded positions: patch its "
            f"base model, .{where}, by itself."
        )
    return None


def _set_attention(model: PreTrainedModel, handle: PatchHandle) -> str:
    """Put our name into the model's configs, and on the handle what puts theirs back."""
    configs = list(_configs(model))
    forwards = [part.__dict__.get("forward") for part in model.modules()]
    handles = [f.handle for f in forwards if isinstance(f, PatchedForward)]
    around = [other for config in configs for claim in _others(config, handle) if (other := claim.model()) is not None]
    if any(h.active and h is not handle for h in handles) or any(
        part is model for other in around for part in other.modules()
    ):
        raise ValueError(
            f"{type(model).__name__} is patched already, or a part of it: remove() the handle of that patch first "
            "(a copy has its original's, and a loaded model one in .forward.handle)."
        )
    before = model.config._attn_implementation
    over = next((over for over, name in NAME_OVER.items() if name == before), None)
    if over is not None and handles:
        before = over  # a copy that outlived its patch
    kept = []
    for config in configs:
        others = _others(config, handle)  # another model with this config: the name in it is ours already
        own = {name: value for name, value in vars(config).items() if name.startswith("_attn")}
        kept.append((config, others[0].before if others else own))
        _claims_on[config] = [*others, _Claim(weakref.ref(handle), weakref.ref(model), kept[-1][1])]
    if _others(model.config, handle):
        before = next(own for config, own in kept if config is model.config)["_attn_implementation_internal"]
    handle.on_remove(functools.partial(_put_back_configs, handle, kept, over and before))
    if model.config.output_attentions:  # no call can be packed, and transformers saves such a config as eager alone
        return before
    # what is not packed runs as before: on eager, which each model has its own of, or on sdpa
    model.set_attn_implementation(register(over or ("sdpa" if before != "eager" and model._supports_sdpa else "eager")))
    return before


@dataclass(frozen=True)
class _Claim:
    """A patch that has put our name into a config, the model that it is of, and what the config held before."""

    handle: weakref.ref[PatchHandle]
    model: weakref.ref[nn.Module]
    before: dict[str, Any]


# By config; two models may have the same one.
_claims_on = WeakIdKeyDictionary()


def _others(config: Any, handle: PatchHandle) -> list[_Claim]:
    """The claims on a config that are in force, but for this patch's own."""
    found = [(claim, claim.handle()) for claim in _claims_on.get(config, ())]
    return [claim for claim, other in found if other is not None and other.active and other is not handle]


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    yield from found.values()


def _put_back_configs(handle: PatchHandle, kept: list[tuple[Any, dict[str, Any]]], ours_becomes: str | None) -> None:
    for config, attributes in kept:
        if _others(config, handle):
            continue  # the last patch of those that share it puts it back
        for key in [key for key in vars(config) if key.startswith("_attn") and key not in attributes]:
            del config.__dict__[key]
        config.__dict__.update(attributes)
        if ours_becomes and config._attn_implementation_internal in NAME_OVER.values():
            config._attn_implementation_internal = ours_becomes


def _attention_layers(model: nn.Module) -> dict[str, str]:
    """Modules that look their attention function up, by name."""
    wanted = {
        path: module
        for path, module in model.named_modules()
        if "Attention" in type(module).__name__ and not isinstance(module, nn.MultiheadAttention)
    }
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
    handle.on_remove(functools.partial(setattr, module, "config", module.config))
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = _VISION_NAME


def _make_padding_free(model: PreTrainedModel, family: Family, handle: PatchHandle, logits: Logits) -> None:
    """Let the model pack, and its base model, where that is called by itself."""
    head, base = families.head_of(model, family), cast(PreTrainedModel, families.base_model(model, family))
    rotary = [module for module in base.modules() if scales_by_length(module)]
    for module in rotary:
        handle.override_forward(module, rotate_apart)

    def packs(entry: PreTrainedModel, as_head: Head | None) -> None:
        given = inspect.signature(entry.forward).parameters.values()
        names = tuple(p.name for p in given if p.kind is not p.VAR_KEYWORD)
        call = PackedCall(handle, family, as_head, logits, names, bool(rotary))
        handle.override_forward(entry, call)
        if as_head == "sequence":  # also where another head has the same base model
            cast(PatchedForward, entry.forward).forward = call

    packs(base, "sequence" if head == "sequence" else None)
    if model is not base and head != "sequence":
        packs(model, head)


for _over in NAME_OVER:  # a model that was saved patched finds its name: loading its forward has imported this file
    register(_over)
AttentionInterface.register(_VISION_NAME, functools.partial(attention, over="sdpa"))
