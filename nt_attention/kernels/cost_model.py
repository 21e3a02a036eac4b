"""The cost model: the expected time of a call on each backend, fitted to times that were measured on a GPU.

The time of a varlen kernel is modeled as a constant for the launch, plus costs per sequence, per token and per (query,
key) pair of a head, plus the time of the query that sees the most keys, for which one multiprocessor works alone. Some
kernels work on all query heads of a key head at once, so there is also a cost per sequence of a key head.
`measured/*.json` has these six numbers for each backend, kind of call and head dim. `python -m nt_attention tune`
measures and fits them. `measurements.py` says which file holds for a GPU.
"""

from __future__ import annotations

import functools
import json
import operator
from importlib import resources
from typing import NamedTuple

import torch

from . import measurements
from .call import AttentionSpec
from .call_size import CallSize
from .masks import Window
from .measurements import Row, Table

# The smallest expected time: the fits are not more accurate. Among such backends, the first of the table is selected.
LEAST_US = {"forward": 10.0, "both": 30.0}
FEW_ROWS = 16  # the rows of the smallest tiles of `split_kv`: each query has one for each head of its group
# Of other backends: the query rows of a tile, and half of the multiprocessors of an H100.
TILE_ROWS, FEW_TILES = 64, 66
MANY_KEYS = 2048  # that a query sees, in the mean
FEW_QUERIES = "few queries"
MORE_KEYS = "more keys"  # than queries, as in cross-attention to long sequences
_Mask = tuple[tuple[int, int], bool, bool, bool, str | None]
NARROW = 256  # keys of a window; tiles at its ends are then much of the work


class CallCosts(NamedTuple):
    """The rows of the backends for one kind of call, and where they are from."""

    rows: tuple[tuple[str, Row], ...]
    kind: str
    about: str


def expected_us(spec: AttentionSpec, size: CallSize) -> dict[str, float]:
    """Each measured backend → its expected time in µs: the forward, plus the backward if gradients are needed."""
    costs = costs_of(spec, size)
    if costs is None:
        return {}
    least = LEAST_US["both" if spec.needs_grad else "forward"]
    numbers = _counts(spec, size, costs.kind)
    return {name: max(least, sum(map(operator.mul, row, numbers))) for name, row in costs.rows}


def counts(spec: AttentionSpec, size: CallSize) -> Row:
    """The numbers in which an expected time is linear, in the order of a `Row`."""
    return _counts(spec, size, kind_of(spec, size))


def _counts(spec: AttentionSpec, size: CallSize, kind: str) -> Row:
    """`counts`. With few queries, most tokens are keys, so they are counted for each key head."""
    heads, key_heads = spec.num_heads / 1000, spec.num_kv_heads / 1000
    tokens = (key_heads if kind in (FEW_QUERIES, MORE_KEYS) else heads) * size.tokens
    pairs, sequences = heads * size.pairs / 1000, size.sequences
    return 1.0, heads * sequences, tokens, pairs, size.most_keys / 1000, key_heads * sequences


def costs_of(spec: AttentionSpec, size: CallSize) -> CallCosts | None:
    """The numbers for a call. None if its kind was not measured, or on a CPU."""
    if spec.device.type == "cpu":
        return None
    dtype, direction = "float32" if spec.dtype == torch.float32 else "16-bit", "both" if spec.needs_grad else "forward"
    return _find(spec.device, dtype, direction, _mask_of(spec, size), spec.head_dim, spec.value_dim)


@functools.lru_cache(maxsize=4096)
def _find(
    device: torch.device, dtype: str, direction: str, mask: _Mask, head_dim: int, value_dim: int
) -> CallCosts | None:
    """The numbers of the first kind that was measured at these head dims or larger ones, else those of the largest."""
    tables, largest = measurements.tables(device), None
    for kind in _kinds(*mask):
        measured: dict[tuple[int, int], tuple[dict[str, Row], Table]] = {}
        for table in reversed(tables):  # the first one wins
            measured |= {dims: (rows, table) for dims, rows in table.costs.get((dtype, direction, kind), {}).items()}
        if not measured:
            continue
        enough = [(d, v) for d, v in measured if d >= head_dim and v >= value_dim]
        rows, table = measured[min(enough, key=sum) if enough else max(measured, key=sum)]
        costs = CallCosts(tuple(rows.items()), kind, table.about)
        if enough:
            return costs
        largest = largest or costs
    return largest


def has_few_queries(spec: AttentionSpec, size: CallSize) -> bool:
    """Whether there are no gradients, and few queries for many keys. `split_kv` is for such calls.

    There are few queries if each sequence has one, or fits in one of the smallest tiles of `split_kv`, and keys besides
    its own; or if all tiles of another backend would leave half of the multiprocessors without work.
    `benchmarks/paged_decoding.py` measured both kinds on an H100.
    """
    if spec.needs_grad:
        return False
    of_a_sequence = size.most_queries * (spec.num_heads // spec.num_kv_heads)
    if not spec.equal_lengths and (size.most_queries <= 1 or of_a_sequence <= FEW_ROWS):
        return True
    queries = size.sequences * size.most_queries  # at least as many as there are
    few_tiles = size.sequences * max(1, size.most_queries / TILE_ROWS) * spec.num_heads <= FEW_TILES
    return few_tiles and size.pairs >= MANY_KEYS * queries


def has_more_keys(spec: AttentionSpec, size: CallSize) -> bool:
    """Whether most tokens are keys: even if each sequence had the most queries, they were a third of all tokens."""
    return not spec.equal_lengths and size.sequences * size.most_queries <= 2 / 3 * size.tokens


def kind_of(spec: AttentionSpec, size: CallSize) -> str:
    """The kind of a call, on which its time depends in addition to the numbers of its size."""
    return _kinds(*_mask_of(spec, size))[0]


def _mask_of(spec: AttentionSpec, size: CallSize) -> _Mask:
    """The arguments of `_kinds`. The calls of a tree are of other kinds."""
    of_queries = None
    if size.tree is None and has_few_queries(spec, size):
        of_queries = FEW_QUERIES
    elif size.tree is None and has_more_keys(spec, size):
        of_queries = MORE_KEYS
    return spec.window_size, spec.is_causal, bool(spec.nonlinear), spec.sinks and spec.needs_grad, of_queries


def _kinds(
    window_size: tuple[int, int], is_causal: bool, nonlinear: bool, sinks: bool, of_queries: str | None
) -> list[str]:
    """The kind of a call, and then the kinds whose times are used if it was not measured."""
    window, kinds = Window.of(window_size, is_causal), [] if of_queries is None else [of_queries]
    if nonlinear:
        kinds.append("nonlinear")
    if sinks and (window.is_open or window.is_causal):  # the gradient of lse takes some kernels a further column
        kinds.append("sinks")
    if window.is_open:
        kinds.append("full")
    elif not window.is_causal:
        kind = "window behind" if window.right <= 0 else "window"
        kinds += [f"narrow {kind}", kind] if window.left + window.right < NARROW else [kind]
    return [*kinds, "causal"]


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
