"""The `token_tiled` backend and what it supports."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from ..backend import COMMON, Backend, HeadDims
from ..call import AttentionSpec
from . import ops


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
    reasons = []
    if spec.device.type == "cpu" and not interpreted():
        reasons.append("tensors must be on a GPU, got cpu: move them there.")
    if spec.batch_invariant and spec.dropout_p:
        reasons.append(
            "dropout depends on a sequence's place in the batch: leave dropout_p at 0 or batch_invariant at False."
        )
    return reasons


BACKEND = Backend(
    name="token_tiled",
    about="this library's Triton kernels over packed tokens (GPU; fast for short sequences, most options)",
    missing=missing,
    forward=ops.forward,
    backward=ops.backward,
    prepare_forward=ops.prepare_forward,
    prepare_backward=ops.prepare_backward,
    features=COMMON
    | {
        "scale ≤ 0",
        "window",
        "softcap",
        "alibi",
        "relative bias",
        "dropout",
        "deterministic",
        "batch_invariant",
        "bounds",
    },
    min_capability=(8, 0),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=HeadDims(256),
    refuses=refuses,
    lse_gradient=True,
)
