"""Functions and constants that several Triton kernels use."""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """tanh(x). If EXACT, also for small x with the precision of float32."""
    result = 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E)) + 1.0)
    if EXACT:  # the formula cancels near 0, which matters in float32: use the Taylor series there
        y = x * x
        series = 62 / 2835 + y * (-1382 / 155925 + y * (21844 / 6081075))
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * series)))
        result = tl.where(tl.abs(x) < 0.4, x * series, result)
    return result


@triton.jit
def score_factor_of(scale, LINEAR: tl.constexpr):
    """The factor that `_scores` leaves out if LINEAR: the scale, which then fuses into later operations."""
    score_factor = 1.0
    if LINEAR:
        score_factor = scale * LOG2E
    return score_factor
