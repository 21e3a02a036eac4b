"""``SequenceLayout``: where each sequence of a packed batch begins and ends.

Dimensions: B sequences, T tokens in all of them, L positions in a padded row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from . import _offsets
from ._offsets import HostFacts, creating_cached_tensors, facts_of_lengths, on_host, plain
from ._tracing import TracedLayout, check_readable, is_traced, is_tracing, outside_of_graphs, refuse_jit_trace

if TYPE_CHECKING:
    from ._offsets import Ints

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The sequence lengths of a ragged batch, in every form that kernels and reshapes need.

    Each ``from_*`` constructor syncs with the device at most once. Later use needs no sync. Layouts of the same offsets
    tensor share a cache.

    Attributes:
        offsets: (B+1,) int64, the first row of each sequence, then the end of the last one.
        cu_seqlens: (B+1,) int32, the same numbers.
        total: T, the number of tokens.
        max_seqlen: the length of the longest sequence, or the larger bound that was passed.
        min_seqlen: the length of the shortest sequence.
        sum_of_squares: of the lengths: the number of (query, key) pairs without a mask.
        host_offsets: ``offsets`` on the CPU.
        padded_length: L of the padded batch, if the layout was made from its mask, else None.
        padded_index: (T,) int64, the position of each token in the flattened (B·L) batch, else None.
        has_holes: whether that batch has padding between the tokens of some row.
    """

    offsets: Tensor
    cu_seqlens: Tensor
    total: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int = field(repr=False)
    host_offsets: Tensor = field(repr=False)
    _facts: HostFacts = field(repr=False)
    padded_length: int | None = None
    padded_index: Tensor | None = field(default=None, repr=False)
    has_holes: bool = field(default=False, repr=False)

    # Conversions of NestedTensors. nested.py sets them, because it imports this file.
    _wrap: ClassVar[Callable[[Tensor, SequenceLayout], Tensor]]
    _layout_of_nested: ClassVar[Callable[[Tensor], SequenceLayout]]

    @classmethod
    def from_offsets(cls, offsets: Tensor, max_seqlen: int | None = None) -> SequenceLayout:
        """The layout of ``offsets`` (B+1,) int32 or int64, which begin at 0 and never decrease.

        Args:
            offsets: kept as this layout's ``offsets`` (int64) or ``cu_seqlens`` (int32), not copied.
            max_seqlen: an upper bound to use as ``max_seqlen``, so that shapes are the same for all batches.

        Syncs with the device once for each tensor. After an in-place change of ``offsets``, the next call reads them
        again, and layouts made before the change raise an error. On a GPU, writes to ``offsets.data`` are not detected,
        because PyTorch does not record them.

        In a graph of torch.compile, torch.export or make_fx, the layout has no lengths: the operators read them.

        Raises:
            ValueError: malformed offsets, or a ``max_seqlen`` that is below the longest sequence.
        """
        refuse_jit_trace()
        if is_traced(offsets):
            return cast(SequenceLayout, TracedLayout(offsets))
        return cls.from_facts(*_offsets.read_offsets(offsets), max_seqlen)

    @classmethod
    def from_facts(cls, offsets: Tensor, facts: HostFacts, max_seqlen: int | None = None) -> SequenceLayout:
        """``from_offsets``, for offsets that have been read already."""
        if facts.first:
            raise ValueError(
                f"offsets must begin at 0, got {facts.first}: drop the rows before that and pass offsets - offsets[0]."
            )
        if max_seqlen is not None and max_seqlen < facts.max_seqlen:
            raise ValueError(
                f"max_seqlen={max_seqlen} is below the longest sequence of {facts.max_seqlen} tokens: "
                "pass a bound that holds, or leave it out."
            )
        wide = offsets.dtype == torch.int64
        return cls(
            offsets=offsets if wide else facts.converted,
            cu_seqlens=facts.converted if wide else offsets,
            total=facts.total,
            max_seqlen=facts.max_seqlen if max_seqlen is None else int(max_seqlen),
            min_seqlen=facts.min_seqlen,
            sum_of_squares=facts.sum_of_squares,
            host_offsets=facts.host,
            _facts=facts,
        )

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Tensor, *, device: torch.device | str | None = None
    ) -> SequenceLayout:
        """The layout of sequences of these ``lengths`` (B,), a list of ints or an integer tensor.

        Args:
            lengths: zero is a legal length.
            device: of the layout. By default that of ``lengths`` if it is a tensor, else the CPU.

        Syncs once if ``lengths`` is a tensor on a GPU; a list needs no sync.

        Raises:
            ValueError: lengths that are negative, not integers, not one-dimensional, or more tokens than 2³¹ − 1.
        """
        refuse_jit_trace()
        if isinstance(lengths, Tensor):
            check_readable(lengths, "lengths")
        with creating_cached_tensors():
            given = _as_tensor(lengths)
            host = given.detach().to("cpu", torch.int64).numpy()
        return cls.from_facts(*facts_of_lengths(host, given.device if device is None else torch.device(device)))

    @classmethod
    def from_nested(cls, nested: Tensor) -> SequenceLayout:
        """The layout of a jagged or strided NestedTensor. Holes between its sequences are left out."""
        return SequenceLayout._layout_of_nested(nested)

    @classmethod
    def from_attention_mask(cls, mask: Tensor) -> SequenceLayout:
        """The layout of the tokens of a padded batch, from its mask (B, L): True or 1 at tokens.

        The mask is Hugging Face's ``attention_mask``. For a ``key_padding_mask``, which is True at padding, pass
        ``~mask``. Padding may be on the left, on the right or in between; ``pack`` and ``pad`` keep these positions.
        Syncs once.

        Raises:
            ValueError: not two-dimensional, or a value other than 0 and 1 (an additive mask of 0 and −inf, say).
        """
        if not isinstance(mask, Tensor) or mask.is_nested or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) and not mask.is_nested else type(mask).__name__
            raise ValueError(f"mask must be a (B, L) tensor with 1 where a token is, got {shape}.")
        check_readable(mask, "mask")
        mask = plain(mask).detach()
        batch, length = mask.shape
        index = _token_mask(mask).reshape(-1).nonzero()[0]
        bounds = index.searchsorted(length * np.arange(batch + 1))
        lengths = np.diff(bounds)
        layout = cls.from_facts(*facts_of_lengths(lengths, mask.device))
        first, last = bounds[:-1][lengths > 0], bounds[1:][lengths > 0] - 1
        return dataclasses.replace(
            layout,
            padded_length=length,
            padded_index=_offsets.to_device(index, mask.device),
            has_holes=bool((index[last] - index[first] > last - first).any()),
        )

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> SequenceLayout:
        """The layout of packed rows, from the positions (T,) or (R, T) of their tokens.

        A sequence begins at each row's start, and at each position that is not the previous one plus 1. Positions may
        count from any number, as RoBERTa's do. Rows are concatenated. Syncs once.

        Raises:
            ValueError: not an integer tensor of one or two dimensions.
        """
        if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2) or not _is_integer(position_ids):
            got = type(position_ids).__name__
            if isinstance(position_ids, Tensor):
                got = f"shape {tuple(position_ids.shape)} and {position_ids.dtype}"
            raise ValueError(f"position_ids must be a (T,) or (R, T) tensor of integers, got {got}.")
        check_readable(position_ids, "position_ids")
        rows = torch.atleast_2d(position_ids.long())  # a narrow integer type would wrap around in the difference
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[:, 1:] = rows.diff(dim=1) != 1
        return layout_where(on_host(begins.flatten()), position_ids.device)

    @property
    def batch_size(self) -> int:
        """B, the number of sequences."""
        return self.host_offsets.numel() - 1

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, the number of tokens of each sequence."""
        return self.cached("lengths", self._own_offsets.diff)

    @property
    def sequence_ids(self) -> Tensor:
        """(T,) int64, the sequence that each token belongs to."""

        def build() -> Tensor:
            if self.device.type == "cpu":  # faster here; on a GPU it launches three times as many kernels
                ids = torch.arange(self.batch_size, device=self.device)
                return ids.repeat_interleave(self.lengths, output_size=self.total)
            return torch.searchsorted(self._own_offsets[1:], torch.arange(self.total, device=self.device), right=True)

        return self.cached("sequence_ids", build)

    @property
    def position_ids(self) -> Tensor:
        """(T,) int64, each token's position inside its sequence, from 0."""

        def build() -> Tensor:
            return torch.arange(self.total, device=self.device) - self._own_offsets[self.sequence_ids]

        return self.cached("position_ids", build)

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """(N,) int64 each: every row's sequence, and its position in it. Arbitrary for rows past ``total``."""
        ids, positions = self.sequence_ids, self.position_ids
        if rows > self.total:
            ids, positions = (torch.nn.functional.pad(x, (0, rows - self.total)) for x in (ids, positions))
        return ids, positions

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_facts"}  # __setstate__ makes new ones

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        facts = HostFacts(_offsets.snapshot(self.offsets), self.host_offsets, self.cu_seqlens)
        self.__dict__["_facts"] = _offsets.cache_facts(self.offsets, facts)

    @staticmethod
    def require(given: object, name: str) -> SequenceLayout:
        """``given``, after checks. In a graph, its ``TracedLayout``, so that one graph serves all lengths.

        Raises:
            TypeError: ``given`` is not a SequenceLayout. ``name`` is the argument's, for the message.
            ValueError: its offsets were changed in place.
        """
        if not isinstance(given, (SequenceLayout, TracedLayout)):
            raise TypeError(
                f"{name} must be a SequenceLayout, got {type(given).__name__}: pass "
                "SequenceLayout.from_offsets(offsets), .from_lengths(lengths), or .from_attention_mask(mask) and pack."
            )
        if is_tracing() or isinstance(given, TracedLayout):  # one that was made in a graph is read outside of it
            return SequenceLayout.from_offsets(given.offsets)
        given.check_unchanged(name)
        return given

    def check_unchanged(self, name: str) -> None:
        """Check that the offsets were not changed in place after the layout was made.

        Raises:
            ValueError: they were changed. ``name`` is the argument's, for the message.
        """
        if not torch.compiler.is_compiling() and not self._facts.match_both(self.offsets, self.cu_seqlens):
            raise ValueError(
                f"the offsets of {name} were changed in place after it was made: make a new layout from them with "
                "SequenceLayout.from_offsets(offsets), or make it from a copy of the offsets."
            )

    def check_saved(self) -> None:
        """For a backward: check that ``cu_seqlens`` were not changed in place since the forward.

        Raises:
            RuntimeError: they were changed.
        """
        if not self._matches(self.cu_seqlens):
            raise RuntimeError(
                "the cu_seqlens of a layout, which are needed for gradient computation, have been modified by an "
                "inplace operation: give each forward its own, for example cu_seqlens.clone()."
            )

    def _matches(self, offsets: Tensor) -> bool:
        """Whether ``offsets``, of either dtype, were not changed since they were read. Always True in a graph."""
        return torch.compiler.is_compiling() or self._facts.match(offsets)

    @property
    def _own_offsets(self) -> Tensor:
        """``offsets`` as they were read. The caller's tensor may have been changed in place since then."""
        return self.offsets if self._matches(self.offsets) else self.cu_seqlens.long()

    @property
    def digest(self) -> int:
        """A hash of the offsets."""
        return self._facts.digest

    def cached(self, key: object, build: Callable[[], _T], other: SequenceLayout | None = None) -> _T:
        """The value of ``key``, built by ``build`` the first time and cached as long as the offsets live.

        Pass ``other`` if the value depends on a second layout: it is then cached as long as the offsets of both live.
        The value must not refer to ``offsets`` or ``cu_seqlens`` themselves, or they would never be freed.
        """
        if torch.compiler.is_compiling():
            return build()  # tensors of a graph can't be cached
        other_cache = None if other is None else other._facts.cache
        return cast(_T, self._facts.cache.find_or_build(key, build, other_cache))

    def same_lengths(self, other: SequenceLayout) -> bool:
        """Whether both layouts have the same lengths; compared on the host."""
        return self.host_offsets is other.host_offsets or torch.equal(self.host_offsets, other.host_offsets)

    def extended(self, extra: int) -> SequenceLayout:
        """The layout in which every sequence is ``extra`` tokens longer."""
        return self._derived(("extended", extra), lambda lengths: lengths + extra)

    @property
    def reversed(self) -> SequenceLayout:
        """The layout of the rows in reverse order: the last sequence first."""
        return self._derived("reversed", lambda lengths: lengths[::-1])

    def _derived(self, key: object, lengths: Callable[[Ints], Ints]) -> SequenceLayout:
        def build() -> SequenceLayout:
            return self.from_facts(*facts_of_lengths(lengths(np.diff(self.host_offsets.numpy())), self.device))

        return self.cached(key, build)

    def pack(self, padded: Tensor) -> Tensor:
        """The tokens (T, …) of a padded batch (B, L, …).

        For a layout from a mask, L and the positions are the mask's. For others, tokens are first in each row, and L is
        at least the longest length.

        Raises:
            ValueError: another batch size, another or too small L, or another device.
        """
        self._check_usable(padded, "padded")
        length = padded.shape[1] if padded.dim() >= 2 else -1
        if self.padded_length is None:
            fits, wanted = length >= self._facts.max_seqlen, f"{self._facts.max_seqlen} or more"
        else:
            fits, wanted = length == self.padded_length, f"{self.padded_length}"
        if not fits or padded.shape[0] != self.batch_size:
            raise ValueError(
                f"padded must be ({self.batch_size}, {wanted}, …) for this layout, got {tuple(padded.shape)}."
            )
        return padded.flatten(0, 1).index_select(0, self._index(length))

    def pad(self, values: Tensor, value: float = 0.0) -> Tensor:
        """The padded batch (B, L, …) of tokens (T, …), with ``value`` at padding.

        For a layout from a mask, L and the positions are the mask's. For others L is ``max_seqlen``, tokens first.

        Raises:
            ValueError: fewer rows than the layout has tokens, or another device.
        """
        self._check_usable(values, "values")
        self.check_rows(values, "values")
        length = self.padded_length if self.padded_length is not None else self.max_seqlen
        shape = (self.batch_size, length, *values.shape[1:])
        return scatter_rows(values[: self.total], self._index(length), shape, value)

    def to_nested(self, values: Tensor) -> Tensor:
        """The jagged NestedTensor (B, j, …) of tokens (T, …), with this layout's ``offsets`` tensor as its offsets."""
        self._check_usable(values, "values")
        self.check_rows(values, "values")
        return SequenceLayout._wrap(values, self)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        """``values`` (N, …) with ``value`` in the rows past ``total``, which belong to no sequence."""
        if values.shape[0] == self.total:
            return values
        past = torch.arange(values.shape[0], device=values.device) >= self.total
        return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)

    def check_rows(self, values: Tensor, name: str) -> None:
        """Raise ValueError for a tensor on another device, or with fewer rows than ``total``."""
        self._check_device(values, name)
        if values.dim() == 0 or values.shape[0] < self.total:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but the layout's {self.batch_size} sequences have "
                f"{self.total} tokens: pass at least that many rows, tokens first."
            )

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        """Raise ValueError if key or value has fewer rows than ``total``, or if one has fewer rows than the other.

        Either may have more rows than ``total``; those are not read.
        """
        for name, x in (("key", key), ("value", value)):
            self.check_rows(x, name)
        if key.shape[0] != value.shape[0] and self.total != min(key.shape[0], value.shape[0]):
            raise ValueError(
                f"key and value must have the same tokens, got {tuple(key.shape)} and {tuple(value.shape)}."
            )

    def _check_usable(self, given: object, name: str) -> None:
        """Check that ``given`` is a tensor on this layout's device, and that the offsets were not changed."""
        refuse_jit_trace()
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}.")
        self._check_device(given, name)
        self.check_unchanged("this layout")

    def _check_device(self, tensor: Tensor, name: str) -> None:
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device} and the layout on {self.device}: "
                f"make the layout from offsets or lengths on {tensor.device}."
            )

    def _index(self, length: int) -> Tensor:
        """(T,) int64, the position of each token in a flattened (B·length) batch."""
        if self.padded_index is not None:
            return self.padded_index
        return self.cached(("padded_index", length), lambda: self.sequence_ids * length + self.position_ids)


