"""What this library's Triton kernels share on the host: whether they can run, and compile-time arguments."""

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


def block_size(size: int) -> int:
    """The smallest power of 2 of at least `size` and 16, which `tl.dot` needs."""
    return max(16, 1 << (size - 1).bit_length())


def input_precision() -> str:
    """How `tl.dot` multiplies float32: three tf32 products are more accurate than multiply-adds, and twice as fast."""
    return "ieee" if torch.version.hip else "tf32x3"


def refuses(spec: AttentionSpec) -> list[str]:
    if spec.device.type == "cpu" and not interpreted():
        return ["tensors must be on a GPU, got cpu: move them there."]
    return []
