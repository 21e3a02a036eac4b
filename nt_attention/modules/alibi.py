"""ALiBi's slopes."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._offsets import creating_cached_tensors


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """(H,) float32: the geometric sequence that starts at and has the ratio 2^(−8/n), for n the power of 2 up to H.

    Where H is no power of 2, every second slope of the sequence for 2n fills up, as in Press et al. 2022's code.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _slopes(num_heads, device)  # what a graph or a mode makes of it is not to be cached
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
