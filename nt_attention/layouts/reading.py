"""Reads each offsets tensor on the host once, and caches the values that are derived from it.

Dimensions: B sequences.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..compiler import check_readable, is_compiling, is_replayed, outside_of_graphs
from ..torch_private import (
    count_dispatch_modes,
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
_V = TypeVar("_V")


@outside_of_graphs  # torch.compile would compile it: a tensor may be freed between two functions that it compiles
def _remove(entries: dict[int, tuple[weakref.ref[Tensor], Any]], key: int, freed: weakref.ref[Tensor]) -> None:
    entry = entries.get(key)
    if entry is not None and entry[0] is freed:  # else another tensor has this id now
        del entries[key]


class WeakTensorDict(Generic[_V]):
    """A dictionary whose keys are tensor objects. An entry is removed when its tensor is freed.

    The same as `torch.utils.weak.WeakTensorKeyDictionary`, whose `get` takes 2 µs, with one that takes 0.2 µs.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], _V]] = {}

    def get(self, tensor: Tensor) -> _V | None:
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __setitem__(self, tensor: Tensor, value: _V) -> None:
        key = id(tensor)
        self._entries[key] = (weakref.ref(tensor, functools.partial(_remove, self._entries, key)), value)

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None

    def __len__(self) -> int:
        return len(self._entries)


class Cache:
    """A cache of values that are derived from offsets. It keeps `MOST_ENTRIES` values and drops the oldest first.

    A value that is used during the capture of a CUDA graph is never dropped, because replays of the graph read it.
    """

    MOST_ENTRIES = 64
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._may_be_captured = device.type == "cuda"
        self._entries: dict[object, Any] = {}
        self._captured: dict[object, Any] = {}

    def find_or_build(self, key: object, build: Callable[[], Any], other: Cache | None = None) -> Any:
        """The value of `key`, built the first time. With `other`, it is kept until one of both caches is freed."""
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
                value = build()
            with self._lock:
                self._entries[key] = value
                if len(self._entries) > self.MOST_ENTRIES:
                    del self._entries[next(iter(self._entries))]
        if self._may_be_captured and torch.cuda.is_current_stream_capturing():
            self._captured[key] = value
        return value

    def __len__(self) -> int:
        return len(self._entries)


def snapshot(tensor: Tensor) -> object:
    """The state of a tensor. Two snapshots of a tensor differ if it was changed in place between them.

    On a CPU, a snapshot is the values. So changes through NumPy or `.data` are found too, and a change of another row
    of the same table is none. On other devices it has the version counter, which writes to `.data` do not increase. It
    is None for inference tensors there, which have no version counter.
    """
    if tensor.is_cpu:
        if tensor.is_contiguous():  # twice as fast as NumPy
            return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        with no_modes():
            return tensor.numpy().tobytes()
    if tensor.is_inference():
        return None
    return version_of(tensor), tensor.data_ptr(), tensor.numel()


