"""Detects in-place changes of `DTensor`s whose local parts are saved for a backward.

Autograd does not: they change the version of the `DTensor`, and not that of the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_private import version_of


def check_in_backward(x: Tensor, used: Iterable[object]) -> None:
    """Let the backward of `x` raise an error if a `DTensor` from which it was computed was changed in place meanwhile.

    Optimizers with `foreach=True` do not change the version of a `DTensor`, so their changes are not noticed. Nothing
    is checked in a compiled graph.

    Args:
        x: a result, of any shape.
        used: what it was computed from. What is not a `DTensor` is ignored.
    """
    if torch.compiler.is_compiling() or x.grad_fn is None:
        return
    versions = [(each, version_of(each)) for each in used if isinstance(each, DTensor)]

    def check(_: object) -> None:
        for tensor, version in versions:
            if version_of(tensor) != version:
                raise RuntimeError(
                    "a DTensor needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {version_of(tensor)}, expected version {version}. Call "
                    "backward before the change."
                )

    if versions:
        x.grad_fn.register_prehook(check)
