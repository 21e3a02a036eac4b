"""`patch` for Hugging Face models: changes a model, and lets the handle undo the changes.

The attention implementation in the model's configs is set to ours. A model that gives the same packed (`check/`) also
gets a `forward` that packs (`pack/packed_forward.py`). A model that can't be packed stays as it is, and the models in
it are patched. A vision tower that gets several images in one row runs one attention call for all of them.
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
from transformers import AttentionInterface, PreTrainedModel

from ..compiler import can_be_read, outside_of_graphs
from ..patching.forwards import Handle, WeakReference, active_forwards, is_recorded, override_forward, restore_forward
from . import families
from .check.find import why_prefixes_differ
from .check.first_batches import FirstBatches, is_foreign
from .check.later import why_later
from .check.layers import FirstBatchesOfLayers
from .check.plans import Checked, checked
from .pack.change_model import attention_modules, check_not_patched, make_padding_free, set_attention
from .pack.encoder_layers import kinds_of_layers, pack_layers, why_no_layers
from .pack.packed_forward import PackingMode
from .pack.padded_modules import paths_of, share_of_weights
from .pack.sharded_packing import why_not_sharded
from .pack.shared_prefixes import why_not_shared
from .plan import Plan
from .route.attention import attention, is_stock
from .route.by_name import why_rows_mixed
from .route.hand_packed import refuse_packed_rows
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
    check_not_patched(model, handle)
    patch = _Patch(name, model, handle, packing)
    if not padding_free:
        return patch.replace_attention()
    if (reason := families.why_not_packed(model)) is not None:
        return patch.of_layers() if why_no_layers(model) is None else patch.unpacked(reason)
    if families.routes_attention(model) and not is_stock(kind := attention_of(model.config)):
        return patch.skip(f"can't be packed: {kind!r} is not an attention implementation of transformers. {_ALONE}")
    if families.base_model(model) is not model and any(
        patched.handle is handle for patched in active_forwards(families.base_model(model))
    ):
        return patch.with_patched_base()
    if (later := why_later(model)) is not None:
        return patch.at_first_call(later)
    return patch.by_plan(checked(model))


@dataclass
class _Patch:
    """The patch of one model. Each method returns what `patch_model` does."""

    name: str
    model: PreTrainedModel
    handle: Handle
    packing: PackingMode

    def skip(self, reason: str, look_inside: bool = False) -> bool:
        """Leave the model as it is."""
        self.handle.skip(self.name, f"{type(self.model).__name__} {reason.rstrip('.')}.")
        if look_inside:
            names = tuple(inspect.signature(self.model.forward).parameters)
            override_forward(self.model, functools.partial(_run_with_packed_parts, names), self.handle)
        return not look_inside

    def replace_attention(self) -> bool:
        """Replace the attention of the model only."""
        if (reason := families.why_not_routed(self.model)) is not None:
            return self.skip(reason)
        if (reason := why_rows_mixed(self.model)) is not None:
            return self.skip(f"would mix the sequences of rows that you pack, because {reason}: leave out padding_free")
        return self._changed(["supports rows that you pack, with cu_seq_lens or position_ids"])

    def unpacked(self, reason: str) -> bool:
        """Replace the attention of a model that is not packed, and count its calls; or patch the models in it."""
        if any(families.may_pack(part) for part in _parts_of(self.model)):
            return self.skip(f"is not packed as a whole, because {reason}", look_inside=True)
        if (not_routed := families.why_not_routed(self.model)) is not None:
            return self.skip(f"can't be packed: {reason}. It {not_routed}. {_REWRITE}", look_inside=True)
        for part in (self.model, *_parts_of(self.model)):
            names = tuple(inspect.signature(part.forward).parameters)
            if any(name.endswith("attention_mask") for name in names):
                override_forward(part, functools.partial(_run_padded, self.handle, reason, names), self.handle)
        return self._changed([f"not packed, because {reason}"])

    def of_layers(self) -> bool:
        """Pack the layers of an encoder of audio or images."""
        if self.handle.mesh is not None:
            return self.skip("can't be divided over the ranks of a mesh: its layers pack by themselves")
        if self.handle.prefixes is not None:
            self.handle.prefixes.add_model(self.model, "its layers pack by themselves")
        layers = FirstBatchesOfLayers(self.handle.check)
        kinds = " and ".join(kinds_of_layers(self.model))
        done = self._changed([f"each {kinds} packed if its mask hides padding", "checked at its first call"])
        pack_layers(self.model, self.handle, layers, always=self.packing == "always")
        return done

    def with_patched_base(self) -> bool:
        """Leave the head as it is. Its base model, which heads share, packs by itself."""
        self.handle.change(self.name, f"{type(self.model).__name__}, whose base model packs by itself")
        return True

    def at_first_call(self, reason: str) -> bool:
        """Check and patch a model when it is called."""
        call = AtFirstCall(self.name, self.model, self.packing)
        for entry in {self.model, families.base_model(self.model)}:
            override_forward(entry, call, self.handle)
        if self.handle.prefixes is not None:
            self.handle.prefixes.add_model(self.model, None)
        self.handle.change(self.name, f"{type(self.model).__name__}, checked at its first call, because {reason}")
        return True

    def by_plan(self, found: Checked) -> bool:
        """Patch a model that was checked."""
        model, handle, plan = self.model, self.handle, found.plan
        if plan is None:
            not_routed = families.why_not_routed(model)
            alone = _ALONE if attention_modules(model) else _WITHOUT_ATTENTION
            advice = alone if not_routed is None else f"It {not_routed}. {_REWRITE}"
            may_look = any(map(families.may_pack, _parts_of(model))) or any(
                isinstance(part, nn.MultiheadAttention) for part in model.modules()
            )
            return self.skip(f"can't be packed: {found.reason} ({found.how}). {advice}", look_inside=may_look)
        if handle.mesh is not None and (reason := _why_not_sharded(model, plan)) is not None:
            return self.skip(f"can't be divided over the ranks of a mesh: {reason}")
        how = ["packed at the entry, padded at the exit"]
        if plan.padded:
            share = share_of_weights(model, plan.padded)
            how.append(f"modules with {share:.0%} of its weights (no embeddings) run padded, in groups of like lengths")
        how.append(found.how)
        why_not_shared = None if handle.prefixes is None else _why_not_shared(model, plan)
        done = self._changed(how)
        shares = handle.prefixes is not None and handle.prefixes.add_model(model, why_not_shared)
        scales = any(map(scales_by_length, model.modules()))
        first = FirstBatches(self.handle.check, is_foreign(model), scales)
        family = families.family_of(model)
        make_padding_free(model, plan, family, handle, self.packing, shares, first_batches=first)
        handle.change_layers(self.name, _row_modules(model, plan))
        return done

    def _changed(self, how: list[str]) -> bool:
        """Set the name of our attention, and describe what was changed."""
        model, handle, name = self.model, self.handle, self.name
        if families.has_named_attention(model):
            how.append(f"attn_implementation was {set_attention(model, handle)!r}")
        handle.change(name, f"{type(model).__name__}, {'; '.join(how)}")
        handle.change_layers(name, _attention_layers(model))
        for path, module in model.named_modules():
            if _takes_packed_images(module):
                # only this module's copy of the config gets the special name
                handle.on_remove(module, setattr, "config", module.config)
                module.config = copy.copy(cast(Any, module.config))
                vars(module.config)[ATTENTION] = VISION_NAME
                handle.change(f"{name}.{path}" if path else name, "one call for all images")
        return True


class AtFirstCall:
    """The `forward` of a model that is checked and patched at its first call, and of its base model."""

    def __init__(self, name: str, model: PreTrainedModel, packing: PackingMode) -> None:
        self.name, self.model, self.packing = name, WeakReference(model), packing

    @outside_of_graphs
    def __call__(self, entry: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        of_call = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if is_recorded() or entry in _not_packed or any(x.is_meta for x in of_call):
            return original(*args, **kwargs)
        model = self.model()
        if model is None or entry not in (model, families.base_model(model)):  # of a copy
            model = entry
        entries = {model, families.base_model(model)}
        (handle,) = {patched.handle for patched in active_forwards(entry)}
        for each in entries:
            restore_forward(each)
        found = checked(model, inside=True)
        if handle.prefixes is not None:
            handle.prefixes.models -= 1  # `by_plan` counts it again
        if not _Patch(self.name, model, handle, self.packing).by_plan(found) or found.plan is None:
            _not_packed.update(entries)
            handle.fall_back(f"{type(model).__name__} can't be packed: {found.reason}")
        return next(iter(active_forwards(entry)), original)(*args, **kwargs)


# Models that were checked at their first call, and can't be packed.
_not_packed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _why_not_sharded(model: PreTrainedModel, plan: Plan) -> str | None:
    """Why the tokens of a model can't be divided over ranks, or None."""
    if families.is_encoder_decoder(model):
        return "it has an encoder and a decoder"
    needs_row = any(counts_positions(x) or scales_by_length(x) for x in model.modules())
    return why_not_sharded(plan, needs_row, families.routes_attention(model))


