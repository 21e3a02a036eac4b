"""Whether a GPU is available, and how to make it the current device for kernels that PyTorch does not launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .call import AttentionSpec


def no_cuda() -> str | None:
    """Why no CUDA device is available, or None if one is."""
    if not torch.backends.cuda.is_built():
        return "this build of torch does not include CUDA: install a CUDA build."
    return None if torch.cuda.is_available() else "no CUDA device is available."


def too_old(spec: AttentionSpec, *needed: int) -> list[str]:
    """Why a CUDA device can't run kernels that need this compute capability; empty if it can."""
    if spec.device.type != "cuda" or torch.cuda.get_device_capability(spec.device) >= needed:
        return []
    name, version = torch.cuda.get_device_name(spec.device), ".".join(map(str, needed))
    return [f"compute capability {version} or higher is required, which {name} does not have."]


def older_than_ampere(spec: AttentionSpec) -> list[str]:
    return too_old(spec, 8, 0)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within the block, `device` is the current one."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _NOTHING
    return torch.accelerator.device_index(device.index)


_NOTHING = contextlib.nullcontext()
