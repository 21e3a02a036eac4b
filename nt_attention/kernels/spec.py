"""What an attention call asks for, and what a backend is.

Dimensions: B sequences, T query tokens, S key tokens, H query heads, G key heads (H a multiple of G), D the head dim of
queries and keys, Dv that of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..layout import SequenceLayout

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CausalAlignment = Literal["lower_right", "upper_left"]


def open_window(left: int, right: int) -> tuple[float, float]:
    """A window that is −1 where it is open, with inf there."""
    return math.inf if left < 0 else left, math.inf if right < 0 else right


@dataclass(frozen=True)
class AttentionSpec:
    """One call, without its tensors: all that decides which backend can run it, and how.

    The meaning of each field is that of ``varlen_attention``'s argument of the same name.

    Attributes:
        device: where the tensors are.
        dtype: of query, key and value.
        num_heads, num_kv_heads, head_dim, value_dim: H, G, D, Dv.
        alibi: whether there are slopes.
        needs_grad: whether anything will ask for gradients of query, key or value.
        equal_lengths: whether every sequence has as many keys as queries, so that both alignments are one.
        min_keys: the fewest keys of a sequence.
        mean_queries: the mean number of queries of a sequence.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    is_causal: bool = False
    causal_alignment: CausalAlignment = "lower_right"
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    batch_invariant: bool = False
    needs_grad: bool = False
    equal_lengths: bool = True
    min_keys: int = 0
    mean_queries: float = 0.0

    @property
    def window(self) -> tuple[float, float]:
        """How far back and ahead of its own place a query sees, causality included; inf where it is open."""
        left, right = open_window(*self.window_size)
        return left, 0 if self.is_causal else right

    @property
    def sees_all(self) -> bool:
        return self.window == (math.inf, math.inf)

    @property
    def may_be_blind(self) -> bool:
        """Whether a query may see no key at all: never where lengths are equal, since each sees its own place."""
        return not self.equal_lengths and (self.min_keys == 0 or not self.sees_all)

    def shift(self, queries: int, keys: int) -> int:
        """The key position that stands across from query 0: the diagonal runs through (i, i + shift)."""
        return keys - queries if self.causal_alignment == "lower_right" else 0


class Forward(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alibi_slopes: Tensor | None,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        spec: AttentionSpec,
        /,
    ) -> tuple[Tensor, ...]: ...


# (grad, query, key, value, out, lse, saved, alibi_slopes, layout, key_layout, spec[, grad_lse]) to the gradients of
# query, key and value
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def any_head_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    return head_dim, value_dim


@dataclass(frozen=True)
class Backend:
    """A kernel's name, what it can't do, and how to run it.

    Attributes:
        name: what ``backend=`` takes.
        about: the kernel in a line.
        missing: why it can't run on this machine at all, or None.
        unsupported: the reasons why it can't run a call, each a sentence that says what to change; empty if it can.
            Sinks, and head dims that ``head_dims`` makes right, are no reasons: they are dealt with above.
        forward: query (T, H, D), key (S, G, D), value (S, G, Dv) to out (T, H, Dv), lse (T, H) in at least float32, and
            whatever ``backward`` wants to find in ``saved``. Rows past the layout's total may be left unwritten. A row
            that sees no key gives 0 and −inf.
        backward: the gradients of query, key and value from that of out. None if ``forward`` is made of differentiable
            operations.
        head_dims: the head dims (D, Dv) to pad with zeros to before this kernel is called.
        max_head_dim: the largest head dim that it takes, after padding.
        lse_gradient: whether ``backward`` takes the gradient of lse (T, H) as its last argument. Where it does not,
            that gradient is brought in from above.
    """

    name: str
    about: str
    missing: Callable[[], str | None]
    unsupported: Callable[[AttentionSpec], list[str]]
    forward: Forward
    backward: Backward | None = None
    head_dims: Callable[[int, int], tuple[int, int]] = any_head_dims
    max_head_dim: float = math.inf
    lse_gradient: bool = False
