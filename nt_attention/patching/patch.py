"""``patch``: find what can run padding-free in a model, and change it."""

from __future__ import annotations

import sys
from typing import Literal

from torch import nn

from ..modules.multihead import VarlenMultiheadAttention
from . import torch_modules
from .handle import NotPackedError, NotPackedWarning, OnFallback, PatchHandle

__all__ = ["NotPackedError", "NotPackedWarning", "PatchHandle", "patch"]


def patch(
    model: nn.Module,
    padding_free: bool = True,
    *,
    logits: Literal["padded"] | None = None,
    on_fallback: OnFallback = "warn",
) -> PatchHandle:
    """Make ``model`` run attention over its real tokens, in place.

    Reaches every ``nn.TransformerEncoder`` and every Hugging Face model of a family in ``nt_attention.hf.families``, as
    the model itself or anywhere inside it. With ``padding_free`` a padded batch is packed once at the entry of each,
    every layer of it sees real tokens only, and the result is padded again at its exit, with 0 where there is no token.
    The device is read at most once a forward, and once more for the labels of question answering. A call that packing
    can't serve falls back to the forward that the model had; ``handle.calls`` counts it with the reason, and a
    ``NotPackedWarning`` says so once. Any other ``nn.MultiheadAttention`` inside is swapped, layer by layer, for one
    that takes NestedTensors as well and skips the padding in its ``key_padding_mask``.

    Args:
        model: any module. Its parameters, state_dict and optimizer stay as they are.
        padding_free: if False, only swap the attention: nn.TransformerEncoder layers take NestedTensors, and Hugging
            Face models keep the sequences of packed rows apart.
        logits: "padded" pads the logits of a Hugging Face head also where it is training with labels. Without it they
            stay packed there, (1, T, V): the loss is what is wanted, and padding them costs the memory that was saved.
        on_fallback: "warn" warns once for each reason for which a call did not run packed; "raise" raises a
            ``NotPackedError`` at every such call. ``generate`` asks for a cache, and so is such a call. A batch without
            padding, and a row that you have packed yourself, are not.

    Returns:
        A handle: ``remove()`` undoes everything, and so does leaving ``with patch(model):``, also by an exception.
        Printed, it tells what was changed and what was left alone, and why.

    Raises:
        ValueError: nothing in the model could be reached, with the reasons; or it is patched already. The model is
            then as it was.
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if logits not in (None, "padded"):
        raise ValueError(f'logits must be "padded", or left out, got {logits!r}.')
    if on_fallback not in ("warn", "raise"):
        raise ValueError(f'on_fallback must be "warn" or "raise", got {on_fallback!r}.')
    handle = PatchHandle(type(model).__name__, on_fallback)
    try:
        _patch_modules("", model, handle, padding_free, logits)
        if not (handle.changed or handle.layers):
            found = "".join(f"\n  {name}: {reason}" for name, reason in handle.left.items())
            raise ValueError(
                f"there is nothing in {type(model).__name__} that patch can reach:"
                f"{found or ' it holds no nn.MultiheadAttention and no Hugging Face model.'}"
            )
    except BaseException:
        handle.remove()
        raise
    handle.replacements.clear()
    return handle


def _patch_modules(
    name: str, module: nn.Module, handle: PatchHandle, padding_free: bool, logits: Literal["padded"] | None
) -> None:
    """Change ``module`` if it is of a kind that can be patched; else look inside. A name is "" or ".path.to.module"."""
    if isinstance(module, nn.TransformerEncoder) and torch_modules.patch_encoder(name, module, handle, padding_free):
        return
    if isinstance(module, nn.MultiheadAttention):
        if not isinstance(module, VarlenMultiheadAttention):
            handle.leave(name, "it is attention itself: use VarlenMultiheadAttention.from_torch(module) in its place.")
        return
    if "transformers" in sys.modules:  # without it, no module is one of its models
        from ..hf import patch_model

        if patch_model.patch_model(name, module, handle, padding_free, logits):
            return
    for child_name, child in list(module._modules.items()):  # a module may be there under two names
        path = f"{name}.{child_name}"
        if child is None:
            continue
        if not isinstance(child, nn.MultiheadAttention):
            _patch_modules(path, child, handle, padding_free, logits)
        elif (reason := torch_modules.swap_attention(module, child_name, handle)) is not None:
            handle.leave(path, reason)
        else:
            description = "takes NestedTensors, and skips padding where its mask tells of it"
            handle.change_layers(name, {child_name: description})
