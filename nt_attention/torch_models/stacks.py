"""`patch` for the Transformer modules of PyTorch.

Dimensions: B sequences, L positions of a padded row, T tokens, E embed dim.

A patched `nn.TransformerEncoder` or `nn.TransformerDecoder` packs the batch at its entry, and passes the layouts to its
layers as attention masks. A patched `nn.Transformer` packs the source and the target, and its decoder gets the packed
memory. A layer outside of these modules packs by itself. Any other `nn.MultiheadAttention` is replaced, and the modules
around it are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn

from ..compiler import is_compiling, needs_one_graph, outside_of_graphs
from ..layouts.nested import Unwrapped
from ..layouts.protocol import Sharded
from ..layouts.sequence import unwrap_each
from ..modules.graphs import PackedValues, run_as_graph
from ..patching.forwards import (
    CONTEXT_PARALLEL,
    GRADIENTS_PER_SAMPLE,
    PatchedForward,
    has_gradients_per_sample,
    is_context_parallel,
    override_forward,
)
from ..patching.handle import PatchHandle
from ..torch_private import backward_hooks_of, forward_hooks_of, has_compiled_call
from .changed_modules import why_not_packed_now
from .layers import (
    DECODER_LAYER,
    ENCODER_LAYER,
    LayerKind,
    final_norm_not_supported,
    layer_not_supported,
    may_mix_tokens,
    patch_layers,
    run_decoder_layer,
    run_encoder_layer,
)
from .padded_inputs import PackedInput, PaddedInput, pack_inputs, padding_of_memory

Stack = nn.TransformerEncoder | nn.TransformerDecoder
Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def patch_stack(name: str, stack: Stack, handle: PatchHandle, padding_free: bool) -> bool:
    """Replace the attention of every layer, and make an encoder or a decoder pack at its entry if `padding_free`.

    Returns:
        False if it or a layer has a custom forward, or may mix tokens. The reason is then in the handle.
    """
    is_encoder = isinstance(stack, nn.TransformerEncoder)
    stock = nn.TransformerEncoder if is_encoder else nn.TransformerDecoder
    kind = ENCODER_LAYER if is_encoder else DECODER_LAYER
    if (unsupported := _stack_not_supported(stack, stock, kind)) is not None:
        path, reason = unsupported
        handle.skip(name + path, reason)
        return False
    patch_layers(stack.layers, kind, handle, padding_free)
    if padding_free:
        forward = (
            functools.partial(_encoder, handle) if is_encoder else functools.partial(_decoder, handle, _run_decoder)
        )
        override_forward(stack, forward, handle)
    how = "packed at the entry, padded at the exit" if padding_free else "takes NestedTensors"
    layers = f"{len(stack.layers)} layer{'s' if len(stack.layers) > 1 else ''}"
    handle.change(name, f"nn.{stock.__name__} of {layers}, {how}")
    return True


def _stack_not_supported(stack: Stack, stock: type[Stack], kind: LayerKind) -> tuple[str, str] | None:
    """The path of the module because of which a stack can't run packed, and the reason. None if it can."""
    own = stack.__dict__.get("forward")
    if not len(stack.layers):
        return "", f"{type(stack).__name__} has no layers."
    if type(stack).forward is not stock.forward or not isinstance(own, PatchedForward | None):
        return "", f"{type(stack).__name__} overrides forward."
    for i, layer in enumerate(stack.layers):
        if (reason := layer_not_supported(layer, kind)) is not None:
            return f".layers.{i}", reason
    reason = final_norm_not_supported(stack)
    return None if reason is None else ("", reason)


def patch_layer(name: str, layer: Layer, handle: PatchHandle) -> bool:
    """Make a layer that is in no encoder or decoder pack at its entry.

    Returns:
        False if it can't. Its attention can then still be replaced.
    """
    is_encoder = isinstance(layer, nn.TransformerEncoderLayer)
    kind = ENCODER_LAYER if is_encoder else DECODER_LAYER
    if (reason := layer_not_supported(layer, kind)) is not None:
        handle.skip(name, reason if handle.is_automatic else f"{reason} Only its attention is replaced.")
        return False
    patch_layers([layer], kind, handle, padding_free=True, in_stack=False)
    decoder = functools.partial(_decoder, handle, _run_decoder_layer)
    override_forward(layer, functools.partial(_lone_encoder_layer, handle) if is_encoder else decoder, handle)
    description = f"nn.{kind.stock.__name__}, packed at the entry, padded at the exit"
    handle.change_layers("", {name.removeprefix(".") or "model": description})
    return True


