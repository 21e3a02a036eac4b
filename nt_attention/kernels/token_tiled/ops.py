"""Forward and backward of the `token_tiled` backend: the launches of its kernels.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and V head dims.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import device
from ..backend import BackwardInputs, Gradients
from ..call import AttentionSpec, Call
from ..launch import Launch, Launches, Ready, launch_again, launch_cached
from ..relative import RelativeBias
from ..triton_support import column_parts, input_precision
from .bounded_plan import BoundedPlan
from .configs import ANY_BATCH, Config, Tile, config_for
from .plan import Intervals, Plan, Tiles

_INT32_MAX = 2**31 - 1
Shapes = tuple[Sequence[int], int, int]  # (H, D), G, V


@dataclass(frozen=True, eq=False)
class Settings:
    """The part of a call that is the same for all layers of a model; cached with the layout."""

    plan: Plan | BoundedPlan
    config: Config
    shared: int
    constants: tuple[Any, ...]  # the compile-time arguments of the kernels, without those of the tile
    floats: tuple[float, float, float]  # scale, softcap, dropout_p
    has_relative_bias: bool
    is_ordered: bool  # whether gradients of biases are added in a fixed order
    launches: Launches = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, shapes: Shapes, call: Call, bias_gradient: bool) -> Settings:
        """The settings of calls with these shapes and this spec and these layouts."""
        layout, key_layout, _, spec, *_ = call
        (heads, dim), key_heads, value_dim = shapes
        window, upper_left = spec.window, not spec.lower_right

        def make_plan() -> Plan | BoundedPlan:
            if spec.bounded:
                return BoundedPlan.make(layout, key_layout, window, upper_left, spec.batch_invariant)
            return Plan.make(layout, key_layout, window, upper_left)

        key = ("token_tiled plan", window, upper_left, spec.bounded and spec.batch_invariant)
        plan = layout.cached(key, make_plan, key_layout)
        parts = column_parts(dim), column_parts(value_dim)
        constants = (
            *(heads // key_heads, dim, value_dim, *[block for block, _ in parts], *[rest for _, rest in parts]),
            *_switches(spec, bias_gradient, layout is key_layout),
            *(spec.dtype == torch.float32, input_precision(), spec.bounded),
        )
        floats = (spec.scale, spec.softcap, spec.dropout_p)
        longest = max(min(x.max_seqlen, x.total) for x in (layout, key_layout))
        mean = layout.total / max(1, layout.batch_size)
        if spec.bounded and longest <= 256:  # bounds of short sequences are mostly larger than the lengths
            longest, mean = longest // 2, 0.8 * mean
        batch = ANY_BATCH if spec.batch_invariant else (min(longest, sum(window) + 1), mean)
        config = config_for(spec.device, max(map(sum, parts)), spec.dtype.itemsize, *batch)
        shared = 0 if spec.batch_invariant else config.shared
        if spec.bounded and mean > 2 * shared:  # programs for fused tiles, which are probably few, take time
            shared = 0
        is_ordered = spec.deterministic or spec.batch_invariant
        return cls(plan, config, shared, constants, floats, bool(spec.relative), is_ordered)

    @property
    def has_dropout(self) -> bool:
        return self.floats[2] > 0

    @functools.cached_property
    def forward_tiles(self) -> Tiles:
        """The tiles of `forward_kernel`."""
        return Tiles.of(self.plan.query_tiles(self.config.forward.block_m, self.shared))

    @functools.cached_property
    def query_tiles(self) -> Tiles:
        """The tiles of `query_kernel`."""
        return Tiles.of(self.plan.query_tiles(self.config.query.block_m, self.shared, without_fused=True))

    @functools.cached_property
    def key_tiles(self) -> Tiles:
        """The tiles of `key_kernel`."""
        return Tiles.of(self.plan.key_tiles(self.config.key.block_n, self.shared))

    @functools.cached_property
    def fused_tiles(self) -> Tiles | None:
        """The tiles of `fused_kernel`; None if no sequences share a tile."""
        return Tiles.of(self.plan.fused_tiles(self.shared)) if self.shared else None


def _switches(spec: AttentionSpec, bias_gradient: bool, same_tokens: bool) -> tuple[int, ...]:
    """The compile-time arguments LINEAR, SOFTCAP, ALIBI, DROPOUT and RELATIVE of the kernels."""
    linear = spec.has_positive_scale and not spec.softcap and not spec.has_bias
    relative = _relative_flags(spec, bias_gradient, same_tokens) if spec.relative else 0
    return linear, spec.softcap != 0, spec.alibi, spec.dropout_p > 0, relative


class Launcher(NamedTuple):
    """What all launches of a call share.

    Attributes:
        settings: the settings.
        heads: the number of query heads.
        slopes: slopes, or None.
        biases: buckets, the bias of each distance (H, 2R+1), query_bias and key_bias; each may be None.
        integers: the stride of a row of slopes, R, N, and the strides of rows and heads of query_bias and of key_bias.
        ready: the launches that were made before, by the function of the kernel. None if the geometry of the tensors
            may differ, or the slopes and biases are others in each call.
    """

    settings: Settings
    heads: int
    slopes: Tensor | None
    biases: tuple[Tensor | None, ...]
    integers: tuple[int, ...]
    ready: dict[Any, Ready] | None

    @classmethod
    def make(
        cls, query: Tensor, key: Tensor, value: Tensor, call: Call, bias_gradient: bool = False, repeats: bool = False
    ) -> Launcher:
        """`repeats`: whether it is kept for tensors of the same geometry."""
        layout, key_layout, slopes, spec, _, relative, *_ = call
        slope_row = 0
        if slopes is not None:
            slopes = slopes.to(torch.float32).contiguous()
            if slopes.dim() == 2:
                slopes = slopes.index_select(0, layout.locate_rows(layout.total)[0])
                slope_row = slopes.stride(0)
        shapes = (query.shape[1:], key.shape[1], value.shape[2])
        settings = layout.cached(
            ("token_tiled", spec, shapes, bias_gradient), lambda: Settings.make(shapes, call, bias_gradient), key_layout
        )
        biases, numbers = _relative_arguments(relative)
        return cls(settings, query.shape[1], slopes, biases, (slope_row, *numbers), {} if repeats else None)

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        tiles: Tiles,
        heads: int,
        intervals: Intervals,
        tensors: tuple[Tensor | None, ...],
        seed: Tensor | None,
        strided: tuple[Tensor, ...],
        more_strides: tuple[int, ...],
        *constants: int,
    ) -> None:
        """Launch a kernel, unless there are no tiles. It gets the strides of rows and heads of `strided`."""
        if not tiles.most:
            return
        first = (*tensors, self.slopes, seed, *self.biases)
        ready = None if self.ready is None else self.ready.get(kernel.fn)
        if ready is not None:
            launch_again(ready, first)
            return
        strides = _rows_and_heads(*strided)

        def make() -> Launch:
            unit = math.gcd(16, *strides)
            far = max(strides[1::2]) * self.heads > _INT32_MAX
            return Launch(
                kernel,
                (tiles.programs, heads),
                (tiles.tensor, intervals.lo, intervals.hi, self.settings.plan.queries.own),
                (*[stride // unit for stride in strides], *more_strides, *self.integers),
                self.settings.floats,
                (*self.settings.constants, unit, far, tile.block_m, tile.block_n, *constants),
                tile.warps,
                tile.stages_with_biases if self.settings.has_relative_bias else tile.stages,
            )

        key = (kernel.fn, tile, tiles.tensor.data_ptr(), strides, more_strides, self.integers, constants)
        ready = launch_cached(self.settings.launches, key, first, make)
        if self.ready is not None and ready is not None:
            self.ready[kernel.fn] = ready


def _relative_flags(spec: AttentionSpec, gradient: bool, same_tokens: bool) -> int:
    """The compile-time argument RELATIVE of the kernels."""
    from . import triton_kernels as kernels

    flags = {"bias": kernels.BIAS, "query_bias": kernels.QUERY_BIAS, "key_bias": kernels.KEY_BIAS}
    total = sum(flags[name].value for name in spec.relative)
    total += kernels.SAME_TOKENS.value if same_tokens else 0
    if gradient:
        total += kernels.BIAS_GRADIENT.value
        total += kernels.ORDERED.value if spec.deterministic or spec.batch_invariant else 0
    return total


def _relative_arguments(relative: RelativeBias | None) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """The last four of `Launcher.tensors` and the last six of `Launcher.integers`."""
    if relative is None:
        return (None,) * 4, (0,) * 6
    rows = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (relative.query_bias, relative.key_bias)]
    strides = [stride for x in rows for stride in ((0, 0) if x is None else x.stride()[:2])]
    bias = None if relative.bias is None else relative.bias.index_select(1, relative.valid_buckets)
    numbers = (relative.buckets.shape[0] // 2, relative.num_buckets, *strides)
    return (relative.buckets.to(torch.int32).contiguous(), bias, *rows), numbers


class _BiasGradients(NamedTuple):
    """float32 sums to which the backward kernels add; None for biases that are not given.

    Attributes:
        bias: (P, H, 2R+1), the sums of P parts by distance. If ordered, a part is a tile of `query_kernel`, then of
            `fused_kernel`.
        query_bias: (T, H, N).
        key_bias: (S, H, N).
    """

    bias: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None

    @classmethod
    def zeros(cls, relative: RelativeBias, parts: int) -> _BiasGradients:
        shapes = {name: x.shape for name, x in zip(relative.terms, relative.tensors, strict=True)}
        if relative.bias is not None:
            shapes["bias"] = torch.Size((parts, len(relative.bias), len(relative.buckets)))
        return cls(**{name: relative.buckets.new_zeros(s, dtype=torch.float32) for name, s in shapes.items()})

    def finish(self, relative: RelativeBias | None, is_ordered: bool, fill: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients of the biases that are given. `fill` is added to them, see `bounds.Checked.fill_value`."""
        found = self._finish(relative, is_ordered)
        return found if fill is None else tuple([x + fill for x in found])

    def _finish(self, relative: RelativeBias | None, is_ordered: bool) -> tuple[Tensor, ...]:
        found = [x for x in (self.query_bias, self.key_bias) if x is not None]
        if self.bias is None or relative is None:
            return tuple(found)
        buckets, by_distance = relative.valid_buckets, self.bias.sum(0).T
        by_bucket = by_distance.new_zeros(relative.num_buckets, by_distance.shape[1])
        if is_ordered:
            by_bucket.index_put_((buckets,), by_distance, accumulate=True)
        else:
            by_bucket.index_add_(0, buckets, by_distance)
        return (by_bucket.T, *found)


