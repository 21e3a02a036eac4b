"""The backend `token_tiled`: Triton kernels whose tiles are ranges of packed tokens (docs/internals/token_tiled.md)."""

from __future__ import annotations

import torch

from .. import triton_support
from ..backend import COMMON, Backend, HeadDims, Hooks
from ..call import AttentionSpec
from ..triton_support import missing
from . import ops


def refuses(spec: AttentionSpec) -> list[str]:
    reasons = triton_support.refuses(spec)
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
    features=COMMON
    | {"scale ≤ 0", "window", "softcap", "alibi", "relative bias", "bounds"}
    | {"dropout", "deterministic", "batch_invariant"},
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=HeadDims(576),
    refuses=refuses,
    traits={"takes_parts", "lse_gradient"},
    hooks=Hooks(ops.prepare_forward, ops.prepare_backward),
)
