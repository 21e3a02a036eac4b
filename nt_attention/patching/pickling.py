"""Pickles of modules that `patch_all` has patched have no trace of the patch.

The program did not ask for this package, so they have to load without it. Deep copies stay patched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .forwards import SET_WITH_FORWARD, PatchedForward

_Unpatched = Callable[[Any, dict[str, Any]], dict[str, Any]]
_functions: dict[type, list[_Unpatched]] = {}


def leave_out(kind: type, unpatched: _Unpatched) -> None:
    """Let pickle write the state that `unpatched(object, state)` gives, for all objects of a class from now on."""
    if kind not in _functions:
        _functions[kind] = []
        reduce = functools.partialmethod(_reduce, kind.__reduce_ex__, _functions[kind])
        kind.__reduce_ex__ = reduce  # type: ignore[assignment, method-assign]
    if unpatched not in _functions[kind]:
        _functions[kind].append(unpatched)


def _reduce(self: Any, reduce: Any, functions: list[_Unpatched], protocol: Any) -> Any:
    """What pickle writes: as `reduce` says, with the state that `functions` give. `copy` gets all.

    A partial method has no frame of its own, so the frame below this one is that of the caller.
    """
    reduced = reduce(self, protocol)
    is_copy = sys._getframe(1).f_globals.get("__name__") == "copy"
    if is_copy or not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = reduced[2]
    for unpatched in functions:
        state = unpatched(self, state)
    return *reduced[:2], state, *reduced[3:]


def without_forward(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a module without the `forward` of `patch_all`."""
    forward = state.get("forward")
    if not isinstance(forward, PatchedForward) or not forward.handle.is_automatic:
        return state
    state = {name: x for name, x in state.items() if name not in ("forward", *SET_WITH_FORWARD)}
    return state if forward.before is None else {**state, "forward": forward.before}
