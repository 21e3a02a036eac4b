"""`patch`: finds the modules of a model that can run padding-free, and changes them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from .graphs.cache import CudaGraphs
from .modules.multihead import VarlenMultiheadAttention
from .patching.forwards import CALL_REMOVE_FIRST, WeakReference, active_handles
from .patching.handle import CheckMode, NotPackedError, NotPackedWarning, OnFallback, PatchHandle
from .torch_models import stacks
from .torch_models.attention_modules import swap_attention
from .torch_private import children_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NOTHING_KNOWN = (
    " it has no nn.MultiheadAttention and no Hugging Face model. In attention code of its own, call "
    "nt_attention.varlen_attention (docs/coming_from/attention.md)."
)

__all__ = ["NotPackedError", "NotPackedWarning", "PatchHandle", "patch"]


def patch(
    model: nn.Module,
    padding_free: bool = True,
    *,
    packing: Literal["auto", "always"] = "auto",
    on_fallback: OnFallback = "warn",
    cuda_graphs: CudaGraphs = False,
    mesh: DeviceMesh | None = None,
    need_weights: bool = True,
    shared_prefixes: bool = False,
    check: CheckMode = "first",
) -> PatchHandle:
    """Make a model padding-free: it computes real tokens only. Changes the model in place.

    Changes every `nn.Transformer`, `nn.TransformerEncoder` and `nn.TransformerDecoder`, and every Hugging Face model
    that gives the same packed as each sequence alone, whether it is the model itself or a part of it. This is checked
    on the model: it runs some short rows, in less than a second on most devices, and stays as it is. The first batches
    are compared with the padded run, see `check`. A padded batch is packed once at the entry, all layers run on real
    tokens, and the result is padded again at the exit, with 0 at padding. A layer of PyTorch's encoders and decoders
    that is in none of them packs and pads by itself. Any other `nn.MultiheadAttention` is replaced by a
    `VarlenMultiheadAttention` with the same parameters, which also takes NestedTensors, and skips padding in calls with
    `need_weights=False`, a boolean `key_padding_mask` and no `attn_mask`. A model that calls it without `need_weights`,
    and drops the weights, packs with `patch(model, need_weights=False)`: those of DETR and of point clouds do.

    Dropout draws random numbers for tokens only. So under the same seed it drops other values than before the patch.

    A call that can't run packed falls back to the padded forward, the one before the patch: `handle.calls` counts it
    with the reason, and a `NotPackedWarning` is shown once for each reason.

    A forward syncs with the device once to read the padding, and once more for the labels of question answering. A
    module of `torch.nn` syncs once for each padding mask, and once more for each that is additive, and for the mask of
    self-attention without `is_causal`. An `nn.Transformer` reads the padding of its source once, if it is passed for
    the memory too; it syncs once more to compare different tensors. Single layers, and any other
    `nn.MultiheadAttention`, sync in each call with a padding mask.

    Args:
        model: any module. Its parameters, state_dict and optimizer stay the same.
        padding_free: if False, only the attention is replaced. Layers of encoders and decoders then take
            NestedTensors, and Hugging Face models keep the sequences of packed rows apart.
        packing: "auto" runs a Hugging Face model on the padded batch where that takes less time: on Hopper GPUs
            (measured on an H200), if the batch is so small that the device waits for the host. This is decided from
            shapes, before the mask is read, and `handle.calls` counts these calls. Outputs are 0 at padding, as in a
            packed call. All else is as without the patch, such as a loss that counts labels at padding. "always" packs
            every batch. So do CPUs, other GPUs, compiled models, encoder-decoders and modules of `torch.nn`.
        on_fallback: "warn" warns once for each reason why calls fall back, and for each difference from the padded
            run, such as a loss that leaves out padding; "raise" raises a `NotPackedError` at each such call; "silent"
            only counts them. `generate` falls back, because it uses a cache. A batch without
            padding, or a row that is already packed, is no fallback. A single `nn.MultiheadAttention` does not look for
            padding: each of its calls with a `key_padding_mask` counts.
        cuda_graphs: run packed calls on a CUDA device as CUDA graphs, also small batches: with True, calls without
            gradients in evaluation mode; with "training", also calls with gradients; with "auto", both, but only
            batch sizes that come often and for which the GPU waits for the host, which is measured in some calls. A
            graph serves all batches of similar sizes. Calls that can't run as graphs run as without this option, and
            `handle.graphs.calls` counts them with the reason. After a change inside of an object that is no module,
            such as a field of the config, call `handle.graphs.clear()`. The guides "Embed and serve" and "Fine-tune"
            have the sizes, the memory, and what a backward can't do with "training" and "auto".
        mesh: divide the tokens of each batch over the ranks of this `DeviceMesh`, such as `mesh["cp"]` (context
            parallelism). All ranks pass the same batch, and get the same outputs and the same loss. Only the first
            batch is checked. Outputs beside a loss are gathered when they are read, so all ranks must read them. Take
            the mean of gradients over the ranks, as FSDP and DDP do. A call that falls back runs padded on every rank.
            For the modules of `torch.nn` that pack, and for Hugging Face models whose attention can be divided.
            Attention dropout in training raises an error.
        need_weights: False says that nobody reads the attention weights of an `nn.MultiheadAttention`. In calls that
            leave its own `need_weights` at the default, it then returns None in the place of weights, so that they can
            run packed. Calls with `need_weights=True` return weights. Other modules have no such default.
        shared_prefixes: compute tokens that rows of a batch have in common once, forward and backward, if the rows
            begin with 32 or more equal tokens at equal positions: prompts with several answers, preference pairs,
            few-shot prompts. For causal Hugging Face models whose attention runs through transformers' interface.
            Outputs are as without it. A call with dropout in training, `inputs_embeds`, CUDA graphs or a compiler
            shares nothing. `handle.prefixes` counts calls and tokens.

        check: when a packed call of a Hugging Face model is compared with the padded run, by up to three of its rows.
            "first": the first call of each kind (mode, arguments, dtype, hooks), and again if its rows are twice as
            long as any that were compared; of models with classes of other packages, also one call in 64. "always":
            every call, for debugging. "never": none. If a result differs by more than the rounding that was measured,
            the call and those of its kind run padded, with a `NotPackedWarning` that says what differs. Ranks with a
            `mesh` or with sharded parameters compare nothing.

    Returns:
        A `PatchHandle`. Its `remove()` undoes the patch, as does the end of `with patch(model):`. `print(handle)`
            shows what was changed, what was not changed and why, and how calls ran. If the model is already patched
            with these options, as in a notebook cell that runs again, it is the earlier handle.

    Raises:
        ValueError: the model has nothing that can be changed (the message has the reasons), or is already patched
            with other options. The model is then not changed. Or an option has another value than those above. Or
            `mesh` has several dimensions, or is passed with `cuda_graphs` or `padding_free=False`. Or no model can
            share prefixes with `shared_prefixes`, which can't be combined with `mesh` and `padding_free=False`.
        TypeError: `model` is not a module, or `mesh` is not a `DeviceMesh`.

    Example:
        >>> import torch, nt_attention as nta
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> padding = torch.tensor([[False, False, False], [False, True, True]])  # True at padding
        >>> with nta.patch(encoder):
        ...     encoder(torch.randn(2, 3, 16), src_key_padding_mask=padding).shape
        torch.Size([2, 3, 16])
    """
    if not isinstance(model, nn.Module):
        hint = " Pass its .model." if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.{hint}")
    check_options(packing, on_fallback, check)
    if not isinstance(need_weights, bool):
        raise ValueError(f"need_weights must be True or False, got {need_weights!r}.")
    if mesh is not None:
        _check_mesh(mesh, bool(cuda_graphs), padding_free)
    if shared_prefixes and (mesh is not None or not padding_free):
        raise ValueError("shared_prefixes needs packed batches on one device: leave out mesh and padding_free=False.")
    options = padding_free, packing, on_fallback, cuda_graphs, mesh, need_weights, shared_prefixes, check
    for earlier in set(active_handles(model)):
        if earlier.is_automatic:  # of `patch_all`
            earlier.remove()
        elif earlier.is_patch_of(model, options):
            return cast(PatchHandle, earlier)
        elif earlier.is_patch_of(model):
            raise ValueError(f"{type(model).__name__} is already patched, with other options: {CALL_REMOVE_FIRST}")
    name = type(model).__name__
    handle = PatchHandle(name, on_fallback, cuda_graphs, mesh, need_weights, shared_prefixes, check=check)
    apply_patch(handle, model, padding_free, packing)
    handle.made_for = WeakReference(model), options
    return handle


def check_options(packing: object, on_fallback: object, check: object) -> None:
    """Raise a ValueError for another value than those of `patch`."""
    if packing not in ("auto", "always"):
        raise ValueError(f'packing must be "auto" or "always", got {packing!r}.')
    if on_fallback not in ("warn", "raise", "silent"):
        raise ValueError(f'on_fallback must be "warn", "raise" or "silent", got {on_fallback!r}.')
    if check not in ("first", "always", "never"):
        raise ValueError(f'check must be "first", "always" or "never", got {check!r}.')


def apply_patch(handle: PatchHandle, model: nn.Module, padding_free: bool, packing: Literal["auto", "always"]) -> None:
    """Change a model. If this is not possible, it stays as it was.

    Raises:
        ValueError: as in `patch`.
    """
    try:
        _patch_modules("", model, handle, padding_free, packing)
        if not (handle.changed or handle.layers):
            found = "".join(f"\n  {name}: {reason}" for name, reason in handle.left.items())
            raise ValueError(f"patch found nothing to change in {type(model).__name__}:{found or _NOTHING_KNOWN}")
        if handle.prefixes is not None and not handle.prefixes.models:
            reasons = "".join(f"\n  {reason}" for reason in handle.prefixes.left) or " it has no Hugging Face model."
            raise ValueError(f"{type(model).__name__} has no model that can share prefixes:{reasons}")
    except BaseException:
        handle.remove()
        raise
    handle.replacements.clear()


def _check_mesh(mesh: Any, cuda_graphs: bool, padding_free: bool) -> None:
    from .distributed.sharded_layout import check_mesh  # imports torch.distributed, so only if there is a mesh

    check_mesh(mesh)
    if cuda_graphs:
        raise ValueError("CUDA graphs can't have the exchanges of a mesh: leave out cuda_graphs or mesh.")
    if not padding_free:
        raise ValueError("a mesh divides packed batches: leave out padding_free=False or mesh.")


def _hugging_face(module: nn.Module) -> Any:
    """The module `hf.patch_model`, or None if `module` is no Hugging Face model.

    Raises:
        ImportError: it is one, and the version of transformers is too old.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    try:
        from .hf import patch_model
    except ImportError:
        if isinstance(module, modeling.PreTrainedModel):
            raise
        return None
    return patch_model


