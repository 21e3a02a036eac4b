"""Tuned tile sizes: a table by head dim, dtype and sequence lengths. Nothing is tuned at run time.

The sizes were measured on an H200 (torch 2.11, Triton 3.6) with `python benchmarks/tune_token_tiled.py` on the
workloads of `cli/workloads.py`. All GPUs without a table of their own use this one. To add a table, run that command on
the GPU and put the result into `TABLES` under the GPU's name.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Launch parameters of a kernel: query rows and key rows of a block, warps and pipeline stages of a program."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    @property
    def stages_with_biases(self) -> int:
        """The stages with a relative bias: one less, because prefetching its values takes the memory of a stage."""
        return max(1, self.stages - 1)


class Config(NamedTuple):
    """The tiles of the kernels of a call.

    Attributes:
        shared: Neighboring sequences share a tile if together they have at most this many tokens on each side.
            `fused_kernel` computes their gradients.
        forward, query, key, fused: The tiles of `forward_kernel`, `query_kernel`, `key_kernel` and `fused_kernel`.
            `fused.block_n` is at least `shared`.
    """

    shared: int
    forward: Tile
    query: Tile
    key: Tile
    fused: Tile


# (longest, mean) → config. The first entry is used whose bounds are not exceeded. `longest` is the length of the
# longest query or key sequence, or the window's size if that is smaller. `mean` is the mean number of queries.
Profiles = dict[tuple[float, float], Config]
ANY = float("inf")

# (head dim, bytes per element) → profiles. A head dim is rounded up to the next one in the table: 80 uses that of 128.
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
# The profile of batch-invariant calls of any lengths, chosen because it costs least on all workloads.
ANY_BATCH = (1024.0, ANY)
# A part of the device's name → its table. The empty string is for all other devices.
TABLES = {"": H200}


def config_for(device: torch.device, head_dim: int, itemsize: int, longest: float, mean: float) -> Config:
    """The config for the larger head dim (a power of 2), bytes per element, and the lengths as in `Profiles`."""
    profiles = _table(device)[max(64, head_dim), itemsize]
    return next(config for bounds, config in profiles.items() if longest <= bounds[0] and mean <= bounds[1])


@functools.cache
def _table(device: torch.device) -> dict[tuple[int, int], Profiles]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next(table for part, table in sorted(TABLES.items(), reverse=True) if part in name)
