"""`SequenceLayout`: the rows at which each sequence of a packed batch begins and ends.

Dimensions: B sequences, T tokens in the whole batch, L positions in a padded row.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..compiler import check_readable, is_compiling, is_traced, is_tracing, outside_of_graphs, refuse_tracers
from ..operators import define
from ..torch_private import is_transformed
from . import nested as nested_tensors
from .bounded import BoundedLayout
from .cache import (
    Cache,
    cache_with,
    copy_of,
    creating_cached_tensors,
    find_cached,
    no_modes,
    offsets_of_ends,
    offsets_of_lengths,
    on_host,
    owner_of,
    plain,
    read_offsets,
    starts_of_positions,
    to_device,
)
from .nested import Unwrapped
from .protocol import Layout, Sharded
from .rows import fill_rows_from, scatter_rows
from .traced import TracedLayout

if TYPE_CHECKING:
    from .cache import Ints

_LAYOUT = "layout"  # of an offsets tensor, with a bound or None


class SequenceLayout(Layout):
    """The lengths of the sequences in a ragged batch, and the rows at which they begin in a packed tensor.

    Create a layout with one of its `from_*` constructors. A constructor syncs with the device at most once
    (`from_nested`: at most twice). Later uses of the layout need no sync. A layout copies its offsets when it is made,
    and never changes: it keeps the old lengths if the tensor that it was made from is changed in place. Values that
    depend on it are cached, such as `position_ids` and the choice of a backend. Layouts made from the same offsets
    tensor share this cache.

    Attributes:
        batch_size: B, the number of sequences.
        device: the device of the layout.
        total: T, the number of tokens.
        max_seqlen: the length of the longest sequence, or the bound that was passed to `from_offsets`.
        min_seqlen: the length of the shortest sequence.
        sum_of_squares: the sum of the squared lengths. In self-attention without a mask, it is the number of (query,
            key) pairs.
        padded_length: L of the attention mask that the layout was made from; None if it was made in another way.
        has_holes: whether a row of that mask has padding between its tokens; else False.

    All tensors that a layout returns are copies: a change of them in place does not change the layout.

    Example:
        >>> import nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 0, 3])
        >>> layout
        SequenceLayout(3 sequences, 5 tokens, max_seqlen=3, cpu)
        >>> layout.offsets
        tensor([0, 2, 2, 5])
    """

    first: int  # the first offset, which is not 0 in some NestedTensors
    host: Tensor
    _offsets: Tensor  # (B+1,) int32, which kernels and operators get
    _longest: int
    _padded_index: Tensor | None
    _copies: dict[torch.dtype, weakref.ref[Tensor]]  # of the offsets, which users have

    def __init__(
        self,
        ends: Ints,
        offsets: Tensor,
        *,
        padded_length: int | None = None,
        padded_index: Tensor | None = None,
        has_holes: bool = False,
    ) -> None:
        """Use a `from_*` constructor. `ends` (B+1,) int64 and `offsets` (B+1,) int32 have the same numbers."""
        lengths = ends[1:] - ends[:-1]
        longest = int(lengths.max(initial=0))
        self.__dict__.update(
            batch_size=len(lengths),
            device=offsets.device,
            first=int(ends[0]),
            total=int(ends[-1] - ends[0]),
            max_seqlen=longest,
            min_seqlen=int(lengths.min()) if lengths.size else 0,
            sum_of_squares=int(lengths.dot(lengths)),
            padded_length=padded_length,
            has_holes=has_holes,
            host=torch.from_numpy(ends),
            cache=Cache(offsets.device),
            _offsets=offsets,
            _longest=longest,
            _padded_index=padded_index,
            _copies={},
        )
        offsets.untyped_storage().owner = weakref.ref(self)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"layouts do not change: make a new one instead of setting {name}.")

    def __repr__(self) -> str:
        sizes = f"{self.batch_size} sequences, {self.total} tokens, max_seqlen={self.max_seqlen}"
        return f"SequenceLayout({sizes}, {self.device})"

    @classmethod
    @outside_of_graphs  # in a graph, the numbers would become constants or fake tensors
    def of_numbers(cls, lengths: Ints, device: torch.device, **of_mask: Any) -> SequenceLayout:
        """The layout of `lengths` (B,) on the host, without a sync. `of_mask` is as for the class."""
        with creating_cached_tensors():
            return cls(*offsets_of_lengths(lengths, device), **of_mask)

    @classmethod
    def read(cls, offsets: Tensor, max_seqlen: int | None = None) -> SequenceLayout:
        """The layout of `offsets` (B+1,), with a bound if it is not None.

        This syncs the first time that a tensor object is passed, and after each in-place change of it. On a GPU,
        inference tensors are read each time, because they have no version counter. So are the outputs of a compiled
        function that runs as a CUDA graph: each replay writes other values to them, without a change of their version.
        """
        if is_transformed():
            offsets = plain(offsets)

        def build() -> SequenceLayout:
            if max_seqlen is not None:
                return cls.read(offsets).with_bound(max_seqlen)
            with creating_cached_tensors():
                return cls(*read_offsets(offsets))

        layout: SequenceLayout | None = find_cached(offsets, (_LAYOUT, max_seqlen)) or _owner(offsets)
        if layout is None:
            return cache_with(offsets, (_LAYOUT, max_seqlen), build)
        return layout if max_seqlen in (None, layout.max_seqlen) else layout.with_bound(max_seqlen)

    def with_bound(self, max_seqlen: int | None) -> SequenceLayout:
        """A layout of the same sequences with another bound, and not of a mask. It shares the cache."""
        if max_seqlen is not None and max_seqlen < self._longest:
            raise ValueError(
                f"max_seqlen={max_seqlen} is below the longest sequence of {self._longest} tokens: "
                "pass a larger bound, or leave it out."
            )
        longest = self._longest if max_seqlen is None else max_seqlen
        if longest == self.max_seqlen and self._padded_index is None:
            return self
        layout = object.__new__(SequenceLayout)
        without_mask = {"padded_length": None, "_padded_index": None, "has_holes": False}
        # operators find `_unbound` by the offsets
        layout.__dict__.update(self.__dict__, max_seqlen=longest, _unbound=self, **without_mask)
        return layout

    @classmethod
    def from_offsets(cls, offsets: Tensor, max_seqlen: int | None = None, max_tokens: int | None = None) -> Layout:
        """Create a layout from the offsets of its sequences.

        The first call with a tensor syncs with its device once. Later calls with the same tensor need no sync. The
        layout has a copy of the offsets. So an in-place change of `offsets` does not change it: it keeps the old
        lengths, also in a backward, and the next call reads the new ones. On a GPU, writes to `offsets.data` are not
        detected, because PyTorch does not record them.

        Under torch.compile and torch.export, the lengths are not read while the graph is traced. They are read
        when the graph runs.

        With both bounds, offsets on a GPU are never read by the host. Such a call can be captured in a CUDA graph, and
        the offsets may change whenever the graph is replayed. Packed tensors then have `max_tokens` rows or more, and
        the layout's `total` is `max_tokens`. Rows past the last offset get the output 0 and the gradient 0. Offsets
        that decrease, do not begin at 0, or exceed a bound give NaN. The backends `token_tiled`, `torch_flash` and,
        without gradients, `split_kv` support such layouts.

        Args:
            offsets: (B+1,) int32 or int64, from 0 and never decreasing. Sequence b has the rows `offsets[b]` to
                `offsets[b + 1] - 1`.
            max_seqlen: an upper bound of the lengths, which becomes the layout's `max_seqlen`. `pad` pads to this
                length, so batches with the same bound and B get the same shape.
            max_tokens: an upper bound of the number of tokens. It needs `max_seqlen`. On a CPU the lengths are read
                all the same, and compared with the bounds, except in a graph.

        Returns:
            The layout, on the device of `offsets`.

        Raises:
            TypeError: `offsets` is not a tensor.
            ValueError: the offsets have a wrong shape, dtype or order, or exceed a bound, a bound is not an integer, or
                `max_tokens` is given without `max_seqlen`.

        Example:
            >>> import torch, nt_attention as nta
            >>> nta.SequenceLayout.from_offsets(torch.tensor([0, 2, 2, 5])).lengths
            tensor([2, 0, 3])
        """
        refuse_tracers()
        if max_tokens is not None and max_seqlen is None:
            raise ValueError(f"max_tokens={max_tokens} needs max_seqlen, the bound of the longest sequence.")
        if not isinstance(offsets, Tensor):
            raise TypeError(
                f"offsets must be a torch.Tensor, got {type(offsets).__name__}: pass torch.tensor([0, 3, 7])."
            )
        if max_seqlen is not None and max_tokens is not None and not offsets.is_cpu:
            of_bounds = TracedLayout if is_traced(offsets) else BoundedLayout.of
            return of_bounds(offsets, max_seqlen, max_tokens)
        if is_traced(offsets):
            return cls.in_graph(offsets, None, max_seqlen)
        if (bounded := BoundedLayout.with_offsets(offsets)) is not None:
            return bounded
        layout = cls.read(offsets, _integer("max_seqlen", max_seqlen))
        if layout.first:
            raise ValueError(
                f"offsets must begin at 0, got {layout.first}: remove the rows before the first sequence, and pass "
                "offsets - offsets[0]."
            )
        most = _integer("max_tokens", max_tokens)
        if most is not None and most < layout.total:
            raise ValueError(f"max_tokens={max_tokens} is below the {layout.total} tokens of the offsets.")
        return layout

    @classmethod
    def in_graph(
        cls, numbers: Tensor, token: Tensor | None = None, max_seqlen: int | None = None, rows: int = 0
    ) -> TracedLayout:
        """The layout of offsets (B+1,), or of positions (1, L) or (R, L) if `rows` is R.

        They are read when the graph runs; with the `token` of a model's forward, once in it.
        """
        return TracedLayout(torch.ops.nt_attention.offsets.default(numbers, token, rows), max_seqlen)

    @classmethod
    def in_operator(cls, offsets: Tensor) -> Layout:
        """The layout of the offsets that an operator in a graph gets, from `in_graph` or of a layout from outside."""
        owner = owner_of(offsets)
        if type(owner) is _InGraph and offsets.numel() == owner.size:
            return owner.layout
        return BoundedLayout.with_offsets(offsets) or _owner(offsets) or cls(*read_offsets(offsets))

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Tensor, *, device: torch.device | str | None = None
    ) -> SequenceLayout:
        """Create a layout from the lengths of its sequences.

        Syncs once if `lengths` is a tensor on a GPU. A list needs no sync.

        Args:
            lengths: (B,) integers, as a list or a tensor. A length may be 0.
            device: the device of the layout. The default is the device of `lengths` if it is a tensor, else the CPU.

        Returns:
            The layout.

        Raises:
            ValueError: the lengths are negative, not integers, not one-dimensional, or add up to more than 2³¹ − 1.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).offsets
            tensor([0, 2, 2, 5])
        """
        refuse_tracers()
        if isinstance(lengths, Tensor):
            check_readable(lengths, "lengths")
        with creating_cached_tensors():
            numbers = _as_tensor(lengths)
            host = numbers.detach().to("cpu", torch.int64).numpy()
        return cls.of_numbers(host, numbers.device if device is None else torch.device(device))

    @classmethod
    def from_nested(cls, nested: Tensor) -> Layout:
        """Create a layout from a NestedTensor.

        Syncs once for a new offsets tensor, and once more for a new tensor of `lengths`, if it has holes.

        Args:
            nested: (B, j, …) or (B, H, j, D), where j is the ragged dimension, with layout `torch.jagged` or
                `torch.strided`. Rows that belong to no sequence (holes) are not part of the layout.

        Returns:
            The layout of its tokens.

        Raises:
            TypeError: `nested` is not a NestedTensor.
            ValueError: the ragged dimension is not 1 or 2, or sequences overlap.

        Example:
            >>> import torch, nt_attention as nta
            >>> nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)
            >>> nta.SequenceLayout.from_nested(nested).lengths
            tensor([2, 3])
        """
        if not any(nested_tensors.are_nested(nested)):
            what = f"a dense tensor {tuple(nested.shape)}" if isinstance(nested, Tensor) else type(nested).__name__
            raise TypeError(
                f"nested must be a NestedTensor, got {what}: make one with torch.nested.nested_tensor(sequences, "
                "layout=torch.jagged), or make a layout with SequenceLayout.from_lengths(lengths)."
            )
        (unwrapped,) = unwrap_each(nested=nested)
        layout = unwrapped.layout
        if isinstance(layout, SequenceLayout) and nested.layout == torch.jagged:
            offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
            if offsets.dtype == torch.int64 and find_cached(offsets, (_LAYOUT, None)) is layout:
                layout._copies[torch.int64] = weakref.ref(offsets)
        return layout

    @classmethod
    def from_attention_mask(cls, mask: Tensor) -> SequenceLayout:
        """Create a layout from the mask of a padded batch, such as the `attention_mask` of Hugging Face.

        Padding may be on the left, on the right, or between tokens. `pad` puts tokens back to their positions in the
        mask. Syncs once.

        Args:
            mask: (B, L), True or 1 at tokens, False or 0 at padding. A `key_padding_mask` is True at padding, so pass
                `~key_padding_mask`.

        Returns:
            The layout of the tokens.

        Raises:
            ValueError: `mask` is not two-dimensional, or has a value other than 0 and 1, as an additive mask does.

        Example:
            >>> import torch, nt_attention as nta
            >>> layout = nta.SequenceLayout.from_attention_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
            >>> layout.pack(torch.tensor([[5, 6, 0], [7, 8, 9]]))
            tensor([5, 6, 7, 8, 9])
        """
        if not isinstance(mask, Tensor) or mask.is_nested or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) and not mask.is_nested else type(mask).__name__
            raise ValueError(f"mask must be a (B, L) tensor with 1 at tokens and 0 at padding, got {shape}.")
        check_readable(mask, "mask")
        return layout_of_mask(_token_mask(plain(mask).detach()), mask.device)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> SequenceLayout:
        """Create a layout from the positions of packed tokens.

        A sequence begins at the start of each row, and at each position that is not the previous position plus 1. The
        first position of a sequence may be any number, such as 2 in RoBERTa. Syncs once.

        Args:
            position_ids: (T,) or (R, T) integers. Several rows are concatenated, in their order.

        Returns:
            The layout of the sequences.

        Raises:
            ValueError: `position_ids` is not an integer tensor with one or two dimensions.

        Example:
            >>> import torch, nt_attention as nta
            >>> nta.SequenceLayout.from_position_ids(torch.tensor([0, 1, 0, 1, 2])).lengths
            tensor([2, 3])
        """
        if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2) or not _is_integer(position_ids):
            got = type(position_ids).__name__
            if isinstance(position_ids, Tensor):
                got = f"shape {tuple(position_ids.shape)} and {position_ids.dtype}"
            raise ValueError(f"position_ids must be a (T,) or (R, T) tensor of integers, got {got}.")
        check_readable(position_ids, "position_ids")
        return layout_where(starts_of_positions(position_ids), position_ids.device)

    @property
    def device_offsets(self) -> Tensor:
        return self._offsets

    @property
    def operator_offsets(self) -> Tensor:
        return self._offsets

    @property
    def offsets(self) -> Tensor:
        """(B+1,) int64, the first row of each sequence, then the end of the last sequence.

        It is one copy as long as somebody has it and it is unchanged, because NestedTensors can only be added if they
        share this object. For the same reason, it is that of the NestedTensor that the layout was made from, if any.
        """
        return self._copy(torch.int64)

    @property
    def cu_seqlens(self) -> Tensor:
        """(B+1,) int32, the same numbers."""
        return self._copy(torch.int32)

    def _copy(self, dtype: torch.dtype) -> Tensor:
        """A copy of the offsets, with which `from_offsets` finds this layout."""
        if is_compiling():
            return self._offsets.to(dtype, copy=True)
        reference = self._copies.get(dtype)
        tensor = None if reference is None else reference()
        if tensor is None or find_cached(tensor, (_LAYOUT, None)) is None:
            layout = self.with_bound(None)
            with creating_cached_tensors():
                tensor = self._offsets.to(dtype, copy=True)
            cache_with(tensor, (_LAYOUT, None), lambda: layout)
            self._copies[dtype] = weakref.ref(tensor)
        return tensor

    @property
    def host_offsets(self) -> Tensor:
        """(B+1,) int64, a copy of `offsets` on the CPU."""
        if is_compiling():
            return copy_of(self.host)
        with no_modes():  # which would make a fake tensor of it
            return copy_of(self.host)

    @property
    def padded_index(self) -> Tensor | None:  # type: ignore[override]
        """(T,) int64, the position of each token in the mask that the layout was made from, flattened to (B·L)."""
        return None if self._padded_index is None else copy_of(self._padded_index)

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        ids, positions = self.cached("rows", self._locate)
        if rows > self.total:
            ids, positions = (torch.nn.functional.pad(x, (0, rows - self.total)) for x in (ids, positions))
        return ids, positions

    def _locate(self) -> tuple[Tensor, Tensor]:
        """See `locate_rows`, for all tokens."""
        offsets, row = self.safe_offsets, torch.arange(self.total, device=self.device)
        if self.device.type == "cpu":  # faster on a CPU; on a GPU it launches three times as many kernels
            ids = torch.arange(self.batch_size, device=self.device)
            ids = ids.repeat_interleave(offsets.diff(), output_size=self.total)
        else:
            ids = torch.searchsorted(offsets[1:], row, right=True)
        return ids, row - offsets[ids]

    @property
    def safe_offsets(self) -> Tensor:
        return self.cached("int64", self._offsets.long)

    def __reduce__(self) -> tuple[Any, ...]:
        of_mask = {name: self.__dict__[name] for name in ("padded_length", "has_holes")}
        of_mask["padded_index"] = self._padded_index
        return _restore, (np.diff(self.host.numpy()), self.device, self.max_seqlen, of_mask)

    @staticmethod
    def require(layout: object, name: str) -> Layout:
        """Check that an argument is a layout. In a graph, return one that stands for it with any lengths.

        Raises:
            TypeError: `layout` is not a layout.
            ValueError: it has bounds, and its offsets were changed in place.
        """
        if not isinstance(layout, Layout):
            raise TypeError(
                f"{name} must be a SequenceLayout, got {type(layout).__name__}: pass "
                "SequenceLayout.from_offsets(offsets), .from_lengths(lengths) or .from_attention_mask(mask)."
            )
        if isinstance(layout, TracedLayout) and not is_traced(layout.operator_offsets):  # outside of graphs
            return layout.read()
        if is_tracing():
            return TracedLayout(layout.operator_offsets, *(layout.bounds or ()))
        if isinstance(layout, BoundedLayout):
            layout.check_unchanged(name)
        return layout

    def same_lengths(self, other: Layout) -> bool:
        """Whether both layouts have the same lengths; if they know only bounds, whether they are one. Needs no sync.

        Example:
            >>> import torch, nt_attention as nta
            >>> layout = nta.SequenceLayout.from_lengths([2, 3])
            >>> layout.same_lengths(nta.SequenceLayout.from_offsets(torch.tensor([0, 2, 5])))
            True
        """
        if not isinstance(other, SequenceLayout):
            return False
        return self is other or torch.equal(self.host, other.host)

    def padded_right(self) -> SequenceLayout:
        return self.with_bound(None)

    def extended(self, extra: int) -> SequenceLayout:
        return self._derived(("extended", extra), lambda lengths: lengths + extra)

    @property
    def reversed(self) -> SequenceLayout:
        return self._derived("reversed", lambda lengths: lengths[::-1])

    def _derived(self, key: object, lengths: Callable[[Ints], Ints]) -> SequenceLayout:
        return self.cached(key, lambda: self.of_numbers(lengths(np.diff(self.host.numpy())), self.device))

    def pack(self, padded: Tensor) -> Tensor:
        """Remove the padding from a batch. Needs no sync.

        Args:
            padded: (B, L, …). If the layout was made from a mask, L must be that of the mask, and tokens are where the
                mask has them. If not, tokens come first in each row, and L is at least the longest length.

        Returns:
            The tokens, (T, …).

        Raises:
            TypeError: `padded` is not a tensor.
            ValueError: B, L or the device does not fit the layout.

        Example:
            >>> import torch, nt_attention as nta
            >>> layout = nta.SequenceLayout.from_lengths([2, 1])
            >>> layout.pack(torch.tensor([[5, 6, 0], [7, 0, 0]]))
            tensor([5, 6, 7])
        """
        self._check_usable(padded, "padded")
        length = padded.shape[1] if padded.dim() >= 2 else -1
        fits = length >= self._longest if self.padded_length is None else length == self.padded_length
        if not fits or padded.shape[0] != self.batch_size:
            wanted = f"{self._longest} or more" if self.padded_length is None else f"{self.padded_length}"
            raise ValueError(
                f"padded must be ({self.batch_size}, {wanted}, …) for this layout, got {tuple(padded.shape)}."
            )
        return padded.flatten(0, 1).index_select(0, self.index_of_tokens(length))

    def pad(self, values: Tensor, value: float = 0.0) -> Tensor:
        """Convert packed tokens to a padded batch. Needs no sync.

        Args:
            values: (T, …). Rows after the first T are not used.
            value: the value at padding.

        Returns:
            The batch, (B, L, …). If the layout was made from a mask, L is that of the mask, and tokens are where the
            mask has them. If not, L is `max_seqlen`, and tokens come first in each row.

        Raises:
            TypeError: `values` is not a tensor.
            ValueError: too few rows, another device.

        Example:
            >>> import torch, nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 1]).pad(torch.tensor([5, 6, 7]), value=-1)
            tensor([[ 5,  6],
                    [ 7, -1]])
        """
        self._check_usable(values, "values")
        self.check_rows(values, "values")
        length = self.padded_length if self.padded_length is not None else self.max_seqlen
        shape = (self.batch_size, length, *values.shape[1:])
        return scatter_rows(values[: self.total], self.index_of_tokens(length), shape, value)

    def to_nested(self, values: Tensor) -> Tensor:
        """Convert packed tokens to a jagged NestedTensor. Needs no sync.

        NestedTensors from the same layout share its `offsets` tensor, so they can be added. Gradients flow to `values`.

        Args:
            values: (T, …). The result is a view of this tensor.

        Returns:
            A NestedTensor (B, j, …) with layout `torch.jagged`.

        Raises:
            TypeError: `values` is not a tensor.
            ValueError: too few rows, another device.

        Example:
            >>> import torch, nt_attention as nta
            >>> nested = nta.SequenceLayout.from_lengths([2, 3]).to_nested(torch.zeros(5, 8))
            >>> [tuple(x.shape) for x in nested.unbind()]
            [(2, 8), (3, 8)]
        """
        self._check_usable(values, "values")
        self.check_rows(values, "values")
        return self.wrap(values)

    def wrap(self, values: Tensor, ragged_dim: int = 1) -> Tensor:
        """`to_nested` of checked values. With the ragged dimension 2, the result is (B, H, j, D)."""
        return nested_tensors.wrap(values, self.offsets, self, ragged_dim=ragged_dim)

    def shard(self, mesh: Any, *, is_causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Any:
        """Divide the tokens over the ranks of a mesh, for context parallelism. Needs no sync and no communication.

        Each rank gets as many tokens as `torch.chunk` would give it, and about the same work. Every rank must call it
        with the same lengths.

        Args:
            mesh: a `torch.distributed.device_mesh.DeviceMesh` with one dimension, such as `mesh["cp"]`.
            is_causal, window_size: the mask for which work is balanced, as for `varlen_attention`. Results are right
                with any mask.

        Returns:
            A `nt_attention.distributed.ShardedLayout`. `varlen_attention` takes it as `layout`.

        Raises:
            TypeError: `mesh` is not a DeviceMesh.
            ValueError: the mesh has several dimensions, `window_size` is invalid, or the lengths are not known on the
                host.

        Example:
            >>> import torch, nt_attention as nta  # one process; torchrun starts several
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
            >>> sharded = nta.SequenceLayout.from_lengths([2, 3]).shard(mesh["cp"])
            >>> local = sharded.local(torch.arange(5))
            >>> sharded.gather(local)
            tensor([0, 1, 2, 3, 4])
            >>> torch.distributed.destroy_process_group()
        """
        return Sharded.divide(self, mesh, is_causal=is_causal, window_size=window_size)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        return values if values.shape[0] == self.total else fill_rows_from(self.total, values, value)

    def _check_usable(self, tensor: object, name: str) -> None:
        """Check that `tensor` is a plain tensor on this layout's device."""
        refuse_tracers()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.is_nested:
            raise TypeError(f"{name} must be a plain tensor, got a NestedTensor: pass its .values().")
        self.check_device(tensor, name)

    def index_of_tokens(self, length: int) -> Tensor:
        """(T,) int64, the position of each token in a padded batch that is flattened to (B·length)."""
        if self._padded_index is not None:
            return self._padded_index

        def build() -> Tensor:
            ids, positions = self.locate_rows(self.total)
            return ids * length + positions

        return self.cached(("padded_index", length), build)


