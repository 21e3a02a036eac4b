"""`Exchange`: what the two exchanges have in common.

Dimensions: N query tokens of this rank, M key tokens of this rank, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from .local_attention import Saved, TensorInfo


class Exchange:
    """A call that runs on all ranks, forward and backward.

    Attributes:
        saved: what the backward needs of each call on this rank; None for calls without queries or heads.
        reads_out: whether the backward reads `out`.
    """

    reads_out: ClassVar[bool] = True

    saved: list[Saved | None]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """out (N, H, Dv), and lse (N, H) or None, from query (N, H, D), key (M, G, D) and value (M, G, Dv)."""
        raise NotImplementedError

    def take_tensors(self) -> list[Tensor | None]:
        """Return the tensors that the backward needs, and drop them here."""
        each = [[] if saved is None else saved.take_tensors() for saved in self.saved]
        self._counts = [len(tensors) for tensors in each]
        return [x for tensors in each for x in tensors]

    def split(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """The tensors of each call, from those of `take_tensors`."""
        found, at = [], 0
        for count in self._counts:
            found.append(tensors[at : at + count])
            at += count
        return found

    def backward(
        self,
        tensors: Sequence[Any],
        inputs: Sequence[TensorInfo],
        out: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value.

        Args:
            tensors: those of `take_tensors`.
            inputs: the shapes of query, key and value.
            out: the result of the forward if `reads_out`, else any tensor.
            grad: (N, H, Dv) the gradient of `out`.
            grad_lse: (N, H) the gradient of lse, or None.
        """
        raise NotImplementedError
