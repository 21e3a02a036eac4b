"""`SequenceLayout`: the rows at which each sequence of a packed batch begins and ends.

Dimensions: B sequences, T tokens in the whole batch, L positions in a padded row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..compiler import (
    TracedLayout,
    check_readable,
    is_compiling,
    is_traced,
    is_tracing,
    outside_of_graphs,
    refuse_jit_trace,
)
from ..operators import define
from ..torch_private import forward_ad_level, is_transformed
from . import reading
from .reading import HostFacts, copy_of, creating_cached_tensors, facts_of_lengths, on_host, plain

if TYPE_CHECKING:
    from .reading import Ints

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The lengths of the sequences in a ragged batch, and the rows at which they begin in a packed tensor.

    Create a layout with one of its `from_*` constructors. A constructor syncs with the device at most once
    (`from_nested`: at most twice). Later uses of the layout need no sync. Values that depend on the layout are cached,
    such as `position_ids` and the choice of a backend. Layouts made from the same offsets tensor share this cache.

    Attributes:
        offsets: (B+1,) int64, the first row of each sequence, then the end of the last sequence.
        cu_seqlens: (B+1,) int32, the same numbers.
        total: T, the number of tokens.
        max_seqlen: the length of the longest sequence, or the bound that was passed to `from_offsets`.
        min_seqlen: the length of the shortest sequence.
        sum_of_squares: the sum of the squared lengths. In self-attention without a mask, it is the number of (query,
            key) pairs.
        host_offsets: the same numbers on the CPU.
        padded_length: L of the attention mask that the layout was made from; None if it was made in another way.
        padded_index: (T,) int64, the position of each token in that mask, flattened to (B·L); else None.
        has_holes: whether a row of that mask has padding between its tokens; else False.

    `host_offsets`, `padded_index`, `lengths`, `sequence_ids` and `position_ids` are new tensors in each access, so you
    may change them in place. After a change of `offsets` or `cu_seqlens`, the layout raises an error.

    Example:
        >>> import nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 0, 3])
        >>> layout.total, layout.max_seqlen
        (5, 3)
        >>> layout.offsets
        tensor([0, 2, 2, 5])
    """

    offsets: Tensor
    cu_seqlens: Tensor
    total: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int = field(repr=False)
    _facts: HostFacts = field(repr=False)
    padded_length: int | None = None
    _padded_index: Tensor | None = field(default=None, repr=False)
    has_holes: bool = field(default=False, repr=False)

    knows_lengths: ClassVar[bool] = True  # False if the host only knows bounds of them

    # Conversions from and to NestedTensors. nested.py sets them, because it imports this file.
    _wrap: ClassVar[Callable[[Tensor, SequenceLayout], Tensor]]
    _layout_of_nested: ClassVar[Callable[[Tensor], SequenceLayout]]
    # `ShardedLayout`, whose import takes long. nt_attention/__init__.py sets it.
    _shard: ClassVar[Callable[..., Any]]
    # `BoundedLayout`, the same in a graph, and the one that has a tensor object. bounded.py sets them.
    _with_bounds: ClassVar[Callable[[Tensor, int, int], SequenceLayout]]
    _with_bounds_in_graph: ClassVar[Callable[[Tensor, int, int], SequenceLayout]]
    _find_bounded: ClassVar[Callable[[Tensor], SequenceLayout | None]]

    @classmethod
    def from_offsets(
        cls, offsets: Tensor, max_seqlen: int | None = None, max_tokens: int | None = None
    ) -> SequenceLayout:
        """Create a layout from the offsets of its sequences.

        The first call with a tensor syncs with its device once. Later calls with the same tensor need no sync. After an
        in-place change of `offsets`, the next call reads them again, and layouts that were made before the change raise
        an error. On a GPU, writes to `offsets.data` are not detected, because PyTorch does not record them.

        Under torch.compile, torch.export and make_fx, the lengths are not read while the graph is traced. They are read
        when the graph runs.

        With both bounds, offsets on a GPU are never read by the host. Such a call can be captured in a CUDA graph, and
        the offsets may change whenever the graph is replayed. Packed tensors then have `max_tokens` rows or more, and
        the layout's `total` is `max_tokens`. Rows past the last offset get the output 0 and the gradient 0. Offsets
        that decrease, do not begin at 0, or exceed a bound give NaN. The backends `token_tiled`, `torch_flash` and,
        without gradients, `split_kv` support such layouts.

        Args:
            offsets: (B+1,) int32 or int64, from 0 and never decreasing. Sequence b has the rows `offsets[b]` to
                `offsets[b + 1] - 1`. The tensor is not copied; it becomes `offsets` (int64) or `cu_seqlens` (int32).
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
        refuse_jit_trace()
        if max_tokens is not None and max_seqlen is None:
            raise ValueError(f"max_tokens={max_tokens} needs max_seqlen, the bound of the longest sequence.")
        has_bounds = max_seqlen is not None and max_tokens is not None
        if is_traced(offsets):
            if has_bounds and offsets.device.type != "cpu":
                return cls._with_bounds_in_graph(offsets, cast(int, max_seqlen), cast(int, max_tokens))
            return cls.in_graph(offsets, None, max_seqlen)
        if isinstance(offsets, Tensor):
            if has_bounds and offsets.device.type != "cpu":
                return cls._with_bounds(offsets, cast(int, max_seqlen), cast(int, max_tokens))
            if (bounded := cls._find_bounded(offsets)) is not None:
                return bounded
        layout = cls.from_facts(*reading.read_offsets(offsets), _integer("max_seqlen", max_seqlen))
        if max_tokens is not None and cast(int, _integer("max_tokens", max_tokens)) < layout.total:
            raise ValueError(f"max_tokens={max_tokens} is below the {layout.total} tokens of the offsets.")
        return layout

    @classmethod
    def in_graph(cls, offsets: Tensor, marker: Tensor | None = None, max_seqlen: int | None = None) -> SequenceLayout:
        """The layout of a graph. The offsets are read when it runs; see `reading.read_in_operator`."""
        offsets = torch.ops.nt_attention.offsets.default(offsets, marker)
        return cast(SequenceLayout, TracedLayout(offsets, max_seqlen))

    @staticmethod
    def in_this_graph(offsets: Tensor, bounds: tuple[int, int] | None) -> SequenceLayout:
        """The layout of offsets that were made outside of the graph, or that the graph has made before."""
        if bounds is not None:
            return SequenceLayout._with_bounds_in_graph(offsets, *bounds)
        return cast(SequenceLayout, TracedLayout(offsets))

    @classmethod
    def in_operator(cls, offsets: Tensor, is_backward: bool = False) -> SequenceLayout:
        """The layout of the offsets that an operator in a graph gets, from `in_graph` or of a layout from outside.

        Raises:
            ValueError: they are of a layout, and were changed in place. In a backward, it is a RuntimeError.
        """
        if (bounded := cls._find_bounded(offsets)) is not None:
            return bounded
        if (found := reading.find(offsets)) is not None:
            return cls.from_facts(*found)
        if reading.are_of_layout(offsets):
            raise _changed_before_backward() if is_backward else _changed("this layout")
        return cls.from_facts(*reading.read_in_operator(offsets, None))

    @classmethod
    def _of_lengths(cls, lengths: Ints, device: torch.device, **of_mask: Any) -> SequenceLayout:
        """Create a layout from lengths on the host. For `of_mask`, see `from_facts`.

        Both `offsets` and `cu_seqlens` are found after the layout is freed: NestedTensors keep the former, and graphs
        keep the latter for their backward.
        """
        offsets, facts, cu_seqlens = facts_of_lengths(lengths, device)
        return cls.from_facts(offsets, facts, cu_seqlens=cu_seqlens, **of_mask)

    @classmethod
    def from_facts(
        cls,
        offsets: Tensor,
        facts: HostFacts,
        max_seqlen: int | None = None,
        cu_seqlens: Tensor | None = None,
        **of_mask: Any,
    ) -> SequenceLayout:
        """Create a layout from offsets that have already been read, see `from_offsets`.

        `cu_seqlens`: an alias of `facts.converted`, if those are int32.
        `of_mask`: `padded_length`, `_padded_index` and `has_holes` of the mask that it was made from.
        """
        if facts.first:
            raise ValueError(
                f"offsets must begin at 0, got {facts.first}: remove the rows before the first sequence, and pass "
                "offsets - offsets[0]."
            )
        if max_seqlen is not None and max_seqlen < facts.max_seqlen:
            raise ValueError(
                f"max_seqlen={max_seqlen} is below the longest sequence of {facts.max_seqlen} tokens: "
                "pass a larger bound, or leave it out."
            )
        wide = offsets.dtype == torch.int64
        if cu_seqlens is None:
            cu_seqlens = facts.converted if wide else offsets
        return cls(
            offsets=offsets if wide else facts.converted,
            cu_seqlens=cu_seqlens,
            total=facts.total,
            max_seqlen=facts.max_seqlen if max_seqlen is None else max_seqlen,
            min_seqlen=facts.min_seqlen,
            sum_of_squares=facts.sum_of_squares,
            _facts=facts,
            **of_mask,
        )

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
        refuse_jit_trace()
        if isinstance(lengths, Tensor):
            check_readable(lengths, "lengths")
        with creating_cached_tensors():
            given = _as_tensor(lengths)
            host = given.detach().to("cpu", torch.int64).numpy()
        return cls._of_lengths(host, given.device if device is None else torch.device(device))

    @classmethod
    def from_nested(cls, nested: Tensor) -> SequenceLayout:
        """Create a layout from a NestedTensor.

        Syncs once for an offsets tensor that was not read before, and once more for a new tensor of `lengths` (a
        NestedTensor with holes has it).

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
        return SequenceLayout._layout_of_nested(nested)

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
        mask = plain(mask).detach()
        batch, length = mask.shape
        index = _token_mask(mask).reshape(-1).nonzero()[0]
        bounds = index.searchsorted(length * np.arange(batch + 1))
        lengths = np.diff(bounds)
        first, last = bounds[:-1][lengths > 0], bounds[1:][lengths > 0] - 1
        return cls._of_lengths(
            lengths,
            mask.device,
            padded_length=length,
            _padded_index=reading.to_device(index, mask.device),
            has_holes=bool((index[last] - index[first] > last - first).any()),
        )

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
        rows = torch.atleast_2d(position_ids.long())  # the difference of smaller integer types could overflow
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[:, 1:] = rows.diff(dim=1) != 1
        return layout_where(on_host(begins.flatten()), position_ids.device)

    @property
    def batch_size(self) -> int:
        """B, the number of sequences.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).batch_size
            3
        """
        return self._facts.host.numel() - 1

    @property
    def device(self) -> torch.device:
        """The device of `offsets`."""
        return self.offsets.device

    @property
    def host_offsets(self) -> Tensor:
        """(B+1,) int64, a copy of `offsets` on the CPU."""
        if is_compiling():
            return copy_of(self._facts.host)
        with reading.no_modes():  # which would make a fake tensor of it
            return copy_of(self._facts.host)

    @property
    def padded_index(self) -> Tensor | None:
        """(T,) int64, the position of each token in the mask that the layout was made from, flattened to (B·L)."""
        return None if self._padded_index is None else copy_of(self._padded_index)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, the number of tokens in each sequence.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).lengths
            tensor([2, 0, 3])
        """
        return copy_of(self._cached_lengths)

    @property
    def _cached_lengths(self) -> Tensor:
        """The same for code of this package, which does not change it. It is not copied."""
        return self.cached("lengths", lambda: self._own_offsets.diff())

    @property
    def sequence_ids(self) -> Tensor:
        """(T,) int64, the index of each token's sequence.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).sequence_ids
            tensor([0, 0, 2, 2, 2])
        """
        return copy_of(self.locate_rows(self.total)[0])

    @property
    def position_ids(self) -> Tensor:
        """(T,) int64, each token's position in its sequence, from 0.

        Example:
            >>> import nt_attention as nta
            >>> nta.SequenceLayout.from_lengths([2, 0, 3]).position_ids
            tensor([0, 1, 0, 1, 2])
        """
        return copy_of(self.locate_rows(self.total)[1])

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """The sequence of each of N rows, and the row's position in it: (N,) int64 each. Undefined past `total`.

        They are not copied, so they are for code of this package, which does not change them.
        """
        ids, positions = self.cached("rows", self._locate)
        if rows > self.total:
            ids, positions = (torch.nn.functional.pad(x, (0, rows - self.total)) for x in (ids, positions))
        return ids, positions

    def _locate(self) -> tuple[Tensor, Tensor]:
        """See `locate_rows`, for all tokens."""
        offsets, row = self._own_offsets, torch.arange(self.total, device=self.device)
        if self.device.type == "cpu":  # faster on a CPU; on a GPU it launches three times as many kernels
            ids = torch.arange(self.batch_size, device=self.device)
            ids = ids.repeat_interleave(offsets.diff(), output_size=self.total)
        else:
            ids = torch.searchsorted(offsets[1:], row, right=True)
        return ids, row - offsets[ids]

    def __getstate__(self) -> dict[str, object]:
        """Without `_facts`, which `__setstate__` creates from its copy of the offsets on the host.

        Raises:
            ValueError: the offsets were changed in place.
        """
        self.check_unchanged("this layout")
        state = {name: value for name, value in self.__dict__.items() if name != "_facts"}
        return state | {"host": self._facts.host}

    def __setstate__(self, state: dict[str, Any]) -> None:
        host = state.pop("host")
        self.__dict__.update(state)
        found = reading.find(self.offsets) or reading.find(self.cu_seqlens)  # the tensors of a shallow copy
        if found is not None:
            self.__dict__["_facts"] = found[1]
            return
        facts = HostFacts(reading.snapshot(self.offsets), host, self.cu_seqlens)
        self.__dict__["_facts"] = reading.cache_facts(self.offsets, facts)
        self.__dict__["cu_seqlens"] = reading.alias_of(self.cu_seqlens, self.offsets, facts)

    @staticmethod
    def require(given: object, name: str) -> SequenceLayout:
        """Check that an argument is a layout, and return it.

        In a graph it returns a `TracedLayout`, so that one graph can run with any lengths.

        Args:
            given: the argument.
            name: the name of the argument, for error messages.

        Raises:
            TypeError: `given` is not a SequenceLayout.
            ValueError: its offsets were changed in place.
        """
        if not isinstance(given, (SequenceLayout, TracedLayout)):
            raise TypeError(
                f"{name} must be a SequenceLayout, got {type(given).__name__}: pass "
                "SequenceLayout.from_offsets(offsets), .from_lengths(lengths) or .from_attention_mask(mask)."
            )
        if isinstance(given, TracedLayout) and not is_traced(given.offsets):  # outside of graphs
            return SequenceLayout.from_offsets(given.offsets, *given.arguments)
        if is_tracing():
            return SequenceLayout.in_this_graph(given.operator_offsets, given.bounds)
        if isinstance(given, TracedLayout):
            return cast(SequenceLayout, given)
        given.check_unchanged(name)
        return given

    def check_unchanged(self, name: str) -> None:
        """Check that the offsets were not changed in place after the layout was made.

        Raises:
            ValueError: they were changed. The message calls the layout `name`.
        """
        if not self.is_unchanged:
            raise _changed(name)

    @property
    def is_unchanged(self) -> bool:
        """Whether the offsets were not changed in place, as far as can be known. In a graph, its operators find out."""
        return is_compiling() or self._facts.match_both(self.offsets, self.cu_seqlens)

    def check_saved(self) -> None:
        """In a backward pass: check that `cu_seqlens` was not changed in place since the forward pass.

        Raises:
            RuntimeError: it was changed.
        """
        if not self._matches(self.cu_seqlens):
            raise _changed_before_backward()

    def _matches(self, offsets: Tensor) -> bool:
        """Whether `offsets` (int32 or int64) are known to be unchanged since they were read. True in a graph."""
        return is_compiling() or self._facts.match(offsets)

    @property
    def operator_offsets(self) -> Tensor:
        """(B+1,) int32 or int64, the offsets that custom operators get."""
        return self.cu_seqlens

    @property
    def _safe_offsets(self) -> Tensor:
        """(B+1,) int64, offsets that are safe to index with."""
        return self.offsets

    @property
    def bounds(self) -> tuple[int, int] | None:
        """`max_seqlen` and `total` if the host only knows bounds, else None."""
        return None

    @property
    def _own_offsets(self) -> Tensor:
        """The offsets that were read. The caller may have changed the tensor `offsets` in place since then.

        In a graph, an operator raises an error then, as attention does.
        """
        if is_compiling():
            return torch.ops.nt_attention.offsets_of_layout.default(self.cu_seqlens)
        return self.offsets if self._matches(self.offsets) else self.cu_seqlens.long()

    @property
    def digest(self) -> int:
        """A hash of the offsets."""
        return self._facts.digest

    def cached(self, key: object, build: Callable[[], _T], other: SequenceLayout | None = None) -> _T:
        """Return the cached value of `key`, or build it and cache it until the offsets are freed.

        Args:
            key: the cache key.
            build: builds the value. The value must not refer to the tensors `offsets` and `cu_seqlens`, or they would
                never be freed.
            other: a second layout on which the value depends. The value is then cached until the offsets of one of
                both layouts are freed.
        """
        if is_compiling():
            return build()  # a graph's tensors can't be cached
        if other is not None and not other.knows_lengths:  # its caches depend on the CUDA graph that is captured
            return other.cached((key, "with keys"), build, self)
        other_cache = None if other is None or other is self else other._facts.cache
        return cast(_T, self._facts.cache.find_or_build(key, build, other_cache))

    def same_lengths(self, other: SequenceLayout) -> bool:
        """Whether both layouts have the same lengths; if they know only bounds, whether they are one. Needs no sync.

        Example:
            >>> import torch, nt_attention as nta
            >>> layout = nta.SequenceLayout.from_lengths([2, 3])
            >>> layout.same_lengths(nta.SequenceLayout.from_offsets(torch.tensor([0, 2, 5])))
            True
        """
        if not (self.knows_lengths and other.knows_lengths):
            return self is other
        return self._facts is other._facts or torch.equal(self._facts.host, other._facts.host)

    def padded_right(self) -> SequenceLayout:
        """The same layout, which pads at the end of each row, to the longest length."""
        return replace(self, max_seqlen=self._facts.max_seqlen, padded_length=None, _padded_index=None, has_holes=False)

    def extended(self, extra: int) -> SequenceLayout:
        """The layout in which every sequence is `extra` tokens longer."""
        return self._derived(("extended", extra), lambda lengths: lengths + extra)

    @property
    def reversed(self) -> SequenceLayout:
        """The layout of the same sequences in reverse order."""
        return self._derived("reversed", lambda lengths: lengths[::-1])

    def _derived(self, key: object, lengths: Callable[[Ints], Ints]) -> SequenceLayout:
        def build() -> SequenceLayout:
            return self._of_lengths(lengths(np.diff(self._facts.host.numpy())), self.device)

        return self.cached(key, build)

    def offsets_for_graph(self, size: int) -> Tensor:
        """(size,) int32, `cu_seqlens`, then the total. `from_offsets` of them gives this layout, without a sync."""
        read = self.offsets if self._facts.converted.dtype == torch.int32 else self.cu_seqlens
        return reading.copy_for_graph(read, self._facts, size)

    def pack(self, padded: Tensor) -> Tensor:
        """Remove the padding from a batch. Needs no sync.

        Args:
            padded: (B, L, …). If the layout was made from a mask, L must be that of the mask, and tokens are where the
                mask has them. If not, tokens come first in each row, and L is at least the longest length.

        Returns:
            The tokens, (T, …).

        Raises:
            TypeError: `padded` is not a tensor.
            ValueError: B, L or the device does not fit the layout, or the layout's offsets were changed in place.

        Example:
            >>> import torch, nt_attention as nta
            >>> layout = nta.SequenceLayout.from_lengths([2, 1])
            >>> layout.pack(torch.tensor([[5, 6, 0], [7, 0, 0]]))
            tensor([5, 6, 7])
        """
        self._check_usable(padded, "padded")
        length = padded.shape[1] if padded.dim() >= 2 else -1
        longest = self._facts.max_seqlen
        fits = length >= longest if self.padded_length is None else length == self.padded_length
        if not fits or padded.shape[0] != self.batch_size:
            wanted = f"{longest} or more" if self.padded_length is None else f"{self.padded_length}"
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
            ValueError: too few rows, another device, or the layout's offsets were changed in place.

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
            ValueError: too few rows, another device, or the layout's offsets were changed in place.

        Example:
            >>> import torch, nt_attention as nta
            >>> nested = nta.SequenceLayout.from_lengths([2, 3]).to_nested(torch.zeros(5, 8))
            >>> [tuple(x.shape) for x in nested.unbind()]
            [(2, 8), (3, 8)]
        """
        self._check_usable(values, "values")
        self.check_rows(values, "values")
        return SequenceLayout._wrap(values, self)

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
        return SequenceLayout._shard(self, mesh, is_causal=is_causal, window_size=window_size)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        """Replace the rows of `values` (N, …) from row `total` on, which belong to no sequence, by `value`."""
        if values.shape[0] == self.total:
            return values
        past = torch.arange(values.shape[0], device=values.device) >= self.total
        return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)

    def check_rows(self, values: Tensor, name: str) -> None:
        """Raise a ValueError if `values` is on another device or has fewer rows than `total`."""
        self._check_device(values, name)
        if values.dim() == 0 or values.shape[0] < self.total:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but the layout's {self.batch_size} sequences have "
                f"{self.total} tokens: pass at least {self.total} rows."
            )

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError if key or value has fewer rows than `total`, or both have more and differ.

        Rows from row `total` on are not read.
        """
        for name, x in (("key", key), ("value", value)):
            self.check_rows(x, name)
        if key.shape[0] != value.shape[0] and self.total != min(key.shape[0], value.shape[0]):
            raise ValueError(
                f"key and value must have the same tokens, got {tuple(key.shape)} and {tuple(value.shape)}."
            )

    def _check_usable(self, given: object, name: str) -> None:
        """Check that `given` is a tensor on this layout's device, and that the offsets were not changed in place."""
        refuse_jit_trace()
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}.")
        if given.is_nested:
            raise TypeError(f"{name} must be a plain tensor, got a NestedTensor: pass its .values().")
        self._check_device(given, name)
        self.check_unchanged("this layout")

    def _check_device(self, tensor: Tensor, name: str) -> None:
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device} and the layout on {self.device}: "
                f"make the layout from offsets or lengths on {tensor.device}."
            )

    def index_of_tokens(self, length: int) -> Tensor:
        """(T,) int64, the position of each token in a padded batch that is flattened to (B·length)."""
        if self._padded_index is not None:
            return self._padded_index

        def build() -> Tensor:
            ids, positions = self.locate_rows(self.total)
            return ids * length + positions

        return self.cached(("padded_index", length), build)


