"""The reference backend: plain PyTorch operations on one sequence at a time, slow, with all options.

It runs if no other backend supports a call. Softmax attention follows Vaswani et al. 2017. Scores are changed by
softcap as in Gemma 2, softcap · tanh(scores / softcap), then by ALiBi, relative biases, score_mod and the masks, in
this order.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims, Lq queries and Lk keys of a
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from ..backend import Backend, BackwardInputs, Gradients
from ..call import FEATURES, AttentionSpec, Call
from ..masks import alibi_bias, distances
from ..mods import Positions, apply_mask_mod, apply_score_mod, without_autocast
from ..relative import RelativeBias


class _Sequence(NamedTuple):
    """One sequence: its rows, and q (H, Lq, D), k (H, Lk, D), v (H, Lk, Dv), slopes (H,) and biases with heads first.

    All are in at least float32.
    """

    number: int
    rows: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    relative: RelativeBias | None


def _sequences(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Iterator[_Sequence]:
    layout, key_layout, alibi_slopes, spec, _, relative, *_ = call
    precision = torch.promote_types(query.dtype, torch.float32)
    starts, key_starts = layout.host.tolist(), key_layout.host.tolist()
    for b in range(layout.batch_size):
        rows, keys = slice(starts[b], starts[b + 1]), slice(key_starts[b], key_starts[b + 1])
        groups = spec.num_heads // spec.num_kv_heads
        q = rearrange(query[rows].to(precision), "t h d -> h t d")
        k, v = (repeat(x[keys].to(precision), "s g d -> (g r) s d", r=groups) for x in (key, value))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        biases = relative and relative.map_rows(partial(_heads_first, rows), partial(_heads_first, keys))
        yield _Sequence(b, rows, keys, q, k, v, slopes, biases)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Computes in float32, or in float64 for float64 inputs. out and lse are differentiable any number of times."""
    layout, spec, relative = call.layout, call.spec, call.relative
    precision = torch.promote_types(query.dtype, torch.float32)
    seed = torch.randint(2**62, (2,), device="cpu") if spec.dropout_p else None
    generator = _generator(seed, query.device)
    if relative is not None:  # cast once, so that the gradients of all sequences are summed in this precision
        call = call._replace(relative=relative.with_tensors([x.to(precision) for x in relative.tensors]))
    outs, lses = [], []
    if not layout.batch_size:  # connects the empty output to all inputs, for gradients of 0
        empty = query[:0, :, :1] * sum(x[:0].sum() for x in (key, value, *(relative.tensors if relative else ())))
        outs.append(empty.expand(-1, -1, value.shape[2]))
    for sequence in _sequences(query, key, value, call):
        with without_autocast(query.device):  # it would cast the products below
            weights, lse, _ = _weights(sequence, spec)
            if generator is not None:
                weights = weights * _dropout(weights, spec, generator)
            out = weights @ sequence.v
        outs.append(out.transpose(0, 1).to(query.dtype))
        lses.append(lse.transpose(0, 1))
    past = query.shape[0] - layout.total  # rows that belong to no sequence
    outs.append(query.new_zeros(past, query.shape[1], value.shape[2]))
    lses.append(query.new_full((past, query.shape[1]), -torch.inf, dtype=precision))
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out, lse) if seed is None else (out, lse, seed)


def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    """For operators in graphs. It has no score_mod and mask_mod, because functions can't be arguments of operators."""
    spec, relative = call.spec, call.relative
    precision = torch.promote_types(query.dtype, torch.float32)
    generator = _generator(saved.rng_state if spec.dropout_p else None, query.device)
    grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=precision) for x in (query, key, value))
    biases = relative if spec.relative_grad else None
    sums = biases and biases.with_tensors([torch.zeros_like(x, dtype=precision) for x in biases.tensors])
    for sequence in _sequences(query, key, value, call):
        rows, keys = sequence.rows, sequence.keys
        grad = saved.grad[rows].to(precision).transpose(0, 1)
        grad_lse = None if saved.grad_lse is None else saved.grad_lse[rows].to(precision).T
        with without_autocast(query.device):
            grad_q, grad_k, grad_v, grad_scores = _gradients(sequence, spec, grad, grad_lse, generator)
        grad_query[rows] = grad_q.transpose(0, 1)
        for total, of_heads in ((grad_key, grad_k), (grad_value, grad_v)):
            total[keys] = reduce(of_heads, "(g r) s d -> s g d", "sum", g=spec.num_kv_heads)
        if sums is not None and sequence.relative is not None:
            of_biases = sequence.relative.gradients(_buckets(sequence, spec), grad_scores)
            found = sequence.relative.with_tensors(of_biases)
            _add(sums.bias, slice(None), found.bias)
            _add(sums.query_bias, rows, found.query_bias)
            _add(sums.key_bias, keys, found.key_bias)
    grads = [grad.to(x.dtype) for grad, x in zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)]
    return (*grads, *(sums.tensors if sums else ()))


