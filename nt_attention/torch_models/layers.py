"""The layers of PyTorch's encoders and decoders: which of them can run packed, and their packed forward.

Dimensions: T tokens, S tokens of the memory, E embed dim.

A patched layer runs packed tokens (T, E) if it gets layouts in place of attention masks, and its original forward if
not. Layouts are arguments so that activation checkpointing finds them in the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layouts.protocol import Layout
from ..modules.multihead import VarlenMultiheadAttention
from ..patching.forwards import PatchedForward, active_forwards, override_forward, replacement_of
from ..patching.handle import PatchHandle
from ..torch_private import forward_hooks_of, relu_of_addmm
from .attention_modules import PatchedMultiheadAttention, as_varlen, attention_not_supported, swap_attention

_Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


class LayerKind(NamedTuple):
    """One of PyTorch's layer classes.

    Attributes:
        stock: the class.
        attentions: the names of its attention modules.
        methods: the methods whose computation a packed layer repeats, `forward` first.
        blocks: the number of its residual blocks. Each has a norm and a dropout with its number, from 1.
    """

    stock: type[nn.Module]
    attentions: tuple[str, ...]
    methods: tuple[str, ...]
    blocks: int


def _methods(stock: type[nn.Module]) -> tuple[str, ...]:
    """The names of the methods that compute a layer: its forward, and one for each block."""
    return tuple([name for name in vars(stock) if name == "forward" or name.endswith("_block")])


ENCODER_LAYER = LayerKind(nn.TransformerEncoderLayer, ("self_attn",), _methods(nn.TransformerEncoderLayer), 2)
DECODER_LAYER = LayerKind(
    nn.TransformerDecoderLayer, ("self_attn", "multihead_attn"), _methods(nn.TransformerDecoderLayer), 3
)


def layer_not_supported(layer: nn.Module, kind: LayerKind) -> str | None:
    """Why a layer can't run packed, or None."""
    name = type(layer).__name__
    if not isinstance(layer, kind.stock):
        return f"{name} is not an nn.{kind.stock.__name__}."
    own = [x for part in kind.methods if (x := layer.__dict__.get(part)) is not None]
    inherited = all(getattr(type(layer), part) is getattr(kind.stock, part) for part in kind.methods)
    if not inherited or not all(isinstance(x, PatchedForward) for x in own):
        return f"{name} overrides {', '.join(kind.methods[:-1])} or {kind.methods[-1]}."
    if (reason := may_mix_tokens(layer, kind)) is not None:
        return reason
    attentions: list[Any] = [getattr(layer, attention) for attention in kind.attentions]
    for attention_name, attention in zip(kind.attentions, attentions, strict=True):
        if any(forward_hooks_of(attention)):
            return f"its {attention_name} has hooks, which would get packed tokens."
        is_ours = type(attention) in (VarlenMultiheadAttention, PatchedMultiheadAttention)
        why = None if is_ours else attention_not_supported(attention)
        why = why or part_not_supported(f"{attention_name}.out_proj", attention.out_proj, (nn.Linear,))
        if why is not None:
            return why
    if any(x.batch_first is not attentions[0].batch_first for x in attentions):
        return "its attention modules differ in batch_first."
    return None


def may_mix_tokens(layer: nn.Module, kind: LayerKind) -> str | None:
    """Which part of a layer may mix tokens, such as stochastic depth in place of a dropout, or None."""
    numbers = range(1, kind.blocks + 1)
    parts = {
        **dict.fromkeys(("linear1", "linear2"), (nn.Linear,)),
        **dict.fromkeys((f"norm{i}" for i in numbers), NORMS),
        **dict.fromkeys(("dropout", *(f"dropout{i}" for i in numbers)), (nn.Dropout, nn.Identity)),
    }
    for name, kinds in parts.items():
        if (reason := part_not_supported(name, getattr(layer, name), kinds)) is not None:
            return reason
    activation: Any = layer.activation
    while isinstance(activation, functools.partial):
        activation = activation.func
    is_module = isinstance(activation, nn.Module)
    known = type(activation) in _ACTIVATIONS and _runs_known_code(activation) if is_module else activation in _POINTWISE
    return None if known else "its activation may mix tokens."


NORMS = (nn.LayerNorm, nn.RMSNorm)
_ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardswish, nn.ReLU6, nn.SELU,
    nn.CELU, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
_POINTWISE = {
    F.relu, F.gelu, F.silu, F.mish, F.elu, F.selu, F.celu, F.leaky_relu, F.relu6, F.hardswish, F.hardsigmoid, F.tanh,
    F.sigmoid, F.softplus, F.softsign, F.logsigmoid, torch.relu, torch.tanh, torch.sigmoid,
}  # fmt: skip


def final_norm_not_supported(stack: nn.TransformerEncoder | nn.TransformerDecoder) -> str | None:
    """Why the norm after the layers of a stack may mix tokens, or None."""
    return None if stack.norm is None else part_not_supported("norm", stack.norm, (*NORMS, nn.Identity))