def _why_not_shared(model: PreTrainedModel, plan: Plan) -> str | None:
    """Why rows of a model that begin with the same tokens can't share them, or None."""
    attentions = attention_modules(families.base_model(model)).values()
    return why_not_shared(model, plan, attentions) or why_prefixes_differ(model, plan)


def _parts_of(model: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models in a model."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model]


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
    refuse_packed_rows(model, arguments, f"it is not packed, because {reason}")
    if any(mask.dim() == 2 and _has_padding(mask) for mask in masks):
        handle.fall_back(reason)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model]
    with running(unpatched=tuple(parts if masks else ())):
        return original(*args, **kwargs)


def _run_with_packed_parts(
    names: tuple[str, ...], model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a model that is not packed, though the models in it are. `names` are those of its arguments."""
    refuse_packed_rows(model, {**dict(zip(names, args, strict=False)), **kwargs}, "it is not packed as a whole")
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


def _attention_layers(model: nn.Module) -> dict[str, str]:
    """The innermost attention modules, by name. They are the modules that call the attention function."""
    layers = attention_modules(model)
    windows = {path: getattr(module, "sliding_window", None) for path, module in layers.items()}
    return {
        path: type(module).__name__ + (f", window {windows[path]}" if isinstance(windows[path], int) else "")
        for path, module in layers.items()
    }


def _row_modules(model: nn.Module, plan: Plan) -> dict[str, str]:
    """The modules that mix the tokens of a row, by name, and how each sequence stays apart."""
    how = {name: f"{name}, padded" for name in plan.padded}
    how |= {name: f"{name}, zeros between sequences" for name in plan.convolutions}
    return {path: how[type(model.get_submodule(path)).__name__] for path in paths_of(model, tuple(how))}


def _takes_packed_images(module: nn.Module) -> bool:
    if not hasattr(module, "config") or "Attention" not in type(module).__name__:
        return False
    return "cu_seqlens" in inspect.signature(type(module).forward).parameters


AttentionInterface.register(VISION_NAME, functools.partial(attention, over="sdpa"))