def unwrap_each(*, for_weights: bool = True, **named: Tensor) -> tuple[Unwrapped, ...]:
    """Convert NestedTensors to packed tokens. Those with the same offsets share a layout; see `nested.take_apart`."""
    return nested_tensors.take_apart(SequenceLayout, for_weights, named)


def _restore(lengths: Ints, device: torch.device, max_seqlen: int, of_mask: dict[str, Any]) -> SequenceLayout:
    """A layout from a pickle."""
    layout = SequenceLayout.of_numbers(lengths, device, **of_mask)
    return layout if of_mask["padded_index"] is not None else layout.with_bound(max_seqlen)


@outside_of_graphs  # as `SequenceLayout.of_numbers`
def layout_of_mask(is_token: Ints, device: torch.device) -> SequenceLayout:
    """The layout of a padded batch on `device`, from its mask (B, L) on the host, True at tokens."""
    batch, length = is_token.shape
    index = is_token.reshape(-1).nonzero()[0]
    ends = index.searchsorted(length * np.arange(batch + 1))
    first, end = ends[:-1], ends[1:]
    lengths = end - first
    if not lengths.all():
        first, end, lengths = (x[lengths > 0] for x in (first, end, lengths))
    has_holes = bool((index[end - 1] - index[first] >= lengths).any())
    with creating_cached_tensors():
        offsets, of_tokens = offsets_of_ends(ends, device), to_device(index, device)
        return SequenceLayout(ends, offsets, padded_length=length, padded_index=of_tokens, has_holes=has_holes)


