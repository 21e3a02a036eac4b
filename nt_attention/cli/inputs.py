"""A batch as tensors, which is what every rival is given, and what a rival makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .workloads import Batch


class Problem:
    """A batch's layouts, packed tensors with a fixed seed, and what is asked of attention.

    T tokens of queries and S of keys, H heads and G of keys, head dims D and Dv.

    Attributes:
        layout, key_layout: one object where the lengths are the same.
        qkv: (T, H, D), (S, G, D) and (S, G, Dv), standard normal; leaves that want gradients.
        grad: (T, H, Dv), the gradient that comes from above.
        masks: what a query sees, and the softcap, as arguments of ``varlen_attention``.
        promises: what is asked of our own backends beside that: the same bits each time, or in any batch.
    """

    def __init__(self, batch: Batch, device: torch.device, dtype: torch.dtype, **promises: Any) -> None:
        self.batch, self.promises = batch, promises
        self.layout = self.key_layout = SequenceLayout.from_lengths(batch.lengths, device=device)
        if batch.keys != batch.lengths:
            self.key_layout = SequenceLayout.from_lengths(batch.keys, device=device)
        draw = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int, width: int) -> Tensor:
            return torch.randn(tokens, heads, width, generator=draw, device=device, dtype=dtype)

        queries, keys = self.layout.total, self.key_layout.total
        self.grad = normal(queries, batch.heads, batch.value_width)
        self.qkv = (
            normal(queries, batch.heads, batch.head_dim).requires_grad_(),
            normal(keys, batch.kv_heads, batch.head_dim).requires_grad_(),
            normal(keys, batch.kv_heads, batch.value_width).requires_grad_(),
        )
        self.masks: dict[str, Any] = {
            "is_causal": batch.is_causal,
            "window_size": batch.window_size,
            "softcap": batch.softcap,
        }

    @property
    def is_cross(self) -> bool:
        return self.layout is not self.key_layout

    @property
    def has_window(self) -> bool:
        """Whether a query sees less than all keys, or than all up to its own place if it is causal."""
        left, right = self.batch.window_size
        return left >= 0 or (right >= 0 and not self.batch.is_causal)

    @property
    def is_ragged(self) -> bool:
        """Whether a padded batch has any padding."""
        return any(layout.min_seqlen != layout.max_seqlen for layout in (self.layout, self.key_layout))


@dataclass(frozen=True)
class Run:
    """A rival, ready to run on one batch: tensors in its own form, and how to bring results back to packed rows.

    Attributes:
        attention: the timed part, from the leaves to out.
        leaves: query, key and value.
        grad: the gradient of out.
        pack_queries, pack_keys: from the form of out and query, and of key and value, to packed rows.
        exact: whether the result is attention over the batch; if not, only its time counts.
    """

    attention: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    grad: Tensor
    pack_queries: Callable[[Tensor], Tensor]
    pack_keys: Callable[[Tensor], Tensor]
    exact: bool = True

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.attention()

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.attention(), self.leaves, self.grad)

    def results(self, backward: bool) -> dict[str, Tensor]:
        """Packed rows: out, and the gradients dq, dk and dv as well if asked for."""
        if not backward:
            return {"out": self.pack_queries(self.forward())}
        out = self.attention()
        dq, dk, dv = torch.autograd.grad(out, self.leaves, self.grad)
        queries = {"out": self.pack_queries(out.detach()), "dq": self.pack_queries(dq)}
        return queries | {"dk": self.pack_keys(dk), "dv": self.pack_keys(dv)}


@dataclass(frozen=True)
class Rival:
    """A way to run attention.

    Attributes:
        reasons: why it can't run a batch, forward alone or with its backward; empty if it can.
        prepare: what is done once for a batch, and not timed.
        chosen: the backend that "auto" takes, forward alone or with its backward; None for others.
    """

    name: str
    reasons: Callable[[Problem, bool], list[str]]
    prepare: Callable[[Problem], Run]
    chosen: Callable[[Problem, bool], str | None] = lambda problem, backward: None
