"""`patch` for Hugging Face models: changes a model, and lets the handle undo the changes.

The attention implementation in the model's configs is set to ours. A model that can be packed (`proofs.py`) also gets a
`forward` that packs (`packed_forward.py`). A vision tower that gets several images in one row runs one attention call
for all of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .._forwards import Handle, override_forward, replacement_of
from .._tracing import can_be_read, outside_of_graphs
from . import families
from .attention import NAME_OVER, attention, register
from .change_model import make_padding_free, set_attention
from .families import Family
from .packed_forward import Logits
from .proof import Proof
from .proofs import proof_of

# Vision towers that get all images in one row only run them in one call if the name contains "flash".
_VISION_NAME = "nt_attention_flash_for_packed_images"


def patch_model(name: str, model: nn.Module, handle: Handle, padding_free: bool, logits: Logits) -> bool:
    """Patch a Hugging Face model, or tell the handle why not. Returns False if `model` is not a Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        return False
    reason = families.why_not_routed(model) or (_not_provable(model) if padding_free else None)
    if reason is not None:
        handle.leave(name, f"{type(model).__name__} {reason}.")
        return True
    how = "supports rows that you pack, with cu_seq_lens or position_ids"
    family, head, not_packed = Family(), None, families.why_not_packed(model) if padding_free else None
    if padding_free and not_packed is None:
        proof, where = proof_of(model)
        if proof.reason is not None:
            handle.leave(name, f"{type(model).__name__} can't be packed: {proof.reason} (proof {where}). {_ALONE}.")
            return True
        family, head = _family_of(model, proof), proof.head
        how = "packed at the entry, padded at the exit"
        if logits is None and head in ("token", "next token"):
            how += "; in training with labels its logits stay packed"
        how += f"; proof {where}"
    before = set_attention(model, handle)
    if not_packed is not None:
        how = f"not packed, because {not_packed}"
        names = tuple(inspect.signature(model.forward).parameters)
        if any(name.endswith("attention_mask") for name in names):
            override_forward(model, functools.partial(_run_padded, handle, not_packed, names), handle)
    elif padding_free:
        make_padding_free(model, family, head, handle, logits)
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


_ALONE = "Pass padding_free=False to replace only its attention, for rows that you pack"


def _not_provable(model: PreTrainedModel) -> str | None:
    """Why a proof, which is made with a small model of the same class, says nothing about this model, or None."""
    for path, part in model.named_modules():
        if not path or isinstance(part, PreTrainedModel):
            continue
        if "forward" in vars(part) and (reason := replacement_of(part.forward, type(part))) is not None:
            return f"can't be packed: in {path}, {reason}. {_ALONE}"
        for name, value in vars(part).items():
            is_method = name != "forward" and not name.startswith("_") and inspect.isroutine(value)
            if is_method and inspect.isfunction(getattr(type(part), name, None)):
                return f"can't be packed: {name} of {path} replaces that of {type(part).__name__}. {_ALONE}"
    return None


def _family_of(model: PreTrainedModel, proof: Proof) -> Family:
    known = families.family_of(model)
    pool = known.pool or (families.pool_first if proof.pool else None)
    return replace(
        known,
        positions=proof.positions,
        pool=pool,
        holes=proof.holes,
        embeds=proof.embeds,
        token_types=proof.token_types,
    )


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


for _over in NAME_OVER:  # a patched model that is unpickled needs the names, and unpickling imports this file
    register(_over)
AttentionInterface.register(_VISION_NAME, functools.partial(attention, over="sdpa"))
