"""Tuned tile sizes: one table by head dim, dtype and length profile. Nothing is tuned at run time.

Measured on an H200 (torch 2.11, Triton 3.6) with ``python benchmarks/tune_token_tiled.py``, over the batches of
``cli/workloads.py``. Other GPUs take the same rows until they have their own: run that command there, and add a
table under the GPU's name to ``TABLES``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How one kernel runs: rows of queries and of keys in a block, warps in a program, stages of loads in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Config(NamedTuple):
    """The tiles of a call's kernels.

    ``shared``: sequences up to this length share tiles whole, and take ``closed``, whose ``block_n`` is at least that.
    """

    shared: int
    forward: Tile
    query: Tile
    key: Tile
    closed: Tile


# (head dim, bytes of an element) to profiles, the first whose bounds are not exceeded: the longest sequence of either
# side, or what a window lets a query see if that is less; and the mean number of queries. Head dims go up to the next
# row: 80 takes that of 128.
Profiles = dict[tuple[float, float], Config]
ANY = float("inf")

H200: dict[tuple[int, int], Profiles] = {
    (64, 2): {
        (128, 48): Config(64, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
        (128, ANY): Config(128, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2), Tile(64, 128, 8, 2)),
        (1024, ANY): Config(64, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
        (ANY, ANY): Config(64, Tile(128, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 128, 4, 3), Tile(64, 64, 4, 2)),
    },
    (128, 2): {
        (1024, ANY): Config(64, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 1), Tile(32, 64, 4, 2)),
        (ANY, ANY): Config(64, Tile(64, 32, 4, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
    },
    (256, 2): {
        (256, ANY): Config(32, Tile(64, 32, 4, 2), Tile(128, 32, 8, 3), Tile(32, 64, 8, 3), Tile(32, 32, 4, 2)),
        (ANY, ANY): Config(32, Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(32, 64, 8, 3), Tile(32, 32, 4, 2)),
    },
    (64, 4): {
        (256, ANY): Config(32, Tile(64, 32, 4, 2), Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)),
        (ANY, ANY): Config(32, Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 1), Tile(32, 32, 4, 1)),
    },
    (128, 4): {
        (256, ANY): Config(32, Tile(64, 32, 4, 1), Tile(64, 64, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
        (ANY, ANY): Config(32, Tile(128, 32, 8, 2), Tile(64, 64, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
    (256, 4): {
        (ANY, ANY): Config(16, Tile(64, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    },
}
# What a batch-invariant call takes, whatever its lengths: this profile loses least on all others.
ANY_BATCH = (1024.0, ANY)
# By a part of the device's name; the empty one is for all others.
TABLES = {"": H200}


def config_for(device: torch.device, head_dim: int, itemsize: int, longest: float, mean: float) -> Config:
    """For a head dim that is a power of 2 (the larger of both), bytes of an element, and the batch's lengths."""
    profiles = _table(device)[max(64, head_dim), itemsize]
    return next(config for bounds, config in profiles.items() if longest <= bounds[0] and mean <= bounds[1])


@functools.cache
def _table(device: torch.device) -> dict[tuple[int, int], Profiles]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next(table for part, table in sorted(TABLES.items(), reverse=True) if part in name)