define(
    "offsets(Tensor offsets, Tensor? marker) -> Tensor",
    lambda offsets, marker: reading.copy_for_graph(*reading.read_in_operator(offsets, marker), offsets.shape[0]),
    lambda offsets, marker: offsets.new_empty(offsets.shape, dtype=torch.int32),
)


def _offsets_of_layout(cu_seqlens: Tensor) -> Tensor:
    SequenceLayout.in_operator(cu_seqlens)  # raises an error if they were changed
    return cu_seqlens.to(torch.int64, copy=True)


define(
    "offsets_of_layout(Tensor cu_seqlens) -> Tensor",
    _offsets_of_layout,
    lambda cu_seqlens: cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int64),
)
TracedLayout._read_offsets = staticmethod(outside_of_graphs(lambda *given: SequenceLayout.from_offsets(*given)))


def _changed(name: str) -> ValueError:
    return ValueError(
        f"the offsets of {name} were changed in place after it was made: make a new layout with "
        "SequenceLayout.from_offsets(offsets), or make the layout from a copy of the offsets."
    )


def _changed_before_backward() -> RuntimeError:
    return RuntimeError(
        "the cu_seqlens of a layout, which are needed for gradient computation, have been modified by an inplace "
        "operation: pass a copy, cu_seqlens.clone(), to each forward."
    )


