"""Packed attention on the CPU with ATen's flash kernel, `aten::_scaled_dot_product_flash_attention_for_cpu`.

The kernel takes a dense (n, H, L, D) batch. So the packed rows are split into tiles without padding (`cpu_tiles.py`).
The kernel has no dropout, and no scores that are not linear in query · key: `cpu_scores.py` runs tiles of these calls.

The kernel crashes (SIGFPE) on tiles without rows or keys, so these are not run. It returns lse 0 for rows that are
fully masked or whose scores are all NaN, which is corrected.

Dimensions: T query tokens, S key tokens, H heads (the kernel groups them), D head dim, n tiles of a call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...compiler import EAGER, call_mode, outside_of_graphs
from ...layouts.paged import merge_pages
from ...torch_private import cpu_flash_backward, cpu_flash_forward
from ..backend import Backend, BackwardInputs, Gradients, HeadDims, Hooks
from ..call import FEATURES, AttentionSpec, Call
from ..masks import alibi_bias, distances
from ..mods import needs_gradient
from ..relative import RelativeBias
from . import cpu_scores
from .cpu_mods import SavedMods
from .cpu_scores import Dropout, ScoreRules
from .cpu_tiles import TileGroup, TilePlan, Tiling, changes_scores, make_plan, uncached_plan

_run = cpu_flash_forward
_run_backward = cpu_flash_backward


def _rules(tiles: TileGroup, call: Call, mods: SavedMods) -> ScoreRules:
    """What changes the scores of tiles (n, H, rows, keys). `bias` is (n or 1, H or 1, rows, keys) if there is one."""
    rows, keys, diagonal, is_causal = tiles.shape
    spec, alibi_slopes, relative, visible = call.spec, call.alibi_slopes, call.relative, tiles.is_key
    if is_causal:  # the kernel applies this mask, and nothing else changes the scores
        return ScoreRules()
    # float32 also for 16-bit inputs, because 16 bits would round ALiBi
    dtype = torch.promote_types(spec.dtype, torch.float32)
    bias = None
    if diagonal is not None and (in_window := spec.window.mask(rows, keys, diagonal, spec.device)) is not None:
        visible = in_window if visible is None else visible & in_window
    if alibi_slopes is not None:
        assert diagonal is not None
        slopes = alibi_slopes[tiles.sequences] if alibi_slopes.dim() == 2 else alibi_slopes[None]
        bias = alibi_bias(distances(rows, keys, diagonal, spec.device), slopes.to(dtype))
    if relative is not None:
        scores = _gather(relative, tiles).scores(_bucket(relative, tiles), dtype)
        scores = (scores if scores.dim() == 4 else scores.unsqueeze(0)).contiguous()
        bias = scores if bias is None else bias + scores
    if spec.mask_mod is not None:
        by_mod = mods.mask_of(tiles)
        visible = by_mod if visible is None else visible & by_mod
    return ScoreRules(bias, None if spec.score_mod is None else mods.score_mod_of(tiles, dtype), visible)


def _mask(rules: ScoreRules, spec: AttentionSpec, hides_keys: bool) -> tuple[Tensor | None, Tensor | None]:
    """The bias (n or 1, H or 1, rows, keys) to add to the scores, and (…, rows) True in fully masked rows, if any.

    `hides_keys`: see `_hides_keys`.
    """
    bias, _, visible = rules
    if visible is not None:
        if bias is None:
            bias = torch.zeros((), dtype=torch.promote_types(spec.dtype, torch.float32), device="cpu")
        bias = bias.where(visible, -torch.inf)
        bias = bias if bias.dim() == 4 else bias[None, None]
    masked = None
    if hides_keys and bias is not None:
        masked = bias.amax(-1) == -torch.inf
    elif visible is not None and (spec.may_have_fully_masked_rows or spec.mask_mod is not None):
        masked = ~visible.any(-1)
    return bias, masked if masked is not None and bool(masked.any()) else None


def _hides_keys(relative: RelativeBias, spec: AttentionSpec) -> bool:
    """Whether biases of a relative bias may be −inf, so that rows are fully masked that the window does not mask."""
    dtype = torch.promote_types(spec.dtype, torch.float32)
    return not bool(relative.lowest(dtype) > -torch.inf)  # NaN may hide a −inf


def _gather(relative: RelativeBias, tiles: TileGroup) -> RelativeBias:
    """The biases of the tiles' queries (n, H, rows, N) and keys (n, H, keys, N)."""
    return relative.map_rows(tiles.queries.of, tiles.keys.of)


