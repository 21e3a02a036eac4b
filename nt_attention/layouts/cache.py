"""Reads offsets on the host, and caches what is made of them, and of the tensors of users.

Dimensions: B sequences.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..compiler import check_readable, is_compiling, outside_of_graphs
from ..torch_private import (
    count_dispatch_modes,
    is_output_of_cuda_graph,
    is_transformed,
    unwrapped,
    version_of,
    without_dispatch_modes,
    without_transforms,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[Any]

INT32_MAX = 2**31 - 1
_MISSING: Any = object()
_T = TypeVar("_T")


class Cache:
    """A cache of values that are derived from offsets. It keeps `MOST_ENTRIES` values and drops the oldest first.

    A value that is used during the capture of a CUDA graph is never dropped, because replays of the graph read it.
    """

    MOST_ENTRIES = 64

    def __init__(self, device: torch.device) -> None:
        self._may_be_captured = device.type == "cuda"
        self._entries: dict[object, Any] = {}
        self._captured: dict[object, Any] = {}

    def find_or_build(self, key: object, build: Callable[[], Any], other: Cache | None = None) -> Any:
        """The value of `key`, built the first time. With `other`, it is cached until one of both caches is freed."""
        if other is not None:
            values = self.find_or_build((key, "with"), weakref.WeakKeyDictionary)
            value = values.get(other, _MISSING)
            if value is _MISSING:
                with creating_cached_tensors():
                    value = values[other] = build()
            return value
        value = self._entries.get(key, _MISSING)
        if value is _MISSING:
            value = self._captured.get(key, _MISSING)
        if value is _MISSING:
            with creating_cached_tensors():
                value = self._entries[key] = build()
            if len(self._entries) > self.MOST_ENTRIES:
                self._entries.pop(list(self._entries)[0], None)  # noqa: RUF015 (other threads may change it)
        if self._may_be_captured and torch.cuda.is_current_stream_capturing():
            self._captured[key] = value
        return value


class _Entry(NamedTuple):
    """A value that was made of a tensor, their states at that time, and a second tensor on which it depends."""

    states: tuple[object, ...]
    other: weakref.ref[Tensor] | None
    value: Any

    @property
    def is_dead(self) -> bool:
        return self.other is not None and self.other() is None


# The id of a tensor of a user → the tensor, and what was made of it, by key. An entry is removed with its tensor.
_entries: dict[int, tuple[weakref.ref[Tensor], dict[object, _Entry]]] = {}


@outside_of_graphs  # torch.compile would compile it: a tensor may be freed between two functions that it compiles
def _remove(entries: dict[int, tuple[weakref.ref[Tensor], Any]], at: int, freed: weakref.ref[Tensor]) -> None:
    entry = entries.get(at)  # not the global name, which is None when the interpreter exits
    if entry is not None and entry[0] is freed:  # else another tensor has this id now
        del entries[at]


def find_cached(tensor: Tensor, key: object, other: Tensor | None = None) -> Any:
    """What `cache_with` has made of a tensor, if neither it nor `other` was changed since; else None."""
    reference, entries = _entries.get(id(tensor), (None, None))
    if reference is None or entries is None or reference() is not tensor:
        return None
    entry = entries.get(key)
    if entry is None or (None if entry.other is None else entry.other()) is not other:
        return None
    return entry.value if entry.states == _states(tensor, other) else None


def cache_with(
    tensor: Tensor, key: object, build: Callable[[], _T], other: Tensor | None = None, *, follows: bool = False
) -> _T:
    """What `build` makes of a tensor, cached until this tensor is freed or changed in place.

    If a change could not be seen, the value is made in each call.

    Args:
        tensor: the tensor. The value must not refer to it, or neither would be freed.
        key: what is made of it.
        build: makes the value.
        other: a second tensor on which the value depends.
        follows: whether the value follows changes that can't be seen, so that it is cached then too.
    """
    value: _T | None = find_cached(tensor, key, other)
    if value is None:
        states = _states(tensor, other)  # from before it is read
        value = build()
        if follows or None not in states:
            at = id(tensor)
            reference, entries = _entries.get(at, (None, {}))
            if reference is None or reference() is not tensor:
                reference, entries = weakref.ref(tensor, functools.partial(_remove, _entries, at)), {}
            entries = {name: entry for name, entry in list(entries.items()) if not entry.is_dead}
            entries[key] = _Entry(states, None if other is None else weakref.ref(other), value)
            _entries[at] = reference, entries
    return value


def forget(tensor: Tensor, key: object) -> None:
    """Forget what `cache_with` has made of a tensor, which may have changed unseen."""
    reference, entries = _entries.get(id(tensor), (None, None))
    if reference is not None and entries is not None and reference() is tensor:
        entries.pop(key, None)


def _states(tensor: Tensor, other: Tensor | None) -> tuple[object, ...]:
    return (state_of(tensor),) if other is None else (state_of(tensor), state_of(other))


def state_of(tensor: Tensor) -> object:
    """What differs after an in-place change of a tensor; None if a change could not be seen.

    On a CPU it is the content, so that writes through NumPy and `.data` are seen. On other devices it has the version,
    which inference tensors do not have, and which replays of CUDA graphs do not change.
    """
    if is_output_of_cuda_graph(tensor):
        return None
    if tensor.is_cpu:
        if tensor.is_contiguous():  # twice as fast as NumPy
            return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        with no_modes():
            return tensor.numpy().tobytes()
    return None if tensor.is_inference() else (version_of(tensor), tensor.data_ptr(), tensor.numel())


def check_offsets(offsets: Tensor) -> None:
    """Check that `offsets` are (B+1,) int32 or int64, and that the host can read them.

    Raises:
        ValueError: they are not.
    """
    if offsets.is_nested or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        shape = "nested" if offsets.is_nested else tuple(offsets.shape)
        raise ValueError(
            f"offsets must be a (B+1,) tensor of int32 or int64, got shape {shape} and {offsets.dtype}: "
            "pass 0 followed by the cumulative sum of the lengths, or use SequenceLayout.from_lengths."
        )
    check_readable(offsets, "offsets")
    if offsets.numel() == 0:
        raise ValueError("offsets is empty: B sequences have B+1 offsets, so pass torch.tensor([0]) for no sequences.")


def read_offsets(offsets: Tensor) -> tuple[Ints, Tensor]:
    """Copy `offsets` (B+1,) to the host, as int64, and on their device, as int32. Syncs.

    Raises:
        ValueError: as `check_offsets`, or they are decreasing, negative or above the int32 range.
    """
    check_offsets(offsets)
    return _read(offsets)


def _read(offsets: Tensor) -> tuple[Ints, Tensor]:
    with creating_cached_tensors():
        numbers: Ints = offsets.detach().to("cpu", torch.int64, copy=True).numpy()
    decreases = numbers[1:] < numbers[:-1]  # their difference could overflow
    if decreases.any():
        at = int(decreases.argmax())
        raise ValueError(
            f"offsets decrease from {numbers[at]} to {numbers[at + 1]} at index {at + 1}, but must never decrease. "
            "If these are lengths, pass them to SequenceLayout.from_lengths."
        )
    if numbers[0] < 0 or numbers[-1] > INT32_MAX:
        bad = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise ValueError(f"offsets must be in the kernels' range, 0 to {INT32_MAX}, got {bad}.")
    with creating_cached_tensors():
        return numbers, offsets.detach().to(torch.int32, copy=True)


def offsets_of_lengths(lengths: Ints, device: torch.device) -> tuple[Ints, Tensor]:
    """The offsets of sequences of `lengths` (B,) on the host, as in `read_offsets`, without a sync.

    Raises:
        ValueError: a length is negative, or there are more than 2³¹ − 1 tokens.
    """
    if lengths.size and lengths.min() < 0:
        at = int(lengths.argmin())
        raise ValueError(f"lengths[{at}] is {lengths[at]}: lengths must be 0 or greater.")
    ends = np.zeros(lengths.size + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    if ends[-1] > INT32_MAX or lengths.max(initial=0) > INT32_MAX:  # both, because the sum may overflow
        raise _too_many_tokens(sum(map(int, lengths)))
    return ends, to_device(ends.astype(np.int32), device)


def offsets_of_ends(ends: Ints, device: torch.device) -> Tensor:
    """(B+1,) int32 on `device`, from offsets that begin at 0 and do not decrease. Without a sync.

    Raises:
        ValueError: there are more than 2³¹ − 1 tokens.
    """
    if ends[-1] > INT32_MAX:
        raise _too_many_tokens(int(ends[-1]))
    return to_device(ends.astype(np.int32), device)


def _too_many_tokens(total: int) -> ValueError:
    return ValueError(
        f"the lengths add up to {total} tokens, but kernels support at most {INT32_MAX}: split the batch."
    )


def starts_of_positions(position_ids: Tensor) -> Ints:
    """(R·L,) whether a sequence begins at each of the positions (R, L): where one isn't the one before it plus 1."""
    rows = torch.atleast_2d(position_ids.long())  # the difference of smaller integer types could overflow
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows.diff(dim=1) != 1
    return on_host(begins.flatten())


