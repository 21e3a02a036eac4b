"""Rotary position embedding as a product of complex numbers in float64.

Dimensions: L tokens of a sequence, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nt_attention.modules.rotary import Rotary

LENGTHS = [5, 0, 1, 127, 13]
HEADS, HEAD_DIM, EMBED = 3, 14, 35
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # transformers counts angles in float32


def frequencies_of(rotary: Rotary, head_dim: int = HEAD_DIM) -> Tensor:
    dims = head_dim if rotary.dims is None else rotary.dims
    return rotary.base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)


def rotated_by_complex_numbers(
    x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool, factor: float = 1.0
) -> Tensor:
    """(…, H, D) at positions (…): pairs of dims as complex numbers times factor · exp(i · position · frequency)."""
    dims = 2 * len(frequencies)
    turning, rest = x[..., :dims], x[..., dims:]
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.tensor_split(2, -1)
    angles = positions.double()[..., None, None] * frequencies
    numbers = torch.complex(first, second) * torch.polar(torch.full_like(angles, factor), angles)
    both = torch.stack([numbers.real, numbers.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([both, rest], -1)
