"""How much two results differ, and what is rounding.

Dimensions: n tokens of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..families import dtype_of

# The largest error relative to the largest value, of a model that is right. Some compute parts in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 3e-2}
# Experts in float32 differ by some units in the last place: the size of a group of tokens chooses the kernel.
UNITS = {torch.float64: 64, torch.float32: 64}

# The same of a loss, whose rounding is small because it is a mean over tokens.
LOSS_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
LOSS_TOLERANCE_OF_HALF = 1e-2

# In comparisons of the user's batches: relative errors of a token that are rounding whatever was measured, by the dtype
# in which a model computes; how much more than measured is rounding; and more than what is not rounding. An 8-billion
# model with random weights in bfloat16 has 5 % (H200).
_FLOOR = {torch.float64: 1e-5, torch.float32: 4e-4}
_FLOOR_OF_HALF = 3e-2
FACTOR = 6
_MOST_ROUNDING, _MOST_ROUNDING_OF_HALF = 0.05, 0.2


def units_apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units in the last place of the largest value. Infinite for NaN or other shapes."""
    if a.shape == b.shape and torch.equal(a, b):
        return 0.0
    if a.shape != b.shape or not bool((a - b).isfinite().all()):
        return float("inf")
    unit = b.abs().amax().double().clamp(min=1e-30) * torch.finfo(b.dtype).eps
    return float((a.double() - b.double()).abs().amax() / unit)


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest value. Infinite for NaN or other shapes."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    wide = torch.promote_types(want.dtype, torch.float32)  # float64 would take much memory for logits
    error = (got.to(wide) - want).abs().amax() / want.abs().amax().to(wide).clamp(min=1e-6)
    return float(error.nan_to_num(float("inf")))


def is_near_loss(got: Tensor, want: Tensor, dtype: torch.dtype, error: float) -> bool:
    """Whether two losses are the same up to rounding.

    `dtype` is that in which the model computes, `error` the relative error of its outputs. Both count, because a mean
    over tokens has less than its parts.
    """
    limit = LOSS_TOLERANCE.get(dtype, LOSS_TOLERANCE_OF_HALF)
    return relative_error(got, want) <= max(limit, 2 * error)


def worst(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> tuple[float, str]:
    """The largest relative error over its tolerance, and the name of the output that has it.

    `tolerance` is that of the dtype in which the model computes, if its outputs have another one.
    """
    ratios = []
    for name, x in want.items():
        error = relative_error(got[name], x) if name in got else float("inf")
        ratios.append((error / max(TOLERANCE[x.dtype], tolerance), name))
    return max(ratios, default=(0.0, ""))


def error_of(got: Tensor, want: Tensor) -> float:
    """The relative error that nine tenths of the tokens stay below, or half of few tokens. Experts flip by rounding."""
    ordered = errors_of_tokens(got, want).sort().values
    share = 0.9 if len(ordered) >= 10 else 0.5
    return float(ordered[math.ceil(share * len(ordered)) - 1])


def errors_of_tokens(got: Tensor, want: Tensor) -> Tensor:
    """The relative error of each token, (n,)."""
    if got.dim() == 1:  # a number for each token: they are compared together
        got, want = got[None], want[None]
    errors = []
    for mine, theirs in zip(got.flatten(1).split(1024), want.flatten(1).split(1024), strict=True):
        difference, size = mine.float() - theirs.float(), theirs.float().norm(dim=1)
        errors.append(difference.norm(dim=1) / size.clamp(min=1e-12))
    return torch.cat(errors).nan_to_num(float("inf"))


def floor_of(model: nn.Module) -> float:
    """The relative error that is rounding in any case."""
    return _FLOOR.get(dtype_of(model), _FLOOR_OF_HALF)


def most_rounding(model: nn.Module) -> float:
    """The relative error that is not rounding in any case."""
    return _MOST_ROUNDING_OF_HALF if floor_of(model) == _FLOOR_OF_HALF else _MOST_ROUNDING
