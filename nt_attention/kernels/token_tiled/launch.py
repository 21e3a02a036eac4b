"""Launch a Triton kernel in a few µs of host time.

Triton's own ``kernel[grid](...)`` takes about 45 µs for 40 arguments, to find out which compiled form they want. That
depends on little: dtypes, constants, which pointers and strides are multiples of 16, which strides are 1. Forms are
kept here by just that, and launched as Triton documents it for kernels that are compiled ahead, ``form[grid](...)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_forms: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    integers: tuple[int, ...],
    floats: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> None:
    """Run ``kernel(*tensors, *integers, *floats, *constants)`` over a grid, on the current device and stream."""
    key = (
        kernel.fn,
        tensors[0].device.index,
        constants,
        warps,
        stages,
        tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]),
        tuple([i if i == 1 else (i % 16 == 0, i > _INT32_MAX) for i in integers]),
    )
    arguments = (*tensors, *integers, *floats, *constants)
    form = _forms.get(key)
    if form is not None:
        form[(*grid, 1)](*arguments)
        return
    form = kernel[grid](*arguments, num_warps=warps, num_stages=stages)
    if form is not None:  # Triton's interpreter compiles nothing
        _forms[key] = form


_INT32_MAX = 2**31 - 1