def why_attention_is_padded(module: nn.Module) -> str | None:
    """Why the attention in a stack or layer that does not pack may not pack by itself, or None.

    Packed self-attention gives 0 at padding. Parts that mix tokens would pass that on to tokens.
    """
    if not isinstance(module, Stack | Layer):
        return None
    is_encoder = isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer)
    kind = ENCODER_LAYER if is_encoder else DECODER_LAYER
    layers = list(module.layers) if isinstance(module, Stack) else [module]
    mixing = next((reason for x in layers if isinstance(x, Layer) and (reason := may_mix_tokens(x, kind))), None)
    return None if mixing is None else f"a layer around it may mix tokens ({mixing.removesuffix('.')})"


def patch_transformer(name: str, model: nn.Transformer, handle: PatchHandle, padding_free: bool) -> None:
    """Make an `nn.Transformer` pass packed tokens from its encoder to its decoder, after both have been patched.

    If only the encoder was patched, the forward is replaced too: it makes the encoder run padded in calls in which the
    decoder attends to the padding of the source. Without `padding_free` it only takes NestedTensors.
    """
    is_stock = type(model).forward is nn.Transformer.forward
    if not is_stock or not isinstance(model.__dict__.get("forward"), PatchedForward | None):
        return
    if not padding_free or _is_patched(model.encoder, nn.TransformerEncoder):
        override_forward(model, functools.partial(_transformer, handle), handle)
        if _is_patched(model.decoder, nn.TransformerDecoder):
            handle.change(name, "nn.Transformer, passes packed tokens from its encoder to its decoder")


def _is_patched(module: nn.Module, kind: type[Stack]) -> bool:
    """Whether a module of an `nn.Transformer` packs at its entry."""
    forward = module.__dict__.get("forward")
    return isinstance(module, kind) and isinstance(forward, PatchedForward) and forward.handle.active


def _encoder(
    handle: PatchHandle,
    encoder: nn.TransformerEncoder,
    original: Callable[..., Tensor],
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
    *,
    run_padded: bool = False,
) -> Tensor:
    """The forward of a patched encoder. With `run_padded` it is the original forward, and counts nothing."""
    if src.is_nested and not handle.is_automatic:
        return _nested_encoder(handle, encoder, src, mask, src_key_padding_mask, bool(is_causal))
    source = PaddedInput(src, src_key_padding_mask, "src_key_padding_mask", mask, "mask", is_causal)
    packed = None if run_padded or src.is_nested else _pack(handle, encoder, source)
    if packed is None:
        return original(src, mask, src_key_padding_mask, is_causal)
    (tokens,) = packed
    return tokens.restore(_run(handle, _run_encoder, encoder, tokens.is_causal, tokens))


