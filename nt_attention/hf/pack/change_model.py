"""Changes the attention implementation and the `forward` of a Hugging Face model. The handle can undo both."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Container
from typing import Any, cast

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel

from ...patching.forwards import CALL_REMOVE_FIRST, Handle, PatchedForward, copies_of, override_forward
from .. import families
from ..families import Family, is_of_transformers
from ..plan import Head, Plan
from ..route.attention import NAME_OVER, register
from ..route.by_name import name_for_patch
from ..route.packed_row import counts_positions, embed_positions
from ..route.rope import rotate_per_sequence, scales_by_length
from ..transformers_private import ATTENTION, attention_attributes, attention_of, supports_sdpa
from .attention_code import override_attention, override_methods
from .encoder_decoder import EncoderDecoderCall
from .inputs import padding_id
from .packed_forward import PackedCall, PackingMode, SequenceHeadCall
from .padded_modules import add_padded_modules, group_by_length
from .small_batches import Size


class _Patched:
    """A config in which patches have set our name. Models may share it: the name stays until the last one is removed.

    Attributes:
        before: what the config stored about its attention before.
        handles: the models whose patches have set our name → the handle.
    """

    def __init__(self, config: Any) -> None:
        self.before = attention_attributes(config)
        self.handles: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()

    def active(self, models: Container[nn.Module] | None = None) -> list[Handle]:
        """The handles that are active, of all models or of some."""
        of_models = [reference() for model, reference in self.handles.items() if models is None or model in models]
        return [handle for handle in of_models if handle is not None and handle.active]


_patched = WeakIdKeyDictionary()  # config → `_Patched`


def set_attention(model: PreTrainedModel, handle: Handle) -> str:
    """Set our name in the model's configs, let the handle undo it, and return the name that was there."""
    configs, handles = _configs(model), _handles(model)
    check_not_patched(model, handle)
    for config in configs:
        if config not in _patched or not _patched[config].active():
            _patched[config] = _Patched(config)
        _patched[config].handles.update(dict.fromkeys(_parts(model), weakref.ref(handle)))
    kept = [(config, _patched[config].before) for config in configs]
    before: str = _patched[model.config].before.get(ATTENTION, "eager")
    over = next((over for over, name in NAME_OVER.items() if name == before), None)
    if over is not None and handles:
        before = over  # the model is a copy, made before the patch of the original was removed
    handle.on_remove(handle, _restore_configs, kept, over and before)
    if not model.config.output_attentions:  # if set, no call is packed, and transformers only saves an eager config
        # calls that are not packed run on the implementation that the model had, eager or sdpa
        name = register(over or ("sdpa" if before != "eager" and supports_sdpa(model) else "eager"))
        with name_for_patch():
            model.set_attn_implementation(name)
        # transformers 5.17 leaves out parts whose config is a copy, such as the encoder of T5
        of_parts = [config for config in configs if type(config) is type(model.config)]
        for config in of_parts + _configs_of_layers(model, configs):
            if attention_of(config) in (before, over, over and NAME_OVER[over]):
                kept.append((config, {ATTENTION: over or attention_of(config)}))
                vars(config)[ATTENTION] = name
    return before


