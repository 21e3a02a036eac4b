"""How long a call takes on each backend: measured on a card, and fitted to what the host knows of a batch.

Every varlen kernel's time is close to a launch, plus something for each sequence, each token and each (query, key)
pair of a head. ``measured/sm90.json`` holds these four numbers for each backend, kind of call and head dim, written by
``benchmarks/fit_costs.py`` from times that ``python -m nt_attention bench`` gave; it names the card, the versions and
how far the fit lies from what was measured. A card that nobody measured takes the numbers of one that was.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources

import torch

from .call import AttentionSpec
from .work import Work

# Below these the host's launches take as long, and the fits, to batches of 16384 tokens, tell nothing apart.
LAUNCH_US = {"forward": 50.0, "both": 150.0}
# of a call: ("float32" or "16-bit", "forward" or "both", a kind of mask) → head dim → backend → µs for a call, and ns
# for a head's sequence, token and 1000 pairs
Costs = dict[tuple[str, str, str], dict[int, dict[str, tuple[float, float, float, float]]]]


def expected_us(spec: AttentionSpec, size: Work) -> dict[str, float]:
    """What each backend that was measured is expected to take, forward, or forward and backward if that is wanted."""
    if spec.device.type == "cpu":
        return {}
    dtype = "float32" if spec.dtype == torch.float32 else "16-bit"
    direction = "both" if spec.needs_grad else "forward"
    kinds = (mask_kind(spec), "causal")  # where windows were not measured
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
    """Which of the kinds of masks a kernel's time depends on, besides the pairs that it leaves."""
    left, right = spec.window
    if left == right == math.inf:
        return "full"
    if (left, right) == (math.inf, 0):
        return "causal"
    return "window behind" if right <= 0 else "window"


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
