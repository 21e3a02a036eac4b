"""Whether this library's Triton kernels can run on this machine, and a call on its device."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from .call import AttentionSpec


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1), which is slow and meant for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: install a GPU build of torch, which includes it, or pip install triton."
    if not interpreted() and not torch.accelerator.is_available():
        return "no GPU is available."
    return None


def refuses(spec: AttentionSpec) -> list[str]:
    if spec.device.type == "cpu" and not interpreted():
        return ["tensors must be on a GPU, got cpu: move them there."]
    return []
