"""The device: whether there is one, and which is the current one, that kernels run on which torch does not launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def no_cuda() -> str | None:
    """Why there is no CUDA device here, or None."""
    if not torch.backends.cuda.is_built():
        return "this build of torch has no CUDA: install one that has."
    return None if torch.cuda.is_available() else "torch sees no CUDA device."


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the current one within the block."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
