"""`BoundedLayout`: a layout whose lengths only the device knows. The host knows upper bounds of them.

Dimensions: B sequences, N the bound of the number of tokens in the whole batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..compiler import CapturedGraph, TracedLayout, captured_graph, check_readable, is_replayed
from ..torch_private import version_of
from .known import SequenceLayout
from .reading import INT32_MAX, Cache, WeakTensorDict, creating_cached_tensors, plain

_T = TypeVar("_T")


class LengthsUnknownError(ValueError):
    """The host needs lengths that only the device knows.

    Example:
        >>> import torch
        >>> from nt_attention.layouts.bounded import BoundedLayout, LengthsUnknownError
        >>> layout = BoundedLayout(torch.tensor([0, 2, 5], dtype=torch.int32), max_seqlen=4, max_tokens=8)
        >>> try:
        ...     layout.host_offsets
        ... except LengthsUnknownError as error:
        ...     print(error)
        host_offsets needs the lengths, but this layout only knows bounds of them: make it without max_tokens.
    """


class Valid(NamedTuple):
    """Offsets that are safe to index with.

    Attributes:
        offsets: (B+1,) int64. All are 0 if the given ones are not valid: if they decrease, do not begin at 0, or exceed
            a bound.
        are_valid: () bool, on the device.
    """

    offsets: Tensor
    are_valid: Tensor

    @classmethod
    def of(cls, given: Tensor, max_seqlen: int, max_tokens: int) -> Valid:
        offsets = given.long()
        lengths = offsets.diff()
        in_order = ((lengths >= 0) & (lengths <= max_seqlen)).all()
        are_valid = in_order & (offsets[0] == 0) & (offsets[-1] <= max_tokens)
        return cls(torch.where(are_valid, offsets, 0), are_valid)

    def locate(self, rows: int) -> tuple[Tensor, Tensor]:
        """The sequence of each of `rows` rows, and its position in it: B − 1 and 0 past the last offset."""
        row, offsets = torch.arange(rows, device=self.offsets.device), self.offsets
        sequence = torch.searchsorted(offsets[1:], row, right=True).clamp(max=len(offsets) - 2)
        return sequence, torch.where(row < offsets[-1], row - offsets[sequence], 0)

    def extended(self, extra: int) -> Tensor:
        """The offsets of sequences that are `extra` tokens longer; not valid if these are not."""
        longer = self.offsets + extra * torch.arange(len(self.offsets), device=self.offsets.device)
        return torch.where(self.are_valid, longer, -1)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        """Replace the rows of `values` past the last offset. If the offsets are not valid, all rows stay."""
        past = torch.arange(values.shape[0], device=values.device) >= self.offsets[-1]
        return values.masked_fill((past & self.are_valid).view(-1, *[1] * (values.dim() - 1)), value)


class BoundedLayout(SequenceLayout):
    """The layout that `SequenceLayout.from_offsets` makes with both bounds, of offsets on a GPU.

    It never syncs, so it can be used while a CUDA graph is captured, and the offsets may have other values whenever the
    graph is replayed. Packed tensors have N rows. Rows past the last offset belong to no sequence: there, results and
    gradients are 0. If the offsets are not valid or exceed the bounds, all results and gradients of attention are NaN.

    Attributes:
        given: (B+1,) int32 or int64, an alias of the offsets that were passed.
        total: N.
        max_seqlen: the bound of the longest length.
        min_seqlen: 0.
        sum_of_squares: an upper bound.
    """

    knows_lengths = False
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}  # torch.compile reads all fields of a frozen dataclass

    given: Tensor
    _version: int | None
    _caches: dict[CapturedGraph | None, Cache]

    def __init__(self, offsets: Tensor, max_seqlen: int, max_tokens: int) -> None:
        check_readable(offsets, "offsets")
        is_flat = not offsets.is_nested and offsets.dim() == 1 and len(offsets) > 0
        if not is_flat or offsets.dtype not in (torch.int32, torch.int64):
            shape = "nested" if offsets.is_nested else tuple(offsets.shape)
            raise ValueError(
                f"offsets must be a (B+1,) tensor of int32 or int64, got shape {shape} and {offsets.dtype}: "
                "pass 0 followed by the cumulative sum of the lengths."
            )
        for name, bound in (("max_seqlen", max_seqlen), ("max_tokens", max_tokens)):
            if not isinstance(bound, int) or not 0 <= bound <= INT32_MAX:
                raise ValueError(f"{name} must be an integer from 0 to {INT32_MAX}, got {bound!r}.")
        if len(offsets) == 1:
            max_tokens = 0  # there are no sequences
        # An object of its own, because several layouts of these offsets may have other bounds.
        with creating_cached_tensors():
            given = plain(offsets).detach()
        self.__dict__.update(
            total=max_tokens,
            max_seqlen=max_seqlen,
            min_seqlen=0,
            sum_of_squares=max_tokens * min(max_seqlen, max_tokens),
            padded_length=None,
            _padded_index=None,
            has_holes=False,
            given=given,
            _version=None if is_replayed(offsets) else _version(given),
            _caches={},
        )
        _layout_with[given] = weakref.ref(self)

    @staticmethod
    def of(offsets: Tensor, max_seqlen: int, max_tokens: int) -> BoundedLayout:
        """The layout of these offsets and bounds, which is kept until the offsets are freed or changed in place.

        So all layers of a model get the same layout.
        """
        found = _made_of.get(offsets)
        if found is not None and found.is_unchanged and found.bounds == (max_seqlen, max_tokens):
            return found
        made = _made_of[offsets] = BoundedLayout(offsets, max_seqlen, max_tokens)
        return made

    @property
    def offsets(self) -> Tensor:
        return self._converted(torch.int64)

    @property
    def cu_seqlens(self) -> Tensor:
        return self._converted(torch.int32)

    def _converted(self, dtype: torch.dtype) -> Tensor:
        """The offsets, or a new tensor of them."""
        return self.given.to(dtype).contiguous()

    @property
    def operator_offsets(self) -> Tensor:
        return self.given

    @property
    def bounds(self) -> tuple[int, int]:
        return self.max_seqlen, self.total

    @property
    def valid(self) -> Valid:
        """The offsets, if they are valid."""
        return self.cached("valid", lambda: Valid.of(self.given, *self.bounds))

    @property
    def _safe_offsets(self) -> Tensor:
        return self.valid.offsets

    @property
    def host_offsets(self) -> Tensor:
        raise self._unknown("host_offsets")

    @property
    def _facts(self) -> Any:
        raise self._unknown("this method")

    @property
    def digest(self) -> int:
        """A constant: the backward can't compare lengths that the host does not know."""
        return 0

    @property
    def batch_size(self) -> int:
        return len(self.given) - 1

    @property
    def device(self) -> torch.device:
        return self.given.device

    @property
    def lengths(self) -> Tensor:
        self.check_unchanged("this layout")
        return super().lengths

    @property
    def sequence_ids(self) -> Tensor:
        """(N,) int64, the index of each row's sequence; B − 1 past the last offset."""
        return super().sequence_ids

    @property
    def position_ids(self) -> Tensor:
        """(N,) int64, each row's position in its sequence; 0 past the last offset."""
        return super().position_ids

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        self.check_unchanged("this layout")
        return self.cached(("locate", rows), lambda: self.valid.locate(rows))

    @property
    def reversed(self) -> SequenceLayout:
        raise self._unknown("this call")

    @property
    def _own_offsets(self) -> Tensor:
        return self.offsets

    def __repr__(self) -> str:
        bounds = f"at most {self.total} tokens, each sequence at most {self.max_seqlen}"
        return f"BoundedLayout({self.batch_size} sequences, {bounds}, on {self.device})"

    def __getstate__(self) -> dict[str, object]:
        self.check_unchanged("this layout")
        return {"offsets": self.given, "max_seqlen": self.max_seqlen, "max_tokens": self.total}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BoundedLayout.__init__(self, **state)

    @property
    def is_unchanged(self) -> bool:
        """Whether the offsets were not changed in place since the layout was made."""
        return self._version is None or self._version == _version(self.given)

    def check_unchanged(self, name: str) -> None:
        if not self.is_unchanged:
            raise ValueError(
                f"the offsets of {name} were changed in place after it was made: make a new layout with "
                "SequenceLayout.from_offsets(offsets, max_seqlen=..., max_tokens=...). It needs no sync."
            )

    def check_saved(self) -> None:
        if not self.is_unchanged:
            raise RuntimeError(
                "the cu_seqlens of a layout, which are needed for gradient computation, have been modified by an "
                "inplace operation: pass a copy, cu_seqlens.clone(), to each forward."
            )

    def cached(self, key: object, build: Callable[[], _T], other: SequenceLayout | None = None) -> _T:
        cache = self._cache
        if cache is None:
            return build()
        other_cache = None
        if other is not None and other is not self:
            other_cache = other._cache if isinstance(other, BoundedLayout) else other._facts.cache
            if other_cache is None:
                return build()
        return cast(_T, cache.find_or_build(key, build, other_cache))

    @property
    def _cache(self) -> Cache | None:
        """The cache of this moment; None if nothing can be cached, because changes of the offsets would go unnoticed.

        What is built while a graph is captured is computed in each replay of this graph, and only there.
        """
        graph = captured_graph(self.given)
        if graph is None and self._version is None:
            return None
        cache = self._caches.get(graph)
        if cache is None:
            for other in self._caches.keys() - {None}:  # another graph, whose capture has ended
                del self._caches[other]
            cache = self._caches[graph] = Cache(self.device)
        return cache

    def extended(self, extra: int) -> SequenceLayout:
        longest, total = self.max_seqlen + extra, self.total + extra * self.batch_size
        return self.cached(("extended", extra), lambda: BoundedLayout(self.valid.extended(extra), longest, total))

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        """Replace the rows past the last offset. If the offsets are not valid, all rows stay: they are NaN."""
        return self.valid.fill_past_end(values, value)

    def pack(self, padded: Tensor) -> Tensor:
        """Remove the padding: (B, L, …) → (N, …), with 0 past the last offset. L is at least `max_seqlen`."""
        self._check_usable(padded, "padded")
        if padded.dim() < 2 or padded.shape[0] != self.batch_size or padded.shape[1] < self.max_seqlen:
            raise ValueError(
                f"padded must be ({self.batch_size}, {self.max_seqlen} or more, …) for this layout, "
                f"got {tuple(padded.shape)}."
            )
        rows, (sequence, position) = torch.arange(self.total, device=self.device), self.locate_rows(self.total)
        packed = padded.flatten(0, 1).index_select(0, sequence * padded.shape[1] + position)
        past = rows >= self.valid.offsets[-1]
        return self._or_nan(packed.masked_fill(past.view(-1, *[1] * (packed.dim() - 1)), 0))

    def pad(self, values: Tensor, value: float = 0.0) -> Tensor:
        """Convert packed tokens (N, …) to a padded batch (B, `max_seqlen`, …)."""
        self._check_usable(values, "values")
        self.check_rows(values, "values")
        offsets, positions = self.valid.offsets, torch.arange(self.max_seqlen, device=self.device)
        is_token = positions < offsets.diff()[:, None]
        index = torch.where(is_token, offsets[:-1, None] + positions, 0)
        values = values if len(values) else values.new_zeros(1, *values.shape[1:])
        padded = values.index_select(0, index.flatten()).unflatten(0, index.shape)
        return self._or_nan(padded.masked_fill(~is_token.view(*is_token.shape, *[1] * (values.dim() - 1)), value))

    def _or_nan(self, values: Tensor) -> Tensor:
        """`values`, or NaN if the offsets are not valid. Integers stay."""
        return values.masked_fill(~self.valid.are_valid, torch.nan) if values.is_floating_point() else values

    def to_nested(self, values: Tensor) -> Tensor:
        raise self._unknown("to_nested")

    def _unknown(self, name: str) -> LengthsUnknownError:
        return LengthsUnknownError(
            f"{name} needs the lengths, but this layout only knows bounds of them: make it without max_tokens."
        )