TracedLayout._read_offsets = staticmethod(outside_of_graphs(lambda offsets: SequenceLayout.from_offsets(offsets)))


def layout_where(begins: Ints, device: torch.device) -> SequenceLayout:
    """The layout on ``device`` of N tokens. Sequences begin where ``begins`` (N,) is not 0. The first must not be 0."""
    starts = begins.nonzero()[0]
    return SequenceLayout.from_facts(*facts_of_lengths(np.diff(starts, append=len(begins)), device))


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
    """``mask`` (B, L) as booleans on the host, read in one sync. Finding tokens on the host is fast for any batch."""
    if mask.dtype == torch.bool:
        return on_host(mask)
    values = on_host((mask != 0) + 2 * (mask != (mask != 0)))  # above 1 if the mask's value is neither 0 nor 1
    if (values > 1).any():
        raise ValueError(
            f"mask holds {mask.flatten()[int(values.argmax())].item()}, and only 0 (padding) and 1 (a token) "
            "have a meaning here. For an additive mask, pass mask == 0."
        )
    return values > 0


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def scatter_rows(values: Tensor, index: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """A tensor of ``shape`` (B, L, …): ``values[t]`` at position ``index[t]`` of B · L, and ``value`` elsewhere.

    Its own autograd function, because that of ``index_copy_`` saves the values, and its result would be a view.
    """
    if not torch.compiler.is_compiling():
        return cast(Tensor, _Scatter.apply(values, index, shape, value))
    padded = values.new_full((shape[0] * shape[1], *shape[2:]), value)
    return padded.index_put((index,), values).unflatten(0, shape[:2])


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
        return grad.flatten(0, 1).index_select(0, ctx.saved_tensors[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return cast(Tensor, _Scatter.apply(tangent, ctx.saved_tensors[0], ctx.shape, 0.0))