def layout_where(begins: Ints, device: torch.device) -> SequenceLayout:
    """A layout of N tokens on `device`. A sequence begins wherever `begins` (N,) is not 0, as `begins[0]` must be."""
    starts = begins.nonzero()[0]
    return SequenceLayout._of_lengths(np.diff(starts, append=len(begins)), device)


def _as_tensor(lengths: Sequence[int] | Tensor) -> Tensor:
    how = "pass a list such as [5, 0, 9]. For a mask, use SequenceLayout.from_attention_mask."
    try:
        given = plain(lengths) if isinstance(lengths, Tensor) else torch.tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"lengths must be one integer for each sequence, got {lengths!r}: {how}") from error
    if given.dim() != 1 or not (_is_integer(given) or given.numel() == 0):
        got = f"shape {tuple(given.shape)} and {given.dtype}"
        raise ValueError(f"lengths must be one integer for each sequence, got {got}: {how}")
    return given


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


def scatter_rows(values: Tensor, index: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """A tensor of `shape` (B, L, …) with `values[t]` at position `index[t]` of the flattened B · L, else `value`.

    It has its own autograd function, because `index_copy_` would save the values and return a view.
    """
    if not is_compiling():
        is_derived = is_transformed() or forward_ad_level() >= 0
        if not (is_derived or (values.requires_grad and torch.is_grad_enabled())):
            return _Scatter.forward(values, index, shape, value)  # `apply` takes 50 µs
        return cast(Tensor, _Scatter.apply(values, index, shape, value))
    padded = values.new_full((shape[0] * shape[1], *shape[2:]), value)
    return padded.index_put((index,), values).unflatten(0, shape[:2])


def _integer(name: str, value: Any) -> int | None:
    """An integer, an integer tensor of one value, or None. A float would be rounded."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None


class _Scatter(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, index: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
        padded = values.new_full(shape, value)
        padded.view(shape[0] * shape[1], *shape[2:]).index_copy_(0, index, values)
        return padded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, ctx.shape, _ = inputs
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad.shape[0] * grad.shape[1]
        packed = grad.reshape(rows, *grad.shape[2:])  # `flatten` has no batching rule for is_grads_batched=True
        return packed.index_select(0, ctx.saved_tensors[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return cast(Tensor, _Scatter.apply(tangent, ctx.saved_tensors[0], ctx.shape, 0.0))
