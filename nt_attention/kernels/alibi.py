"""The slopes of ALiBi (Press et al. 2022).

Dimensions: H query heads.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..compiler import is_compiling
from ..layouts.cache import creating_cached_tensors
from ..torch_private import count_dispatch_modes


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slopes (H,), in float32, as in the code of Press et al. 2022.

    n is the largest power of 2 that is not above H. The first n slopes are 2^(−8i/n) for i = 1 … n. The others are
    every second slope for 2n heads: 2^(−4i/n) for i = 1, 3, 5, ….
    """
    if is_compiling() or count_dispatch_modes():
        return _slopes(num_heads, device)  # a traced or fake tensor must not be cached
    return _cached_slopes(num_heads, device)


def _slopes(num_heads: int, device: torch.device) -> Tensor:
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (i + 1) / n) for i in range(0, 2 * (num_heads - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


@functools.cache
def _cached_slopes(num_heads: int, device: torch.device) -> Tensor:
    with creating_cached_tensors():
        return _slopes(num_heads, device)
