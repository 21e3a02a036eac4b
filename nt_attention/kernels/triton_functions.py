"""Functions and constants that several Triton kernels use.

A tensor of head dim D is in two parts: BLOCK_D columns, and REST_D columns after them. Both are powers of 2, or
REST_D is 0 and there is one part (`triton_support.column_parts`). So a head dim of 320 is 256 + 64, not 512.
"""

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


@triton.jit
def filled(value, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Both parts of ROWS rows of one float32 value."""
    rest = 0.0
    if REST:
        rest = tl.zeros([ROWS, REST], tl.float32) + value
    return tl.zeros([ROWS, BLOCK], tl.float32) + value, rest


@triton.jit
def times(x, factor, REST: tl.constexpr):
    """Both parts of x · factor."""
    rest = x[1]
    if REST:
        rest = rest * factor
    return x[0] * factor, rest


@triton.jit
def row_products(x, y, REST: tl.constexpr, PRECISION: tl.constexpr):
    """x · yᵀ: the products of the rows of `x` and `y`."""
    products = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
    if REST:
        products = tl.dot(x[1], tl.trans(y[1]), products, input_precision=PRECISION)
    return products


@triton.jit
def add_product(x, y, total, REST: tl.constexpr, PRECISION: tl.constexpr):
    """total + x · y, in the two parts of `y`. `x` is rounded to the dtype of `y`."""
    x = x.to(y[0].dtype)
    rest = total[1]
    if REST:
        rest = tl.dot(x, y[1], rest, input_precision=PRECISION)
    return tl.dot(x, y[0], total[0], input_precision=PRECISION), rest
