"""A workload as tensors, and an implementation that is ready to run on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.masks import Window
from ..layout import SequenceLayout
from .workloads import Workload


class WorkloadTensors:
    """The layouts of a workload, packed tensors with a fixed seed, and the options of attention.

    T tokens of queries and S of keys, H heads and G of keys, head dims D and Dv.

    Attributes:
        layout, key_layout: one object where the lengths are the same.
        qkv: (T, H, D), (S, G, D) and (S, G, Dv), standard normal; leaves that want gradients.
        grad: (T, H, Dv), the gradient that comes from above.
        options: the mask and the softcap, as arguments of ``varlen_attention``.
        window: the window, causality included.
        guarantees: ``deterministic`` and ``batch_invariant``, which this library's backends alone have.
    """

    def __init__(self, workload: Workload, device: torch.device, dtype: torch.dtype, **guarantees: Any) -> None:
        self.workload, self.guarantees, self.device = workload, guarantees, device
        self.window = Window.of(workload.window_size, workload.is_causal)
        self.layout = self.key_layout = SequenceLayout.from_lengths(workload.lengths, device=device)
        if workload.keys != workload.lengths:
            self.key_layout = SequenceLayout.from_lengths(workload.keys, device=device)
        draw = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int, width: int) -> Tensor:
            return torch.randn(tokens, heads, width, generator=draw, device=device, dtype=dtype)

        queries, keys = self.layout.total, self.key_layout.total
        self.grad = normal(queries, workload.heads, workload.value_width)
        self.qkv = (
            normal(queries, workload.heads, workload.head_dim).requires_grad_(),
            normal(keys, workload.kv_heads, workload.head_dim).requires_grad_(),
            normal(keys, workload.kv_heads, workload.value_width).requires_grad_(),
        )
        self.options: dict[str, Any] = {
            "is_causal": workload.is_causal,
            "window_size": workload.window_size,
            "softcap": workload.softcap,
        }

    @property
    def is_cross(self) -> bool:
        return self.layout is not self.key_layout

    @property
    def has_window(self) -> bool:
        """Whether the mask hides more keys than causality does."""
        return self.window.left < math.inf or (self.window.right < math.inf and not self.workload.is_causal)

    @property
    def is_ragged(self) -> bool:
        """Whether a padded batch has any padding."""
        return any(layout.min_seqlen != layout.max_seqlen for layout in (self.layout, self.key_layout))


@dataclass(frozen=True)
class PreparedCall:
    """An implementation on one workload: tensors in its own form, and how to pack its results.

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
class Implementation:
    """A way to run attention.

    Attributes:
        reasons: why it can't run a workload, forward alone or with its backward; empty if it can.
        prepare: what is done once for a workload, and not timed.
        chosen: the backend that "auto" selects, forward alone or with its backward; None for others.
    """

    name: str
    reasons: Callable[[WorkloadTensors, bool], list[str]]
    prepare: Callable[[WorkloadTensors], PreparedCall]
    chosen: Callable[[WorkloadTensors, bool], str | None] = lambda tensors, backward: None
