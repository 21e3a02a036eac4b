"""What this library's Triton kernels share on the host: whether they can run, and compile-time arguments."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from .call import AttentionSpec
from .device import older_than_ampere


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


def column_parts(size: int) -> tuple[int, int]:
    """Two powers of 2 for a tensor's columns, at least 16 each, which have `size` columns or a few more together.

    The second is 0 if the first is large enough, or if both would have as many columns as the next power of 2.
    """
    whole = block_size(size)
    rest = block_size(size - whole // 2)
    return (whole // 2, rest) if size > 64 and rest < whole // 2 else (whole, 0)


def input_precision() -> str:
    """How `tl.dot` multiplies float32: three tf32 products are more accurate than multiply-adds, and twice as fast."""
    return "ieee" if torch.version.hip else "tf32x3"


@functools.cache
def shared_memory(where: torch.device) -> int:
    """The bytes of shared memory of a multiprocessor, of which a program may have all but 1 KiB; 0 on a CPU."""
    return torch.cuda.get_device_properties(where).shared_memory_per_multiprocessor if where.type == "cuda" else 0


def refuses(spec: AttentionSpec) -> list[str]:
    if spec.device.type == "cpu" and not interpreted():
        return ["tensors must be on a GPU, got cpu: move them there."]
    reasons, wide = older_than_ampere(spec), max(spec.head_dim, spec.value_dim)
    if wide > 256 and spec.dtype == torch.float32:
        advice = "cast the inputs or use torch.autocast"
        reasons.append(f"head dims above 256 are not supported in float32, got {wide}: {advice}.")
    return reasons