def _rows_and_heads(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([stride for x in tensors for stride in x.stride()[:2]])


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """out (T, H, V), lse (T, H) in float32, and with dropout the seed (2,) int64."""
    return _forward(Launcher.make(query, key, value, call), query, key, value)


def prepare_forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """`forward` for other tensors of the same geometry."""
    return functools.partial(_forward, Launcher.make(query, key, value, call, repeats=True))


def _forward(launcher: Launcher, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    from . import triton_kernels as kernels

    settings = launcher.settings
    seed = torch.randint(2**62, (2,), device=query.device) if settings.has_dropout else None
    out = query.new_empty(*query.shape[:2], value.shape[2])
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32).T
    with device.current(query.device):
        launcher.launch(
            *(kernels.forward_kernel, settings.config.forward, settings.forward_tiles, query.shape[1]),
            *(settings.plan.queries, (query, key, value, out, lse), seed, (query, key, value, out)),
            (lse.stride(1),),
        )
    return (out, lse) if seed is None else (out, lse, seed)


def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    """The gradients of query, key and value, and those of a relative bias if they are needed."""
    relative = call.relative if call.spec.relative_grad else None
    launcher = Launcher.make(query, key, value, call, call.spec.relative_grad)
    return _backward(launcher, relative, saved, query, key, value)


def prepare_backward(
    saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> Callable[[BackwardInputs, Tensor, Tensor, Tensor], Gradients]:
    """`backward` for other tensors of the same geometry."""
    return functools.partial(_backward, Launcher.make(query, key, value, call, repeats=True), None)


def _backward(
    launcher: Launcher, relative: RelativeBias | None, saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor
) -> Gradients:
    """`relative`: the relative bias if it needs gradients."""
    from . import triton_kernels as kernels

    grad, grad_lse, out, lse, seed = saved
    grads = grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    settings = launcher.settings
    plan, config, is_ordered = settings.plan, settings.config, settings.is_ordered
    seed = seed if settings.has_dropout else None
    heads, key_heads = query.shape[1], key.shape[1]
    has_grad_lse = grad_lse is not None
    lse_strides = (lse.stride(1), *((0, 0) if grad_lse is None else grad_lse.stride()))
    tiles, key_tiles = settings.query_tiles, settings.key_tiles
    biases = _BiasGradients()
    if relative is not None:
        parts = tiles.most + (settings.fused_tiles.most if settings.fused_tiles else 0)
        biases = _BiasGradients.zeros(relative, parts if is_ordered else kernels.PARTS.value)
    with device.current(query.device):
        if tiles.most or key_tiles.most:
            delta = torch.empty_like(lse)
            launcher.launch(
                *(kernels.query_kernel, config.query, tiles, heads, plan.queries),
                (query, key, value, out, grad, lse, grad_lse, delta, grad_query, *biases[:2]),
                *(seed, (query, key, value, out, grad, grad_query), lse_strides, has_grad_lse),
            )
            parts = _parts(heads, key_heads)
            programs = key_heads * parts
            targets = [grad_key, grad_value]
            if parts > 1:
                targets = [x.new_empty(x.shape[0], programs, x.shape[2], dtype=torch.float32) for x in targets]
            launcher.launch(
                *(kernels.key_kernel, config.key, key_tiles, programs, plan.keys),
                (query, key, value, grad, lse, delta, *targets, biases.key_bias),
                *(seed, (query, key, value, grad, *targets), lse_strides[:1], heads // programs),
            )
            if parts > 1:
                for x, by_part in zip((grad_key, grad_value), targets, strict=True):
                    x.copy_(by_part.unflatten(1, (key_heads, parts)).sum(2))
        if settings.fused_tiles is not None:  # last, because the sum over parts above also writes to these rows
            of_fused = biases.bias[tiles.most :] if biases.bias is not None and is_ordered else biases.bias
            launcher.launch(
                *(kernels.fused_kernel, config.fused, settings.fused_tiles, key_heads, plan.keys),
                (query, key, value, out, grad, lse, grad_lse, *grads, of_fused, *biases[1:]),
                *(seed, (query, key, value, out, grad, *grads), lse_strides, has_grad_lse),
            )
    return (*grads, *biases.finish(relative, is_ordered, settings.plan.fill_value))


def _parts(heads: int, key_heads: int) -> int:
    """The number of parts into which the query heads of a key head are split, so that few key heads keep the GPU busy.

    It does not depend on the batch, so the order of additions does not either.
    """
    group = heads // key_heads
    return next(
        parts for parts in range(1, group + 1) if group % parts == 0 and (key_heads * parts >= 4 or parts == group)
    )
