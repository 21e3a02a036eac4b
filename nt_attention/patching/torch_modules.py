"""`patch` for the Transformer modules of PyTorch.

Dimensions: B sequences, L positions of a padded row, T tokens, E embed dim.

A patched `nn.TransformerEncoder` packs the batch at its entry and passes the layout to its layers as `src_mask`. A
patched layer runs packed tokens (T, E) if it gets a layout, and its original forward if not. An
`nn.TransformerEncoderLayer` outside of an encoder packs by itself. Any other `nn.MultiheadAttention` is replaced, and
the modules around it are not changed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import nested
from .._forwards import CALL_REMOVE_FIRST, PatchedForward, override_forward
from .._tracing import can_be_read, outside_of_graphs
from ..layout import SequenceLayout
from ..modules.multihead import VarlenMultiheadAttention
from .handle import PatchHandle


def patch_encoder(name: str, encoder: nn.TransformerEncoder, handle: PatchHandle, padding_free: bool) -> bool:
    """Replace the attention of every layer, and make the encoder pack at its entry if `padding_free`.

    Returns:
        False if the encoder or a layer has a custom forward. The reason is then in the handle.
    """
    own = encoder.__dict__.get("forward", None)
    known = type(encoder).forward is nn.TransformerEncoder.forward and isinstance(own, (PatchedForward, type(None)))
    if not known or not len(encoder.layers):
        reason = "overrides forward" if len(encoder.layers) else "has no layers"
        handle.leave(name, f"{type(encoder).__name__} {reason}.")
        return False
    for i, layer in enumerate(encoder.layers):
        if (why := _layer_not_supported(layer)) is not None:
            handle.leave(f"{name}.layers.{i}", why)
            return False
    for layer in encoder.layers:
        swap_attention(layer, "self_attn", handle)
        if padding_free:
            override_forward(layer, _layer_forward, handle)
    if padding_free:
        override_forward(encoder, functools.partial(_encoder_forward, handle), handle)
    how = "packed at the entry, padded at the exit" if padding_free else "takes NestedTensors"
    layers = f"{len(encoder.layers)} layer{'s' if len(encoder.layers) > 1 else ''}"
    handle.change(name, f"nn.TransformerEncoder of {layers}, {how}")
    return True


def patch_layer(name: str, layer: nn.TransformerEncoderLayer, handle: PatchHandle) -> bool:
    """Make a layer that is in no `nn.TransformerEncoder` pack at its entry.

    Returns:
        False if it can't. Its attention can then still be replaced.
    """
    if (reason := _layer_not_supported(layer)) is not None:
        handle.leave(name, f"{reason} Only its attention is replaced.")
        return False
    swap_attention(layer, "self_attn", handle)
    override_forward(layer, functools.partial(_single_layer_forward, handle), handle)
    kind = "nn.TransformerEncoderLayer, packed at the entry, padded at the exit"
    handle.change_layers("", {name.removeprefix(".") or "model": kind})
    return True


def _layer_not_supported(layer: nn.Module) -> str | None:
    """Why a layer can't run packed, or None."""
    stock = nn.TransformerEncoderLayer
    if not isinstance(layer, stock):
        return f"{type(layer).__name__} is not an nn.TransformerEncoderLayer."
    parts = ("forward", "_sa_block", "_ff_block")
    own = [x for part in parts if (x := layer.__dict__.get(part)) is not None and not isinstance(x, PatchedForward)]
    if own or any(getattr(type(layer), part) is not getattr(stock, part) for part in parts):
        return f"{type(layer).__name__} overrides forward, _sa_block or _ff_block."
    for name, kinds in _PARTS.items():
        part = getattr(layer, name)
        part = getattr(part, "base_layer", part)  # an adapter has the layer as base_layer
        if not isinstance(part, kinds):
            return f"its {name} is a {type(getattr(layer, name)).__name__}, which may mix tokens."
        if isinstance(part, (nn.LayerNorm, nn.RMSNorm)) and len(part.normalized_shape) != 1:
            return f"its {name} normalizes over {len(part.normalized_shape)} dimensions, which may mix tokens."
    if layer.activation not in (F.relu, F.gelu) and type(layer.activation) not in _ACTIVATIONS:
        return "its activation may mix tokens."
    attention = layer.self_attn
    if attention._forward_hooks or attention._forward_pre_hooks:
        return "its self_attn has hooks, which would get packed tokens."
    return None if type(attention) is VarlenMultiheadAttention else _attention_not_supported(attention)