def no_modes() -> AbstractContextManager[Any]:
    """A context in which all dispatch modes are off."""
    return without_dispatch_modes() if count_dispatch_modes() else nullcontext()


def creating_cached_tensors() -> AbstractContextManager[None]:
    """A context to make cached tensors in: without inference mode, gradients, dispatch modes and transforms."""
    if torch.is_inference_mode_enabled() or is_transformed() or count_dispatch_modes():
        return _without_modes()
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()  # it is often nested


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), without_transforms(), no_modes():
        yield


def copy_of(tensor: Tensor) -> Tensor:
    """A copy for a user, who may change it. It is no inference tensor, so it can be saved for a backward."""
    if is_compiling() or not torch.is_inference_mode_enabled():
        return tensor.clone()
    with torch.inference_mode(False):
        return tensor.clone()


def plain(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of function transforms, whose values the host can't read."""
    while isinstance(tensor, Tensor) and (inner := unwrapped(tensor)) is not tensor:
        tensor = inner
    return tensor


def on_host(tensor: Tensor) -> Ints:
    if not is_transformed():
        return tensor.detach().cpu().numpy()
    with without_transforms():
        return plain(tensor).detach().cpu().numpy()


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """Copy `numbers` to `device` without a sync: CUDA first copies unpinned memory to a buffer of its own."""
    with creating_cached_tensors():
        return torch.from_numpy(numbers).to(device, non_blocking=True)


def tensor_of(owner: object, device: torch.device, number: int = 0) -> Tensor:
    """A tensor () of a number that keeps an object, for code that passes tensors only. `owner_of` returns the object.

    The object must not refer to the tensor, or neither would be freed.
    """
    made = torch.tensor(number, dtype=torch.int64, device=device)
    made.untyped_storage().owner = owner  # type: ignore[attr-defined]
    return made


def owner_of(tensor: Tensor) -> Any:
    """The object that is kept in the storage of a tensor or its alias, or None."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "owner", None)
