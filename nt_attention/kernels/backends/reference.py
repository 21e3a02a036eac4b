"""Attention as it is written down, one sequence at a time: every feature, any dtype, no speed.

The oracle for the other backends, and what runs when none of them can. Softmax attention as in Vaswani et al. 2017,
with softcapping as in Gemma 2 (scale · tanh(scores / scale)), then ALiBi, then score_mod, then the masks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backend import Backend
from ..call import FEATURES, AttentionSpec, Call
from ..masks import alibi_bias, distances, for_each_score


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Computes in float32, or in float64 where the inputs are; differentiable in every output, twice if need be."""
    layout, key_layout, alibi_slopes, spec, _ = call
    precision = torch.promote_types(query.dtype, torch.float32)
    starts, key_starts = layout.host_offsets.tolist(), key_layout.host_offsets.tolist()
    outs, lses = [], []
    if not layout.batch_size:  # no rows, but a path to all three for autograd, which gives them gradients of 0
        empty = query[:0, :, :1] * (key[:0].sum() + value[:0].sum())
        outs.append(empty.expand(-1, -1, value.shape[2]))
    for b in range(layout.batch_size):
        rows, columns = slice(starts[b], starts[b + 1]), slice(key_starts[b], key_starts[b + 1])
        q, k, v = (x.to(precision).transpose(0, 1) for x in (query[rows], key[columns], value[columns]))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        with torch.autocast(query.device.type, enabled=False):  # which would cast the products below once more
            out, lse = _attend(q, k, v, slopes, b, spec)
        outs.append(out.transpose(0, 1).to(query.dtype))
        lses.append(lse.transpose(0, 1))
    past = query.shape[0] - layout.total  # tokens that belong to no sequence
    outs.append(query.new_zeros(past, query.shape[1], value.shape[2]))
    lses.append(query.new_full((past, query.shape[1]), -torch.inf, dtype=precision))
    return torch.cat(outs), torch.cat(lses)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, b: int, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """One sequence: q (H, Lq, D), k (G, Lk, D), v (G, Lk, Dv) to out (H, Lq, Dv) and lse (H, Lq)."""
    heads, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    diagonal = spec.shift(queries, keys)
    if slopes is not None:
        scores = scores + alibi_bias(distances(queries, keys, diagonal, q.device), slopes.to(scores.dtype))
    some = scores.numel() > 0  # vmap refuses an empty dimension
    if spec.score_mod is not None and some:
        scores = for_each_score(spec.score_mod, scores, b)
    mask = spec.window.mask(queries, keys, diagonal, q.device)
    if spec.mask_mod is not None and some:
        wanted = for_each_score(lambda _, *where: spec.mask_mod(*where), scores, b)  # type: ignore[misc]
        mask = wanted if mask is None else mask & wanted
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # a row that sees nothing takes −inf from −inf nowhere, forward or backward
    masked = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(masked.unsqueeze(-1), 0.0)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(masked.unsqueeze(-1), 0.0)
    return F.dropout(weights, spec.dropout_p) @ v, lse.masked_fill(masked, -torch.inf)


BACKEND = Backend(
    name="reference",
    about="plain PyTorch, one sequence at a time: every feature, any dtype, slow",
    missing=lambda: None,
    forward=forward,
    # matrix products on the CPU go by where their operands lie in memory
    features=frozenset(FEATURES) - {"batch_invariant"},
    is_reference=True,
)
