"""Rotary position embedding (Su et al. 2021, RoFormer) for packed or padded tokens.

Dimensions: H heads, D head dim, R ≤ D the dims that are rotated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compiler import is_traced
from ..layouts.known import SequenceLayout
from ..layouts.protocol import Layout, Sharded
from ..layouts.reading import creating_cached_tensors

# Converts the frequencies (R/2,) to new frequencies, or to a tuple of them and a factor for rotated queries and keys.
Scaling = Callable[[Tensor], "Tensor | tuple[Tensor, float]"]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: rotates pairs of dims by an angle that is proportional to a token's position.

    Positions count from 0 in each sequence. Pass it as `rotary=` to `VarlenMultiheadAttention`.

    Args:
        base: θ. Pair i of R/2 is rotated by base^(−2i/R) radians for each position.
        dims: R, an even number: only the first R dims are rotated, as in GPT-NeoX. None rotates all dims.
        interleaved: if True, pairs are the dims (2i, 2i + 1), as in RoFormer and GPT-J. If False, pairs are the dims
            (i, i + R/2), as in GPT-NeoX and Llama.
        scaling: a function of the frequencies (R/2,). It returns new frequencies, or a tuple of new frequencies and a
            factor for rotated queries and keys. `ntk` and `yarn` return such functions.

    Raises:
        ValueError: `base` is not positive, or `dims` is not positive and even.

    Example:
        >>> import torch, nt_attention as nta
        >>> attention = nta.VarlenMultiheadAttention(64, 8, batch_first=True, rotary=nta.Rotary(base=500_000.0))
        >>> x = torch.randn(2, 5, 64)
        >>> attention(x, x, x, need_weights=False)[0].shape
        torch.Size([2, 5, 64])
    """

    base: float = 10000.0
    dims: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.base <= 0:
            raise ValueError(f"base must be greater than 0, got {self.base}.")
        if self.dims is not None and (self.dims <= 0 or self.dims % 2):
            raise ValueError(f"dims must be an even number greater than 0, got {self.dims}.")

    def of_head_dim(self, head_dim: int) -> Rotation:
        """The rotation for head dim D.

        Raises:
            ValueError: `dims` is above D, `dims` is None and D is odd, or `scaling` changes the shape of frequencies.
        """
        dims = head_dim if self.dims is None else self.dims
        if dims > head_dim or dims % 2:
            raise ValueError(
                f"rotary rotates pairs of dims, but head_dim is {head_dim} and dims is {self.dims}: pass an even "
                "head_dim, or Rotary(dims=...) with an even number up to head_dim."
            )
        plain = self.base ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)
        scaled = plain if self.scaling is None else self.scaling(plain)
        scaled, factor = scaled if isinstance(scaled, tuple) else (scaled, 1.0)
        if scaled.shape != plain.shape:
            raise ValueError(f"scaling must return the shape {tuple(plain.shape)}, got {tuple(scaled.shape)}.")
        return Rotation(tuple(scaled.tolist()), float(factor), self.interleaved)


