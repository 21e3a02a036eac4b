"""`patch` for Hugging Face models: changes a model, and lets the handle undo the changes.

The attention implementation in the model's configs is set to ours. A model that can be packed (`prove/store.py`) also
gets a `forward` that packs (`pack/packed_forward.py`). A vision tower that gets several images in one row runs one
attention call for all of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..compiler import can_be_read, outside_of_graphs
from ..patching.forwards import Handle, override_forward, replacement_of
from ..torch_private import inside_compiled
from . import families
from .pack.change_model import attention_modules, make_padding_free, set_attention
from .pack.encoder_layers import pack_layers, why_no_layers
from .pack.islands import paths_of, share_of_weights
from .pack.packed_forward import PackingMode
from .pack.sharded_packing import why_not_sharded
from .pack.shared_prefixes import why_not_shared
from .proof import Proof
from .prove.prover import why_prefixes_differ
from .prove.store import proof_of
from .prove.twin import changed_numbers
from .route.attention import attention, is_stock
from .route.packed_row import counts_positions, is_unpatched, running
from .route.rope import scales_by_length
from .transformers_private import ATTENTION, attention_of

# Vision towers that get all images in one row only run them in one call if the name contains "flash".
VISION_NAME = "nt_attention_flash_for_packed_images"


def patch_model(name: str, model: nn.Module, handle: Handle, padding_free: bool, packing: PackingMode) -> bool:
    """Patch a Hugging Face model, or tell the handle why not.

    Returns:
        False if the modules in it may be patched by themselves: it is no Hugging Face model, or can't be packed.
    """
    if not isinstance(model, PreTrainedModel):
        if padding_free and hasattr(type(model), "query_expansion"):  # of sentence-transformers
            override_forward(model, functools.partial(_run_expanded, handle), handle)
        return False
    plan = _plan(model, padding_free)
    proof, reason, not_packed, packs_layers = plan.proof, plan.reason, plan.not_packed, bool(plan.proof.layers)
    if reason is None and handle.mesh is not None:
        reason = _why_not_sharded(model, proof, not_packed)
    # What a head that was tried computes is wrong with a packed base model too.
    was_tried = not_packed is None and proof.tried
    looks_inside = (
        padding_free
        and not was_tried
        and any(families.may_pack(x) for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model)
    )
    if reason is not None:
        handle.skip(name, f"{type(model).__name__} {reason}.")
        return not looks_inside
    if not_packed is not None and looks_inside:
        handle.skip(name, f"{type(model).__name__} is not packed as a whole, because {not_packed}.")
        return False
    how = "supports rows that you pack, with cu_seq_lens or position_ids"
    if not_packed is not None:
        how = f"not packed, because {not_packed}"
    elif packs_layers:
        how = f"each {' and '.join(proof.layers)} packed"
        how += f"{'' if proof.trains else ', but not in training or with labels'}; check {plan.where}"
    elif padding_free:
        how = "packed at the entry, padded at the exit"
        if proof.islands:
            share = share_of_weights(model, proof.islands)
            how += f"; modules with {share:.0%} of its weights (no embeddings) run padded, in groups of like lengths"
        how += f"; check {plan.where}"
    if families.routes_attention(model):
        how += f"; attn_implementation was {set_attention(model, handle)!r}"
    if not_packed is not None:
        for part in [x for x in model.modules() if isinstance(x, PreTrainedModel)]:
            names = tuple(inspect.signature(part.forward).parameters)
            if any(name.endswith("attention_mask") for name in names):
                override_forward(part, functools.partial(_run_padded, handle, not_packed, names), handle)
    elif packs_layers:
        if handle.prefixes is not None:
            handle.prefixes.add_model(model, "its layers pack by themselves")
        pack_layers(model, proof, handle)
    elif padding_free:
        shares = handle.prefixes is not None and handle.prefixes.add_model(model, _why_not_shared(model, proof))
        make_padding_free(model, proof, families.family_of(model), handle, packing, shares)
    handle.change(name, f"{type(model).__name__}, {how}")
    handle.change_layers(name, {**_attention_layers(model), **_row_modules(model, proof)})
    for path, module in model.named_modules():
        if _takes_packed_images(module):
            # only this module's copy of the config gets the special name
            handle.on_remove(module, setattr, "config", module.config)
            module.config = copy.copy(cast(Any, module.config))
            vars(module.config)[ATTENTION] = VISION_NAME
            handle.change(f"{name}.{path}" if path else name, "one call for all images")
    return True


class _Plan(NamedTuple):
    """How a model is patched: what was proven, and where the proof is from; or why it is not patched or not packed."""

    proof: Proof
    where: str
    reason: str | None
    not_packed: str | None


def _plan(model: PreTrainedModel, padding_free: bool) -> _Plan:
    not_routed = families.why_not_routed(model)
    if not padding_free:
        return _Plan(Proof(), "", not_routed, None)
    proof, where, reason, not_packed = Proof(), "", _not_provable(model), families.why_not_packed(model)
    if not_packed is not None:
        if reason is None and why_no_layers(model) is None:
            proof, where = proof_of(model)
            not_packed = proof.reason
        if not_routed is not None and not_packed is not None:
            reason = f"can't be packed: {not_packed}. It {not_routed}. {_REWRITE}"
    elif reason is None:
        proof, where = proof_of(model)
        if proof.reason is not None:
            reason = f"can't be packed: {proof.reason} (check {where})"
            alone = _ALONE if attention_modules(model) else _WITHOUT_ATTENTION
            reason += f". {alone}" if not_routed is None else f". It {not_routed}. {_REWRITE}"
    return _Plan(proof, where, reason, not_packed)


def _why_not_sharded(model: PreTrainedModel, proof: Proof, not_packed: str | None) -> str | None:
    """Why the tokens of a model can't be divided over ranks, or None."""
    if proof.layers:
        return "can't be divided over the ranks of a mesh: its layers pack by themselves"
    reason = not_packed or ("it has an encoder and a decoder" if families.is_encoder_decoder(model) else None)
    if reason is None:
        needs_row = any(counts_positions(x) or scales_by_length(x) for x in model.modules())
        reason = why_not_sharded(proof, needs_row, families.routes_attention(model))
    return None if reason is None else f"can't be divided over the ranks of a mesh: {reason}"


