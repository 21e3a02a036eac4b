"""Launch a Triton kernel in a few µs of host time.

Triton's own `kernel[grid](...)` takes about 45 µs for 40 arguments, to find the compiled kernel for them. The compiled
kernel depends on dtypes, constants, which pointers and strides are multiples of 16, and which strides are 1.
This module caches compiled kernels by these, and launches them as `compiled[grid](...)`, which Triton documents for
kernels that were compiled ahead of time. The layers of a model launch a kernel many times with the same numbers on
other tensors. For them, everything but the addresses of these tensors is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
_INT32_MAX = 2**31 - 1


class Launch(NamedTuple):
    """A kernel and its arguments after the first tensors: `kernel[grid](*first, *tensors, *integers, …)`."""

    kernel: Any
    grid: tuple[int, int]
    tensors: tuple[Tensor, ...]
    integers: tuple[int, ...]
    floats: tuple[float, ...]
    constants: tuple[Any, ...]
    warps: int
    stages: int


# Launches that were made before. The key is that of `launch_cached` with the dtypes and alignment of the first tensors.
# The value is the launcher, all arguments but the first tensors, as addresses and numbers, and the tensors at these
# addresses, which must not be freed.
Ready = tuple[Callable[..., Any], tuple[Any, ...], tuple[Tensor, ...]]
Launches = dict[tuple[Any, ...], Ready]


def launch_again(ready: Ready, first: Sequence[Tensor | None]) -> None:
    """Launch a kernel with other first tensors, which have the same dtypes and alignment."""
    launcher, other_arguments, _ = ready
    launcher(*[0 if x is None else x.data_ptr() for x in first], *other_arguments)


def launch_cached(
    launches: Launches, key: object, first: Sequence[Tensor | None], make: Callable[[], Launch]
) -> Ready | None:
    """Launch a kernel on the current device and stream.

    Args:
        launches: the cache of launches.
        key: the key of the launch in this cache. It determines everything that `make` returns.
        first: the first arguments, which may differ in each call. The kernel does not read those that are None.
        make: makes the launch, if there is none of this key for tensors of these dtypes and this alignment.

    Returns:
        The launch, or None in Triton's interpreter, which compiles nothing.
    """
    addresses = [0 if x is None else x.data_ptr() for x in first]
    full_key = (key, *[None if x is None else x.dtype for x in first], *[address % 16 == 0 for address in addresses])
    cached = launches.get(full_key)
    if cached is not None:
        launcher, other_arguments, _ = cached
        launcher(*addresses, *other_arguments)
        return cached
    made = make()
    compiled = launch(made, first)
    if compiled is None:
        return None
    pointers = [x.data_ptr() for x in made.tensors]
    other_arguments = (*pointers, *made.integers, *made.floats, *made.constants)
    launches[full_key] = compiled[(*made.grid, 1)], other_arguments, made.tensors
    return launches[full_key]


def launch(made: Launch, first: Sequence[Tensor | None] = ()) -> Any:
    """Launch a kernel, and return it compiled. Returns None in Triton's interpreter, which compiles nothing."""
    kernel, grid, tensors, integers, floats, constants, warps, stages = made
    key = (
        kernel.fn,
        tensors[0].device.index,
        constants,
        warps,
        stages,
        tuple([None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in (*first, *tensors)]),
        tuple([i if i == 1 else (i % 16 == 0, i > _INT32_MAX) for i in integers]),
    )
    pointers = [tensors[0] if x is None else x for x in first]
    arguments = (*pointers, *tensors, *integers, *floats, *constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1)](*arguments)
        return compiled
    compiled = kernel[grid](*arguments, num_warps=warps, num_stages=stages)
    if compiled is not None:
        _compiled[key] = compiled
    return compiled
