"""Compiled `flex_attention` (Dong et al. 2024) on packed rows, for any score_mod and mask_mod on a GPU.

The block mask of sequences, causality and window is computed from the layout and cached with it. Each token sees one
interval of rows, so this needs memory that is linear in the number of tokens.

Softcap and ALiBi are not supported, because torch 2.11 fails to compile some calls with both for dynamic lengths. Users
can write them as a score_mod.

Dimensions: B sequences, N blocks of 128 tokens of one side (queries or keys), M largest number of blocks of the other
side that are visible to a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layouts.protocol import Layout
from ...torch_private import recompile_limit
from ..backend import COMMON, Backend, HeadDims
from ..call import AttentionSpec, Call
from ..device import older_than_ampere
from ..mods import checked_mask_mod, checked_score_mod

BLOCK = 128
_RECOMPILE_LIMIT = 256  # kinds of calls; the default of 8 is for one function of one model


@functools.cache
def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device is available, and compiled flex_attention has no gradients on a CPU."
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: install a GPU build of torch, which includes it."
    return None


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)  # raises an error instead of running unfused


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    layout, key_layout, _, spec, *_ = call
    past = query.shape[0] - layout.total
    if not layout.total or not key_layout.total:
        return _nothing(query, key, value)
    # without rows past the end, because weights of 0 do not remove a NaN
    q = query[: layout.total].transpose(0, 1).unsqueeze(0)
    k, v = (x[: key_layout.total].transpose(0, 1).unsqueeze(0) for x in (key, value))
    with recompile_limit(_RECOMPILE_LIMIT):
        out, aux = _compiled()(
            *(q, k, v, _score_mod(call), _block_mask(call)),
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            return_aux=AuxRequest(lse=True),
        )
    out, lse = out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
    if past:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, past))
        lse = torch.nn.functional.pad(lse, (0, 0, 0, past), value=-torch.inf)
    return out, lse


def _nothing(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a call without queries or without keys, with gradients of 0."""
    zero = query[:0].sum() + key[:0].sum() + value[:0].sum()
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_zeros(*query.shape[:2], value.shape[2]) + zero, lse


def _score_mod(call: Call) -> Callable[..., Tensor] | None:
    layout, key_layout, _, spec, *_ = call
    if spec.score_mod is None:
        return None
    user = checked_score_mod(spec.score_mod)
    query_sequence, query_position = layout.locate_rows(layout.total)
    _, key_position = key_layout.locate_rows(key_layout.total)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return user(score, query_sequence[i], h, query_position[i], key_position[j])

    return score_mod


def _mask_mod(call: Call) -> Callable[..., Tensor]:
    layout, key_layout, _, spec, *_ = call
    query_sequence, query_position = layout.locate_rows(layout.total)
    key_sequence, key_position = key_layout.locate_rows(key_layout.total)
    shift = _shift(layout, key_layout, spec)
    window, user = spec.window, spec.mask_mod and checked_mask_mod(spec.mask_mod)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = query_sequence[i] == key_sequence[j]
        in_window = window.visible(key_position[j] - query_position[i] - shift[query_sequence[i]])
        if in_window is not None:
            visible = visible & in_window
        return visible if user is None else visible & user(query_sequence[i], h, query_position[i], key_position[j])

    return mask_mod


def _shift(layout: Layout, key_layout: Layout, spec: AttentionSpec) -> Tensor:
    """(B,) the key position of the first query of each sequence."""
    lengths = layout.cached_lengths
    return key_layout.cached_lengths - lengths if spec.lower_right else torch.zeros_like(lengths)


def _block_mask(call: Call) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    layout, key_layout, _, spec, *_ = call

    def build() -> tuple[Tensor, ...]:
        left, right = spec.window
        queries, keys = layout.host.diff(), key_layout.host.diff()
        shift = keys - queries if spec.lower_right else torch.zeros_like(queries)
        by_query = _overlapping_blocks(layout, key_layout, shift, left, right)
        by_key = _overlapping_blocks(key_layout, layout, -shift, right, left)
        return (*by_query, *by_key)

    blocks = layout.cached(("flex blocks", spec.window, spec.lower_right), build, key_layout)
    kv_num_blocks, kv_indices, q_num_blocks, q_indices = blocks
    return BlockMask(
        seq_lengths=(layout.total, key_layout.total),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_mod(call),
    )


def _overlapping_blocks(
    layout: Layout, other: Layout, shift: Tensor, before: float, after: float
) -> tuple[Tensor, Tensor]:
    """(1, 1, N) the number of blocks of the other side with rows visible to each block, and (1, 1, N, M) their indices.

    Computed on the host. The ends of visible intervals are non-decreasing, so the first and the last token of a block
    determine the union of its intervals.
    """
    offsets, other_offsets = layout.host, other.host
    lengths = other_offsets.diff()

    def bound(token: Tensor, extent: float, past: int, unbounded: Tensor) -> Tensor:
        sequence = torch.searchsorted(offsets, token, right=True) - 1
        if extent == math.inf:
            return (other_offsets[:-1] + unbounded)[sequence]
        at = token - offsets[sequence] + shift[sequence] + int(extent) + past
        return other_offsets[sequence] + torch.minimum(at.clamp(min=0), lengths[sequence])

    first_token = torch.arange(0, layout.total, BLOCK, device="cpu")
    last_token = (first_token + BLOCK - 1).clamp(max=layout.total - 1)
    begin = bound(first_token, before if before == math.inf else -before, 0, torch.zeros_like(lengths))
    end = bound(last_token, after, 1, lengths)
    first = begin // BLOCK
    count = torch.where(end > begin, (end - 1) // BLOCK - first + 1, 0)
    which = first[:, None] + torch.arange(max(1, int(count.max())), device="cpu")
    which = which.clamp(max=max(0, (other.total - 1) // BLOCK))
    count, which = (x.to(torch.int32).to(layout.device, non_blocking=True) for x in (count, which))
    return count[None, None], which[None, None]


BACKEND = Backend(
    name="flex",
    about="compiled flex_attention (CUDA; any score_mod and mask_mod; the first call compiles for minutes)",
    missing=missing,
    forward=forward,
    traits={"differentiable"},
    features=COMMON | {"scale ≤ 0", "window", "score_mod", "mask_mod"},
    device_type="cuda",
    refuses=older_than_ampere,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    # Of other pairs, some need more shared memory than there is: torch chooses tiles by the head dim of queries.
    head_dims=HeadDims(256, least=16, only=(*[(dim, dim) for dim in (16, 32, 64, 128)], (192, 128), (256, 256))),
)
