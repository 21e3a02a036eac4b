"""The reference backend: plain PyTorch operations on one sequence at a time, slow, with all options.

It runs if no other backend supports a call. Softmax attention follows Vaswani et al. 2017. Scores are changed by
softcap as in Gemma 2, softcap · tanh(scores / softcap), then by ALiBi, relative biases, score_mod and the masks, in
this order.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims, Lq queries and Lk keys of a
sequence.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backend import Backend
from ..call import FEATURES, AttentionSpec, Call
from ..masks import alibi_bias, distances, for_each_score
from ..relative import RelativeBias


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Computes in float32, or in float64 for float64 inputs. Both outputs are differentiable any number of times."""
    layout, key_layout, alibi_slopes, spec, _, relative = call
    precision = torch.promote_types(query.dtype, torch.float32)
    starts, key_starts = layout.host_offsets.tolist(), key_layout.host_offsets.tolist()
    if relative is not None:  # cast once, so that the gradients of all sequences are summed in this precision
        relative = relative.with_tensors([x.to(precision) for x in relative.tensors])
    outs, lses = [], []
    if not layout.batch_size:  # connects the empty output to all inputs, for gradients of 0
        empty = query[:0, :, :1] * sum(x[:0].sum() for x in (key, value, *(relative.tensors if relative else ())))
        outs.append(empty.expand(-1, -1, value.shape[2]))
    for b in range(layout.batch_size):
        rows, columns = slice(starts[b], starts[b + 1]), slice(key_starts[b], key_starts[b + 1])
        q, k, v = (x.to(precision).transpose(0, 1) for x in (query[rows], key[columns], value[columns]))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        biases = relative and relative.map_rows(partial(_heads_first, rows), partial(_heads_first, columns))
        with torch.autocast(query.device.type, enabled=False):  # autocast would cast the products below
            out, lse = _attend(q, k, v, slopes, biases, b, spec)
        outs.append(out.transpose(0, 1).to(query.dtype))
        lses.append(lse.transpose(0, 1))
    past = query.shape[0] - layout.total  # rows that belong to no sequence
    outs.append(query.new_zeros(past, query.shape[1], value.shape[2]))
    lses.append(query.new_full((past, query.shape[1]), -torch.inf, dtype=precision))
    return torch.cat(outs), torch.cat(lses)


def _heads_first(rows: slice, packed: Tensor) -> Tensor:
    """(H, L, …) some rows of (T, H, …)."""
    return packed[rows].transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, relative: RelativeBias | None, b: int, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """One sequence: q (H, Lq, D), k (G, Lk, D), v (G, Lk, Dv) → out (H, Lq, Dv), lse (H, Lq).

    `relative` has the biases of this sequence, with heads first.
    """
    heads, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    diagonal = spec.shift(queries, keys)
    if slopes is not None:
        scores = scores + alibi_bias(distances(queries, keys, diagonal, q.device), slopes.to(scores.dtype))
    if relative is not None:
        bucket = relative.bucket_of(distances(queries, keys, diagonal, q.device))
        scores = scores + relative.scores(bucket, scores.dtype)
    not_empty = scores.numel() > 0  # vmap does not support empty dimensions
    if spec.score_mod is not None and not_empty:
        scores = for_each_score(spec.score_mod, scores, b)
    mask = spec.window.mask(queries, keys, diagonal, q.device)
    if spec.mask_mod is not None and not_empty:
        visible = for_each_score(lambda _, *indices: spec.mask_mod(*indices), scores, b)  # type: ignore[misc]
        mask = visible if mask is None else mask & visible
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # avoid −inf − (−inf) = NaN in fully masked rows, in the forward and in the backward
    masked = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(masked.unsqueeze(-1), 0.0)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(masked.unsqueeze(-1), 0.0)
    return F.dropout(weights, spec.dropout_p) @ v, lse.masked_fill(masked, -torch.inf)


BACKEND = Backend(
    name="reference",
    about="plain PyTorch, one sequence at a time (any device, most options; slow)",
    missing=lambda: None,
    forward=forward,
    # results of matrix products on a CPU depend on the memory alignment of their operands
    features=frozenset(FEATURES) - {"batch_invariant"},
    is_reference=True,
)
