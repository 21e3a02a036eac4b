"""`Layout`: what every layout of a ragged batch answers, whether the host knows its lengths or not.

Dimensions: B sequences, N rows of a packed tensor, T tokens, L positions in a padded row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..compiler import is_compiling
from .cache import Cache, copy_of
from .rows import fill_rows_from

_T = TypeVar("_T")


class LengthsUnknownError(ValueError):
    """The host needs lengths that only the device knows."""


class Sharded:
    """A batch whose tokens are divided over ranks: the base of `ShardedLayout`, and of what stands for one in a graph.

    `nt_attention.distributed` sets `attend` and `in_graph`, and the package sets `divide`, which imports it.

    Attributes:
        attend: `varlen_attention` with such a layout.
        in_graph: handle → what stands for a layout in a graph, which knows its handle only.
        divide: makes a `ShardedLayout`, for `SequenceLayout.shard`.
    """

    attend: ClassVar[Callable[..., Any]]
    in_graph: ClassVar[Callable[[Tensor], Any]]
    divide: ClassVar[Callable[..., Any]]


class Layout:
    """The sequences of a packed batch. `SequenceLayout`, `BoundedLayout` and the layouts of graphs are its subclasses.

    What needs the lengths on the host raises a `LengthsUnknownError` here. `SequenceLayout`, which knows them, has it.

    Attributes:
        batch_size: B, the number of sequences.
        device: the device of the offsets.
        total: the number of tokens, or an upper bound.
        max_seqlen: the length of the longest sequence, or an upper bound.
        min_seqlen: the length of the shortest sequence, or 0.
        sum_of_squares: the sum of the squared lengths, or an upper bound.
        knows_lengths: whether the host knows the lengths, at the latest when a graph runs.
        padded_length: L of the mask that the layout was made from, or None.
        has_holes: whether a row of that mask has padding between its tokens.
        bounds: `max_seqlen` and `total` if the host only knows bounds, else None.
        padded_index: (T,) int64, the position of each token in that mask, flattened to (B·L), or None.
        cache: values that are derived from the offsets; None if they can't be cached.
    """

    knows_lengths: bool = True
    total: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int
    batch_size: int
    device: torch.device
    padded_length: int | None = None
    has_holes: bool = False
    bounds: tuple[int, int] | None = None
    padded_index: Tensor | None = None
    cache: Cache | None = None

    @property
    def operator_offsets(self) -> Tensor:
        """(B+1,) int32 or int64, the offsets that custom operators get, and that find this layout again."""
        raise NotImplementedError

    @property
    def device_offsets(self) -> Tensor:
        """(B+1,) int32, the offsets that kernels read. Nobody changes them."""
        raise NotImplementedError

    @property
    def offsets(self) -> Tensor:
        """(B+1,) int64, the first row of each sequence, then the end of the last sequence."""
        return self.operator_offsets.to(torch.int64, copy=True).contiguous()

    @property
    def cu_seqlens(self) -> Tensor:
        """(B+1,) int32, the same numbers."""
        return self.operator_offsets.to(torch.int32, copy=True).contiguous()

    @property
    def safe_offsets(self) -> Tensor:
        """(B+1,) int64, offsets that are safe to index with."""
        return self.offsets

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """The sequence of each of N rows, and the row's position in it: (N,) int64 each. Undefined past the last token.

        They are not copied, so they are for code of this package, which does not change them.
        """
        raise NotImplementedError

    @property
    def cached_lengths(self) -> Tensor:
        """`lengths` for code of this package, which does not change them. They are not copied."""
        return self.cached("lengths", lambda: self.safe_offsets.diff())

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, the number of tokens in each sequence.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).lengths
            tensor([2, 0, 3])
        """
        return copy_of(self.cached_lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """(N,) int64, the index of each row's sequence.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).sequence_ids
            tensor([0, 0, 2, 2, 2])
        """
        return copy_of(self.locate_rows(self.total)[0])

    @property
    def position_ids(self) -> Tensor:
        """(N,) int64, each row's position in its sequence, from 0.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).position_ids
            tensor([0, 1, 0, 1, 2])
        """
        return copy_of(self.locate_rows(self.total)[1])

    def cached(self, key: object, build: Callable[[], _T], other: Layout | None = None) -> _T:
        """The cached value of `key`, or build it, and cache it as long as somebody has this layout.

        Args:
            key: the cache key.
            build: builds the value, which must not refer to tensors that users have, or these would never be freed.
            other: a second layout on which the value depends. The value is then cached until one of both is freed.
        """
        if torch.compiler.is_compiling() and is_compiling():  # the first is true in other threads too
            return build()  # a graph's tensors can't be cached
        cache, other_cache = self.cache, None
        if other is not None and other is not self:
            other_cache = other.cache
            if other_cache is None:
                return build()
        value: _T = build() if cache is None else cache.find_or_build(key, build, other_cache)
        return value

    def same_lengths(self, other: Layout) -> bool:
        """Whether both layouts have the same lengths; if they know only bounds, whether they are one. Needs no sync."""
        return self is other

    def extended(self, extra: int) -> Layout:
        """The layout in which every sequence is `extra` tokens longer."""
        raise NotImplementedError

    def check_saved(self) -> None:
        """Raise a RuntimeError, in a backward, if the offsets that this layout follows were changed in place."""

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        """Replace the rows of `values` (N, …) past the last token by `value`."""
        return fill_rows_from(self.operator_offsets[-1], values, value)

    def check_rows(self, values: Tensor, name: str) -> None:
        """Raise a ValueError if `values` is on another device or has fewer rows than `total`."""
        if values.device != self.device:
            self.check_device(values, name)
        if values.dim() == 0 or values.shape[0] < self.total:
            is_heads_first = values.dim() == 3 and values.shape[1] == self.total
            order = " The order is (T, H, D): (H, T, D) may have been passed." if is_heads_first else ""
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but the layout's {self.batch_size} sequences have "
                f"{self.total} tokens: pass at least {self.total} rows.{order}"
            )

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError if key or value has fewer rows than `total`, or both have more and differ.

        Rows from row `total` on are not read.
        """
        self.check_rows(key, "key")
        self.check_rows(value, "value")
        if key.shape[0] != value.shape[0] and self.total != min(key.shape[0], value.shape[0]):
            raise ValueError(
                f"key and value must have the same tokens, got {tuple(key.shape)} and {tuple(value.shape)}."
            )

    def check_device(self, tensor: Tensor, name: str) -> None:
        """Raise a ValueError if a tensor is on another device."""
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device} and the layout on {self.device}: "
                f"make the layout from offsets or lengths on {tensor.device}."
            )

    def with_lengths(self, name: str) -> Any:
        """The `SequenceLayout` of these sequences, for `name`, which needs the lengths.

        Raises:
            LengthsUnknownError: the host does not know them.
        """
        raise LengthsUnknownError(
            f"{name} needs the lengths, but this layout only knows bounds of them: make it without max_tokens."
        )

    def __getattr__(self, name: str) -> Any:
        if name in _NEED_LENGTHS:
            return getattr(self.with_lengths("this call" if name in _INTERNAL else name), name)
        raise AttributeError(f"a layout has no attribute {name!r}.")


_INTERNAL = ("host", "reversed", "padded_right")
# What `SequenceLayout` has. `host` is `host_offsets` for code of this package, which does not change it.
_NEED_LENGTHS = {*_INTERNAL, "host_offsets", "pack", "pad", "to_nested", "shard"}
_NEED_LENGTHS |= {"total", "max_seqlen", "min_seqlen", "sum_of_squares"}
