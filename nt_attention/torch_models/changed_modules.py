"""Whether a patched module of PyTorch can still run packed, if it was changed after the patch."""

from __future__ import annotations

from operator import is_
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from torch import nn

from ..modules.multihead import VarlenMultiheadAttention, reads_weight_only
from ..patching.forwards import have_foreign_hooks, is_patched, replacement_of
from ..patching.handle import PatchHandle
from ..torch_private import children_of, has_compiled_call, inside_compiled
from .attention_modules import attention_not_supported
from .layers import DECODER_LAYER, ENCODER_LAYER, LayerKind, final_norm_not_supported, may_mix_tokens, takes_layouts

# Patched module → the modules and attributes that were checked last, and the result of the check.
_checked: WeakKeyDictionary[nn.Module, tuple[list[ref[nn.Module]], list[int], str | None]] = WeakKeyDictionary()


def why_not_packed_now(module: nn.Module, handle: PatchHandle) -> str | None:
    """Why a patched stack or layer can't run packed any more, or None.

    It takes about 5 µs for each layer if nothing was changed, and some 20 µs more if something was.
    """
    is_stack = isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder))
    is_encoder = isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer))
    kind = ENCODER_LAYER if is_encoder else DECODER_LAYER
    stack: Any = module
    # torch.compile puts a module around a layer
    layers = [inside_compiled(x) for x in stack.layers] if is_stack else [module]
    parts = [*children_of(stack).values(), *layers] if is_stack else []
    methods, attributes = kind.methods[1:], [id(type(module))]
    for layer in layers:
        own, children = layer.__dict__, children_of(layer)
        parts += children.values()
        attributes += [id(type(layer)), id(own.get("activation")), id(own.get("forward"))]
        attributes += [name in own for name in methods]
        for attention in [x for name in kind.attentions if (x := children.get(name)) is not None]:
            parts += children_of(attention).values()
            attributes += [id(type(attention)), has_compiled_call(attention), id(vars(attention).get("forward"))]
    modules = [x for x in parts if x is not None]
    if have_foreign_hooks([*modules, *(layers if is_stack else ())]):
        return "hooks of modules in it get padded batches"
    known = _checked.get(module)
    if known is not None and known[1] == attributes and _are(known[0], modules):
        return known[2]
    reason = _why_not(stack, layers, kind, is_stack, handle.is_automatic)
    _checked[module] = list(map(ref, modules)), attributes, reason
    return reason


def _are(references: list[ref[nn.Module]], modules: list[nn.Module]) -> bool:
    return len(references) == len(modules) and all(map(is_, [x() for x in references], modules))


def _why_not(stack: Any, layers: list[nn.Module], kind: LayerKind, is_stack: bool, keeps_attention: bool) -> str | None:
    if is_stack and type(stack).forward not in (nn.TransformerEncoder.forward, nn.TransformerDecoder.forward):
        return f"its class was changed after the patch: {type(stack).__name__} has a forward of its own"
    for i, layer in enumerate(layers):
        if (reason := _why_layer_not(layer, kind, is_stack, keeps_attention)) is not None:
            name = f"layers.{i}" if is_stack else "the layer"
            return f"{name} was changed or added after the patch: {reason.removesuffix('.')}"
    reason = final_norm_not_supported(stack) if is_stack else None
    return None if reason is None else f"norm was changed after the patch: {reason.removesuffix('.')}"


def _why_layer_not(layer: nn.Module, kind: LayerKind, in_stack: bool, keeps_attention: bool) -> str | None:
    """Why a layer can't take packed tokens. It may have wrappers that keep shapes around its patched forward."""
    if "forward" not in layer.__dict__:
        return "it is not patched"
    if not all(getattr(type(layer), name) is getattr(kind.stock, name) for name in kind.methods):
        return f"{type(layer).__name__} overrides {', '.join(kind.methods)}"
    replaced = [name for name in kind.methods[1:] if name in layer.__dict__]
    if replaced:
        return f"its {' and '.join(replaced)} may need padded rows"
    if (reason := replacement_of(layer.forward, type(layer))) is not None:
        return reason
    if not (takes_layouts(layer) if in_stack else is_patched(layer)):
        return "it is not patched"
    for name in kind.attentions:
        attention = getattr(layer, name)
        if not keeps_attention and not isinstance(attention, VarlenMultiheadAttention):
            return f"its {name} is no VarlenMultiheadAttention"
        if keeps_attention and not _runs_as_stock(attention):
            return f"its {name} was changed"
    return may_mix_tokens(layer, kind)


def _runs_as_stock(attention: nn.Module) -> bool:
    """Whether a call of an attention module gives what `nn.MultiheadAttention.forward` gives with its weights."""
    if attention_not_supported(attention) is not None or has_compiled_call(attention):
        return False
    return reads_weight_only(cast(nn.MultiheadAttention, attention).out_proj)