def _patch_modules(
    name: str,
    module: nn.Module,
    handle: PatchHandle,
    padding_free: bool,
    packing: Literal["auto", "always"],
    in_stack: bool = False,
    padded_because: str | None = None,
) -> None:
    """Patch `module` if possible, else look at its children. A name is "" or ".path.to.module".

    `in_stack` is for the parts of a stack that does not pack, and `padded_because` says why attention may not pack.
    """
    if isinstance(module, stacks.Stack):
        if stacks.patch_stack(name, module, handle, padding_free):
            return
        in_stack = True  # its layers do not pack by themselves: what runs between them may need values at padding
    packs_alone = isinstance(module, stacks.Layer) and padding_free and not in_stack
    if packs_alone and stacks.patch_layer(name, cast(stacks.Layer, module), handle):
        return
    if isinstance(module, nn.MultiheadAttention):
        if handle.mesh is None and not isinstance(module, VarlenMultiheadAttention):
            handle.skip(name, "it is the attention module itself: use VarlenMultiheadAttention.from_torch(module).")
        return
    hugging_face = _hugging_face(module)
    if hugging_face is not None and hugging_face.patch_model(name, module, handle, padding_free, packing):
        return
    if padding_free and padded_because is None:
        padded_because = stacks.why_attention_is_padded(module)
    for child_name, child in list(children_of(module).items()):  # not named_children(), which skips second names
        path = f"{name}.{child_name}"
        if child is None:
            continue
        if (handle.mesh is not None or handle.is_automatic) and isinstance(child, nn.MultiheadAttention):
            who = "patch_all" if handle.is_automatic else "with a mesh, patch"
            handle.skip(path, f"{who} does not change a single nn.MultiheadAttention.")
            continue
        if not isinstance(child, nn.MultiheadAttention):
            _patch_modules(path, child, handle, padding_free, packing, in_stack, padded_because)
            continue
        options: dict[str, Any] = {"padded_because": padded_because, "counts": padding_free}
        if (reason := swap_attention(module, child_name, handle, **options)) is not None:
            handle.skip(path, reason)
        else:
            description = "takes NestedTensors"
            ragged = cast(VarlenMultiheadAttention, getattr(module, child_name))
            ragged.graphs = handle.graphs
            if padding_free and padded_because is None:
                description += (
                    ", and skips padding if need_weights=False and a boolean key_padding_mask is the only mask"
                )
            handle.change_layers(name, {child_name: description})
    if isinstance(module, nn.Transformer):
        stacks.patch_transformer(name, module, handle, padding_free)