class HostFacts:
    """The facts that one sync reads from an offsets tensor.

    It does not refer to the tensor itself, because the tensor would then never be freed.

    Attributes:
        host: (B+1,) int64, a copy on the CPU. Callers must not get this tensor, because they might change it.
        converted: (B+1,) on the same device, as int32 if the offsets are int64, and as int64 if they are int32.
        first, total: the first offset, and the number of tokens after it.
        max_seqlen, min_seqlen, sum_of_squares: the maximum, the minimum and the sum of squares of the lengths.
        digest: a hash of the offsets.
        cache: all other derived values; see `SequenceLayout.cached`.
    """

    def __init__(self, offsets_snapshot: object, host: Tensor, converted: Tensor) -> None:
        """`offsets_snapshot` is the snapshot of the offsets from before they were read."""
        self.host, self.converted = host, converted
        self._offsets_snapshot, self._converted_snapshot = offsets_snapshot, snapshot(converted)
        self._converted_version = version_of(converted)
        numbers = on_host(host)
        lengths = np.diff(numbers)
        self.first, self.total = int(numbers[0]), int(numbers[-1] - numbers[0])
        self.max_seqlen, self.min_seqlen = int(lengths.max(initial=0)), int(lengths.min()) if lengths.size else 0
        self.sum_of_squares = int(lengths.dot(lengths))
        self.digest = hash(numbers.tobytes())
        self.cache = Cache(converted.device)

    def match(self, offsets: Tensor) -> bool:
        """Whether `offsets`, the tensor that was read, `converted` or its alias, is known to be unchanged."""
        is_converted = offsets.dtype == self.converted.dtype
        before = self._converted_snapshot if is_converted else self._offsets_snapshot
        return before is not None and snapshot(offsets) == before

    def match_both(self, offsets: Tensor, cu_seqlens: Tensor) -> bool:
        """Whether neither was changed, as far as can be known. One is `converted`, or an alias of it."""
        read, converted = (offsets, cu_seqlens) if self.converted.dtype == torch.int32 else (cu_seqlens, offsets)
        before = self._offsets_snapshot
        if before is not None and snapshot(read) != before:
            return False
        if not converted.is_cpu:  # this takes half as long
            return version_of(converted) == self._converted_version
        return snapshot(converted) == self._converted_snapshot

    @property
    def has_old_converted(self) -> bool:
        """Whether `converted` was changed in place, by its version counter."""
        return version_of(self.converted) != self._converted_version

    @property
    def notices_changes(self) -> bool:
        """Whether a change of the offsets that were read would be noticed. If not, they are read each time."""
        return self._offsets_snapshot is not None


# Offsets → facts. Keys are weak references, so a new tensor never finds the facts of a freed tensor with its id.
_facts_of: WeakTensorDict[HostFacts] = WeakTensorDict()
# Converted offsets → a weak reference to the offsets they were made from, because callers may pass either.
_source_of: WeakTensorDict[weakref.ref[Tensor]] = WeakTensorDict()
# The results of `copy_for_graph` and `alias_of` → their snapshot, and the offsets and facts they were made from.
_copies: WeakTensorDict[tuple[object, Tensor, HostFacts]] = WeakTensorDict()
# Offsets that an operator has read → the marker of the forward, their snapshot, and the copy that was read.
_read_in: WeakTensorDict[tuple[weakref.ref[Tensor], object, Tensor]] = WeakTensorDict()


