"""`BoundedLayout`: a layout whose lengths only the device knows. The host knows upper bounds of them.

Dimensions: B sequences, N the bound of the number of tokens in the whole batch.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..compiler import CapturedGraph, captured_graph, is_replayed, refuse_tracers
from ..torch_private import version_of
from .cache import INT32_MAX, Cache, cache_with, check_offsets, creating_cached_tensors, find_cached, plain
from .protocol import Layout
from .protocol import LengthsUnknownError as LengthsUnknownError

_T = TypeVar("_T")
_ALIAS = "layout with this alias"


class Valid(NamedTuple):
    """Offsets that are safe to index with.

    Attributes:
        offsets: (B+1,) int64. All are 0 if the user's are not valid: if they decrease, do not begin at 0, or exceed a
            bound.
        are_valid: () bool, on the device.
    """

    offsets: Tensor
    are_valid: Tensor

    @classmethod
    def of(cls, unchecked: Tensor, max_seqlen: int, max_tokens: int) -> Valid:
        offsets = unchecked.long()
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


class BoundedLayout(Layout):
    """The layout that `SequenceLayout.from_offsets` makes with both bounds, of offsets on a GPU.

    It never syncs, so it can be used while a CUDA graph is captured, and the offsets may have other values whenever the
    graph is replayed. So it does not copy them. Packed tensors have N rows. Rows past the last offset belong to no
    sequence: there, results and gradients are 0. If the offsets are not valid or exceed the bounds, all results and
    gradients of attention are NaN.

    Attributes:
        total: N.
        max_seqlen: the bound of the longest length.
        min_seqlen: 0.
        sum_of_squares: an upper bound.
    """

    knows_lengths = False
    min_seqlen = 0

    batch_size: int
    device: torch.device
    max_seqlen: int
    total: int
    sum_of_squares: int

    def __init__(self, offsets: Tensor, max_seqlen: int, max_tokens: int) -> None:
        check_offsets(offsets)
        for name, bound in (("max_seqlen", max_seqlen), ("max_tokens", max_tokens)):
            if not isinstance(bound, int) or not 0 <= bound <= INT32_MAX:
                raise ValueError(f"{name} must be an integer from 0 to {INT32_MAX}, got {bound!r}.")
        with creating_cached_tensors():  # an alias, because several layouts of these offsets may have other bounds
            self._alias = plain(offsets).detach()
        self.batch_size, self.device, self.max_seqlen = len(offsets) - 1, self._alias.device, max_seqlen
        self.total = max_tokens if len(offsets) > 1 else 0  # without sequences there are no tokens
        self.bounds = self.max_seqlen, self.total
        self.sum_of_squares = self.total * min(max_seqlen, self.total)
        self._version = None if is_replayed(offsets) else _version(self._alias)
        self._caches: dict[CapturedGraph | None, Cache] = {}
        # models of transformers pass only offsets to their attention, which finds the layout by them
        cache_with(self._alias, _ALIAS, lambda: weakref.ref(self), follows=True)

    @staticmethod
    def of(offsets: Tensor, max_seqlen: int, max_tokens: int) -> BoundedLayout:
        """The layout of these offsets and bounds, which is kept until the offsets are freed or changed in place.

        So all layers of a model get the same layout.
        """

        key = ("bounds", max_seqlen, max_tokens)
        return cache_with(offsets, key, lambda: BoundedLayout(offsets, max_seqlen, max_tokens), follows=True)

    @staticmethod
    def with_offsets(offsets: Tensor) -> BoundedLayout | None:
        """The layout that has this tensor as `operator_offsets`, if the offsets were not changed since."""
        reference = find_cached(offsets, _ALIAS)
        layout: BoundedLayout | None = None if reference is None else reference()
        return layout if layout is not None and layout.is_unchanged else None

    @property
    def operator_offsets(self) -> Tensor:
        return self._alias

    @property
    def device_offsets(self) -> Tensor:
        return self._alias.int().contiguous()

    @property
    def valid(self) -> Valid:
        """The offsets, if they are valid."""
        return self.cached("valid", lambda: Valid.of(self._alias, self.max_seqlen, self.total))

    @property
    def safe_offsets(self) -> Tensor:
        return self.valid.offsets

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """The sequence of each of N rows, and its position in it: B − 1 and 0 past the last offset."""
        return self.cached(("locate", rows), lambda: self.valid.locate(rows))

    def __repr__(self) -> str:
        bounds = f"at most {self.total} tokens, each sequence at most {self.max_seqlen}"
        return f"BoundedLayout({self.batch_size} sequences, {bounds}, on {self.device})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundedLayout, (self._alias, self.max_seqlen, self.total)

    @property
    def is_unchanged(self) -> bool:
        """Whether the offsets were not changed in place since the layout was made."""
        return self._version is None or self._version == _version(self._alias)

    def check_unchanged(self, name: str) -> None:
        if not self.is_unchanged:
            raise ValueError(
                f"the offsets of {name} were changed in place after it was made: make a new layout with "
                "SequenceLayout.from_offsets(offsets, max_seqlen=..., max_tokens=...). It needs no sync."
            )

    def check_saved(self) -> None:
        if not self.is_unchanged:
            raise RuntimeError(
                "the offsets of a layout with bounds, which are needed for gradient computation, have been modified by "
                "an inplace operation: pass a copy, offsets.clone(), to each forward."
            )

    @property
    def cache(self) -> Cache | None:  # type: ignore[override]
        """The cache of this moment; None if nothing can be cached, because changes of the offsets would go unnoticed.

        What is built while a graph is captured is computed in each replay of this graph, and only there.
        """
        self.check_unchanged("this layout")
        graph = captured_graph(self._alias)
        if graph is None and self._version is None:
            return None
        cache = self._caches.get(graph)
        if cache is None:
            for other in self._caches.keys() - {None}:  # another graph, whose capture has ended
                del self._caches[other]
            cache = self._caches[graph] = Cache(self.device)
        return cache

    def extended(self, extra: int) -> Layout:
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

    def _check_usable(self, tensor: Tensor, name: str) -> None:
        refuse_tracers()
        self.check_device(tensor, name)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)