# Parts of a layer that do not mix tokens. Another one may, such as stochastic depth in place of a dropout.
_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    **dict.fromkeys(("linear1", "linear2"), (nn.Linear,)),
    **dict.fromkeys(("norm1", "norm2"), (nn.LayerNorm, nn.RMSNorm)),
    **dict.fromkeys(("dropout", "dropout1", "dropout2"), (nn.Dropout, nn.Identity)),
}
_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardswish, nn.ReLU6)


def _attention_not_supported(attention: nn.Module) -> str | None:
    """Why an attention module can't be replaced by one with the same parameters, or None."""
    kind = type(attention).__name__
    if type(attention) is not nn.MultiheadAttention:
        return f"{kind} is not nn.MultiheadAttention."
    if "forward" in attention.__dict__:
        return f"{kind} overrides forward."
    if attention._buffers or attention._modules.keys() != {"out_proj"}:
        more = [*attention._buffers, *(attention._modules.keys() - {"out_proj"})]
        return f"{kind} has {', '.join(more)}, which would be lost."
    try:
        VarlenMultiheadAttention.from_torch(attention)
    except ValueError as error:
        return str(error)
    return None


# Attention module → the handle of the patch that put it into a model.
_swapped_by: WeakKeyDictionary[nn.Module, ref[PatchHandle]] = WeakKeyDictionary()


def swap_attention(parent: nn.Module, name: str, handle: PatchHandle) -> str | None:
    """Replace the child `name` of `parent` by a `VarlenMultiheadAttention` with the same parameters and hooks.

    Returns:
        The reason if this is not possible, else None.

    Raises:
        ValueError: another patch has already replaced it.
    """
    stock = cast(nn.MultiheadAttention, parent._modules[name])
    if isinstance(stock, VarlenMultiheadAttention):
        reference = _swapped_by.get(stock)
        other = None if reference is None else reference()
        if other is not None and other is not handle and other.active:
            raise ValueError(f"{type(parent).__name__} is already patched: {CALL_REMOVE_FIRST}")
        return "it is already a VarlenMultiheadAttention."
    ragged = handle.replacements.get(stock)
    if ragged is None:
        if (reason := _attention_not_supported(stock)) is not None:
            return reason
        ragged = handle.replacements[stock] = VarlenMultiheadAttention.from_torch(stock)
        _share(_HOOKS, stock, ragged)
        _share(stock.__dict__.keys() - ragged.__dict__.keys() - _NOT_COPIED, stock, ragged)
    _swapped_by[ragged] = ref(handle)
    parent._modules[name] = ragged
    handle.on_remove(functools.partial(_restore_attention, parent, name, ragged, stock))
    return None


class Report:
    """Counts the padded batches that a replaced attention module gets. A copy of the module has the same `Report`."""

    def __init__(self, handle: PatchHandle) -> None:
        self.handle = handle

    def __call__(self, reason: str | None) -> None:
        if not self.handle.active or torch.compiler.is_compiling():
            return
        if reason is None:
            self.handle.count(None)
        else:
            self.handle.fall_back(reason, "this call of an nn.MultiheadAttention")

    def __deepcopy__(self, memo: dict[int, object]) -> Report:
        return self


# Both modules share the dictionaries of hooks, so that the handle of a hook removes it from both.
_HOOKS = {name for name in vars(nn.Module()) if "_hook" in name}
_NOT_COPIED = {"_qkv_same_embed_dim"}  # a property of VarlenMultiheadAttention
_SETTINGS = {"dropout", "batch_first", "_is_full_backward_hook"}