def layout_of_padding(padding: Tensor) -> SequenceLayout | None:
    """The layout of a padded batch, from its padding mask (B, L): True at padding, or numbers that are added to scores.

    None if numbers other than 0 and −inf are in the mask. Syncs once.
    """
    if padding.dtype == torch.bool:
        return layout_of_mask(~on_host(padding), padding.device)
    is_token, is_padding = on_host(torch.stack([padding == 0, padding == -torch.inf]))
    return layout_of_mask(is_token, padding.device) if (is_token | is_padding).all() else None


def layout_where(begins: Ints, device: torch.device) -> SequenceLayout:
    """A layout of N tokens on `device`. A sequence begins wherever `begins` (N,) is not 0, as `begins[0]` must be."""
    return SequenceLayout.of_numbers(np.diff(begins.nonzero()[0], append=len(begins)), device)


def _as_tensor(lengths: Sequence[int] | Tensor) -> Tensor:
    how = "pass a list such as [5, 0, 9]. For a mask, use SequenceLayout.from_attention_mask."
    try:
        numbers = plain(lengths) if isinstance(lengths, Tensor) else torch.tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"lengths must be one integer for each sequence, got {lengths!r}: {how}") from error
    if numbers.dim() != 1 or not (_is_integer(numbers) or numbers.numel() == 0):
        got = f"shape {tuple(numbers.shape)} and {numbers.dtype}"
        raise ValueError(f"lengths must be one integer for each sequence, got {got}: {how}")
    return numbers