def _lone_encoder_layer(
    handle: PatchHandle,
    layer: nn.TransformerEncoderLayer,
    original: Callable[..., Tensor],
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The forward of a patched encoder layer that is in no encoder."""
    source = PaddedInput(src, src_key_padding_mask, "src_key_padding_mask", src_mask, "mask", is_causal)
    packed = None if src.is_nested else _pack(handle, layer, source)
    if packed is None:
        return original(src, src_mask, src_key_padding_mask, is_causal)
    (tokens,) = packed
    return tokens.restore(_run(handle, _run_encoder_layer, layer, tokens.is_causal, tokens))


_Tokens = PackedInput | Unwrapped


class _DecoderCall(NamedTuple):
    """The arguments of a decoder. Those of a decoder layer have the same names and order."""

    tgt: Tensor
    memory: Tensor
    tgt_mask: Tensor | None = None
    memory_mask: Tensor | None = None
    tgt_key_padding_mask: Tensor | None = None
    memory_key_padding_mask: Tensor | None = None
    tgt_is_causal: bool | None = None
    memory_is_causal: bool = False

    @property
    def inputs(self) -> tuple[PaddedInput, PaddedInput]:
        """The target and the memory."""
        masks = self.tgt_mask, "tgt_mask", self.tgt_is_causal
        return (
            PaddedInput(self.tgt, self.tgt_key_padding_mask, "tgt_key_padding_mask", *masks),
            PaddedInput(self.memory, self.memory_key_padding_mask, "memory_key_padding_mask"),
        )

    @property
    def not_packed_because(self) -> str | None:
        """Why attention to the memory can't run packed, or None: a mask of (L, S) is not about tokens."""
        is_masked = self.memory_mask is not None or self.memory_is_causal
        return "it has a memory_mask or memory_is_causal" if is_masked else None


def _decoder(
    handle: PatchHandle,
    run: Callable[..., Tensor],
    module: nn.Module,
    original: Callable[..., Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The forward of a patched decoder, or of a patched decoder layer that is in none. `run` runs it packed."""
    call = _DecoderCall(*args, **kwargs)
    is_nested = call.tgt.is_nested or call.memory.is_nested
    if is_nested and isinstance(module, nn.TransformerDecoder) and not handle.is_automatic:
        out = _nested_decoder(handle, module, call)
        return original(*args, **kwargs) if out is None else out
    packed = None if is_nested else _pack(handle, module, *call.inputs, reason=call.not_packed_because)
    if packed is None:
        return original(*args, **kwargs)
    target, memory = packed
    return target.restore(_run(handle, run, module, target.is_causal, target, memory))


class _TransformerCall(NamedTuple):
    """The arguments of an `nn.Transformer`."""

    src: Tensor
    tgt: Tensor
    src_mask: Tensor | None = None
    tgt_mask: Tensor | None = None
    memory_mask: Tensor | None = None
    src_key_padding_mask: Tensor | None = None
    tgt_key_padding_mask: Tensor | None = None
    memory_key_padding_mask: Tensor | None = None
    src_is_causal: bool | None = None
    tgt_is_causal: bool | None = None
    memory_is_causal: bool = False

    @property
    def source(self) -> PaddedInput:
        padding = self.src_key_padding_mask
        return PaddedInput(self.src, padding, "src_key_padding_mask", self.src_mask, "src_mask", self.src_is_causal)

    @property
    def encoder_masks(self) -> dict[str, Any]:
        """The keyword arguments that the encoder gets."""
        padding = self.src_key_padding_mask
        return {"mask": self.src_mask, "src_key_padding_mask": padding, "is_causal": self.src_is_causal}

    @property
    def decoder_masks(self) -> dict[str, Any]:
        """The keyword arguments that the decoder gets."""
        return {
            "tgt_mask": self.tgt_mask,
            "memory_mask": self.memory_mask,
            "tgt_key_padding_mask": self.tgt_key_padding_mask,
            "memory_key_padding_mask": self.memory_key_padding_mask,
            "tgt_is_causal": self.tgt_is_causal,
            "memory_is_causal": self.memory_is_causal,
        }


def _transformer(
    handle: PatchHandle, model: nn.Transformer, original: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of a patched `nn.Transformer`.

    If the padding of the memory is that of the source, the memory stays packed. In other calls the encoder and the
    decoder pack, pad and count by themselves.
    """
    call = _TransformerCall(*args, **kwargs)
    padding = call.src_key_padding_mask
    is_nested = call.src.is_nested or call.tgt.is_nested
    if is_nested and not handle.is_automatic:
        _check_nested(call.src, call.tgt)
        return model.decoder(call.tgt, model.encoder(call.src, **call.encoder_masks), **call.decoder_masks)
    may_pack = not is_nested and not _needs_one_graph(handle) and _is_patched(model.encoder, nn.TransformerEncoder)
    if padding is None or not may_pack:
        return original(*args, **kwargs)
    plan = _plan_transformer(handle, model, call, padding)
    if plan == "padded encoder":
        memory = model.encoder(call.src, **call.encoder_masks, run_padded=True)
        return model.decoder(call.tgt, memory, **call.decoder_masks)
    if plan == "one by one":
        return original(*args, **kwargs)
    source, target = plan
    if handle.mesh is None:
        states = source._replace(values=_run(handle, _run_encoder, model.encoder, source.is_causal, source))
    else:  # the memory stays on the ranks
        states = cast(PackedInput, _tokens_of_rank(handle.mesh, source, source.is_causal))
        states = states._replace(values=_run_encoder(model.encoder, source.is_causal, states))
    return target.restore(_run(handle, _run_decoder, model.decoder, target.is_causal, target, states))


def _check_nested(src: Tensor, tgt: Tensor) -> None:
    """The checks of nn.Transformer, for NestedTensors (B, j, E). It reads other dimensions if not batch_first."""
    if not (src.is_nested and tgt.is_nested):
        names = ("src", "tgt") if src.is_nested else ("tgt", "src")
        raise ValueError(f"src and tgt must both be NestedTensors: {names[0]} is one, and {names[1]} is not.")
    if src.size(0) != tgt.size(0):  # not shape, which strided ones do not have
        raise ValueError(f"src and tgt must have the same number of sequences, got {src.size(0)} and {tgt.size(0)}.")


@outside_of_graphs  # the host reads the masks, and graphs support no locks
def _plan_transformer(
    handle: PatchHandle, model: nn.Transformer, call: _TransformerCall, padding: Tensor
) -> tuple[PackedInput, ...] | Literal["padded encoder", "one by one"]:
    """Pack and count the call, or say how encoder and decoder are called."""
    if (handle.mesh is None and is_context_parallel()) or has_gradients_per_sample(model):
        return "one by one"  # they say why they do not pack
    in_memory = padding_of_memory(padding, call.memory_key_padding_mask)
    if in_memory == "visible":
        handle.fall_back("memory_key_padding_mask does not hide the padding of src", "the encoder of this call")
        return "padded encoder"
    packed = _pack_both(handle, model, call) if in_memory == "same" else None
    if packed is None:
        return "one by one"
    handle.count(None, *_sizes((call.src, call.tgt), packed))
    return packed


def _pack_both(handle: PatchHandle, model: nn.Transformer, call: _TransformerCall) -> tuple[PackedInput, ...] | None:
    """Pack source and target. None if the encoder and the decoder have to be called one by one.

    Hooks on them get padded batches, as before the patch, and one that is compiled by itself stays compiled.
    """
    stacks = model.encoder, model.decoder
    if not _is_patched(model.decoder, nn.TransformerDecoder) or any(map(_is_wrapped, stacks)):
        return None
    if any(why_not_packed_now(stack, handle) is not None for stack in stacks):
        return None
    batch_first = _batch_first(model.encoder)
    if _batch_first(model.decoder) != batch_first:
        return None
    decoder_call = _DecoderCall(call.tgt, call.src, **call.decoder_masks)
    inputs = call.source, decoder_call.inputs[0]
    packed = pack_inputs(*inputs, batch_first=batch_first, reason=decoder_call.not_packed_because)
    return packed if isinstance(packed, tuple) else None


def _is_wrapped(stack: nn.Module) -> bool:
    """Whether a call of `stack` does more than its forward."""
    return any(forward_hooks_of(stack)) or any(backward_hooks_of(stack)) or has_compiled_call(stack)


def _batch_first(module: nn.Module) -> bool:
    """Whether an encoder, a decoder or a layer takes (B, L, E)."""
    layer: Any = module.layers[0] if isinstance(module, Stack) else module
    return layer.self_attn.batch_first


def _pack(
    handle: PatchHandle, module: nn.Module, *inputs: PaddedInput, reason: str | None = None
) -> tuple[PackedInput, ...] | None:
    """Pack the inputs of a call, and count the call. None if it has to run padded; see `pack_inputs`."""
    if (all(x.padding is None for x in inputs) and handle.mesh is None) or _needs_one_graph(handle):
        return None
    return _pack_and_count(handle, module, inputs, reason)


def _needs_one_graph(handle: PatchHandle) -> bool:
    """Whether a program that did not ask for a patch has asked for a single graph, which packing would break."""
    return handle.is_automatic and needs_one_graph()


@outside_of_graphs  # the host reads the masks, and graphs support no locks
def _pack_and_count(
    handle: PatchHandle, module: nn.Module, inputs: tuple[PaddedInput, ...], reason: str | None
) -> tuple[PackedInput, ...] | None:
    reason = why_not_packed_now(module, handle) or reason
    if handle.mesh is None and is_context_parallel():
        reason = CONTEXT_PARALLEL
    elif has_gradients_per_sample(module):
        reason = GRADIENTS_PER_SAMPLE
    always = handle.mesh is not None
    packed = pack_inputs(*inputs, batch_first=_batch_first(module), reason=reason, always=always)
    if isinstance(packed, str):
        handle.fall_back(packed)
        return None
    if packed is not None:
        handle.count(None, *_sizes([x.values for x in inputs], packed))
    return packed


def _sizes(padded: Sequence[Tensor], packed: tuple[PackedInput, ...]) -> tuple[int, int]:
    """The number of positions of padded inputs, (B, L, E), (L, B, E) or (L, E), and of tokens."""
    return sum(x.shape[:-1].numel() for x in padded), sum(x.layout.total for x in packed)


def _run(
    handle: PatchHandle, function: Callable[..., Tensor], module: nn.Module, is_causal: bool, *inputs: _Tokens
) -> Tensor:
    """`function(module, is_causal, *inputs)`, one of the functions below.

    As a CUDA graph, or over the ranks of a mesh, if the patch asks for it.
    """
    if handle.mesh is not None:
        local = [_tokens_of_rank(handle.mesh, x, is_causal) for x in inputs]
        return _gather(local[0].layout, function(module, is_causal, *local))
    if handle.graphs is not None and not is_compiling():
        packed = [PackedValues(x.values, x.layout) for x in inputs]

        def run(others: list[PackedValues]) -> Tensor:
            replaced = [x._replace(values=y.values, layout=y.layout) for x, y in zip(inputs, others, strict=True)]
            return function(module, is_causal, *replaced)

        out = run_as_graph(handle.graphs, module, is_causal, packed, run)
        if out is not None:
            return out
    return function(module, is_causal, *inputs)


@outside_of_graphs  # the host divides the tokens
def _tokens_of_rank(mesh: Any, tokens: _Tokens, is_causal: bool) -> _Tokens:
    """The tokens of this rank, with a `ShardedLayout`. Those that have one stay as they are."""
    if isinstance(tokens.layout, Sharded):
        return tokens
    sharded = tokens.layout.shard(mesh, is_causal=is_causal)
    return tokens._replace(values=sharded.local(tokens.values), layout=sharded)


@outside_of_graphs
def _gather(sharded: Any, out: Tensor) -> Tensor:
    gathered: Tensor = sharded.gather(out, sum_gradients=True)
    return gathered


def _run_encoder(encoder: nn.TransformerEncoder, is_causal: bool, source: _Tokens) -> Tensor:
    """Run every layer and the final norm on packed tokens. Returns (T, E)."""
    x = source.values
    for layer in encoder.layers:
        x = layer(x, src_mask=source.layout, is_causal=is_causal)
    return x if encoder.norm is None else encoder.norm(x)


def _run_encoder_layer(layer: nn.TransformerEncoderLayer, is_causal: bool, source: _Tokens) -> Tensor:
    return run_encoder_layer(layer, source.values, source.layout, is_causal)


def _run_decoder(decoder: nn.TransformerDecoder, is_causal: bool, target: _Tokens, memory: _Tokens) -> Tensor:
    """Run every layer and the final norm on packed tokens. Returns (T, E)."""
    x = target.values
    for layer in decoder.layers:
        x = layer(x, memory.values, tgt_mask=target.layout, memory_mask=memory.layout, tgt_is_causal=is_causal)
    return x if decoder.norm is None else decoder.norm(x)


def _run_decoder_layer(layer: nn.TransformerDecoderLayer, is_causal: bool, target: _Tokens, memory: _Tokens) -> Tensor:
    return run_decoder_layer(layer, target.values, memory.values, target.layout, memory.layout, is_causal)


def _nested_encoder(
    handle: PatchHandle,
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    if (mask is not None and not is_causal) or padding is not None:
        raise ValueError(
            "a NestedTensor has no padding and supports no dense mask: pass is_causal=True for a causal encoder, "
            "and leave out src_key_padding_mask."
        )
    _check_unchanged(encoder, handle)
    (source,) = unwrap_each(src=src)
    return source.rewrap(_run(handle, _run_encoder, encoder, is_causal, source))


def _check_unchanged(stack: Stack, handle: PatchHandle) -> None:
    """Raise an error if a stack can't run packed any more: NestedTensors can't run padded."""
    reason = None if is_compiling() else why_not_packed_now(stack, handle)
    if reason is not None:
        raise ValueError(
            f"NestedTensors can only run packed, but {reason}. Call remove() on the handle of the patch, and patch the "
            "model again."
        )


def _nested_decoder(handle: PatchHandle, decoder: nn.TransformerDecoder, call: _DecoderCall) -> Tensor | None:
    """Run a decoder on NestedTensors. None if the attention modules have to read masks, or to raise an error."""
    has_padding = call.tgt_key_padding_mask is not None or call.memory_key_padding_mask is not None
    has_mask = (call.tgt_mask is not None and not call.tgt_is_causal) or call.not_packed_because is not None
    if has_padding or has_mask or not (call.tgt.is_nested and call.memory.is_nested):
        return None
    _check_unchanged(decoder, handle)
    target, memory = unwrap_each(tgt=call.tgt, memory=call.memory)
    return target.rewrap(_run(handle, _run_decoder, decoder, bool(call.tgt_is_causal), target, memory))
