"""``patch`` for PyTorch's own Transformer modules.

Dimensions: B sequences, L positions of a padded row, T tokens, E embed dim.

A patched ``nn.TransformerEncoder`` packs at its entry and hands the layout to its layers in ``src_mask``'s place. A
patched layer that finds one there runs on packed tokens (T, E); without one it runs as it did. Attention anywhere else
is swapped where it stands, and the modules around it stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from .. import nested
from ..layout import SequenceLayout
from ..modules.multihead import VarlenMultiheadAttention

if TYPE_CHECKING:
    from .patch import PatchHandle


def patch_encoder(name: str, encoder: nn.TransformerEncoder, handle: PatchHandle, padding_free: bool) -> bool:
    """Swap the attention of every layer, with the parameters shared; and pack at the entry, if ``padding_free``.

    False, with the reason in the handle, if its forward or its layers are not the ones that are known.
    """
    if type(encoder).forward is not nn.TransformerEncoder.forward or not len(encoder.layers):
        what = "a forward of its own" if len(encoder.layers) else "no layers"
        handle.leave(name, f"{type(encoder).__name__} has {what}.")
        return False
    layers = [layer for layer in encoder.layers if isinstance(layer, nn.TransformerEncoderLayer)]
    for i, layer in enumerate(encoder.layers):
        why = _why_not(layer)
        if why is not None:
            handle.leave(f"{name}.layers.{i}" if name else f"layers.{i}", why)
            return False
    for layer in layers:
        swap_attention(layer, "self_attn", handle)
        if padding_free:
            handle.override_forward(layer, _layer_forward)
    if padding_free:
        handle.override_forward(encoder, functools.partial(_encoder_forward, handle))
    done = "packed at the entry, padded at the exit" if padding_free else "takes NestedTensors"
    handle.change(name, f"nn.TransformerEncoder of {len(layers)} layers, {done}")
    return True


def _why_not(layer: nn.Module) -> str | None:
    stock = nn.TransformerEncoderLayer
    if not isinstance(layer, stock):
        return f"{type(layer).__name__} is not an nn.TransformerEncoderLayer, so its forward is unknown."
    if any(getattr(type(layer), part) is not getattr(stock, part) for part in ("forward", "_sa_block", "_ff_block")):
        return f"{type(layer).__name__} has a forward of its own."
    attention = layer.self_attn
    if type(attention) not in (nn.MultiheadAttention, VarlenMultiheadAttention):
        return f"its self_attn is a {type(attention).__name__}, not an nn.MultiheadAttention."
    if attention._forward_hooks or attention._forward_pre_hooks or "forward" in attention.__dict__:
        return "its self_attn carries hooks or a forward of its own, which would see packed tokens."
    if "in_proj_weight" not in attention._parameters:
        return "its self_attn's weights are parametrized."
    return None


# Attention that a patch put into a module, and that patch.
_swapped_by: WeakKeyDictionary[nn.Module, ref[PatchHandle]] = WeakKeyDictionary()


def swap_attention(parent: nn.Module, name: str, handle: PatchHandle) -> str | None:
    """Put a ``VarlenMultiheadAttention`` with the same parameters and hooks in the place of ``parent.name``.

    Returns:
        Why not, if it can't be done.

    Raises:
        ValueError: another patch has done it already.
    """
    stock = parent._modules[name]
    if isinstance(stock, VarlenMultiheadAttention):
        other = _swapped_by[stock]() if stock in _swapped_by else None
        if other is not None and other is not handle and other.active:
            raise ValueError(f"{type(parent).__name__} is patched already: remove() the handle of that patch first.")
        return None
    if type(stock) is not nn.MultiheadAttention or "forward" in stock.__dict__:
        what = "has a forward of its own" if type(stock) is nn.MultiheadAttention else "is not nn.MultiheadAttention"
        return f"{type(stock).__name__} {what}."
    try:
        ragged = VarlenMultiheadAttention.from_torch(stock)
    except ValueError as made_of_others:
        return str(made_of_others)
    for hooks in _HOOKS & stock.__dict__.keys():  # the very dictionaries, so that handles take hooks out of both
        ragged.__dict__[hooks] = stock.__dict__[hooks]
    _swapped_by[ragged] = ref(handle)
    parent._modules[name] = ragged
    handle.on_remove(functools.partial(_put_back_attention, parent, name, ragged, stock))
    return None


_HOOKS = {name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name}


def _put_back_attention(
    parent: nn.Module, name: str, ragged: VarlenMultiheadAttention, stock: nn.MultiheadAttention
) -> None:
    """With the parameters that it has by now: load_state_dict(assign=True) puts new ones in."""
    VarlenMultiheadAttention.share_parameters(ragged, stock)
    if parent._modules.get(name) is ragged:
        parent._modules[name] = stock.train(ragged.training)


def _layer_forward(
    layer: nn.TransformerEncoderLayer,
    original: Callable[..., Tensor],
    src: Tensor,
    src_mask: Tensor | SequenceLayout | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if not isinstance(src_mask, SequenceLayout):
        return original(src, src_mask, src_key_padding_mask, is_causal)

    def attend(x: Tensor) -> Tensor:
        return layer.dropout1(layer.self_attn(x, x, x, is_causal=is_causal, layout=src_mask)[0])

    if layer.norm_first:
        src = src + attend(layer.norm1(src))
        return src + _feed_forward(layer, layer.norm2(src))
    src = layer.norm1(src + attend(src))
    return layer.norm2(src + _feed_forward(layer, src))


def _feed_forward(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    """``layer._ff_block``; on a GPU without gradients with ReLU inside of the product, as stock's fast path has it."""
    first, second = layer.linear1, layer.linear2
    fused = (
        x.is_cuda
        and not (torch.is_grad_enabled() or layer.training or torch.is_autocast_enabled("cuda"))
        and layer.activation_relu_or_gelu == 1
        and type(first) is nn.Linear
        and first.bias is not None
        and not (first._forward_hooks or first._forward_pre_hooks or "forward" in first.__dict__)
    )
    if not fused:
        return layer._ff_block(x)
    return second(torch._addmm_activation(first.bias, x, first.weight.t()))


