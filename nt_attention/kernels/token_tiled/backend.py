"""The token-tiled kernels as a backend: what they take, and how a call becomes an operator's arguments."""

from __future__ import annotations

import functools
import importlib.util
import math
import os

import torch
from torch import Tensor

from ...layout import SequenceLayout
from ..spec import AttentionSpec, Backend
from . import flops, ops  # noqa: F401 — ops defines the operators

MAX_HEAD_DIM = 256


def interpreted() -> bool:
    """Whether Triton was told to run kernels on the CPU, in Python: for tests, and slow."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it comes with torch's GPU builds; for the CPU's, pip install triton."
    if not interpreted() and not torch.accelerator.is_available():
        return "torch sees no GPU."
    return None


def unsupported(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.device.type == "cpu" and not interpreted():
        reasons.append("needs tensors on a GPU, got cpu: move them there.")
    if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
        reasons.append(f"needs compute capability 8.0 or more; {torch.cuda.get_device_name(spec.device)} has less.")
    if spec.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"needs float16, bfloat16 or float32, got {spec.dtype}: cast the inputs or use torch.autocast.")
    if max(spec.head_dim, spec.value_dim) > MAX_HEAD_DIM:
        reasons.append(f"head dims go up to {MAX_HEAD_DIM}, got {max(spec.head_dim, spec.value_dim)}.")
    if spec.score_mod is not None or spec.mask_mod is not None:
        reasons.append("takes no score_mod or mask_mod: use is_causal, window_size, softcap, alibi_slopes.")
    if spec.batch_invariant and spec.dropout_p:
        reasons.append(
            "drops weights by where a sequence stands in the batch: leave dropout_p at 0 or batch_invariant at False."
        )
    return reasons


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    spec: AttentionSpec,
    seed: Tensor | None,
) -> tuple[object, ...]:
    left, right = (-1 if side == math.inf else int(side) for side in spec.window)
    # one plan serves both alignments where they are one
    upper_left = spec.causal_alignment == "upper_left" and not spec.equal_lengths
    tensors = (query, key, value, layout.cu_seqlens, key_layout.cu_seqlens, alibi_slopes, seed)
    options = (spec.scale, left, right, upper_left, spec.softcap, spec.dropout_p, spec.batch_invariant)
    return (*tensors, *options)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    seed = torch.randint(2**62, (1,), device=query.device) if spec.dropout_p else None
    problem = _arguments(query, key, value, alibi_slopes, layout, key_layout, spec, seed)
    if not torch.compiler.is_compiling():
        flops.register()
    out, lse = torch.ops.nt_attention.token_tiled_forward(*problem)
    return (out, lse) if seed is None else (out, lse, seed)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: tuple[Tensor, ...],
    alibi_slopes: Tensor | None,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    spec: AttentionSpec,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = saved[0] if saved else None
    problem = _arguments(query, key, value, alibi_slopes, layout, key_layout, spec, seed)
    return torch.ops.nt_attention.token_tiled_backward(grad, grad_lse, out, lse, *problem)


BACKEND = Backend(
    name="token_tiled",
    about="this library's Triton kernels, which tile over packed tokens: short sequences, and whatever others lack",
    missing=missing,
    unsupported=unsupported,
    forward=forward,
    backward=backward,
    lse_gradient=True,
)