def read_offsets(offsets: Tensor) -> tuple[Tensor, HostFacts]:
    """Read `offsets` (B+1,) on the host.

    This syncs the first time that a tensor object is passed, and after each in-place change of it. On a GPU, inference
    tensors are read each time, because they have no version counter. So are the outputs of a compiled function that
    runs as a CUDA graph: each replay writes other values to them, without a change of their version.

    Returns:
        The offsets and their facts. If `offsets` is a copy of another tensor (the converted one, or one for a graph)
        and neither was changed, that other tensor is returned. If later changes can't be noticed, int32 offsets are
        copied, because kernels read them.

    Raises:
        TypeError: `offsets` is not a tensor.
        ValueError: the offsets are not one-dimensional int32 or int64, are empty, decreasing, negative or above the
            int32 range, or are on the meta device.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"offsets must be a torch.Tensor, got {type(offsets).__name__}: pass torch.tensor([0, 3, 7]).")
    offsets = plain(offsets)
    if (found := find(offsets)) is not None:
        return found
    facts = _read(offsets)
    if not facts.notices_changes and offsets.dtype == torch.int32:
        with creating_cached_tensors():
            offsets = offsets.detach().clone()
        facts = HostFacts(snapshot(offsets), facts.host, facts.converted)
    return offsets, cache_facts(offsets, facts)


def read_in_operator(offsets: Tensor, marker: Tensor | None) -> tuple[Tensor, HostFacts]:
    """`read_offsets` in an operator of a graph.

    Offsets that were read outside of graphs need no sync. Others may have been computed in the graph. A compiler may
    reuse the memory and the tensor object of such a tensor for other offsets, without a change of its version. So they
    are read again, unless they were read in this forward of the model, which passes them to all of its layers.

    Args:
        offsets: (B+1,).
        marker: a tensor that is made once in each forward of a model; None if it is not known.

    Returns:
        The offsets, or a copy of those that were read, and their facts.
    """
    found = _find(offsets)
    if found is not None:
        return found
    entry = _read_in.get(offsets)
    if entry is not None and entry[0]() is marker is not None and entry[1] == snapshot(offsets):
        return read_offsets(entry[2])
    with creating_cached_tensors():
        copy = offsets.detach().clone()
    if marker is not None:
        _read_in[offsets] = (weakref.ref(marker), snapshot(offsets), copy)
    return read_offsets(copy)


def copy_for_graph(offsets: Tensor, facts: HostFacts, size: int) -> Tensor:
    """Offsets for a graph. Reading them returns `offsets` and `facts`, without a sync.

    Args:
        offsets, facts: (B+1,) offsets that begin at 0, and their facts.
        size: the size of the result, at least B+1. A graph may not know B.

    Returns:
        (size,) int32, the offsets, then the total: sequences without tokens.
    """

    def fill() -> Tensor:
        filled = offsets.new_full((size,), facts.total, dtype=torch.int32)
        filled[: offsets.shape[0]] = offsets
        return filled

    filled = facts.cache.find_or_build(("for graph", size), fill)
    with creating_cached_tensors():
        copy = filled.clone()
        _copies[copy] = (snapshot(copy), offsets, facts)
    return copy


def alias_of(converted: Tensor, offsets: Tensor, facts: HostFacts) -> Tensor:
    """(B+1,), `facts.converted` as another tensor object. Reading it returns `offsets` and `facts`, without a sync.

    A graph keeps this tensor for its backward, and finds by it what was read, also after the offsets are freed. By
    `converted` itself it would not.
    """
    with creating_cached_tensors():
        alias = converted.detach()
        _copies[alias] = (snapshot(alias), offsets, facts)
    return alias


def _find(offsets: Tensor) -> tuple[Tensor, HostFacts] | None:
    """The offsets that `offsets` are, or are a copy of, and their facts, if they are cached and were not changed."""
    facts = _facts_of.get(offsets)
    if facts is not None and facts.match(offsets) and not facts.has_old_converted:
        return offsets, facts
    reference = _source_of.get(offsets)
    source = None if reference is None else reference()
    if source is not None:
        facts = _facts_of.get(source)
        if facts is not None and facts.converted is offsets and facts.match(source) and facts.match(offsets):
            return source, facts
    return None


def are_of_layout(offsets: Tensor) -> bool:
    """Whether a layout was made of these offsets, or made them. They may be changed since.

    If the offsets are freed that a layout was made of, what was read is not known anymore, and this is False.
    """
    source = _source_of.get(offsets)
    return offsets in _facts_of or offsets in _copies or (source is not None and source() is not None)


def _find_copied(offsets: Tensor) -> tuple[Tensor, HostFacts] | None:
    """What `copy_for_graph` or `alias_of` was called with, if it made these offsets."""
    entry = _copies.get(offsets)
    return (entry[1], entry[2]) if entry is not None and entry[0] == snapshot(offsets) else None


def find(offsets: Tensor) -> tuple[Tensor, HostFacts] | None:
    """What `read_offsets` returns, if these offsets were read before and not changed since."""
    return _find(offsets) or _find_copied(offsets)


def _read(offsets: Tensor) -> HostFacts:
    if offsets.is_nested or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        shape = "nested" if offsets.is_nested else tuple(offsets.shape)
        raise ValueError(
            f"offsets must be a (B+1,) tensor of int32 or int64, got shape {shape} and {offsets.dtype}: "
            "pass 0 followed by the cumulative sum of the lengths, or use SequenceLayout.from_lengths."
        )
    check_readable(offsets, "offsets")
    if offsets.numel() == 0:
        raise ValueError("offsets is empty: B sequences have B+1 offsets, so pass torch.tensor([0]) for no sequences.")
    offsets_snapshot = None if is_replayed(offsets) else snapshot(offsets)
    with creating_cached_tensors():
        host = offsets.detach().to("cpu", torch.int64, copy=True)
        converted = offsets.detach().to(torch.int64 if offsets.dtype == torch.int32 else torch.int32)
        numbers = host.numpy()
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
    return HostFacts(offsets_snapshot, host, converted)


def cache_facts(offsets: Tensor, facts: HostFacts) -> HostFacts:
    """Cache `facts` for `offsets` and for `facts.converted`, until the offsets are freed."""
    if facts.notices_changes:
        _facts_of[offsets] = facts
        _source_of[facts.converted] = weakref.ref(offsets)
    return facts


@outside_of_graphs  # in a graph, the numbers would become constants or fake tensors
def facts_of_lengths(lengths: Ints, device: torch.device) -> tuple[Tensor, HostFacts, Tensor]:
    """Make int64 offsets (B+1,) on `device` from `lengths` (B,) on the host, without a sync.

    Returns:
        The offsets, their facts, and the same offsets as int32, see `alias_of`.

    Raises:
        ValueError: a length is negative, or there are more than 2³¹ − 1 tokens.
    """
    if lengths.size and lengths.min() < 0:
        at = int(lengths.argmin())
        raise ValueError(f"lengths[{at}] is {lengths[at]}: lengths must be 0 or greater.")
    ends = np.zeros(lengths.size + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    if ends[-1] > INT32_MAX or lengths.max(initial=0) > INT32_MAX:  # both, because the sum may overflow
        raise ValueError(
            f"the lengths add up to {sum(map(int, lengths))} tokens, but kernels support at most {INT32_MAX}: "
            "split the batch."
        )
    with creating_cached_tensors():  # inference tensors would have no version counter
        host = torch.from_numpy(ends)
        offsets = to_device(ends, device) if device.type != "cpu" else host.clone()
        facts = cache_facts(offsets, HostFacts(snapshot(offsets), host, offsets.to(torch.int32)))
        return offsets, facts, alias_of(facts.converted, offsets, facts)


def no_modes() -> AbstractContextManager[Any]:
    """A context in which all dispatch modes are off."""
    return without_dispatch_modes() if count_dispatch_modes() else nullcontext()


def creating_cached_tensors() -> AbstractContextManager[None]:
    """A context to make cached tensors in: without inference mode, gradients, dispatch modes and transforms."""
    is_plain = not (
        torch.is_inference_mode_enabled() or torch.is_grad_enabled() or is_transformed() or count_dispatch_modes()
    )
    return nullcontext() if is_plain else _without_modes()  # it is often nested


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
    with without_transforms():
        return plain(tensor).detach().cpu().numpy()


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """Copy `numbers` to `device` without a sync: CUDA first copies unpinned memory to a buffer of its own."""
    with creating_cached_tensors():
        return torch.from_numpy(numbers).to(device, non_blocking=True)


def tensor_of(owner: object, device: torch.device) -> Tensor:
    """A tensor () that keeps an object, for code that passes tensors only. `owner_of` returns the object.

    The object must not refer to the tensor, or neither would be freed.
    """
    made = torch.empty((), dtype=torch.int64, device=device)
    made.untyped_storage().owner = owner  # type: ignore[attr-defined]
    return made


def owner_of(tensor: Tensor) -> Any:
    """The object that `tensor_of` has kept in the storage of a tensor or its alias, or None."""
    return getattr(tensor.untyped_storage(), "owner", None)
