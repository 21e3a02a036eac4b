"""The cost model: the expected time of a call on each backend, from times that were measured on a GPU.

The time of a varlen kernel is modelled as a constant for the launch, plus a cost for each sequence, each token and each
(query, key) pair of a head. ``measured/sm90.json`` has these four numbers for each backend, kind of call and head dim,
and the GPU, the versions and the error of the fit. ``benchmarks/fit_costs.py`` fits them to the times that
``python -m nt_attention bench`` measures. All GPUs use these numbers.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import NamedTuple

import torch

from .call import AttentionSpec, Call

# The least expected time. The host takes as long to launch, and the fits (to 16384 tokens) are not more exact.
LAUNCH_US = {"forward": 50.0, "both": 150.0}
# ("float32" or "16-bit", "forward" or "both", kind of mask) → head dim → backend → (µs for a call, and for each head ns
# for a sequence, a token and 1000 pairs)
Costs = dict[tuple[str, str, str], dict[int, dict[str, tuple[float, float, float, float]]]]


class CallSize(NamedTuple):
    """The size of a call, which the cost model takes. Computed on the host from the lengths.

    Attributes:
        sequences: B.
        tokens: the mean of query tokens and key tokens, (T + S) / 2.
        pairs: visible (query, key) pairs of one head.
    """

    sequences: int
    tokens: float
    pairs: float

    @classmethod
    def of(cls, call: Call) -> CallSize:
        """The size of ``call``. Pairs that the layouts do not have at hand are counted once and cached with them."""
        layout, key_layout, _, spec, _ = call
        tokens = (layout.total + key_layout.total) / 2
        if spec.equal_lengths and (spec.window.is_open or spec.window.is_causal):
            squares = layout.sum_of_squares
            return cls(layout.batch_size, tokens, squares if spec.window.is_open else (squares + layout.total) / 2)

        def count() -> int:
            queries, keys = layout.host_offsets.diff(), key_layout.host_offsets.diff()
            return int(spec.window.pairs(queries, keys, spec.lower_right).sum())

        pairs = layout.cached(("pairs", spec.window, spec.lower_right), count, key_layout)
        return cls(layout.batch_size, tokens, pairs)


def expected_us(spec: AttentionSpec, size: CallSize) -> dict[str, float]:
    """Measured backend → its expected time in µs, of the forward, or of both directions if gradients are needed."""
    if spec.device.type == "cpu":
        return {}
    dtype = "float32" if spec.dtype == torch.float32 else "16-bit"
    direction = "both" if spec.needs_grad else "forward"
    kinds = (mask_kind(spec), "causal")  # "causal" if this kind was not measured
    by_head_dim = next((found for kind in kinds if (found := costs().get((dtype, direction, kind)))), None)
    if not by_head_dim:
        return {}
    wide = max(spec.head_dim, spec.value_dim)
    measured = min((d for d in by_head_dim if d >= wide), default=max(by_head_dim))
    sequences, tokens, pairs = size
    heads = spec.num_heads / 1000
    return {
        name: max(LAUNCH_US[direction], call + heads * (a * sequences + b * tokens + c * pairs / 1000))
        for name, (call, a, b, c) in by_head_dim[measured].items()
    }


def mask_kind(spec: AttentionSpec) -> str:
    """The kind of mask. A kernel's time depends on it, and not only on the number of visible pairs."""
    if spec.window.is_open:
        return "full"
    if spec.window.is_causal:
        return "causal"
    return "window behind" if spec.window.right <= 0 else "window"


@functools.cache
def costs() -> Costs:
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