def _why_not_shared(model: PreTrainedModel, proof: Proof) -> str | None:
    """Why rows of a model that begin with the same tokens can't share them, or None."""
    attentions = attention_modules(families.base_model(model)).values()
    return why_not_shared(model, proof, attentions) or why_prefixes_differ(model, proof)


def _run_padded(
    handle: Handle,
    reason: str,
    names: tuple[str, ...],
    model: nn.Module,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a model that can't be packed, or a model in it, and count the call as a fallback if its batch has padding.

    `names` are the names of the model's arguments. Syncs with the device once for each mask.
    """
    if is_unpatched(model):  # the model around it has counted the call
        return original(*args, **kwargs)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    masks = [x for name, x in arguments.items() if name.endswith("attention_mask") and isinstance(x, Tensor)]
    if any(mask.dim() == 2 and _has_padding(mask) for mask in masks):
        handle.fall_back(reason)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model]
    with running(unpatched=tuple(parts if masks else ())):
        return original(*args, **kwargs)


def _run_expanded(
    handle: Handle, module: nn.Module, original: Callable[..., Any], features: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module of sentence-transformers: padded, if it reads states at positions that the mask hides (ColBERT)."""
    expansion, positions = cast(Any, module).query_expansion, features.get("query_expansion_positions")
    if not expansion or expansion["attend"] or positions is None:
        return original(features, *args, **kwargs)
    handle.fall_back("its query_expansion has attend=False, which reads states at positions that attention_mask hides")
    with running(unpatched=tuple(part for part in module.modules() if isinstance(part, PreTrainedModel))):
        return original(features, *args, **kwargs)


@outside_of_graphs
def _has_padding(mask: Tensor) -> bool:
    return can_be_read(mask) and not bool(mask.all())


_ALONE = "Pass padding_free=False to replace only its attention, for rows that you pack"
_WITHOUT_ATTENTION = "It has no attention to replace: leave it unpatched, with rows of similar lengths in a batch"
_REWRITE = "Rewrite it with nt_attention.varlen_attention (docs/coming_from/attention.md)"


def _not_provable(model: PreTrainedModel) -> str | None:
    """Why a proof, which is made with a small model of the same class, says nothing about this model, or None."""
    implementation = attention_of(model.config)
    if families.routes_attention(model) and not is_stock(implementation):
        return f"can't be packed: {implementation!r} is not an attention implementation of transformers. {_ALONE}"
    if (adapter := families.adapter_of_rows(model)) is not None:
        return f"can't be packed: {adapter}. {_ALONE}"
    if (changed := _changed_window(model)) is not None:
        return f"can't be packed: {changed}. {_ALONE}"
    for path, part in model.named_modules():
        if not path or isinstance(part, PreTrainedModel):
            continue
        if inside_compiled(part) is not part:
            return f"can't be packed: {path} was compiled already. Call nt_attention.patch before torch.compile"
        if "forward" in vars(part) and (reason := replacement_of(part.forward, type(part))) is not None:
            return f"can't be packed: in {path}, {reason}. {_ALONE}"
        for name, value in vars(part).items():
            computes = name not in ("forward", "extra_repr") and not name.startswith("_")  # torchao sets extra_repr
            is_method = computes and inspect.isroutine(value)
            if is_method and inspect.isfunction(getattr(type(part), name, None)):
                return f"can't be packed: {name} of {path} replaces that of {type(part).__name__}. {_ALONE}"
    return None


_WINDOWS = ("sliding_window", "attention_chunk_size")


def _changed_window(model: PreTrainedModel) -> str | None:
    """Which window of a module is not what the class makes from the config of the model, or None."""
    owners = [model.config.get_text_config().to_dict(), *map(vars, model.modules())]
    has_windows = any(isinstance(owner.get(name), int) for owner in owners for name in _WINDOWS)
    for path, (value, usual) in (changed_numbers(model) if has_windows else {}).items():
        path, _, name = path.rpartition(".")
        if name in _WINDOWS:
            where = f"{path} ({type(model.get_submodule(path)).__name__})"
            return f"{name} of {where} is {value}, but {usual} in a new model with the same config"
    return None


def _attention_layers(model: nn.Module) -> dict[str, str]:
    """The innermost attention modules, by name. They are the modules that call the attention function."""
    layers = attention_modules(model)
    windows = {path: getattr(module, "sliding_window", None) for path, module in layers.items()}
    return {
        path: type(module).__name__ + (f", window {windows[path]}" if isinstance(windows[path], int) else "")
        for path, module in layers.items()
    }


def _row_modules(model: nn.Module, proof: Proof) -> dict[str, str]:
    """The modules that mix the tokens of a row, by name, and how each sequence stays apart."""
    how = {name: f"{name}, padded" for name in proof.islands}
    how |= {name: f"{name}, zeros between sequences" for name in proof.convolutions}
    return {path: how[type(model.get_submodule(path)).__name__] for path in paths_of(model, tuple(how))}


def _takes_packed_images(module: nn.Module) -> bool:
    if not hasattr(module, "config") or "Attention" not in type(module).__name__:
        return False
    return "cu_seqlens" in inspect.signature(type(module).forward).parameters


AttentionInterface.register(VISION_NAME, functools.partial(attention, over="sdpa"))
