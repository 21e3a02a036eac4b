"""How much two results differ, and what is rounding.

Dimensions: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest error relative to the largest value, of a model that is right. Some compute parts in float32.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 3e-2}
# Experts in float32 differ by some units in the last place: the size of a group of tokens chooses the kernel.
UNITS = {torch.float64: 64, torch.float32: 64}

# The same of a loss, whose rounding is small because it is a mean over tokens.
LOSS_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
LOSS_TOLERANCE_OF_HALF = 1e-2


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