def _bucket(relative: RelativeBias, tiles: TileGroup) -> Tensor:
    """(rows, keys) the bucket of each pair of a tile."""
    rows, keys, diagonal, _ = tiles.shape
    assert diagonal is not None
    return relative.bucket_of(distances(rows, keys, diagonal, relative.buckets.device))


def _with_spare_row(like: Tensor, *, zeros: bool = False) -> Tensor:
    """(T + 1, H, …) for `Rows.write`."""
    return (like.new_zeros if zeros else like.new_empty)((len(like) + 1, *like.shape[1:]))


def _without_spare_row(x: Tensor) -> Tensor:
    """(T, H, …), and no view, because users may not change a view that comes from an autograd function."""
    is_recorded = x.requires_grad  # outside of these functions, in a graph whose mods run outside of it
    return x[:-1] if is_recorded else x.resize_(len(x) - 1, *x.shape[1:])


@outside_of_graphs  # torch.compile sees it if the call has mods, and would compile it for each batch
def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    return _run_plan(make_plan(call.layout, call.key_layout, call.spec), query, key, value, call)


@outside_of_graphs
def paged_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """The same with keys in pools. Pages are merged if that is a view; otherwise all keys are gathered."""
    paged = call.paged
    merged_key, merged_value = (merge_pages(x) if x.dim() == 4 else x for x in (key, value))
    if merged_key is None or merged_value is None:
        key_layout, (key, value) = paged.gather(key, value)
        return forward(query, key, value, call._replace(key_layout=key_layout))
    key_layout = paged.read_lengths()
    pool_rows = paged.rows(*key_layout.locate_rows(key_layout.total))
    paged.check_rows(pool_rows, key)
    plan = uncached_plan(call.layout, key_layout, Tiling.of(call.spec), pool_rows)
    return _run_plan(plan, query, merged_key, merged_value, call)


