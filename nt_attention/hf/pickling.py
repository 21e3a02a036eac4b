"""Pickles of Hugging Face models that `patch_all` has patched, and of their configs, have no trace of the patch."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..patching.building import has_listeners
from ..patching.pickling import leave_out
from .pack.attention_code import is_override
from .pack.change_model import is_patched_by_user
from .patch_model import VISION_NAME
from .route.attention import NAME_OVER
from .transformers_private import ATTENTION

__all__ = ["PreTrainedModel", "leave_out_patches"]

_BEFORE = {name: over for over, name in NAME_OVER.items()} | {VISION_NAME: "sdpa"}


def leave_out_patches() -> None:
    """Let pickle leave out what patches of Hugging Face models change, in this process from now on."""
    leave_out(nn.Module, _without_methods)
    leave_out(PreTrainedConfig, _of_config)


def _without_methods(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in state.items() if not is_override(x)}


def _of_config(config: PreTrainedConfig, state: dict[str, Any]) -> dict[str, Any]:
    name = cast(str, state.get(ATTENTION))
    if name not in _BEFORE or not has_listeners() or is_patched_by_user(config):
        return state
    return {**state, ATTENTION: _BEFORE[name]}
