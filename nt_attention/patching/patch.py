"""``patch``: find what can run padding-free in a model, change it, and hold what undoes the change."""

from __future__ import annotations

import functools
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from .._forwards import Forward, PatchedForward, Replicate, ours_beneath
from ..modules.multihead import VarlenMultiheadAttention
from . import torch_modules

OnFallback = Literal["warn", "raise"]


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
    that takes NestedTensors as well and skips the padding that its ``key_padding_mask`` tells of.

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
        _reach("", model, handle, padding_free, logits)
        if not (handle.changed or handle.layers):
            found = "".join(f"\n  {name}: {why}" for name, why in handle.left.items())
            raise ValueError(
                f"there is nothing in {type(model).__name__} that patch can reach:"
                f"{found or ' it holds no nn.MultiheadAttention and no Hugging Face model.'}"
            )
    except BaseException:
        handle.remove()
        raise
    handle.stand_ins.clear()
    return handle


def _reach(
    name: str, module: nn.Module, handle: PatchHandle, padding_free: bool, logits: Literal["padded"] | None
) -> None:
    """Change ``module`` if it is one that we know; else look inside."""
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
    for child_name, child in list(module._modules.items()):  # with what stands under two names
        path = f"{name}.{child_name}" if name else child_name
        if child is None:
            continue
        if not isinstance(child, nn.MultiheadAttention):
            _reach(path, child, handle, padding_free, logits)
        elif (why := torch_modules.swap_attention(module, child_name, handle)) is not None:
            handle.leave(path, why)
        elif not isinstance(child, VarlenMultiheadAttention):
            handle.change_layers("", {path: "takes NestedTensors, and skips padding where its mask tells of it"})


class NotPackedWarning(UserWarning):
    """A patched model ran a call as it did before it was patched."""


class NotPackedError(ValueError):
    """A call of a model that was patched with ``on_fallback="raise"`` can't run packed; the message says why."""


# Held while a handle counts a call. Not one for each handle: those are copied and pickled with their models.
_lock = threading.Lock()


def _counting() -> AbstractContextManager[Any]:
    return nullcontext() if torch.compiler.is_compiling() else _lock  # graphs take no locks


# Packages that call models for the user: a warning is shown at the line that called them.
_CALLERS = {"accelerate", "lightning", "nt_attention", "peft", "sentence_transformers", "torch", "transformers", "trl"}


class PatchHandle:
    """What ``patch`` changed in a model, and how to undo it.

    Attributes:
        changed: by module name (the model itself is "model"), what was done.
        layers: by module name, the attention that runs through us.
        left: by module name, why nothing was changed.
        calls: how many calls ran packed (None), and how many did not, by the reason.
    """

    def __init__(self, model: str, on_fallback: OnFallback = "warn") -> None:
        self.changed: dict[str, str] = {}
        self.layers: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.calls: Counter[str | None] = Counter()
        self.active = True
        self.on_fallback = on_fallback
        self.stand_ins: dict[nn.Module, VarlenMultiheadAttention] = {}  # while patching: one for each attention
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._said: set[str] = set()

    def remove(self) -> None:
        """Give the model back as it was. Does nothing the second time."""
        self.active = False
        self.stand_ins.clear()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        lines = [f"nt_attention.patch of {self._model}{'' if self.active else ' (removed)'}:"]
        lines += [f"  {name}: {what}" for name, what in self.changed.items()]
        lines += [f"    {names}: {what}" for names, what in _in_ranges(self.layers)]
        lines += [f"  {name}: left alone, {why}" for name, why in self.left.items()]
        lines += [
            f"  {calls} call{'s' if calls > 1 else ''} ran {'packed' if why is None else f'as before: {why}'}"
            for why, calls in self.calls.items()
        ] or ["  no call has come through yet"]
        return "\n".join(lines)

    # What follows is for the files that know models.

    def change(self, name: str, what: str) -> None:
        self.changed[name or "model"] = what

    def change_layers(self, name: str, layers: dict[str, str]) -> None:
        self.layers.update({f"{name}.{path}" if name else path: what for path, what in layers.items()})

    def leave(self, name: str, why: str) -> None:
        self.left[name or "model"] = why

    def on_remove(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def override_forward(self, module: nn.Module, forward: Forward) -> None:
        """Let this one instance run ``forward(module, original, *args, **kwargs)``, ``original`` what it ran before.

        After ``remove`` it runs that again, also where somebody has wrapped our forward since and still calls it.

        Raises:
            ValueError: the module is patched already.
        """
        before = module.__dict__.get("forward")
        if isinstance(before, PatchedForward):
            if before.handle is self:
                return  # as what two models share
            if before.handle.active:
                raise ValueError(
                    f"{type(module).__name__} is patched already: remove() the handle of that patch first."
                )
            before = before.before  # a copy of a model whose patch has been removed since
        beneath = ours_beneath(before, module)
        if beneath is not None:  # somebody has wrapped the forward of a patch that was removed: packing is done there
            beneath.forward, beneath.handle = forward, self
            return
        patched = PatchedForward(module, forward, before, self)
        module.forward = patched
        module._replicate_for_data_parallel = Replicate(patched)  # type: ignore[method-assign]
        self.on_remove(functools.partial(_put_back_forward, module, patched))

    def count(self, why: str | None) -> None:
        """Count a call that ran packed, or the reason for which it did not."""
        with _counting():
            self.calls[why] += 1

    def not_packed(self, why: str, what: str = "this call") -> None:
        """Count a call, or its head, that falls back to the padded forward; warn, once for each reason, or raise.

        Raises:
            NotPackedError: the model was patched with ``on_fallback="raise"``.
        """
        with _counting():
            self.calls[why] += 1
            first = why not in self._said
            self._said.add(why)
        if self.on_fallback == "raise":
            raise NotPackedError(
                f'{what} can\'t run packed: {why}. With on_fallback="warn" it runs padded, as before the patch.'
            )
        if first:
            message = f"{what} runs padded, as before the patch: {why}."
            warnings.warn(message, NotPackedWarning, stacklevel=_frames_to_caller())


def _frames_to_caller() -> int:
    """The ``stacklevel`` of the first caller outside of the packages that run models."""
    if torch.compiler.is_compiling():
        return 2
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _CALLERS:
        frame, level = frame.f_back, level + 1
    return level


def _in_ranges(layers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Layers that differ in their number alone, together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, what in layers.items():
        groups.setdefault((re.sub(r"\d+", "…", name), what), []).append(name)
    for (_, what), names in groups.items():
        yield (f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]), what


def _put_back_forward(module: nn.Module, patched: PatchedForward) -> None:
    module.__dict__.pop("_replicate_for_data_parallel", None)
    if module.__dict__.get("forward") is not patched:
        return  # somebody wrapped it: our part just passes through from now on
    if patched.before is not None:
        module.forward = patched.before
    else:
        del module.__dict__["forward"]
