"""Pickles of models that `patch_all` has patched, and of their configs, have no trace of the patch.

The program did not ask for this package, so they have to load without it. Deep copies stay patched.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..patching.building import has_listeners
from ..patching.forwards import PatchedForward
from ..torch_private import REPLICATE
from .pack.attention_code import is_override
from .pack.change_model import is_patched_by_user
from .patch_model import VISION_NAME
from .route.attention import NAME_OVER
from .transformers_private import ATTENTION

__all__ = ["PreTrainedModel", "leave_out_patches"]

_BEFORE = {name: over for over, name in NAME_OVER.items()} | {VISION_NAME: "sdpa"}


@functools.cache
def leave_out_patches() -> None:
    """Let pickle leave out patches, in this process from now on."""
    for kind, function in ((nn.Module, _of_module), (PreTrainedConfig, _of_config)):
        kind.__reduce_ex__ = functools.partialmethod(_reduce, kind.__reduce_ex__, function)  # type: ignore[method-assign]


def _reduce(self: Any, reduce: Any, unpatched: Any, protocol: Any) -> Any:
    """What pickle writes: as `reduce` says, with the state that `unpatched` gives. `copy` gets all.

    A partial method has no frame of its own, so the frame below this one is that of the caller.
    """
    reduced = reduce(self, protocol)
    is_copy = sys._getframe(1).f_globals.get("__name__") == "copy"
    if is_copy or not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    return *reduced[:2], unpatched(self, reduced[2]), *reduced[3:]


def _of_module(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    state = {name: x for name, x in state.items() if not is_override(x)}
    forward = state.get("forward")
    if isinstance(forward, PatchedForward) and forward.handle.is_automatic:
        del state["forward"]
        state.pop(REPLICATE, None)
        if forward.before is not None:
            state["forward"] = forward.before
    return state


def _of_config(config: PreTrainedConfig, state: dict[str, Any]) -> dict[str, Any]:
    name = cast(str, state.get(ATTENTION))
    if name not in _BEFORE or not has_listeners() or is_patched_by_user(config):
        return state
    return {**state, ATTENTION: _BEFORE[name]}
