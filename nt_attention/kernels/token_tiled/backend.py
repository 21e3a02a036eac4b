"""The token-tiled kernels as a backend: what they take."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from ..backend import COMMON, Backend, HeadDims
from ..call import AttentionSpec
from . import ops


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in Python (TRITON_INTERPRET=1): for tests, and slow."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it comes with torch's GPU builds; for the CPU's, pip install triton."
    if not interpreted() and not torch.accelerator.is_available():
        return "torch sees no GPU."
    return None


def refuses(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.device.type == "cpu" and not interpreted():
        reasons.append("needs tensors on a GPU, got cpu: move them there.")
    if spec.batch_invariant and spec.dropout_p:
        reasons.append(
            "drops weights by where a sequence stands in the batch: leave dropout_p at 0 or batch_invariant at False."
        )
    return reasons


BACKEND = Backend(
    name="token_tiled",
    about="this library's Triton kernels, which tile over packed tokens: short sequences, and whatever others lack",
    missing=missing,
    forward=ops.forward,
    backward=ops.backward,
    features=COMMON | {"scale ≤ 0", "window", "softcap", "alibi", "dropout", "deterministic", "batch_invariant"},
    min_capability=(8, 0),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=HeadDims(256),
    refuses=refuses,
    lse_gradient=True,
)
