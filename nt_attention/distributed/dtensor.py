"""`DTensor`s from local parts, and in-place changes of `DTensor`s whose local parts are saved for a backward.

Autograd does not detect such changes: they change the version of the `DTensor`, and not that of the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..torch_private import version_of


def from_local(x: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    """The contiguous `DTensor` of this shape, whose part on this rank is `x`. Nothing is communicated or checked."""
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, (placement,), run_check=False, shape=shape, stride=stride)


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
