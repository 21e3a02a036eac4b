"""Whether a GPU is available, and how to make it the current device for kernels that PyTorch does not launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def no_cuda() -> str | None:
    """Why no CUDA device is available, or None if one is."""
    if not torch.backends.cuda.is_built():
        return "this build of torch does not include CUDA: install a CUDA build."
    return None if torch.cuda.is_available() else "no CUDA device is available."


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within the block, `device` is the current one."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _NOTHING
    return torch.accelerator.device_index(device.index)


_NOTHING = contextlib.nullcontext()
