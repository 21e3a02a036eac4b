"""PyTorch's memory-efficient attention (Rabe and Staats 2021, with the kernels of xformers) on CUDA.

- The kernel does not support grouped heads, so key heads are repeated.
- It does not support fully masked rows: gradients are NaN, and the output is wrong under lower right causality. It is
  called without these rows.
- Its dropout is not used: for packed sequences, torch 2.11's backward drops other weights than its forward.
- Its lse is padded to the longest sequence, so forward and backward allocate B · H · L numbers for it.

Dimensions: B sequences, L queries of a padded sequence, T query tokens, S key tokens, H query heads, G key heads, D and
Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layouts.protocol import Layout
from ...torch_private import efficient_backward, efficient_forward
from ..backend import COMMON, Backend, BackwardInputs, Gradients, HeadDims
from ..call import AttentionSpec, Call
from ..device import no_cuda, older_than_ampere

_NONE, _UPPER_LEFT, _LOWER_RIGHT = 0, 1, 2  # custom_mask_type
_MOST_NUMBERS = 2**31  # of a tensor with all heads; with more, torch 2.11 accesses memory that is not its own
_ROWS = 32  # the padded length of lse is a multiple of this


def _mask_type(spec: AttentionSpec) -> int:
    if spec.window.is_open:
        return _NONE
    return _UPPER_LEFT if spec.equal_lengths or not spec.lower_right else _LOWER_RIGHT


def _sequences(call: Call) -> tuple[Tensor, Tensor, int, int]:
    layout, key_layout = call[:2]
    return layout.device_offsets, key_layout.device_offsets, layout.max_seqlen, key_layout.max_seqlen


def _batch(x: Tensor, heads: int, groups: int) -> Tensor:
    """(1, T, H, D) with as many key heads as query heads."""
    return (x if x.shape[1] == heads else x.repeat_interleave(groups, 1)).unsqueeze(0)


def _inputs(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, ...]:
    heads, groups = spec.num_heads, spec.num_heads // spec.num_kv_heads
    if max(len(query), len(key)) * heads * max(spec.head_dim, spec.value_dim) >= _MOST_NUMBERS:
        raise ValueError(
            f"torch_efficient counts numbers in 32 bits: {len(query)} queries and {len(key)} keys of {heads} heads are "
            f"too many at head dim {max(spec.head_dim, spec.value_dim)}. Pass backend='token_tiled', or fewer tokens."
        )
    return tuple(_batch(x, heads, groups) for x in (query, key, value))


def _lse_index(layout: Layout) -> tuple[Tensor, int]:
    """(T,) the index of each token in the padded lse (B · L) of a head, and L."""
    length = -(-layout.max_seqlen // _ROWS) * _ROWS
    build = lambda: layout.sequence_ids * length + layout.position_ids  # noqa: E731
    return layout.cached(("efficient lse", length), build), length


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    layout, _, _, spec, *_ = call
    out, padded, *_ = efficient_forward(
        *_inputs(query, key, value, spec), *(None, *_sequences(call), 0.0, _mask_type(spec), True), scale=spec.scale
    )
    index, _ = _lse_index(layout)
    lse = query.new_empty(spec.num_heads, query.shape[0], dtype=padded.dtype)
    lse[:, : layout.total] = padded.transpose(0, 1).flatten(1).index_select(1, index)
    return out[0], lse.T


def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    grad, _, out, lse, _ = saved
    layout, _, _, spec, *_ = call
    index, length = _lse_index(layout)
    padded = lse.new_full((spec.num_heads, layout.batch_size * length), torch.inf)
    padded[:, index] = lse.T[:, : layout.total]
    padded = padded.unflatten(1, (layout.batch_size, length)).transpose(0, 1).contiguous()
    no_seed = torch.zeros((), dtype=torch.int64, device="cpu")
    grads = efficient_backward(
        *(grad.unsqueeze(0), *_inputs(query, key, value, spec), None, out.unsqueeze(0), *_sequences(call)),
        *(padded, 0.0, no_seed, no_seed, _mask_type(spec), False),
        scale=spec.scale,
    )
    dq, dk, dv = (g[0] for g in grads[:3])
    if spec.num_kv_heads != spec.num_heads:
        dk, dv = (g.unflatten(1, (spec.num_kv_heads, -1)).sum(2) for g in (dk, dv))
    return dq, dk, dv


BACKEND = Backend(
    name="torch_efficient",
    about="memory-efficient attention of PyTorch (CUDA, 16-bit and float32)",
    missing=no_cuda,
    forward=forward,
    backward=backward,
    features=COMMON | {"scale ≤ 0"},
    device_type="cuda",
    refuses=older_than_ampere,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=HeadDims(multiple=8),
    traits={"no_fully_masked_rows", "aligned_rows", "takes_parts"},
)
