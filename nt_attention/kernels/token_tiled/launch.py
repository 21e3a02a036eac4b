"""Launch a Triton kernel in a few µs of host time.

Triton's own `kernel[grid](...)` takes about 45 µs for 40 arguments, to find the compiled kernel for them. The compiled
kernel depends on dtypes, constants, which pointers and strides are multiples of 16, and which strides are 1.
This module caches compiled kernels by these, and launches them as `compiled[grid](...)`, which Triton documents for
kernels that were compiled ahead of time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int, ...],
    floats: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> None:
    """Launch `kernel(*tensors, *integers, *floats, *constants)` on the current device and stream.

    The first tensor takes the place of those that are None, which the kernel does not read.
    """
    first = tensors[0]
    assert first is not None
    key = (
        kernel.fn,
        first.device.index,
        constants,
        warps,
        stages,
        tuple([None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]),
        tuple([i if i == 1 else (i % 16 == 0, i > _INT32_MAX) for i in integers]),
    )
    arguments = (*[first if x is None else x for x in tensors], *integers, *floats, *constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1)](*arguments)
        return
    compiled = kernel[grid](*arguments, num_warps=warps, num_stages=stages)
    if compiled is not None:  # None in Triton's interpreter, which compiles nothing
        _compiled[key] = compiled


_INT32_MAX = 2**31 - 1
