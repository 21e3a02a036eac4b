"""`ShardedLayout`: a ragged batch whose tokens are divided over the ranks of a mesh.

Dimensions: B sequences, T tokens of the batch, N tokens of this rank, P ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .._offsets import tensor_of, to_device
from ..kernels.call import OPTIONS
from ..layout import SequenceLayout
from .planner import Mask, Piece, ShardPlan, chunk_sizes, make_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")


class ShardedLayout:
    """A ragged batch whose tokens are divided over P ranks. Create it with `SequenceLayout.shard`.

    Each rank has as many tokens as `torch.chunk` would give it, so the tensors of all ranks are a DTensor with
    `Shard(0)`. Its rows are in another order than those of the packed tensor: rank r has the tokens of
    `plan.pieces[r]`.

    Attributes:
        layout: the sequences of the whole batch.
        mesh: the mesh, with one dimension.
        rank: the index of this rank in the mesh.
        plan: the pieces of sequences of each rank.
        total: N.
        rows: (N,) int64, the row of the packed tensor that is in each row of this rank.
        handle: a tensor () that stands for the layout in code that passes tensors only, such as compiled graphs.

    Example:
        >>> import torch, nt_attention as nta  # one process; torchrun starts several
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
        >>> sharded = nta.SequenceLayout.from_lengths([5, 3, 8]).shard(mesh)
        >>> q = k = v = torch.randn(sharded.total, 4, 8)
        >>> nta.varlen_attention(q, k, v, sharded, is_causal=True).shape
        torch.Size([16, 4, 8])
        >>> torch.distributed.destroy_process_group()
    """

    is_sharded: ClassVar[bool] = True

    def __init__(
        self, layout: SequenceLayout, mesh: DeviceMesh, *, is_causal: bool, window_size: tuple[int, int]
    ) -> None:
        if getattr(mesh, "ndim", None) is None:
            raise TypeError(
                f"mesh must be a DeviceMesh with one dimension, got {type(mesh).__name__}: pass "
                'init_device_mesh("cuda", (ranks,)).'
            )
        OPTIONS["window_size"].parse("window_size", window_size)
        if mesh.ndim != 1:
            raise ValueError(f'mesh must have one dimension, got {mesh.ndim}: pass one of them, such as mesh["cp"].')
        if not getattr(layout, "knows_lengths", False):
            raise ValueError(
                "the lengths must be known on the host to divide a batch: make the layout outside of a compiled graph, "
                "and without max_tokens."
            )
        mask = Mask.of(is_causal, window_size)
        self.layout, self.mesh, self.mask = layout, mesh, mask
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.lengths: list[int] = layout.host_offsets.diff().tolist()
        self.plan: ShardPlan = make_plan(self.lengths, self.ranks, mask)
        self.sizes = chunk_sizes(layout.total, self.ranks)
        self.total = self.sizes[self.rank]
        self._cache: dict[Any, Any] = {}
        # a copy without a handle, because the tensor and its owner would not be freed if they referred to each other
        self.handle = tensor_of(copy.copy(self), self.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the mesh."""
        return self.mesh.get_group()

    @property
    def device(self) -> torch.device:
        """The device of the layout."""
        return self.layout.offsets.device

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of this rank, in the order of its rows."""
        return (*self.plan.whole[self.rank], *self.plan.cut[self.rank])

    @property
    def rows(self) -> Tensor:
        return self.cached("rows", lambda: to_device(self._rows_of(self.rank), self.device))

    @property
    def position_ids(self) -> Tensor:
        """(N,) int64, the position of each token of this rank in its sequence."""
        return self.cached("position_ids", lambda: self.layout.position_ids.index_select(0, self.rows))

    @property
    def order(self) -> Tensor:
        """(T,) int64, the rows of the packed tensor in the order of the ranks."""

        def make() -> Tensor:
            return to_device(concatenate([self._rows_of(rank) for rank in range(self.ranks)]), self.device)

        return self.cached("order", make)

    @property
    def inverse_order(self) -> Tensor:
        """(T,) int64, the index in `order` of each row of the packed tensor."""

        def make() -> Tensor:
            return torch.empty_like(self.order).scatter_(
                0, self.order, torch.arange(len(self.order), device=self.device)
            )

        return self.cached("inverse_order", make)

    @property
    def local_layout(self) -> SequenceLayout:
        """The pieces of this rank as sequences."""

        def make() -> SequenceLayout:
            return SequenceLayout.from_lengths([p.stop - p.start for p in self.pieces], device=self.device)

        return self.cached("local_layout", make)

    def local(self, x: Tensor) -> Tensor:
        """The rows of this rank of a packed tensor that every rank has.

        Args:
            x: (T, …).

        Returns:
            (N, …). Its gradient is that of the rows of this rank alone.

        Raises:
            ValueError: `x` has fewer than T rows.
        """
        if x.dim() == 0 or x.shape[0] < self.layout.total:
            raise ValueError(f"x must have the {self.layout.total} rows of the batch, got {tuple(x.shape)}.")
        return x.index_select(0, self.rows)

    def gather(self, x: Tensor) -> Tensor:
        """The packed tensor of the whole batch, on every rank. A collective.

        Args:
            x: (N, …), the rows of this rank.

        Returns:
            (T, …), in the order of the packed tensor. Every rank should compute the same with it: the gradient of `x`
                is the gradient of its rows on this rank, and is not added over ranks.

        Raises:
            ValueError: `x` does not have N rows.
        """
        self.check_rows("x", x)
        gathered: Tensor = _Gather.apply(x, self)
        return gathered

    def check_rows(self, name: str, x: Tensor) -> None:
        """Check that a tensor has the rows of this rank.

        Raises:
            ValueError: it has other rows.
        """
        if x.dim() == 0 or x.shape[0] != self.total:
            raise ValueError(
                f"{name} must have the {self.total} rows of rank {self.rank}, got {tuple(x.shape)}: pass "
                "sharded.local(x) of a packed tensor."
            )

    def cached(self, key: Any, make: Callable[[], _T]) -> _T:
        """The result of `make`, which is computed once for each key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def __repr__(self) -> str:
        return (
            f"ShardedLayout({len(self.lengths)} sequences, {self.layout.total} tokens over {self.ranks} ranks; rank "
            f"{self.rank} has {self.total})"
        )

    def _rows_of(self, rank: int) -> NDArray[np.int64]:
        begins = self.layout.host_offsets.numpy()
        pieces = (*self.plan.whole[rank], *self.plan.cut[rank])
        return concatenate([np.arange(begins[p.sequence] + p.start, begins[p.sequence] + p.stop) for p in pieces])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sharded: ShardedLayout) -> Tensor:
        ctx.sharded = sharded
        size = sharded.sizes[0]
        if x.shape[0] < size:
            x = torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
        gathered = x.new_empty(sharded.ranks * size, *x.shape[1:])
        dist.all_gather(list(gathered.chunk(sharded.ranks)), x.contiguous(), group=sharded.group)
        # only the last ranks have fewer rows, so the row of a token is its index in `order`
        return gathered.index_select(0, sharded.inverse_order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.sharded.rows), None


def concatenate(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`np.concatenate`, also of no arrays."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
