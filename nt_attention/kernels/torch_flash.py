"""Torch's in-tree flash attention for packed 16-bit tensors on CUDA.

Follows FlashAttention-2 (Dao 2023) through ``aten::_flash_attention_forward``. Whatever implementation has been
activated with ``torch.nn.attention.activate_flash_attention_impl`` answers those operators in its place, and raises on
what it lacks.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .spec import AttentionSpec, Backend

MAX_HEAD_DIM = 256


@functools.cache
def missing() -> str | None:
    if not torch.backends.cuda.is_built():
        return "this build of torch has no CUDA: install one that has."
    if not torch.cuda.is_available():
        return "torch sees no CUDA device."
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention: install one that has."
    return None


def unsupported(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.device.type != "cuda":
        reasons.append(f"needs tensors on a CUDA device, got {spec.device}: move them there.")
    elif torch.cuda.get_device_capability(spec.device) < (8, 0):
        reasons.append(f"needs compute capability 8.0 or more; {torch.cuda.get_device_name(spec.device)} has less.")
    if spec.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"needs float16 or bfloat16, got {spec.dtype}: cast the inputs or use torch.autocast.")
    if max(spec.head_dim, spec.value_dim) > MAX_HEAD_DIM:
        reasons.append(f"head dims go up to {MAX_HEAD_DIM}, got {max(spec.head_dim, spec.value_dim)}.")
    if spec.softcap:
        reasons.append("has no softcap: leave softcap at 0.")
    if spec.alibi:
        reasons.append("has no ALiBi in torch's build: leave out alibi_slopes.")
    if spec.score_mod is not None or spec.mask_mod is not None:
        reasons.append("takes no score_mod or mask_mod: use is_causal and window_size where they say it.")
    if spec.causal_alignment == "upper_left" and not spec.sees_all and not spec.equal_lengths:
        reasons.append('aligns causality and windows lower right only: pass causal_alignment="lower_right".')
    if spec.deterministic and spec.needs_grad:
        reasons.append("its backward adds in no fixed order: leave deterministic at False.")
    if spec.batch_invariant:
        reasons.append("does not promise batch invariance: leave batch_invariant at False.")
    return reasons


def _options(spec: AttentionSpec) -> dict[str, float | int | None]:
    left, right = (None if side == math.inf else int(side) for side in spec.window)
    return {"scale": spec.scale, "window_size_left": left, "window_size_right": right}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        layout.cu_seqlens,
        key_layout.cu_seqlens,
        layout.max_seqlen,
        key_layout.max_seqlen,
        spec.dropout_p,
        spec.is_causal,
        False,
        **_options(spec),
    )
    lse = lse.transpose(0, 1)
    if spec.may_be_blind:  # the kernel marks rows that see nothing with +inf, which no other lse can be
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return out, lse, rng_state, unused


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
) -> tuple[Tensor, Tensor, Tensor]:
    rng_state, unused = saved
    if spec.may_be_blind:
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse.transpose(0, 1).contiguous(),
        layout.cu_seqlens,
        key_layout.cu_seqlens,
        layout.max_seqlen,
        key_layout.max_seqlen,
        spec.dropout_p,
        spec.is_causal,
        rng_state,
        unused,
        **_options(spec),
    )


def head_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """One head dim for all, a multiple of 8."""
    padded = -(-max(head_dim, value_dim) // 8) * 8
    return padded, padded


BACKEND = Backend(
    name="torch_flash",
    about="torch's in-tree FlashAttention-2, or what torch.nn.attention has activated (CUDA, 16-bit)",
    missing=missing,
    unsupported=unsupported,
    forward=forward,
    backward=backward,
    head_dims=head_dims,
    max_head_dim=MAX_HEAD_DIM,
)