def _encoder_forward(
    handle: PatchHandle,
    encoder: nn.TransformerEncoder,
    original: Callable[..., Tensor],
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    as_before = (src, mask, src_key_padding_mask, is_causal)
    if src.is_nested:
        if (mask is not None and not is_causal) or src_key_padding_mask is not None:
            raise ValueError(
                "a NestedTensor has no padding and takes no dense mask: pass is_causal=True for a causal encoder, "
                "and leave out src_key_padding_mask."
            )
        unwrapped = nested.unwrap(src, "src")
        return unwrapped.rewrap(_run_layers(encoder, unwrapped.values, unwrapped.layout, bool(is_causal)))
    if src_key_padding_mask is None or src.dim() != 3:
        return original(*as_before)  # no padding to skip
    batch_first = encoder.layers[0].self_attn.batch_first
    padded = src if batch_first else src.transpose(0, 1)
    a_mask = src_key_padding_mask.dtype == torch.bool or src_key_padding_mask.is_floating_point()
    if src_key_padding_mask.shape != padded.shape[:2] or not a_mask:
        return original(*as_before)  # which refuses it
    causal = _is_causal(mask, is_causal, padded.shape[1])
    padding = _as_padding(src_key_padding_mask)
    if causal is None or padding is None:
        handle.not_packed(
            "mask is neither None nor causal" if causal is None else "src_key_padding_mask is an additive bias",
            frames=6,
        )
        return original(*as_before)
    handle.count(None)
    layout = SequenceLayout.from_attention_mask(~padding)
    out = layout.pad(_run_layers(encoder, layout.pack(padded), layout, causal))
    return out if batch_first else out.transpose(0, 1)


def _run_layers(encoder: nn.TransformerEncoder, x: Tensor, layout: SequenceLayout, causal: bool) -> Tensor:
    """Packed (T, E) through every layer and the final norm."""
    for layer in encoder.layers:
        x = layer(x, src_mask=layout, is_causal=causal)
    return x if encoder.norm is None else encoder.norm(x)


def _is_causal(mask: Tensor | None, is_causal: bool | None, length: int) -> bool | None:
    """Whether a mask says just causal; None where it says something else. A hint is trusted, as upstream does."""
    if is_causal or mask is None:
        return bool(is_causal)
    if is_causal is not None or mask.shape != (length, length):
        return None
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    wanted: Any = later if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(later, -torch.inf)
    return True if torch.equal(mask, wanted) else None


def _as_padding(mask: Tensor) -> Tensor | None:
    """(B, L) bool, True at padding; None where a floating-point mask holds other values than 0 and −inf."""
    if mask.dtype == torch.bool:
        return mask
    padding = mask == -torch.inf
    return padding if torch.equal(mask, torch.zeros_like(mask).masked_fill(padding, -torch.inf)) else None
