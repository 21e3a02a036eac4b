"""The cost model: the expected time of a call on each backend, fitted to times that were measured on a GPU.

The time of a varlen kernel is modeled as a constant for the launch plus costs per sequence, per token and per (query,
key) pair of a head. `measured/sm90.json` has these four numbers for each backend, kind of call and head dim, with the
GPU, the versions and the error of the fit. `benchmarks/fit_costs.py` fits them to the times that `python -m
nt_attention bench` measures. All GPUs use this file.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

import torch

from .call import AttentionSpec
from .call_size import CallSize

# The smallest expected time: the host needs about this long to launch, and the fits are not more accurate.
LAUNCH_US = {"forward": 50.0, "both": 150.0}
FEW_ROWS = 16  # the rows of the smallest tiles of `split_kv`: each query has one for each head of its group
# Of other backends: the query rows of a tile, and half of the multiprocessors of an H100.
TILE_ROWS, FEW_TILES = 64, 66
MANY_KEYS = 2048  # that a query sees, in the mean
# ("float32" or "16-bit", "forward" or "both", kind of mask) → head dim → backend → (µs per call; ns per head and
# sequence, per head and token, per head and 1000 pairs)
Costs = dict[tuple[str, str, str], dict[int, dict[str, tuple[float, float, float, float]]]]


def expected_us(spec: AttentionSpec, size: CallSize) -> dict[str, float]:
    """Each measured backend → its expected time in µs: the forward, plus the backward if gradients are needed."""
    if spec.device.type == "cpu":
        return {}
    dtype = "float32" if spec.dtype == torch.float32 else "16-bit"
    direction = "both" if spec.needs_grad else "forward"
    kinds = (mask_kind(spec), "causal")  # the times of causal calls if this kind was not measured
    by_head_dim = next((found for kind in kinds if (found := costs().get((dtype, direction, kind)))), None)
    if not by_head_dim:
        return {}
    wide = max(spec.head_dim, spec.value_dim)
    measured = min((d for d in by_head_dim if d >= wide), default=max(by_head_dim))
    sequences, tokens, pairs, *_ = size
    heads = spec.num_heads / 1000
    return {
        name: max(LAUNCH_US[direction], call + heads * (a * sequences + b * tokens + c * pairs / 1000))
        for name, (call, a, b, c) in by_head_dim[measured].items()
    }


def has_few_queries(spec: AttentionSpec, size: CallSize) -> bool:
    """Whether `split_kv` is tried first: there are no gradients, and few queries for many keys.

    The times of such calls are not fitted: for other backends they depend on the longest sequence. There are few
    queries if each sequence fits in one of the smallest tiles of `split_kv`, or if all tiles of another backend would
    leave half of the multiprocessors without work. `benchmarks/paged_decoding.py` measured both kinds on an H100.
    """
    if spec.needs_grad:
        return False
    if size.most_queries * (spec.num_heads // spec.num_kv_heads) <= FEW_ROWS:
        return True
    queries = size.sequences * size.most_queries  # at least as many as there are
    few_tiles = size.sequences * max(1, size.most_queries / TILE_ROWS) * spec.num_heads <= FEW_TILES
    return few_tiles and size.pairs >= MANY_KEYS * queries


def mask_kind(spec: AttentionSpec) -> str:
    """The kind of mask, on which the time depends in addition to the number of visible pairs."""
    if spec.window.is_open:
        return "full"
    if spec.window.is_causal:
        return "causal"
    return "window behind" if spec.window.right <= 0 else "window"


def tree_costs(backend: str, spec: AttentionSpec, way: str) -> list[float] | None:
    """The µs of each of `tree.sizes` on a GPU; None if this way was not measured."""
    is_measured = spec.device.type != "cpu" and spec.dtype.itemsize == 2
    by_direction = _tree_costs().get(backend, {}) if is_measured else {}
    by_head_dim = by_direction.get("both" if spec.needs_grad else "forward", {}).get(way, {})
    wide = max(spec.head_dim, spec.value_dim)
    nearest = min((dim for dim in by_head_dim if dim >= wide), default=max(by_head_dim, default=None))
    return None if nearest is None else by_head_dim[nearest]


@functools.cache
def _tree_costs() -> dict[str, dict[str, dict[str, dict[int, list[float]]]]]:
    """The content of `measured/trees_sm90.json`: backend → "forward" or "both" → way → head dim → costs."""
    file = resources.files(__package__) / "measured" / "trees_sm90.json"
    return {
        backend: {
            direction: {way: {int(dim): x for dim, x in by_dim.items()} for way, by_dim in by_way.items()}
            for direction, by_way in by_direction.items()
        }
        for backend, by_direction in json.loads(file.read_text())["costs"].items()
    }


@functools.cache
def costs() -> Costs:
    """The content of `measured/sm90.json`."""
    file = resources.files(__package__) / "measured" / "sm90.json"
    table = json.loads(file.read_text())["costs"]
    return {
        (dtype, direction, mask): {
            int(d): {name: tuple(row) for name, row in rows.items()} for d, rows in by_head_dim.items()
        }
        for dtype, by_direction in table.items()
        for direction, by_mask in by_direction.items()
        for mask, by_head_dim in by_mask.items()
    }
