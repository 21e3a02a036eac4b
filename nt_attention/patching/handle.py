"""The handle of a patch: what was changed in a model, how to undo it, and how the model's calls ran."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..modules.multihead import VarlenMultiheadAttention

OnFallback = Literal["warn", "raise"]


class NotPackedWarning(UserWarning):
    """A patched model ran a call as it did before it was patched."""


class NotPackedError(ValueError):
    """A call of a model that was patched with ``on_fallback="raise"`` can't run packed; the message says why."""


# Held while a handle counts a call. Not one for each handle: those are copied and pickled with their models.
_lock = threading.Lock()

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
        self.replacements: dict[nn.Module, VarlenMultiheadAttention] = {}  # while patching: one for each attention
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._warned: set[str] = set()

    def remove(self) -> None:
        """Restore the original model. Does nothing the second time."""
        self.active = False
        self.replacements.clear()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        lines = [f"nt_attention.patch of {self._model}{'' if self.active else ' (removed)'}:"]
        lines += [f"  {name}: {description}" for name, description in self.changed.items()]
        lines += [f"    {names}: {description}" for names, description in _in_ranges(self.layers)]
        lines += [f"  {name}: left alone, {reason}" for name, reason in self.left.items()]
        lines += [
            f"  {calls} call{'s' if calls > 1 else ''} ran {'packed' if reason is None else f'as before: {reason}'}"
            for reason, calls in self.calls.items()
        ] or ["  no call has come through yet"]
        return "\n".join(lines)

    # The methods of ``_forwards.Handle``. A module's name may begin with a dot: a child's is f"{parent}.{path}".

    def change(self, name: str, description: str) -> None:
        self.changed[name.removeprefix(".") or "model"] = description

    def change_layers(self, name: str, layers: dict[str, str]) -> None:
        """Describe the attention layers of a module, by their paths in it."""
        self.layers.update({f"{name}.{path}".removeprefix("."): kind for path, kind in layers.items()})

    def leave(self, name: str, reason: str) -> None:
        self.left[name.removeprefix(".") or "model"] = reason

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Let ``remove`` call ``undo``; the last one is called first."""
        self._undo.append(undo)

    def count(self, reason: str | None) -> None:
        """Count a call that ran packed, or the reason for which it did not."""
        with _counting():
            self.calls[reason] += 1

    def fall_back(self, reason: str, what: str = "this call") -> None:
        """Count a call, or its head, that falls back to the padded forward; warn, once for each reason, or raise.

        Raises:
            NotPackedError: the model was patched with ``on_fallback="raise"``.
        """
        with _counting():
            self.calls[reason] += 1
            first = reason not in self._warned
            self._warned.add(reason)
        if self.on_fallback == "raise":
            hint = 'With on_fallback="warn" it runs padded, as before the patch.'
            raise NotPackedError(f"{what} can't run packed: {reason}. {hint}")
        if first:
            message = f"{what} runs padded, as before the patch: {reason}."
            warnings.warn(message, NotPackedWarning, stacklevel=_frames_to_caller())


def _counting() -> AbstractContextManager[Any]:
    return nullcontext() if torch.compiler.is_compiling() else _lock  # graphs take no locks


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
    for name, description in layers.items():
        groups.setdefault((re.sub(r"\d+", "…", name), description), []).append(name)
    for (_, description), names in groups.items():
        yield (f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]), description