def _share(names: Iterable[str], of: nn.Module, to: nn.Module) -> None:
    to.__dict__.update({name: of.__dict__[name] for name in names if name in of.__dict__})


def _restore_attention(
    parent: nn.Module, name: str, ragged: VarlenMultiheadAttention, stock: nn.MultiheadAttention
) -> None:
    """Put `stock` back, with the current parameters, because load_state_dict(assign=True) may have replaced them."""
    if parent._modules.get(name) is not ragged:
        return
    names = [{key for key, x in module._parameters.items() if x is not None} for module in (ragged, stock)]
    is_plain = type(ragged) is VarlenMultiheadAttention and ragged._modules.keys() == {"out_proj"}
    if not is_plain or ragged._buffers or names[0] != names[1]:
        warnings.warn(
            f"{name} of {type(parent).__name__} was parametrized or extended while it was patched, so it remains a "
            "VarlenMultiheadAttention.",
            stacklevel=4,
        )
        return
    VarlenMultiheadAttention.share_parameters(ragged, stock)
    _share(_SETTINGS, ragged, stock)
    parent._modules[name] = stock.train(ragged.training)


def _layer_forward(
    layer: nn.TransformerEncoderLayer,
    original: Callable[..., Tensor],
    src: Tensor,
    src_mask: Tensor | SequenceLayout | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if src_mask is None or isinstance(src_mask, Tensor):
        return original(src, src_mask, src_key_padding_mask, is_causal)

    def attend(x: Tensor) -> Tensor:
        return layer.dropout1(layer.self_attn(x, x, x, is_causal=is_causal, layout=src_mask)[0])

    if layer.norm_first:
        src = src + attend(layer.norm1(src))
        return src + _feed_forward(layer, layer.norm2(src))
    src = layer.norm1(src + attend(src))
    return layer.norm2(src + _feed_forward(layer, src))


def _feed_forward(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    """`layer._ff_block`. On a GPU without gradients, ReLU is fused with the matrix product, as in the fast path."""
    first, second = layer.linear1, layer.linear2
    fused = (
        x.is_cuda
        and not (torch.is_grad_enabled() or layer.training or torch.is_autocast_enabled("cuda"))
        and (layer.activation is F.relu or type(layer.activation) is nn.ReLU)
        and type(first) is nn.Linear
        and first.bias is not None
        and not (first._forward_hooks or first._forward_pre_hooks or "forward" in first.__dict__)
    )
    if not fused:
        return layer._ff_block(x)
    hidden = torch._addmm_activation(first.bias, x, first.weight.t())
    return layer.dropout2(second(layer.dropout(hidden)))  # a dropout module may be in training mode


def _encoder_forward(
    handle: PatchHandle,
    encoder: nn.TransformerEncoder,
    original: Callable[..., Tensor],
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    if src.is_nested:
        return _nested_forward(encoder, src, mask, src_key_padding_mask, bool(is_causal))
    batch = _padded_batch(handle, encoder.layers[0], src, mask, src_key_padding_mask, is_causal)
    if batch is None:
        return original(src, mask, src_key_padding_mask, is_causal)
    layout = _layout(batch.is_token)
    return batch.restore(layout.pad(_run_layers(encoder, layout.pack(batch.values), layout, batch.is_causal)))


def _single_layer_forward(
    handle: PatchHandle,
    layer: nn.TransformerEncoderLayer,
    original: Callable[..., Tensor],
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    batch = None
    if not src.is_nested:  # is_causal is False by default here, and then says nothing about src_mask
        batch = _padded_batch(handle, layer, src, src_mask, src_key_padding_mask, is_causal or None)
    if batch is None:
        return original(src, src_mask, src_key_padding_mask, is_causal)
    layout = _layout(batch.is_token)
    values = layout.pack(batch.values)
    return batch.restore(layout.pad(_layer_forward(layer, original, values, layout, is_causal=batch.is_causal)))


class _PaddedBatch(NamedTuple):
    """A padded batch that can be packed.

    Attributes:
        values: (B, L, E).
        is_token: (B, L) bool, False at padding.
        is_causal: whether attention is causal.
        batch_first: whether the caller passed (B, L, E), not (L, B, E).
        is_batched: False if the caller passed (L, E).
    """

    values: Tensor
    is_token: Tensor
    is_causal: bool
    batch_first: bool
    is_batched: bool

    def restore(self, out: Tensor) -> Tensor:
        """Convert (B, L, E) to the form of the input."""
        if not self.is_batched:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)


def _padded_batch(
    handle: PatchHandle,
    layer: nn.Module,
    src: Tensor,
    mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool | None,
) -> _PaddedBatch | None:
    """Read the batch of an encoder or a layer, and count the call. None if it has to run padded."""
    if src_key_padding_mask is None or src.dim() not in (2, 3):
        return None  # there is no padding, or the original forward raises an error
    batch_first, is_batched = cast(nn.MultiheadAttention, layer.self_attn).batch_first, src.dim() == 3
    padded = src if batch_first or not is_batched else src.transpose(0, 1)
    is_mask = src_key_padding_mask.dtype == torch.bool or src_key_padding_mask.is_floating_point()
    if src_key_padding_mask.shape != padded.shape[:-1] or not is_mask:
        return None  # the original forward raises an error
    if not (torch.compiler.is_compiling() or can_be_read(src)):  # torch.compile breaks its graph to read it
        handle.fall_back("its values can't be read here")
        return None
    if not is_batched:
        padded, src_key_padding_mask = padded[None], src_key_padding_mask[None]
    causal = _is_causal(mask, is_causal, padded.shape[1])
    padding = _as_padding(src_key_padding_mask)
    if causal is None or padding is None:
        handle.fall_back(
            "mask is neither None nor causal"
            if causal is None
            else "src_key_padding_mask has values other than 0 and −inf"
        )
        return None
    handle.count(None)
    return _PaddedBatch(padded, ~padding, causal, batch_first, is_batched)


def _nested_forward(
    encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
) -> Tensor:
    if (mask is not None and not is_causal) or padding is not None:
        raise ValueError(
            "a NestedTensor has no padding and supports no dense mask: pass is_causal=True for a causal encoder, "
            "and leave out src_key_padding_mask."
        )
    (unwrapped,) = nested.unwrap_each(src=src)
    return unwrapped.rewrap(_run_layers(encoder, unwrapped.values, unwrapped.layout, is_causal))


@outside_of_graphs
def _layout(mask: Tensor) -> SequenceLayout:
    return SequenceLayout.from_attention_mask(mask)


def _run_layers(encoder: nn.TransformerEncoder, x: Tensor, layout: SequenceLayout, causal: bool) -> Tensor:
    """Run every layer and the final norm on packed `x` (T, E)."""
    for layer in encoder.layers:
        x = layer(x, src_mask=layout, is_causal=causal)
    return x if encoder.norm is None else encoder.norm(x)


def _is_causal(mask: Tensor | None, is_causal: bool | None, length: int) -> bool | None:
    """Whether attention is causal, or None for any other mask. If `is_causal` is True, the mask is not read."""
    if is_causal or mask is None:
        return bool(is_causal)
    if is_causal is not None or mask.shape != (length, length):
        return None
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return True if torch.equal(mask, later if mask.dtype == torch.bool else _additive(later, mask)) else None


def _as_padding(mask: Tensor) -> Tensor | None:
    """(B, L) bool, True at padding. None if a floating-point mask has values other than 0 and −inf."""
    padding = mask if mask.dtype == torch.bool else mask == -torch.inf
    return padding if padding is mask or torch.equal(mask, _additive(padding, mask)) else None


def _additive(blocked: Tensor, like: Tensor) -> Tensor:
    """An additive mask with the dtype of `like`: −inf where `blocked`, else 0."""
    return torch.zeros_like(like).masked_fill(blocked, -torch.inf)