def _handles(model: PreTrainedModel) -> list[Handle]:
    """The handles of the patches of a model and its parts, active or not."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    return [forward.handle for forward in forwards if isinstance(forward, PatchedForward)]


def check_not_patched(model: PreTrainedModel, handle: Handle) -> None:
    """Raise an error if a model or a part of it is patched already, by another handle."""
    configs = [config for config in _configs(model) if config in _patched]
    of_parts = [x for config in configs for x in _patched[config].active(set(_parts(model)))]
    if any(other.active and other is not handle for other in (*_handles(model), *of_parts)):
        raise ValueError(
            f"{type(model).__name__} or a part of it is already patched: {CALL_REMOVE_FIRST} For a copied or loaded "
            "model, it is model.forward.handle."
        )


def is_patched_by_user(config: Any) -> bool:
    """Whether our name is in a config because the program has called `patch`."""
    return config in _patched and any(not handle.is_automatic for handle in _patched[config].active())


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs of a model and its parts, without duplicates."""
    configs: dict[int, Any] = {}
    waiting = [part.config for part in _parts(model)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return list(configs.values())


def _configs_of_layers(model: PreTrainedModel, configs: list[Any]) -> list[Any]:
    """The configs that only layers have, without duplicates: a layer that was copied has a copy of the config."""
    known = {id(config) for config in configs}
    of_modules = (vars(module).get("config") for module in model.modules())
    return list({id(x): x for x in of_modules if isinstance(x, PreTrainedConfig) and id(x) not in known}.values())


def _restore_configs(handle: Handle, kept: list[tuple[Any, dict[str, Any]]], replace_ours: str | None) -> None:
    before = {type(config): attributes for config, attributes in reversed(kept)}
    for copied in copies_of(handle):  # their patch also ends
        for part in _parts(copied):
            for config in _configs(part) + _configs_of_layers(part, []):
                if attention_of(config) in NAME_OVER.values() and type(config) in before:
                    config.__dict__.update(before[type(config)])
    for config, attributes in kept:
        if config in _patched and _patched[config].active():
            continue  # another model needs our name
        for key in attention_attributes(config).keys() - attributes.keys():
            del config.__dict__[key]
        config.__dict__.update(attributes)
        if replace_ours and vars(config)[ATTENTION] in NAME_OVER.values():
            vars(config)[ATTENTION] = replace_ours


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost attention modules, by name: those that compute attention."""
    modules = {
        path: module
        for path, module in model.named_modules()
        if "Attention" in type(module).__name__ and not isinstance(module, nn.MultiheadAttention)
    }
    return {path: x for path, x in modules.items() if not any(other.startswith(f"{path}.") for other in modules)}


def _override_positions(base: nn.Module, handle: Handle) -> bool:
    """Override modules that count positions along the row, or scale them by its length. Returns whether there are."""
    scaling, counting = ([x for x in base.modules() if test(x)] for test in (scales_by_length, counts_positions))
    for module in scaling:
        override_forward(module, rotate_per_sequence, handle)
    for module in counting:
        override_forward(module, embed_positions, handle)
    return bool(scaling or counting)


def make_padding_free(
    model: PreTrainedModel,
    plan: Plan,
    family: Family,
    handle: Handle,
    packing: PackingMode,
    shares: bool = False,
    grouping: Callable[..., Any] = group_by_length,
    first_batches: Any = None,
) -> None:
    """Make the model pack, and also its base model, because callers may call it directly.

    Args:
        model, plan, family, handle, packing: what is packed, and how.
        shares: whether to share prefixes.
        grouping: which sequences run together in modules that run padded.
        first_batches: what compares calls with padded ones.
    """
    base = families.base_model(model)
    needs_row = _override_positions(base, handle) or plan.mask is not None
    needs_row |= add_padded_modules(base, plan, handle, grouping)
    is_routed = families.has_named_attention(model)
    override_methods(base, handle)
    attentions = attention_modules(base).values()
    is_causal = any(getattr(module, "is_causal", False) is True for module in attentions)
    for module in attentions:
        if type(module).__name__ not in plan.padded:
            override_attention(module, is_routed, handle)

    # Positions scaled by the length of a sequence differ in a padded batch, where it is the length of the longest.
    # Embeddings that depend on other tokens of the row become NaN in a padded row without tokens.
    scales = any(map(scales_by_length, base.modules()))
    differs = plan.reads_padding or family.embed is not None or scales
    has_windows = any(map(_has_window, (model.config.get_text_config().to_dict(), *map(vars, base.modules()))))
    may_run_padded = packing == "auto" and handle.mesh is None and not differs

    def packed_call(entry: PreTrainedModel, head: Head | None) -> PackedCall:
        defaults, takes_any = _arguments(entry)
        is_base = families.base_model(entry) is entry
        first = (padding_id(base) or 0) + 1 if plan.positions == "ids" else 0
        size = Size.of(entry, first) if may_run_padded else None
        return PackedCall(
            handle=handle,
            plan=plan,
            family=family,
            head=head,
            defaults=defaults,
            is_base=is_base,
            takes_any=takes_any,
            is_routed=is_routed,
            needs_row=needs_row,
            is_causal=is_causal,
            size=size,
            shares=shares,
            scales_by_length=scales,
            has_head=is_base and model is not base and plan.head not in (None, "sequence"),
            has_windows=has_windows,
            first_batches=first_batches,
        )

    _override_entries(model, packed_call, plan, handle, is_routed, first_batches)


def _has_window(fields: dict[str, Any]) -> bool:
    """Whether the fields of a config or of a module have a window or chunks of positions."""
    return any(("window" in name or "chunk" in name) and type(x) is int and x > 1 for name, x in fields.items())


def _override_entries(
    model: PreTrainedModel,
    packed_call: Callable[..., PackedCall],
    plan: Plan,
    handle: Handle,
    is_routed: bool,
    first_batches: Any,
) -> None:
    """Override the forward of the base model and that of the model. `packed_call(entry, head)` makes a forward."""
    base, head = families.base_model(model), plan.head
    if families.is_encoder_decoder(model):
        encoder: Any = base.get_encoder()
        override_forward(encoder, packed_call(encoder, None), handle)
        for entry in (base, model) if head == "token" else (base,):
            of_entry = head if entry is model else None
            both = EncoderDecoderCall(handle, plan, _arguments(entry)[0], is_routed, of_entry, first_batches)
            override_forward(entry, both, handle)
        packs_head = head == "token"
    else:
        packs_head = head != "sequence"
        call = packed_call(base, None if packs_head and model is not base else head)
        override_forward(base, call, handle)
        if packs_head and model is not base:
            override_forward(model, packed_call(model, head), handle)
        elif not packs_head:  # replaces the entry that another head with the same base model has made
            cast(PatchedForward, base.forward).forward = call
    if not packs_head and model is not base:
        is_known = is_of_transformers(families.class_of(model)) and not plan.head_mixes
        of_head = None if first_batches is None else first_batches.of_head()
        override_forward(model, SequenceHeadCall(handle, _arguments(model)[0], is_known, of_head), handle)


def _arguments(entry: PreTrainedModel) -> tuple[dict[str, Any], bool]:
    """The parameters of a forward and their defaults, and whether it takes other keyword arguments too."""
    parameters = inspect.signature(entry.forward).parameters.values()
    of_class = inspect.signature(type(entry).forward).parameters
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    return {n: of_class[n].default if n in of_class else None for n in names}, len(names) < len(parameters)
