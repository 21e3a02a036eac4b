"""FlashAttention-2 (Dao 2023) of the `flash-attn` package, 2.7 and 2.8, through its compiled extension.

`missing` looks for the extension, because `import flash_attn` also works if only `flash-attn-4` is installed.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from ..backend import COMMON, Backend, BackwardInputs, Gradients, HeadDims
from ..call import Call
from ..device import no_cuda, older_than_ampere
from .flash import HALVES, heads_first, longest, longest_keys, tokens_first


@functools.cache
def missing() -> str | None:
    if (reason := no_cuda()) is not None:
        return reason
    if importlib.util.find_spec("flash_attn_2_cuda") is None:
        return "flash-attn is not installed: pip install flash-attn --no-build-isolation (docs/internals/backends.md)."
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    import flash_attn_2_cuda

    layout, key_layout, slopes, spec, *_ = call
    out, lse, _, rng_state = flash_attn_2_cuda.varlen_fwd(
        *(query, key, value, None, layout.device_offsets, key_layout.device_offsets),
        *(None, None, None, slopes),  # seqused_k, leftpad_k, block_table
        *(longest(layout), longest_keys(call), spec.dropout_p, spec.scale, False, spec.is_causal),
        *(*spec.window.sizes, spec.softcap, False, None),  # return no weights; the default generator
    )
    lse = tokens_first(lse, spec)
    return (out, lse, rng_state) if spec.dropout_p else (out, lse)


def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    import flash_attn_2_cuda

    grad, _, out, lse, rng_state = saved
    layout, key_layout, slopes, spec, *_ = call
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    flash_attn_2_cuda.varlen_bwd(
        *(grad, query, key, value, out, heads_first(lse, spec), *grads),
        *(layout.device_offsets, key_layout.device_offsets),
        *(slopes, longest(layout), longest_keys(call), spec.dropout_p, spec.scale, False, spec.is_causal),
        *(*spec.window.sizes, spec.softcap, spec.deterministic, None, rng_state if spec.dropout_p else None),
    )
    return grads


BACKEND = Backend(
    name="flash_attn_2",
    about="FlashAttention-2 of the flash-attn package (CUDA, 16-bit)",
    missing=missing,
    forward=forward,
    backward=backward,
    features=COMMON | {"window", "softcap", "alibi", "dropout", "deterministic"},
    device_type="cuda",
    refuses=older_than_ampere,
    dtypes=HALVES,
    head_dims=HeadDims(256, multiple=8, equal=True, compiled=(32, 64, 96, 128, 192, 256)),
    traits={"lower_right_only", "aligned_rows", "takes_parts"},
)