def _run_plan(plan: TilePlan, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    spec = call.spec
    out = _with_spare_row(query)
    lse = out.new_empty(out.shape[:2], dtype=torch.promote_types(spec.dtype, torch.float32))
    for rows in plan.fully_masked:
        out[rows], lse[rows] = 0, -torch.inf
    hides_keys = call.relative is not None and _hides_keys(call.relative, spec)
    seed = torch.randint(2**62, (2,), device="cpu") if spec.dropout_p else None
    dropout = None if seed is None else Dropout.of(spec, seed)
    mods, by_scores = SavedMods(spec), changes_scores(spec)
    for tiles, (q, k, v) in plan.tiles([query], [key, value]):
        rules = _rules(tiles, call, mods)
        if by_scores:
            with torch.autocast("cpu", enabled=False):
                tiles_out, tiles_lse = cpu_scores.forward(q, k, v, spec, rules, dropout)
                tiles_out = tiles_out.to(out.dtype)
        else:
            bias, masked = _mask(rules, spec, hides_keys)
            tiles_out, tiles_lse = _run(q, k, v, 0.0, tiles.shape.causal, attn_mask=bias, scale=spec.scale)
            if masked is not None:
                tiles_lse = tiles_lse.masked_fill(masked, -torch.inf)
        tiles.queries.write(out, tiles_out)
        tiles.queries.write(lse, tiles_lse)
        del q, k, v  # the next tiles are gathered into the same memory
    out, lse = _without_spare_row(out), _without_spare_row(lse).T.contiguous().T
    if not by_scores:
        _propagate_nan(out, lse, query)
    if spec.has_mods and spec.needs_grad:
        return out, lse, mods.with_seed(seed)
    return (out, lse) if seed is None else (out, lse, seed)


def _propagate_nan(out: Tensor, lse: Tensor, query: Tensor) -> None:
    """Write NaN to the results of queries (T, H, D) that contain NaN, which the kernel treats as fully masked rows.

    The kernel returns out 0 and lse 0 for them. Only rows with lse 0 are checked, which is rare in other rows.
    """
    if int(lse.count_nonzero()) == lse.numel():
        return
    wrong = (lse == 0) & query.isnan().any(-1)
    out.masked_fill_(wrong.unsqueeze(-1), torch.nan)
    lse.masked_fill_(wrong, torch.nan)


class BiasGradients:
    """The gradients of a relative bias, summed over tiles in at least float32."""

    def __init__(self, relative: RelativeBias, dtype: torch.dtype) -> None:
        self._relative = relative
        tensors = [x.new_zeros(x.shape, dtype=dtype) for x in relative.tensors]
        zeros = functools.partial(_with_spare_row, zeros=True)
        self._sums = relative.with_tensors(tensors).map_rows(zeros, zeros)

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """The gradients, when all tiles have been added."""
        return self._sums.map_rows(_without_spare_row, _without_spare_row).tensors

    def add(self, tiles: TileGroup, grad_scores: Tensor) -> None:
        """Add what the gradient of the tiles' scores (n, H, rows, keys) gives."""
        biases = _gather(self._relative, tiles)
        found = biases.with_tensors(biases.gradients(_bucket(biases, tiles), grad_scores))
        if self._sums.bias is not None and found.bias is not None:
            self._sums.bias.add_(found.bias)
        if self._sums.query_bias is not None and found.query_bias is not None:  # each query is in one tile
            tiles.queries.write(self._sums.query_bias, found.query_bias)
        if self._sums.key_bias is not None and found.key_bias is not None:
            tiles.keys.write(self._sums.key_bias, found.key_bias, add=True)


@outside_of_graphs
def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    grad, _, out, lse, state = saved
    layout, key_layout, spec, relative = call.layout, call.key_layout, call.spec, call.relative
    # Not autograd through slices, which would allocate a full gradient of zeros for each slice.
    plan = make_plan(layout, key_layout, spec)
    of_biases = BiasGradients(relative, lse.dtype) if relative is not None and spec.relative_grad else None
    grad_query, add = _with_spare_row(query), not plan.all_keys_once
    grad_key, grad_value = _with_spare_row(key, zeros=add), _with_spare_row(value, zeros=add)
    for rows in plan.fully_masked:
        grad_query[rows] = 0
    # weights exp(score − inf) are 0, in fully masked rows and in padding
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    hides_keys = relative is not None and _hides_keys(relative, spec)
    by_scores = changes_scores(spec) or of_biases is not None
    seed, mods = (state, SavedMods(spec)) if not spec.has_mods or state is None else SavedMods.of_state(spec, state)
    dropout = Dropout.of(spec, seed)
    for tiles, (tiles_grad, q, tiles_out, tiles_lse, k, v) in plan.tiles([grad, query, out, lse], [key, value]):
        rules = _rules(tiles, call, mods)
        if tiles.padded_queries is not None:
            tiles_lse = tiles_lse.masked_fill(tiles.padded_queries, torch.inf)
        if by_scores:
            with torch.autocast("cpu", enabled=False):
                dq, dk, dv, grad_scores = cpu_scores.backward(
                    tiles_grad, (q, k, v), (tiles_out, tiles_lse), spec, rules, dropout
                )
            dq, dk, dv = (x.to(spec.dtype) for x in (dq, dk, dv))
            if of_biases is not None:
                of_biases.add(tiles, grad_scores)
        else:
            bias, _ = _mask(rules, spec, hides_keys)
            dq, dk, dv = _run_backward(
                tiles_grad, q, k, v, tiles_out, tiles_lse, 0.0, tiles.shape.causal, attn_mask=bias, scale=spec.scale
            )
        tiles.queries.write(grad_query, dq)
        tiles.keys.write(grad_key, dk, add=add)
        tiles.keys.write(grad_value, dv, add=add)
        del tiles_grad, q, tiles_out, tiles_lse, k, v  # the next tiles are gathered into the same memory
    gradients = [_without_spare_row(x) for x in (grad_query, grad_key, grad_value)]
    return (*gradients, *(of_biases.sums if of_biases else ()))


def _refuses(spec: AttentionSpec) -> list[str]:
    return _refuses_mods(spec) if spec.has_mods and spec.device.type == "cpu" else []


@outside_of_graphs  # what is asked here is not known while a graph is traced
def _refuses_mods(spec: AttentionSpec) -> list[str]:
    """Why score_mod or mask_mod needs the reference."""
    if call_mode(_PLAIN) != EAGER:
        return ["score_mod and mask_mod are not supported in function transforms and dispatch modes."]
    # With dropout also without gradients: a checkpoint runs the forward again with gradients, on the same backend.
    with torch.set_grad_enabled(torch.is_grad_enabled() or bool(spec.dropout_p)):
        if spec.score_mod is not None and needs_gradient(spec.score_mod, spec.dtype):
            return ["score_mod reads a tensor that requires a gradient: detach it, or pass it in relative."]
    return []


_PLAIN = torch.empty(0, device="cpu")

BACKEND = Backend(
    name="cpu",
    about="PyTorch's CPU flash attention on tiles of the packed rows (CPU)",
    missing=lambda: None,
    forward=forward,
    backward=backward,
    features=frozenset(FEATURES) - {"batch_invariant", "bounds"},
    device_type="cpu",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    head_dims=HeadDims(equal=True),
    refuses=_refuses,
    traits={"takes_parts"},
    hooks=Hooks(paged_forward=paged_forward),
)
