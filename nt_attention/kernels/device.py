"""The current device: what kernels that torch does not launch itself run on, whatever their tensors are on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the current one within the block."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