class TracedBoundedLayout(TracedLayout):
    """A `BoundedLayout` in a graph.

    Attributes:
        bounds: `max_seqlen` and `total`.
    """

    knows_lengths = False

    def __init__(self, offsets: Tensor, max_seqlen: int, max_tokens: int) -> None:
        super().__init__(offsets)
        self.arguments = self.bounds = self.max_seqlen, self.total = max_seqlen, max_tokens
        self.min_seqlen = 0

    @property
    def valid(self) -> Valid:
        return Valid.of(self.offsets, self.max_seqlen, self.total)

    @property
    def _safe_offsets(self) -> Tensor:
        return self.valid.offsets

    def extended(self, extra: int) -> TracedLayout:
        longest, total = self.max_seqlen + extra, self.total + extra * self.batch_size
        return TracedBoundedLayout(self.valid.extended(extra), longest, total)

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.valid.locate(rows)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        return self.valid.fill_past_end(values, value)


# The offsets that a layout keeps → the layout, for models of transformers, which pass only offsets to their attention.
_layout_with: WeakTensorDict[weakref.ref[BoundedLayout]] = WeakTensorDict()
# Offsets → the layout that `BoundedLayout.of` made of them. It refers to an alias of them only, so they can be freed.
_made_of: WeakTensorDict[BoundedLayout] = WeakTensorDict()


def _find(offsets: Tensor) -> BoundedLayout | None:
    """The layout that keeps this tensor object; None if there is none, or if the offsets were changed since."""
    reference = _layout_with.get(offsets)
    layout = None if reference is None else reference()
    return layout if layout is not None and layout.is_unchanged else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


SequenceLayout._with_bounds = staticmethod(BoundedLayout.of)
SequenceLayout._with_bounds_in_graph = staticmethod(lambda *given: cast(SequenceLayout, TracedBoundedLayout(*given)))
SequenceLayout._find_bounded = staticmethod(_find)