def part_not_supported(name: str, part: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str | None:
    """Why a part of a layer or a stack may mix tokens, or None if it is one of `kinds`."""
    base = getattr(part, "base_layer", part)  # an adapter has the layer as base_layer
    layers = [part] if base is part else [part, base]
    if not isinstance(base, kinds) or not all(map(_runs_known_code, layers)):
        return f"its {name} is a {type(part).__name__}, which may mix tokens."
    if isinstance(base, NORMS) and len(base.normalized_shape) != 1:
        return f"its {name} normalizes over {len(base.normalized_shape)} dimensions, which may mix tokens."
    return None


# Packages whose layers compute each token alone, also those that extend nn.Linear: quantized, or with adapters.
_TOKEN_WISE = {"bitsandbytes", "peft", "torch", "torchao"}
_MIX_TOKENS = ("peft.tuners.lily", "peft.tuners.poly", "peft.tuners.xlora")  # they weight experts by all tokens


def _runs_known_code(part: nn.Module) -> bool:
    """Whether the forward of a part comes from a package in `_TOKEN_WISE`, and was not replaced."""
    owner = next(x for x in type(part).__mro__ if "forward" in vars(x)).__module__
    known = owner.partition(".")[0] in _TOKEN_WISE and not owner.startswith(_MIX_TOKENS)
    return known and ("forward" not in vars(part) or replacement_of(part.forward, type(part)) is None)


def patch_layers(
    layers: Iterable[nn.Module], kind: LayerKind, handle: PatchHandle, padding_free: bool, in_stack: bool = True
) -> None:
    """Replace the attention of layers, and make those `in_stack` take layouts if `padding_free`.

    `patch_all` does not replace attention: programs that did not ask for it may compare the type of modules.
    """
    for layer in layers:
        for attention in () if handle.is_automatic else kind.attentions:
            swap_attention(layer, attention, handle, padded_because="its layer packs" if padding_free else None)
        if padding_free and in_stack:
            override_forward(layer, _encoder_layer if kind is ENCODER_LAYER else _decoder_layer, handle)


def takes_layouts(layer: nn.Module) -> bool:
    """Whether a patch has made a layer take layouts, as a part of a stack."""
    return any(patched.forward in (_encoder_layer, _decoder_layer) for patched in active_forwards(layer))


def _encoder_layer(
    layer: nn.TransformerEncoderLayer,
    original: Callable[..., Tensor],
    src: Tensor,
    src_mask: Tensor | Layout | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if src_mask is None or isinstance(src_mask, Tensor):
        return original(src, src_mask, src_key_padding_mask, is_causal)
    return run_encoder_layer(layer, src, src_mask, is_causal)


def _decoder_layer(
    layer: nn.TransformerDecoderLayer,
    original: Callable[..., Tensor],
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | Layout | None = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Tensor:
    if tgt_mask is None or isinstance(tgt_mask, Tensor):
        padding = tgt_key_padding_mask, memory_key_padding_mask
        return original(tgt, memory, tgt_mask, memory_mask, *padding, tgt_is_causal, memory_is_causal)
    return run_decoder_layer(layer, tgt, memory, tgt_mask, memory_mask, tgt_is_causal)


def run_encoder_layer(layer: nn.TransformerEncoderLayer, x: Tensor, layout: Layout, is_causal: bool) -> Tensor:
    """Run a layer on packed `x` (T, E)."""
    x = _add_block(layer, layer.norm1, x, lambda x: _attend(layer, x, layout, is_causal))
    return _add_block(layer, layer.norm2, x, lambda x: _feed_forward(layer, x, layer.dropout2))


def run_decoder_layer(
    layer: nn.TransformerDecoderLayer, x: Tensor, memory: Tensor, layout: Layout, memory_layout: Layout, is_causal: bool
) -> Tensor:
    """Run a layer on packed `x` (T, E) and packed `memory` (S, E)."""

    def attend_to_memory(x: Tensor) -> Tensor:
        attention = as_varlen(layer.multihead_attn)
        return layer.dropout2(attention(x, memory, memory, layout=layout, key_layout=memory_layout)[0])

    x = _add_block(layer, layer.norm1, x, lambda x: _attend(layer, x, layout, is_causal))
    x = _add_block(layer, layer.norm2, x, attend_to_memory)
    return _add_block(layer, layer.norm3, x, lambda x: _feed_forward(layer, x, layer.dropout3))


def _add_block(layer: _Layer, norm: nn.Module, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
    """Add the output of a residual block to its input, with the norm before the block or after the sum."""
    return x + block(norm(x)) if layer.norm_first else norm(x + block(x))


def _attend(layer: _Layer, x: Tensor, layout: Layout, is_causal: bool) -> Tensor:
    return layer.dropout1(as_varlen(layer.self_attn)(x, x, x, is_causal=is_causal, layout=layout)[0])


def _feed_forward(layer: _Layer, x: Tensor, last_dropout: nn.Module) -> Tensor:
    """The linear layers. On a GPU without gradients, ReLU is fused with the matrix product, as in the fast path."""
    first, second = layer.linear1, layer.linear2
    fused = (
        x.is_cuda
        and not (torch.is_grad_enabled() or layer.training or torch.is_autocast_enabled("cuda"))
        and (layer.activation is F.relu or type(layer.activation) is nn.ReLU)
        and type(first) is nn.Linear
        and first.bias is not None
        and not (any(forward_hooks_of(first)) or "forward" in first.__dict__)
    )
    if not fused:
        return last_dropout(second(layer.dropout(layer.activation(first(x)))))
    hidden = relu_of_addmm(first.bias, x, first.weight.t())
    return last_dropout(second(layer.dropout(hidden)))  # a dropout module may be in training mode