def _gradients(
    sequence: _Sequence, spec: AttentionSpec, grad: Tensor, grad_lse: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the scores with biases (H, Lq, Lk).

    They are computed as in FlashAttention (Dao et al. 2022, appendix B.2), but with all scores of the sequence.
    """
    weights, _, capped = _weights(sequence, spec)
    factors = 1.0 if generator is None else _dropout(weights, spec, generator)
    grad_weights = (grad @ sequence.v.mT) * factors
    delta = (grad_weights * weights).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1)
    grad_scores = weights * (grad_weights - delta)
    grad_products = grad_scores * spec.scale
    if spec.softcap:
        grad_products = grad_products * (1 - (capped / spec.softcap).square())
    return grad_products @ sequence.k, grad_products.mT @ sequence.q, (weights * factors).mT @ grad, grad_scores


def _add(total: Tensor | None, rows: slice, heads_first: Tensor | None) -> None:
    """Add the gradient of a bias, if there is one: (H, N), or (H, L, N) to these rows of (T, H, N)."""
    if total is not None and heads_first is not None:
        total[rows] += heads_first if heads_first.dim() == 2 else heads_first.transpose(0, 1)


def _heads_first(rows: slice, packed: Tensor) -> Tensor:
    """(H, L, …) some rows of (T, H, …)."""
    return packed[rows].transpose(0, 1)


def _generator(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    """The generator of dropout, which gives the same numbers in the forward and in the backward."""
    if seed is None:
        return None
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(int(seed[0]))


def _dropout(weights: Tensor, spec: AttentionSpec, generator: torch.Generator) -> Tensor:
    """The factors of dropout: 0, or 1 / (1 − p) where a weight is kept."""
    draws = torch.rand(weights.shape, dtype=weights.dtype, device=weights.device, generator=generator)
    return (draws >= spec.dropout_p).to(weights.dtype) / (1 - spec.dropout_p)


def _distances(sequence: _Sequence, spec: AttentionSpec) -> Tensor:
    """(Lq, Lk) the distance of each key from the position of the query."""
    queries, keys = sequence.q.shape[1], sequence.k.shape[1]
    return distances(queries, keys, spec.shift(queries, keys), sequence.q.device)


def _buckets(sequence: _Sequence, spec: AttentionSpec) -> Tensor:
    """(Lq, Lk) the bucket of each pair. The sequence has a relative bias."""
    assert sequence.relative is not None
    return sequence.relative.bucket_of(_distances(sequence, spec))


def _weights(sequence: _Sequence, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The attention weights (H, Lq, Lk), lse (H, Lq), and the scores after softcap, before biases and masks."""
    b, _, _, q, k, _, slopes, relative = sequence
    scores = (q @ k.transpose(1, 2)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    capped = scores
    if slopes is not None:
        scores = scores + alibi_bias(_distances(sequence, spec), slopes.to(scores.dtype))
    if relative is not None:
        scores = scores + relative.scores(_buckets(sequence, spec), scores.dtype)
    queries, keys = scores.shape[1:]
    positions = Positions.of_sequence(b, scores)
    not_empty = scores.numel() > 0  # vmap does not support empty dimensions
    if spec.score_mod is not None and not_empty:
        scores = apply_score_mod(spec.score_mod, scores[None], positions)[0]
    mask = spec.window.mask(queries, keys, spec.shift(queries, keys), q.device)
    if spec.mask_mod is not None and not_empty:
        visible = apply_mask_mod(spec.mask_mod, len(scores), positions)[0]
        mask = visible if mask is None else mask & visible
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # avoid −inf − (−inf) = NaN in fully masked rows, in the forward and in the backward
    masked = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(masked.unsqueeze(-1), 0.0)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(masked.unsqueeze(-1), 0.0)
    return weights, lse.masked_fill(masked, -torch.inf), capped


def refuses(spec: AttentionSpec) -> list[str]:
    if spec.deterministic and spec.relative_grad and spec.device.type != "cpu":
        return [
            "deterministic gradients of a relative bias are not supported on a GPU: leave deterministic at False, "
            "or omit the bias."
        ]
    return []


BACKEND = Backend(
    name="reference",
    about="plain PyTorch, one sequence at a time (any device, most options; slow)",
    missing=lambda: None,
    forward=forward,
    backward=backward,
    traits={"differentiable", "lse_gradient"},
    # results of matrix products on a CPU depend on the memory alignment of their operands
    features=frozenset(FEATURES) - {"batch_invariant", "bounds"},
    refuses=refuses,
)
