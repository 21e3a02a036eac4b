"""``patch``: find what can run padding-free in a model, change it, and hold what undoes the change."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn

from ..modules.multihead import VarlenMultiheadAttention
from . import torch_modules

Forward = Callable[..., Any]  # forward(module, original, *args, **kwargs)


def patch(model: nn.Module, padding_free: bool = True) -> PatchHandle:
    """Make ``model`` run attention over its real tokens, in place.

    Reaches every ``nn.TransformerEncoder`` and every Hugging Face model of a family in ``nt_attention.hf.models``, as
    the model itself or anywhere inside it. With ``padding_free`` a padded batch is packed once at the entry of each,
    every layer of it sees real tokens only, and the result is padded again at its exit, with 0 where there is no token.
    The device is read at most once a forward. A call that packing can't serve runs as it did before, and says so once
    in a ``NotPackedWarning``.

    Args:
        model: any module. Its parameters, state_dict and optimizer stay as they are.
        padding_free: if False, only swap the attention: nn.TransformerEncoder layers take NestedTensors, and Hugging
            Face models run packed rows that are passed with ``cu_seq_lens_q``.

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
    handle = PatchHandle(type(model).__name__)
    try:
        _reach("", model, handle, padding_free)
        if not handle.changed:
            found = "".join(f"\n  {name}: {why}" for name, why in handle.left.items())
            raise ValueError(
                f"there is nothing in {type(model).__name__} that patch can reach:"
                f"{found or ' it holds no nn.TransformerEncoder and no Hugging Face model.'}"
            )
    except BaseException:
        handle.remove()
        raise
    return handle


def _reach(name: str, module: nn.Module, handle: PatchHandle, padding_free: bool) -> None:
    """Change ``module`` if it is one that we know; else look inside."""
    if isinstance(module, nn.TransformerEncoder):
        torch_modules.patch_encoder(name, module, handle, padding_free)
        return
    if isinstance(module, VarlenMultiheadAttention):
        return
    if isinstance(module, nn.MultiheadAttention):
        handle.leave(name, "an attention module outside of nn.TransformerEncoder: not reached yet; replace it by hand.")
        return
    if "transformers" in sys.modules:  # without it, no module is one of its models
        from . import hugging_face

        if hugging_face.patch_model(name, module, handle, padding_free):
            return
    for child_name, child in module.named_children():
        _reach(f"{name}.{child_name}" if name else child_name, child, handle, padding_free)


class NotPackedWarning(UserWarning):
    """A patched model ran a call as it did before it was patched."""


class PatchedForward:
    """The ``forward`` of a patched instance. A deep copy of the module gets one that runs the copy's own weights."""

    def __init__(
        self, module: nn.Module, forward: Forward, before: Callable[..., Any] | None, handle: PatchHandle
    ) -> None:
        self.module, self.forward, self.before, self.handle = module, forward, before, handle
        self.__signature__ = inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        return functools.partial(type(self.module).forward, self.module) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.handle.active:
            return self.original(*args, **kwargs)
        return self.forward(self.module, self.original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        return PatchedForward(copy.deepcopy(self.module, memo), self.forward, self.before, self.handle)

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            f"this {type(self.module).__name__} is patched, and a patch can't be pickled: save its state_dict, which "
            "is as it was, or remove() the patch first."
        )


class PatchHandle:
    """What ``patch`` changed in a model, and how to undo it.

    Attributes:
        changed: by module name (the model itself is "model"), what was done.
        left: by module name, why nothing was.
    """

    def __init__(self, model: str) -> None:
        self.changed: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.active = True
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._said: set[str] = set()

    def remove(self) -> None:
        """Give the model back as it was. Does nothing the second time."""
        self.active = False
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
        lines += [f"  {name}: left alone, {why}" for name, why in self.left.items()]
        return "\n".join(lines)

    # What follows is for the files that know models.

    def change(self, name: str, what: str) -> None:
        self.changed[name or "model"] = what

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
            if before.handle.active:
                raise ValueError(
                    f"{type(module).__name__} is patched already: remove() the handle of that patch first."
                )
            before = before.before  # a copy of a model whose patch has been removed since
        patched = PatchedForward(module, forward, before, self)
        module.forward = patched

        def undo() -> None:
            if module.__dict__.get("forward") is not patched:
                return  # somebody wrapped it: our part just passes through from now on
            if before is not None:
                module.forward = before
            else:
                del module.__dict__["forward"]

        self.on_remove(undo)

    def not_packed(self, why: str) -> None:
        """Tell, once for each reason, that a call runs unpacked."""
        if why not in self._said:
            self._said.add(why)
            warnings.warn(f"this call runs padded, as before the patch: {why}", NotPackedWarning, stacklevel=5)
