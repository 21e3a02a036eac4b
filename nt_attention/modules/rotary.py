"""Rotary position embedding (Su et al. 2021, RoFormer) for packed or padded tokens.

Dimensions: H heads, D head dim, R ≤ D the dims that turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .._tracing import is_tracing
from ..layout import SequenceLayout

# (R/2,) frequencies to new ones, alone or with a factor for the rotated queries and keys
Scaling = Callable[[Tensor], "Tensor | tuple[Tensor, float]"]


@dataclass(frozen=True)
class Rotary:
    """Turns pairs of dims by an angle that grows with a token's position in its sequence, from 0.

    Args:
        base: θ; pair i of R/2 turns by base^(−2i/R) radians a position.
        dims: R, an even number of dims from the first that turn, all of them if None (partial rotation, GPT-NeoX).
        interleaved: pairs are dims (2i, 2i + 1), as in RoFormer and GPT-J; else (i, i + R/2), as in GPT-NeoX and Llama.
        scaling: takes the frequencies (R/2,) and gives those to use, or a tuple of them and a factor by which rotated
            queries and keys are multiplied. ``ntk`` and ``yarn`` make such functions.

    Raises:
        ValueError: a ``base`` or ``dims`` that is not positive, or odd ``dims``.
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
        """The rotation of heads of D dims.

        Raises:
            ValueError: D is odd, or less than ``dims``; or ``scaling`` changes the frequencies' shape.
        """
        dims = head_dim if self.dims is None else self.dims
        if dims > head_dim or dims % 2:
            raise ValueError(
                f"rotary turns pairs of dims: head_dim is {head_dim}, so pass an even one, or Rotary(dims=...) with an "
                f"even number up to it; dims is {self.dims}."
            )
        plain = self.base ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)
        scaled = plain if self.scaling is None else self.scaling(plain)
        scaled, factor = scaled if isinstance(scaled, tuple) else (scaled, 1.0)
        if scaled.shape != plain.shape:
            raise ValueError(f"scaling must keep the shape {tuple(plain.shape)}, and gave {tuple(scaled.shape)}.")
        return Rotation(tuple(scaled.tolist()), float(factor), self.interleaved)


@dataclass(frozen=True)
class Rotation:
    """A ``Rotary`` for one head dim, in plain numbers: layers that turn alike share their tables.

    Attributes:
        frequencies: (R/2) radians a position.
        factor: of rotated queries and keys.
    """

    frequencies: tuple[float, ...] = field(repr=False)
    factor: float
    interleaved: bool

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (…, 1, R/2) of the angles at ``positions`` (…), times the factor; computed in float64."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angles = (positions.to(torch.float64).unsqueeze(-1) * frequencies).unsqueeze(-2)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)

    def rotate(self, x: Tensor, positions: SequenceLayout | Tensor) -> Tensor:
        """Packed (N, H, D) at the positions that a layout gives its rows, or (B, L, H, D) at positions (B or 1, L)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if isinstance(positions, Tensor):
            return self._apply(x, *self.tables(positions, dtype))
        if is_tracing() or not isinstance(positions, SequenceLayout):  # no lengths are known
            return self._apply(x, *self.tables(positions.locate_rows(x.shape[0])[1], dtype))
        layout = positions
        cos, sin = layout.cached(("rotary", self, dtype), lambda: self.tables(layout.position_ids, dtype))
        if past := x.shape[0] - layout.total:  # rows that belong to no sequence
            cos, sin = (F.pad(table, (0, 0, 0, 0, 0, past)) for table in (cos, sin))
        return self._apply(x, cos, sin)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(…, H, D) by the angles of the tables; computed in their dtype and given back in x's."""
        dims = 2 * len(self.frequencies)
        rotated, rest = x[..., :dims].to(cos.dtype), x[..., dims:]
        first, second = (rotated[..., 0::2], rotated[..., 1::2]) if self.interleaved else rotated.chunk(2, -1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        rotated = (torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)).to(x.dtype)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


def ntk(factor: float) -> Scaling:
    """NTK-aware scaling: the base grows, the slowest pair turns ``factor`` times slower, the fastest as it did."""

    def scaling(frequencies: Tensor) -> Tensor:
        pairs = len(frequencies)
        steps = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device) / max(1, pairs - 1)
        return frequencies * factor**-steps

    return scaling


def yarn(
    factor: float, original_length: int, *, beta_fast: float = 32.0, beta_slow: float = 1.0, attention: bool = True
) -> Scaling:
    """YaRN (Peng et al. 2023): pairs that turn often keep their frequency, slow ones turn ``factor`` times slower.

    Args:
        original_length: the positions that the model was trained on.
        beta_fast, beta_slow: the turns over them from which a pair is kept, and up to which it is slowed down; between
            them by a straight line over the pairs.
        attention: also multiply queries and keys by 0.1 · ln(factor) + 1 each, the paper's temperature.
    """

    def scaling(frequencies: Tensor) -> tuple[Tensor, float]:
        pairs = len(frequencies)
        ratio = float(frequencies[0] / frequencies[1]) if pairs > 1 else 1.0  # of one pair to the next

        def pair_that_turns(turns: float) -> float:
            if ratio <= 1:
                return 0.0
            return math.log(float(frequencies[0]) * original_length / (2 * math.pi * turns)) / math.log(ratio)

        low = max(math.floor(pair_that_turns(beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(beta_slow)), 2 * pairs - 1)
        steps = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        slowed = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
        mixed = frequencies * (1 - slowed) + frequencies / factor * slowed
        return mixed, 0.1 * math.log(factor) + 1.0 if attention and factor > 1 else 1.0

    return scaling