@dataclass(frozen=True)
class Rotation:
    """A `Rotary` for one head dim. Equal rotations of several layers share their tables of cosines and sines.

    Attributes:
        frequencies: R/2 angles, in radians for each position.
        factor: rotated queries and keys are multiplied by it.
        interleaved: as in `Rotary`.
    """

    frequencies: tuple[float, ...] = field(repr=False)
    factor: float
    interleaved: bool

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosine and sine of the angles at `positions` (…), times the factor: (…, 1, R/2) each.

        They are computed in float64 and returned in `dtype`.
        """
        if is_traced(positions):
            frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        else:
            frequencies = _on_device(self.frequencies, positions.device)
        angles = (positions.to(torch.float64).unsqueeze(-1) * frequencies).unsqueeze(-2)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)

    def rotate(self, x: Tensor, positions: Layout | Any, in_graph: bool = False) -> Tensor:
        """Rotate packed `x` (N, H, D) with the positions of a layout, or (B, L, H, D) with positions (B or 1, L).

        The layout may be a `ShardedLayout`. `in_graph` says that the call becomes a part of a graph.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        if isinstance(positions, Tensor):
            return rotate_pairs(x, *self.tables(positions, dtype), interleaved=self.interleaved)
        is_known = isinstance(positions, SequenceLayout) and not in_graph
        if not (is_known or isinstance(positions, Sharded)):  # the cache of a sharded layout is outside of graphs
            tables = self.tables(positions.locate_rows(x.shape[0])[1], dtype)
            return rotate_pairs(x, *tables, interleaved=self.interleaved)
        layout = positions
        cos, sin = layout.cached(("rotary", self, dtype), lambda: self.tables(layout.position_ids, dtype))
        if past := x.shape[0] - layout.total:  # rows that belong to no sequence
            cos, sin = (F.pad(table, (0, 0, 0, 0, 0, past)) for table in (cos, sin))
        return rotate_pairs(x, cos, sin, interleaved=self.interleaved)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of the first R dims of `x` (…, H, D), by angles with cosines and sines (…, 1, R/2).

    It computes in the dtype of `cos` and `sin`, and returns the dtype of `x`. `interleaved` is as in `Rotary`.
    """
    dims = 2 * cos.shape[-1]
    rotated, rest = x[..., :dims].to(cos.dtype), x[..., dims:]
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


@functools.cache  # captured CUDA graphs read the memory, so it is never freed
def _on_device(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """Frequencies as a float64 tensor, cached because a CUDA graph that is captured can't copy them."""
    with creating_cached_tensors():
        return torch.tensor(frequencies, dtype=torch.float64, device=device)


def ntk(factor: float) -> Scaling:
    """NTK-aware scaling for `Rotary`: divides the frequency of pair i of n by factor^(i / (n − 1)).

    The first pair, which has the highest frequency, is not changed. The frequency of the last pair is divided by
    `factor`. This is the same as the base θ · factor^(n / (n − 1)).

    Args:
        factor: how many times longer sequences may be than in training.

    Example:
        >>> import torch, nt_attention as nta
        >>> from nt_attention.modules.rotary import ntk
        >>> rotary = nta.Rotary(scaling=ntk(4.0))
        >>> rotary.scaling(torch.tensor([1.0, 0.1, 0.01]))
        tensor([1.0000, 0.0500, 0.0025])
    """

    def scaling(frequencies: Tensor) -> Tensor:
        pairs = len(frequencies)
        steps = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device) / max(1, pairs - 1)
        return frequencies * factor**-steps

    return scaling


def yarn(
    factor: float, original_length: int, *, beta_fast: float = 32.0, beta_slow: float = 1.0, attention: bool = True
) -> Scaling:
    """YaRN scaling (Peng et al. 2023) for `Rotary`: keeps high frequencies, and divides low ones by `factor`.

    Args:
        factor: how many times longer sequences may be than in training.
        original_length: the number of positions that the model was trained with.
        beta_fast: pairs with at least this number of full rotations over `original_length` are not changed.
        beta_slow: the frequency of pairs with at most this number of full rotations is divided by `factor`. Between
            the two bounds, the change is a linear function of the pair's index.
        attention: also multiply queries and keys by 0.1 · ln(factor) + 1 each, the temperature of the paper.

    Example:
        >>> import nt_attention as nta
        >>> from nt_attention.modules.rotary import yarn
        >>> attention = nta.VarlenMultiheadAttention(64, 8, rotary=nta.Rotary(scaling=yarn(4.0, 4096)))
        >>> round(attention.rotation.factor, 4)
        1.1386
    """

    def scaling(frequencies: Tensor) -> tuple[Tensor, float]:
        pairs = len(frequencies)
        ratio = float(frequencies[0] / frequencies[1]) if pairs > 1 else 1.0  # of neighboring frequencies

        def pair_with(rotations: float) -> float:
            if ratio <= 1:
                return 0.0
            return math.log(float(frequencies[0]) * original_length / (2 * math.pi * rotations)) / math.log(ratio)

        low = max(math.floor(pair_with(beta_fast)), 0)
        high = min(math.ceil(pair_with(beta_slow)), 2 * pairs - 1)
        steps = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        share = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)  # of the divided frequency
        mixed = frequencies * (1 - share) + frequencies / factor * share
        return mixed, 0.1 * math.log(factor) + 1.0 if attention and factor > 1 else 1.0

    return scaling
