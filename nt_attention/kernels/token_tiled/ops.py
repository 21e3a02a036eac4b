"""The kernels as registered operators: schemas, fakes, launches.

``import nt_attention`` defines them; Triton is imported when one first runs. An operator takes offsets, not a plan, so
that a graph holds tensors and numbers alone; the plan is found again with the offsets, without a sync. Differentiation
stands above, in ``kernels/run.py``.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and V head dims.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import SequenceLayout
from ..spec import open_window
from .configs import ANY_BATCH, Config, Tile, config_for
from .launch import launch
from .plan import Meeting, Plan

_INT32_MAX = 2**31 - 1
LIBRARY = torch.library.Library("nt_attention", "FRAGMENT")
# The window is what a query sees before and after its own place, −1 where it is open, causality included.
_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor key_cu_seqlens, Tensor? alibi_slopes, "
    "Tensor? seed, float scale, int window_left, int window_right, bool upper_left, float softcap, float dropout_p, "
    "bool batch_invariant"
)
# Lengths are read on the host, so compilers must not record these into CUDA graphs of their own accord. Whoever
# captures one by hand warms up on the layout first, and keeps it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
LIBRARY.define(f"token_tiled_forward({_CALL}) -> (Tensor, Tensor)", tags=_TAGS)
LIBRARY.define(
    f"token_tiled_backward(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, {_CALL}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


class _Recipe(NamedTuple):
    """What is the same for all calls of a kind on a batch, and so made once for all layers of a model."""

    plan: Plan
    config: Config
    shared: int
    constants: tuple[Any, ...]  # the kernels' compile-time arguments, but for the tile

    @classmethod
    def make(
        cls,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        switches: tuple[bool, ...],
        window: tuple[int, int],
        upper_left: bool,
        batch_invariant: bool,
    ) -> _Recipe:
        """``shape``: query heads for a key head, D, V. ``switches``: LINEAR, SOFTCAP, ALIBI, DROPOUT."""
        open_ended = open_window(*window)
        plan = layout.remember(
            ("token_tiled plan", window, upper_left),
            lambda: Plan.make(layout, key_layout, open_ended, upper_left),
            key_layout,
        )
        # matrix instructions take powers of 2 from 16 on
        blocks = [max(16, 1 << (dim - 1).bit_length()) for dim in shape[1:]]
        # float32 as three products of tf32 halves: closer than its own multiply-adds, at twice their speed
        precision = "ieee" if torch.version.hip else "tf32x3"
        constants = (*shape, *blocks, *switches, dtype == torch.float32, precision)
        if batch_invariant:
            return cls(plan, config_for(device, max(blocks), dtype.itemsize, *ANY_BATCH), 0, constants)
        reach = min(max(layout.max_seqlen, key_layout.max_seqlen), sum(open_ended) + 1)
        mean = layout.total / max(1, layout.batch_size)
        config = config_for(device, max(blocks), dtype.itemsize, reach, mean)
        return cls(plan, config, config.shared, constants)


class _Call(NamedTuple):
    """What all launches of a call share."""

    recipe: _Recipe
    slopes: Tensor | None
    seed: Tensor | None
    floats: tuple[float, float, float]  # scale, softcap, dropout_p
    query_heads: int

    @classmethod
    def prepare(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        key_cu_seqlens: Tensor,
        alibi_slopes: Tensor | None,
        seed: Tensor | None,
        scale: float,
        window_left: int,
        window_right: int,
        upper_left: bool,
        softcap: float,
        dropout_p: float,
        batch_invariant: bool,
    ) -> _Call:
        layout = SequenceLayout.from_offsets(cu_seqlens)
        key_layout = layout if key_cu_seqlens is cu_seqlens else SequenceLayout.from_offsets(key_cu_seqlens)
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes.to(torch.float32).contiguous()
            if alibi_slopes.dim() == 2:
                alibi_slopes = alibi_slopes.index_select(0, layout.sequence_ids)
        shape = (query.shape[1] // key.shape[1], query.shape[2], value.shape[2])
        linear = scale > 0 and not softcap and alibi_slopes is None
        switches = (linear, softcap != 0, alibi_slopes is not None, dropout_p > 0)
        kind = (query.device, query.dtype, shape, switches, (window_left, window_right), upper_left, batch_invariant)
        recipe = layout.remember(("token_tiled", *kind), lambda: _Recipe.make(layout, key_layout, *kind), key_layout)
        return cls(recipe, alibi_slopes, seed, (scale, softcap, dropout_p), query.shape[1])

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        tiles: Tensor,
        heads: int,
        meeting: Meeting,
        tensors: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
        more_strides: tuple[int, ...],
        *constants: int,
    ) -> None:
        if not len(tiles):
            return
        some = meeting.lo  # stands for what this call does not have, and the kernel does not read
        given = (*tensors, tiles, meeting.lo, meeting.hi, self.recipe.plan.queries.own, self.slopes, self.seed)
        unit = math.gcd(16, *strides)
        far = max(strides[1::2]) * self.query_heads > _INT32_MAX
        slope_row = self.slopes.stride(0) if self.slopes is not None and self.slopes.dim() == 2 else 0
        launch(
            kernel,
            (len(tiles), heads),
            tuple([some if x is None else x for x in given]),
            (*[stride // unit for stride in strides], *more_strides, slope_row),
            self.floats,
            (*self.recipe.constants, unit, far, tile.block_m, tile.block_n, *constants),
            tile.warps,
            tile.stages,
        )


def _rows_and_heads(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in (x.stride(0), x.stride(1)))


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernels read the last dimension as contiguous, and a gradient may be an expanded number."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """(T, H, V) and the log-sum-exp (T, H) in float32. Rows past the layout's total stay unwritten."""
    from . import triton_kernels as kernels

    query, key, value = _readable(query, key, value)
    out, lse = _forward_outputs(query, key, value)
    call = _Call.prepare(query, key, value, *rest)
    plan, tile = call.recipe.plan, call.recipe.config.forward
    tensors = (query, key, value, out, lse)
    strides = _rows_and_heads(query, key, value, out)
    tiles = plan.query_tiles(tile.block_m, call.recipe.shared)
    with _on(query.device):
        call.launch(
            kernels.forward_kernel, tile, tiles, query.shape[1], plan.queries, tensors, strides, (lse.stride(1),)
        )
    return out, lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. Rows past the layouts' totals stay unwritten."""
    from . import triton_kernels as kernels

    grad, out, query, key, value = _readable(grad, out, query, key, value)
    grad_query, grad_key, grad_value = grads = _backward_outputs(grad, grad_lse, out, lse, query, key, value)
    call = _Call.prepare(query, key, value, *rest)
    plan, config, shared, _ = call.recipe
    heads, key_heads = query.shape[1], key.shape[1]
    inputs = _rows_and_heads(query, key, value)
    has_grad_lse = grad_lse is not None
    lse_strides = (lse.stride(1), *((0, 0) if grad_lse is None else grad_lse.stride()))
    tiles = plan.query_tiles(config.query.block_m, shared, without_closed=True)
    key_tiles = plan.key_tiles(config.key.block_n, shared)
    with _on(query.device):
        if len(tiles) or len(key_tiles):
            delta = torch.empty_like(lse)
            call.launch(
                *(kernels.query_kernel, config.query, tiles, heads, plan.queries),
                (query, key, value, out, grad, lse, grad_lse, delta, grad_query),
                (*inputs, *_rows_and_heads(out, grad, grad_query)),
                lse_strides,
                has_grad_lse,
            )
            parts = _parts(heads, key_heads)
            programs = key_heads * parts
            targets = [grad_key, grad_value]
            if parts > 1:
                targets = [x.new_empty(x.shape[0], programs, x.shape[2], dtype=torch.float32) for x in targets]
            call.launch(
                *(kernels.key_kernel, config.key, key_tiles, programs, plan.keys),
                (query, key, value, grad, lse, delta, *targets),
                (*inputs, *_rows_and_heads(grad, *targets)),
                lse_strides[:1],
                heads // programs,
            )
            if parts > 1:
                for x, by_part in zip((grad_key, grad_value), targets, strict=True):
                    x.copy_(by_part.unflatten(1, (key_heads, parts)).sum(2))
        if shared:  # last: the sum over parts also wrote to its rows
            call.launch(
                *(kernels.closed_kernel, config.closed, plan.closed_tiles(shared), key_heads, plan.keys),
                (query, key, value, out, grad, lse, grad_lse, *grads),
                (*inputs, *_rows_and_heads(out, grad, *grads)),
                lse_strides,
                has_grad_lse,
            )
    return grads


def _parts(heads: int, key_heads: int) -> int:
    """Into how many parts the query heads of a key head are cut, where few key heads would leave the device idle.

    Not by the batch, so that it does not change what is added to what.
    """
    group = heads // key_heads
    return next(
        parts for parts in range(1, group + 1) if group % parts == 0 and (key_heads * parts >= 4 or parts == group)
    )


def _forward_outputs(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:2], value.shape[2])
    return out, query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32).T


def _backward_outputs(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs[:3]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


for _name, _function, _fake in (
    ("token_tiled_forward", forward, _forward_outputs),
    ("token_tiled_backward", backward, _backward_outputs),
):
    # for every kind of device; on the CPU, Triton's interpreter runs it, or says that there is no driver
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nt_attention::{_name}", _fake, lib=LIBRARY)