def _token_mask(mask: Tensor) -> Ints:
    """`mask` (B, L) as booleans on the host, read in one sync."""
    if mask.dtype == torch.bool:
        return on_host(mask)
    values = on_host((mask != 0) + 2 * (mask != (mask != 0)))  # 3 where the mask is neither 0 nor 1
    if (values > 1).any():
        raise ValueError(
            f"mask has the value {mask.flatten()[int(values.argmax())].item()}: it must be 1 at tokens and 0 at "
            "padding. For an additive mask, pass mask == 0."
        )
    return values > 0


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _integer(name: str, value: Any) -> int | None:
    """An integer, an integer tensor of one value, or None. A float would be rounded."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None


# Offsets in a graph


class _InGraph(NamedTuple):
    """The owner of offsets that a graph has made. A compiler may reuse their memory for other numbers in this graph.

    So only the operators to which the graph passes them may trust it, and nothing that reads offsets.

    Attributes:
        layout: of the offsets. The tensor may have more, if it was made of positions.
        size: the number of offsets in the tensor.
    """

    layout: SequenceLayout
    size: int


def _owner(offsets: Tensor) -> SequenceLayout | None:
    """The layout that has these `operator_offsets`, which may be a view of them, if it was not freed."""
    owner = owner_of(offsets)
    layout: SequenceLayout | None = owner() if type(owner) is weakref.ref else None
    return layout if layout is not None and offsets.shape == layout.host.shape else None


def _read_in_graph(numbers: Tensor, token: Tensor | None, rows: int) -> SequenceLayout:
    """Read what a graph may have computed: a compiler may have reused the tensor object, for other numbers.

    So it is read again, unless it was read in this forward of the model, which passes its token to all of its layers.
    """
    layout: SequenceLayout | None = None if rows else find_cached(numbers, (_LAYOUT, None)) or _owner(numbers)
    if layout is not None:  # it was read outside of graphs
        return layout

    def build() -> SequenceLayout:
        if rows:
            return layout_where(starts_of_positions(numbers.expand(rows, -1)), numbers.device)
        return SequenceLayout(*read_offsets(numbers))

    return build() if token is None else cache_with(numbers, ("in graph", rows), build, token, follows=True)


def _offsets_in_graph(numbers: Tensor, token: Tensor | None, rows: int) -> Tensor:
    layout = _read_in_graph(numbers, token, rows)
    with creating_cached_tensors():
        size = rows * numbers.shape[1] + 1 if rows else numbers.shape[0]
        made = layout.device_offsets.new_full((size,), layout.total)
        made[: layout.batch_size + 1] = layout.device_offsets
    made.untyped_storage().owner = _InGraph(layout, size)  # type: ignore[attr-defined]
    return made


def _fake_offsets(numbers: Tensor, token: Tensor | None, rows: int) -> Tensor:
    size = rows * numbers.shape[1] + 1 if numbers.dim() == 2 else numbers.shape[0]
    return numbers.new_empty(size, dtype=torch.int32)


# numbers: (B+1,) offsets, with `rows` 0; or (1 or R, L) positions of R rows. token: the forward token of the model. The
# result is (B+1,) or (R·L+1,) int32, the offsets, then the total.
define("offsets(Tensor numbers, Tensor? token, SymInt rows) -> Tensor", _offsets_in_graph, _fake_offsets)


TOKEN_SHAPE = (1, 1, 0, 0)  # as a mask, it raises an error in all attention functions but ours


def _new_token(device: torch.device) -> Tensor:
    return torch.empty(TOKEN_SHAPE, dtype=torch.int8, device=device)


def new_forward_token(device: torch.device) -> Tensor:
    """A tensor of a graph that is made once in each forward of a model, in which offsets are read once."""
    token: Tensor = torch.ops.nt_attention.forward_token.default(device)
    return token


# As an operator with random results, so that compilers do not replace it by a constant.
define("forward_token(Device device) -> Tensor", _new_token, _new_token, random=True)
TracedLayout.make = SequenceLayout.from_offsets
