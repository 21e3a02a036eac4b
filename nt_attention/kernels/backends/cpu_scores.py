"""Attention of dense tiles with all of their scores, for options that ATen's flash kernel for CPUs does not have.

These are softcap, score_mod and dropout, and the gradients of a relative bias. A tile has few scores, so that they stay
in the caches of the CPU. The backward computes the weights again from lse, as FlashAttention does (Dao et al. 2022,
appendix B.2).

Dimensions: n tiles of the same shape, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionSpec


class ScoreRules(NamedTuple):
    """What is done with the scores (n, H, rows, keys) of tiles after softcap, in this order.

    Attributes:
        bias: Added to them, broadcastable, or None.
        mod: `mod(scores)`, the scores changed by score_mod, or None.
        visible: Bool, broadcastable. Scores where it is False become −inf. None if all keys are visible.
    """

    bias: Tensor | None = None
    mod: Callable[[Tensor], Tensor] | None = None
    visible: Tensor | None = None

    def apply(self, scores: Tensor) -> Tensor:
        """The changed scores. May change `scores`."""
        if self.bias is not None:
            scores = scores.add_(self.bias)
        if self.mod is not None:
            scores = self.mod(scores)
        return self.hide(scores)

    def hide(self, scores: Tensor) -> Tensor:
        """The scores with the mask only."""
        return scores if self.visible is None else scores.masked_fill(~self.visible, -torch.inf)


class Dropout(NamedTuple):
    """Draws which weights are kept. The backward draws in the same order from a generator with the same seed."""

    p: float
    generator: torch.Generator

    @classmethod
    def of(cls, spec: AttentionSpec, seed: Tensor | None) -> Dropout | None:
        """`seed`: (2,) int64, of which the first number is used."""
        if seed is None or not spec.dropout_p:
            return None
        return cls(spec.dropout_p, torch.Generator("cpu").manual_seed(int(seed[0])))

    def kept(self, weights: Tensor) -> Tensor:
        """True where a weight is kept. `p` is rounded to 16 bits: a draw of 64 bits is for four weights."""
        draws = torch.empty(-(-weights.numel() // 4), dtype=torch.int64, device="cpu")
        draws.random_(-(2**63), None, generator=self.generator)  # a sixth of the time of `bernoulli_`
        least = min(round(self.p * 2**16), 2**16 - 1) - 2**15
        return (draws.view(torch.int16)[: weights.numel()] >= least).view(weights.shape)


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, rules: ScoreRules, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """out (n, H, rows, Dv) and lse (n, H, rows), both in at least float32, of tiles with heads first."""
    scores = _products(q, k, spec)
    if spec.softcap:
        scores.tanh_().mul_(spec.softcap)
    scores = rules.apply(scores)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a fully masked row would give −inf − (−inf) = NaN
    weights = scores.sub(top).exp_() if rules.mod is not None else scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1)
    factor = total.masked_fill(total == 0, 1.0).reciprocal_()
    if dropout is not None:
        weights.mul_(dropout.kept(weights))
        factor.div_(1 - dropout.p)
    groups = k.shape[1]
    out = (_by_group(weights, groups) @ v.to(weights.dtype)).view(*weights.shape[:3], v.shape[-1])
    return out.mul_(factor), lse


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    spec: AttentionSpec,
    rules: ScoreRules,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, and of the scores after softcap (n, H, rows, keys), in at least float32.

    Args:
        grad: (n, H, rows, Dv) the gradient of `out`.
        inputs: q, k and v of the tiles, as for `forward`.
        results: out and lse of the tiles. The gradients of rows are 0 if lse is inf.
        spec, rules, dropout: As for `forward`.
    """
    (q, k, v), (out, lse) = inputs, results
    groups, dtype = k.shape[1], lse.dtype
    products = _products(q, k, spec)
    slope = None
    if spec.softcap:
        tanh = products.tanh_()
        slope, products = 1 - tanh.square(), tanh.mul_(spec.softcap)
    scores, pull_back = _with_derivative(products, rules)
    weights = scores.sub(lse.unsqueeze(-1)).exp_()
    grad = grad.to(dtype)
    delta = (grad * out.to(dtype)).sum(-1, keepdim=True)
    scaled = grad if dropout is None else grad / (1 - dropout.p)
    grad_scores = (_by_group(scaled, groups) @ v.to(dtype).mT).view_as(weights)
    dropped = weights
    if dropout is not None:
        kept = dropout.kept(weights)
        grad_scores.mul_(kept)
        dropped = weights * kept
    dv = _by_group(dropped, groups).mT @ _by_group(scaled, groups)
    grad_scores = pull_back(grad_scores.sub_(delta).mul_(weights))
    grad_products = _by_group(grad_scores if slope is None else grad_scores * slope, groups)
    dq = (grad_products @ k.to(dtype)).view(q.shape).mul_(spec.scale)
    dk = (grad_products.mT @ _by_group(q.to(dtype), groups)).mul_(spec.scale)
    return dq, dk, dv, grad_scores


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(n, H, rows, …) to (n, G, H / G · rows, …): the rows of all heads that share a key head, without a copy of it."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).flatten(2, 3)


def _products(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """(n, H, rows, keys) scale · q kᵀ, divided by softcap if there is one, in at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = spec.scale / spec.softcap if spec.softcap else spec.scale
    products = _by_group(q.to(dtype) * scale, k.shape[1]) @ k.to(dtype).mT
    return products.view(*q.shape[:3], k.shape[2])


def _with_derivative(products: Tensor, rules: ScoreRules) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The scores, and a function from their gradient to that of the products. May change `products`."""
    if rules.mod is None:
        return rules.apply(products), lambda grad: grad
    leaf = products if rules.bias is None else products.add_(rules.bias)
    with torch.enable_grad():
        scores = rules.mod(leaf.requires_grad_().clone())  # a copy, which it may change in place

    def pull_back(grad: Tensor) -> Tensor:
        if not scores.requires_grad:  # score_mod ignores the score
            return torch.zeros_like(leaf)
        (found,) = torch.autograd.grad(scores, leaf, grad, allow_unused=True)
        return torch.zeros_like(leaf) if found is None else found

    return rules.hide(scores.detach()), pull_back
