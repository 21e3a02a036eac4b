"""Tile sizes: for each size of shared memory a table by head dim, dtype and lengths. Nothing is tuned at run time.

Those of the largest memory were measured on an H200, and above head dim 256 on an H100 (torch 2.11, Triton 3.6), with
`python benchmarks/tune_token_tiled.py` on the workloads of `benchmarks/workloads.py`. The other tables were not
measured: they have smaller tiles where these do not fit (`tests/token_tiled/compile_token_tiled.py`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..triton_support import shared_memory


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
Table = dict[tuple[int, int], Profiles]
H200: Table = {
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
    (256, 4): {(ANY, ANY): Config(16, Tile(64, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))},
    (384, 2): {(ANY, ANY): Config(16, Tile(128, 32, 8, 1), Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(16, 16, 4, 1))},
    (512, 2): {
        (256, ANY): Config(16, Tile(32, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 2), Tile(16, 16, 4, 1)),
        (ANY, ANY): Config(16, Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 2), Tile(16, 16, 4, 1)),
    },
    (576, 2): {(ANY, ANY): Config(16, Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1))},
}
B200: Table = H200 | {  # the same tiles need more memory than on an H200
    (256, 2): {
        (256, ANY): Config(32, Tile(64, 32, 4, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 3), Tile(32, 32, 4, 2)),
        (ANY, ANY): Config(32, Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 3), Tile(32, 32, 4, 2)),
    }
}
A100: Table = H200 | {
    (256, 2): {
        (256, ANY): Config(32, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 3), Tile(32, 32, 4, 2)),
        (ANY, ANY): Config(32, Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 3), Tile(32, 32, 4, 2)),
    },
    (384, 2): {(ANY, ANY): Config(16, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1))},
    (512, 2): {(ANY, ANY): Config(16, Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1))},
    (576, 2): {(ANY, ANY): Config(16, Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1))},
}
SMALL: Table = H200 | {
    (128, 2): {(ANY, ANY): Config(64, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 1), Tile(32, 64, 4, 2))},
    (256, 2): {(ANY, ANY): Config(32, Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))},
    (384, 2): {(ANY, ANY): Config(16, Tile(32, 32, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
    (512, 2): {(ANY, ANY): Config(16, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
    (576, 2): {(ANY, ANY): Config(16, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
    (64, 4): {(ANY, ANY): Config(32, Tile(64, 32, 4, 2), Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1))},
    (128, 4): {(ANY, ANY): Config(16, Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))},
    (256, 4): {(ANY, ANY): Config(0, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))},
}
# The profile of batch-invariant calls of any lengths, chosen because it costs least on all workloads.
ANY_BATCH = (1024.0, ANY)
# (lowest compute capability, KiB of shared memory that a program may have) → table
TABLES = {(10, 227): B200, (9, 227): H200, (8, 163): A100, (8, 99): SMALL}


def config_for(device: torch.device, head_dim: int, itemsize: int, longest: float, mean: float) -> Config:
    """The config for the larger head dim, bytes per element, and the lengths as in `Profiles`."""
    table = _table(device)
    profiles = table[min(dim for dim, size in table if dim >= head_dim and size == itemsize), itemsize]
    return next(config for bounds, config in profiles.items() if longest <= bounds[0] and mean <= bounds[1])


@functools.cache
def _table(device: torch.device) -> Table:
    if device.type != "cuda":  # Triton's interpreter
        return H200
    return table_for(torch.cuda.get_device_capability(device)[0], shared_memory(device) // 1024)


def table_for(capability: int, kib: int) -> Table:
    """The first table of `TABLES` that fits a GPU; the smallest if none does."""
    return next((table for (least, needed), table in TABLES.items() if capability >= least and kib >= needed), SMALL)
