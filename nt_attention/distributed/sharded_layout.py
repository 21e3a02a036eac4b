"""`ShardedLayout`: a ragged batch whose tokens are divided over the ranks of a mesh.

Dimensions: B sequences, T tokens of the batch, N tokens of this rank, P ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from ..compiler import outside_of_graphs
from ..functional import format_lengths
from ..kernels.call import OPTIONS
from ..layouts import nested
from ..layouts.cache import copy_of, creating_cached_tensors, tensor_of, to_device
from ..layouts.protocol import Layout, Sharded
from ..layouts.sequence import SequenceLayout, unwrap_each
from ..torch_private import ragged_dim_of
from .dtensor import check_in_backward
from .local_attention import accumulation_dtype
from .planner import Mask, Piece, ShardPlan, chunk_sizes, make_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")
_Tensors = tuple[Tensor, Tensor, Tensor]


class ShardedLayout(Sharded):
    """A ragged batch whose tokens are divided over P ranks. Create it with `SequenceLayout.shard`.

    Each rank has as many tokens as `torch.chunk` would give it, so the tensors of all ranks are a DTensor with
    `Shard(0)`. Its rows are in another order than those of the packed tensor: rank r has the tokens of
    `plan.pieces[r]`.

    Attributes:
        layout: the sequences of the whole batch.
        mesh: the mesh, with one dimension.
        mask: the mask for which work is balanced.
        ranks, rank: P, and the index of this rank in the mesh.
        lengths: the B lengths.
        plan: the pieces of sequences of each rank.
        sizes: for each rank, its number of tokens.
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

    layout: SequenceLayout
    mesh: DeviceMesh
    mask: Mask
    ranks: int
    rank: int

    def __init__(
        self, layout: SequenceLayout, mesh: DeviceMesh, *, is_causal: bool, window_size: tuple[int, int]
    ) -> None:
        check_mesh(mesh)
        OPTIONS["window_size"].parse("window_size", window_size)
        if not getattr(layout, "knows_lengths", False):
            raise ValueError(
                "the lengths must be known on the host to divide a batch: make the layout outside of a compiled graph, "
                "and without max_tokens."
            )
        mask = Mask.of(is_causal, window_size)
        self.layout, self.mesh, self.mask = layout, mesh, mask
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.lengths: list[int] = layout.host.diff().tolist()
        self.plan: ShardPlan = make_plan(self.lengths, self.ranks, mask)
        self.sizes: list[int] = chunk_sizes(layout.total, self.ranks)
        self.total: int = self.sizes[self.rank]
        self._cache: dict[Any, Any] = {}
        # a copy without a handle, because the tensor and its owner would not be freed if they referred to each other
        self.handle: Tensor = tensor_of(copy.copy(self), self.device)

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group of the mesh."""
        return self.mesh.get_group()

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`, which can't copy a process group."""
        return {name: x for name, x in vars(self).items() if name != "group"}

    @property
    def device(self) -> torch.device:
        """The device of the layout."""
        return self.layout.device

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of this rank, in the order of its rows."""
        return self.plan.pieces_of(self.rank)

    @property
    def rows(self) -> Tensor:
        return copy_of(self._own_rows)

    @property
    def _own_rows(self) -> Tensor:
        """`rows` for code of this package, which does not change them. They are not copied."""
        return self.cached("rows", lambda: to_device(self._rows_of(self.rank), self.device))

    @property
    def position_ids(self) -> Tensor:
        """(N,) int64, the position of each token of this rank in its sequence."""
        make = lambda: self.layout.position_ids.index_select(0, self._own_rows)  # noqa: E731
        return copy_of(self.cached("position_ids", make))

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
        """The tokens of this rank of a tensor that every rank has.

        Args:
            x: a packed tensor (T, …), or a jagged NestedTensor (B, j, …) or (B, H, j, D) of the whole batch. A
                NestedTensor whose offsets were not read before is read, which syncs once.

        Returns:
            (N, …), or a NestedTensor whose sequences are the pieces of this rank. All these NestedTensors share the
                offsets of `local_layout`, so they can be added. The gradient is that of the rows of this rank alone.

        Raises:
            ValueError: `x` has fewer than T rows, or other lengths.
            TypeError: `x` is a strided NestedTensor.

        Example:
            >>> import torch, nt_attention as nta  # one process; torchrun starts several
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> layout = nta.SequenceLayout.from_lengths([5, 3])
            >>> sharded = layout.shard(torch.distributed.init_device_mesh("cpu", (1,)))
            >>> x = sharded.local(layout.to_nested(torch.randn(8, 4, 16)))
            >>> out = nta.varlen_attention(x, x, x, sharded, is_causal=True)
            >>> [tuple(piece.shape) for piece in out.unbind()]
            [(5, 4, 16), (3, 4, 16)]
            >>> torch.distributed.destroy_process_group()
        """
        if _is_nested(x):
            return self._local_nested(x)
        if x.dim() == 0 or x.shape[0] < self.layout.total:
            raise ValueError(f"x must have the {self.layout.total} rows of the batch, got {tuple(x.shape)}.")
        return x.index_select(0, self._own_rows)

    def gather(self, x: Tensor, *, sum_gradients: bool = False) -> Tensor:
        """The tensor of the whole batch, on every rank. A collective.

        Args:
            x: the tokens of this rank: (N, …), a DTensor of them, or a jagged NestedTensor of the pieces of this rank.
            sum_gradients: whether the gradient of `x` is the sum over all ranks of the gradients of its rows. The
                backward is a collective then. By default it is the gradient on this rank, and every rank should compute
                the same with the result.

        Returns:
            (T, …), in the order of the packed tensor, or a NestedTensor with the offsets of `layout`.

        Raises:
            ValueError: `x` does not have N rows, or its sequences are not the pieces of this rank.
            TypeError: `x` is a strided NestedTensor.
        """
        if _is_nested(x):
            return self._gather_nested(x, sum_gradients)
        x = self._rows_of_dtensor(x)
        self.check_rows("x", x)
        gathered: Tensor = _Gather.apply(x, self, sum_gradients)
        return gathered

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """The sum over all ranks of a gradient (T, …), for the tokens of this rank: (N, …). A collective."""
        sent = gradient.index_select(0, self.order)
        received = sent.new_empty(self.ranks * self.total, *sent.shape[1:])
        dist.all_to_all_single(received, sent, [self.total] * self.ranks, self.sizes, group=self.group)
        first, *others = received.chunk(self.ranks) if self.total else (received,)
        total = first.to(accumulation_dtype(gradient.dtype))
        for each in others:  # in the order of the ranks
            total = total + each
        return total.to(gradient.dtype)

    @outside_of_graphs
    def _local_nested(self, x: Tensor) -> Tensor:
        values, ragged_dim = _values_of_jagged(x, self.layout, "the batch")
        return self.local_layout.wrap(values.index_select(0, self._own_rows), ragged_dim)

    @outside_of_graphs
    def _gather_nested(self, x: Tensor, sum_gradients: bool) -> Tensor:
        values, ragged_dim = _values_of_jagged(x, self.local_layout, self._pieces_of_rank)
        self.check_rows("x", values)
        return self.layout.wrap(cast(Tensor, _Gather.apply(values, self, sum_gradients)), ragged_dim)

    @outside_of_graphs
    def unwrap(
        self, query: Tensor, key: Tensor, value: Tensor, key_sharded: ShardedLayout | None = None
    ) -> tuple[_Tensors, Callable[..., Tensor]]:
        """Convert the tokens of this rank to packed tensors. Inputs that are one object stay one object.

        Syncs once for each offsets tensor of NestedTensors that was not read before. Those of `local` were.

        Args:
            query, key, value: packed tensors (N, …), DTensors with `Shard(0)` on the mesh, or NestedTensors whose
                sequences are the pieces of this rank.
            key_sharded: the layout of key and value; None if it is this one.

        Returns:
            The packed query, key and value, and a function that converts a result (N, …) to the form of `query`. If its
                second argument is True, the ragged dimension of a NestedTensor is 1.

        Raises:
            ValueError: the tokens are not those of this rank, a DTensor has another mesh or placement, or the two
                layouts do not match.
            TypeError: an input is not a tensor, NestedTensors are mixed with other tensors, or `key_sharded` is not a
                `ShardedLayout`.
        """
        keys = self if key_sharded is None else key_sharded
        if not isinstance(keys, ShardedLayout):
            raise TypeError(f"key_layout must be a ShardedLayout too, got {type(keys).__name__}.")
        if len(keys.lengths) != len(self.lengths) or keys.mesh != self.mesh:
            raise ValueError("layout and key_layout must have as many sequences, on one mesh.")
        for name, x in zip(("query", "key", "value"), (query, key, value), strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        kinds = nested.are_nested(query, key, value)
        if any(kinds) and not all(kinds):
            raise TypeError("query, key and value must be three NestedTensors, or none of them may be one.")
        packed, restore = (self._pack_nested if any(kinds) else self._pack_dtensors)(query, key, value, keys)
        for name, x, layout in zip(("query", "key", "value"), packed, (self, keys, keys), strict=True):
            layout.check_rows(name, x)

        @outside_of_graphs
        def restore_outside(x: Tensor, tokens_first: bool = False) -> Tensor:
            return restore(x, tokens_first)

        return packed, restore_outside

    def _pack_nested(
        self, query: Tensor, key: Tensor, value: Tensor, keys: ShardedLayout
    ) -> tuple[_Tensors, Callable[..., Tensor]]:
        """`unwrap` for NestedTensors."""
        q, k, v = unwrap_each(query=query, key=key, value=value)
        for name, x, layout in (("query", q, self), ("key", k, keys), ("value", v, keys)):
            _check_lengths(name, x.layout, layout.local_layout, layout._pieces_of_rank)
        return (q.values, k.values, v.values), q.rewrap

    def _pack_dtensors(
        self, query: Tensor, key: Tensor, value: Tensor, _: ShardedLayout
    ) -> tuple[_Tensors, Callable[..., Tensor]]:
        """`unwrap` for DTensors. Packed tensors stay as they are."""
        different = {id(x): self._rows_of_dtensor(x) for x in (query, key, value)}

        def restore(x: Tensor, tokens_first: bool = False) -> Tensor:
            check_in_backward(x, (query, key, value))
            return self._as_dtensor(x) if isinstance(query, DTensor) else x

        return (different[id(query)], different[id(key)], different[id(value)]), restore

    @property
    def _pieces_of_rank(self) -> str:
        return f"the pieces of rank {self.rank}"

    def _rows_of_dtensor(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        if x.device_mesh != self.mesh or tuple(x.placements) != (Shard(0),):
            raise ValueError(
                f"a DTensor must be Shard(0) on the mesh of the layout, got {x.placements} on {x.device_mesh}."
            )
        return x.to_local()

    def _as_dtensor(self, x: Tensor) -> Tensor:
        shape = torch.Size((self.layout.total, *x.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, (Shard(0),), run_check=False, shape=shape, stride=stride)

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

    def found(self, key: Any) -> Any:
        """The result that `cached` keeps for a key, or None."""
        return self._cache.get(key)

    @outside_of_graphs
    def cached(self, key: Any, make: Callable[[], _T]) -> _T:
        """The result of `make`, which is computed once for each key."""
        if key not in self._cache:
            with creating_cached_tensors():
                self._cache[key] = make()
        return self._cache[key]

    def __repr__(self) -> str:
        return (
            f"ShardedLayout({len(self.lengths)} sequences, {self.layout.total} tokens over {self.ranks} ranks; rank "
            f"{self.rank} has {self.total})"
        )

    def _rows_of(self, rank: int) -> NDArray[np.int64]:
        """The rows of the packed tensor that a rank has, in its order."""
        begins = self.layout.host.numpy()
        pieces = self.plan.pieces_of(rank)
        return concatenate([np.arange(begins[p.sequence] + p.start, begins[p.sequence] + p.stop) for p in pieces])


class _Gather(torch.autograd.Function):
    """(N, …) on each rank → (T, …) on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharded: ShardedLayout, sum_gradients: bool) -> Tensor:
        ctx.sharded, ctx.sum_gradients = sharded, sum_gradients
        size = sharded.sizes[0]
        if x.shape[0] < size:
            x = torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
        gathered = x.new_empty(sharded.ranks * size, *x.shape[1:])
        dist.all_gather(list(gathered.chunk(sharded.ranks)), x.contiguous(), group=sharded.group)
        # only the last ranks have fewer rows, so the row of a token is its index in `order`
        return gathered.index_select(0, sharded.inverse_order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sharded: ShardedLayout = ctx.sharded
        if ctx.sum_gradients:
            return sharded.sum_gradients(grad), None, None
        return grad.index_select(0, sharded._own_rows), None, None


def check_mesh(mesh: Any) -> None:
    """Check that a mesh has one dimension.

    Raises:
        TypeError: it is not a DeviceMesh.
        ValueError: it has several dimensions.
    """
    if getattr(mesh, "ndim", None) is None:
        raise TypeError(
            f"mesh must be a DeviceMesh with one dimension, got {type(mesh).__name__}: pass one, such as "
            'mesh["cp"] or init_device_mesh("cuda", (ranks,)).'
        )
    if mesh.ndim != 1:
        raise ValueError(f'the mesh must have one dimension, got {mesh.ndim}: pass one of them, such as mesh["cp"].')


def _is_nested(x: object) -> bool:
    return nested.are_nested(x)[0]


def _values_of_jagged(x: Tensor, layout: SequenceLayout, whose: str) -> tuple[Tensor, int]:
    """The packed tokens of a jagged NestedTensor with the lengths of `layout`, and its ragged dimension."""
    if x.layout != torch.jagged:
        raise TypeError("x is a strided NestedTensor: make it with layout=torch.jagged.")
    (unwrapped,) = unwrap_each(x=x, for_weights=False)
    _check_lengths("x", unwrapped.layout, layout, whose)
    return unwrapped.values, ragged_dim_of(x)


def _check_lengths(name: str, given: Layout, layout: Layout, whose: str) -> None:
    """Raise a ValueError if a NestedTensor has other lengths. Needs no sync, because both layouts have been read."""
    if not given.same_lengths(layout):
        raise ValueError(
            f"{name} must have the lengths of {whose}, {format_lengths(layout)}, got {format_lengths(given)}: pass "
            f"{'a NestedTensor of all sequences' if whose == 'the batch' else 'sharded.local(nested)'}."
        )


def concatenate(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`np.concatenate`, also of no arrays."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
