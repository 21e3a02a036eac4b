"""Compiled ``flex_attention`` (Dong et al. 2024) over packed rows: any score_mod and mask_mod on a GPU.

A token of one sequence and a token of another meet in no block that is run: which blocks meet is read off the layout
(every mask here is an interval a row) and kept with it, in memory that grows with the tokens and not their square.

It caps no scores and has no ALiBi, which can be written into the score_mod: with both of ours in it, torch 2.11 fails
to compile some calls for any lengths.

Dimensions: T tokens of one side, N blocks of 128 of them, M the most blocks of the other side that one of these meets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layout import SequenceLayout
from ..backend import COMMON, Backend, HeadDims
from ..call import AttentionSpec, Call

BLOCK = 128
_KINDS = 256  # of calls that may be compiled; torch's own limit of 8 is meant for one model's graph


@functools.cache
def missing() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device, and compiled flex_attention has no gradients on a CPU."
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: it comes with torch's GPU builds."
    return None


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)  # rather an error than its unfused form


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    layout, key_layout, _, spec, _ = call
    past = query.shape[0] - layout.total
    # a NaN past the end would spread through weights of 0, so those rows stay out
    q = query[: layout.total].transpose(0, 1).unsqueeze(0)
    k, v = (x[: key_layout.total].transpose(0, 1).unsqueeze(0) for x in (key, value))
    with torch._dynamo.config.patch(recompile_limit=_KINDS):
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


def _score_mod(call: Call) -> Callable[..., Tensor] | None:
    layout, key_layout, _, spec, _ = call
    user = spec.score_mod
    if user is None:
        return None
    of_query, at_query, at_key = layout.sequence_ids, layout.position_ids, key_layout.position_ids

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return user(score, of_query[i], h, at_query[i], at_key[j])

    return score_mod


def _mask_mod(call: Call) -> Callable[..., Tensor]:
    layout, key_layout, _, spec, _ = call
    of_query, of_key, at_query, at_key = (
        *(layout.sequence_ids, key_layout.sequence_ids),
        *(layout.position_ids, key_layout.position_ids),
    )
    shift = _shift(layout, key_layout, spec)
    window, user = spec.window, spec.mask_mod

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = of_query[i] == of_key[j]
        in_window = window.visible(at_key[j] - at_query[i] - shift[of_query[i]])
        if in_window is not None:
            visible = visible & in_window
        return visible if user is None else visible & user(of_query[i], h, at_query[i], at_key[j])

    return mask_mod


def _shift(layout: SequenceLayout, key_layout: SequenceLayout, spec: AttentionSpec) -> Tensor:
    """(B,) the key position that stands across from each sequence's first query."""
    return key_layout.lengths - layout.lengths if spec.lower_right else torch.zeros_like(layout.lengths)


def _block_mask(call: Call) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    layout, key_layout, _, spec, _ = call

    def build() -> tuple[Tensor, ...]:
        left, right = spec.window
        queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
        shift = keys - queries if spec.lower_right else torch.zeros_like(queries)
        by_query = _meet(layout, key_layout, shift, left, right)
        by_key = _meet(key_layout, layout, -shift, right, left)
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


def _meet(
    layout: SequenceLayout, other: SequenceLayout, shift: Tensor, before: float, after: float
) -> tuple[Tensor, Tensor]:
    """(1, 1, N) how many blocks of the other side each block meets, and (1, 1, N, M) which, in order.

    Counted on the host. What a token meets begins and ends no earlier than what the token before it meets, so a block's
    first and last token tell.
    """
    offsets, other_offsets = layout.host_offsets, other.host_offsets
    lengths = other_offsets.diff()

    def border(token: Tensor, reach: float, past: int, unbounded: Tensor) -> Tensor:
        sequence = torch.searchsorted(offsets, token, right=True) - 1
        if reach == math.inf:
            return (other_offsets[:-1] + unbounded)[sequence]
        at = token - offsets[sequence] + shift[sequence] + int(reach) + past
        return other_offsets[sequence] + torch.minimum(at.clamp(min=0), lengths[sequence])

    first_token = torch.arange(0, layout.total, BLOCK, device="cpu")
    last_token = (first_token + BLOCK - 1).clamp(max=layout.total - 1)
    begin = border(first_token, before if before == math.inf else -before, 0, torch.zeros_like(lengths))
    end = border(last_token, after, 1, lengths)
    first = begin // BLOCK
    count = torch.where(end > begin, (end - 1) // BLOCK - first + 1, 0)
    which = first[:, None] + torch.arange(max(1, int(count.max())), device="cpu")
    which = which.clamp(max=max(0, (other.total - 1) // BLOCK))
    count, which = (x.to(torch.int32).to(layout.device, non_blocking=True) for x in (count, which))
    return count[None, None], which[None, None]


BACKEND = Backend(
    name="flex",
    about="compiled flex_attention (a GPU; any score_mod and mask_mod; compiles for minutes at first)",
    missing=missing,
    forward=forward,
    features=COMMON | {"scale ≤ 0", "window", "score_mod", "mask_mod"},
    device_type="cuda",
    min_capability=(8, 0),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=HeadDims(256),
)
