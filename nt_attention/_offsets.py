"""Reading offsets on the host, once for each tensor, and caching what is derived from them.

Dimensions: B sequences.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ._tracing import check_readable, outside_of_graphs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[Any]

INT32_MAX = 2**31 - 1
_MISSING: Any = object()


class Cache:
    """Values derived from offsets, by key. Above ``MOST_ENTRIES`` values, the oldest is dropped.

    A value that is used while a CUDA graph is captured is never dropped, because a replay of the graph reads it.
    """

    MOST_ENTRIES = 64
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._may_be_captured = device.type == "cuda"
        self._entries: dict[object, Any] = {}
        self._captured: dict[object, Any] = {}

    def find_or_build(self, key: object, build: Callable[[], Any], other: Cache | None = None) -> Any:
        """The value of ``key``, built the first time. With ``other``, it is kept as long as both caches live."""
        if other is not None:
            values = self.find_or_build((key, "with"), WeakIdKeyDictionary)
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
    """The state of a tensor. Two snapshots differ if the tensor was changed in place in between.

    On a CPU the memory is compared, which also finds changes through NumPy or ``.data``. On other devices these are not
    found, because they do not increase the version counter. Inference tensors have no counter: no change is found.
    """
    if tensor.is_inference():
        return None
    address = tensor.data_ptr()
    if not tensor.is_cpu:
        return tensor._version, address, tensor.numel()
    if tensor.is_contiguous():  # at least six times as fast as tolist
        return tensor._version, address, ctypes.string_at(address, tensor.nbytes)
    with _no_modes():
        return tensor._version, address, tensor.tolist()


class HostFacts:
    """What is known of an offsets tensor after one sync. Has no reference to the tensor, which would never be freed.

    Attributes:
        host: (B+1,) int64, a copy on the CPU.
        converted: (B+1,) on the same device; int32 for int64 offsets, int64 for int32 ones.
        first, total: the first offset, and the number of tokens after it.
        max_seqlen, min_seqlen, sum_of_squares: of the lengths.
        digest: a hash of the offsets.
        cache: all other derived values; see ``SequenceLayout.cached``.
    """

    def __init__(self, as_read: object, host: Tensor, converted: Tensor) -> None:
        """``as_read``: the snapshot of the offsets when they were read."""
        self.host, self.converted = host, converted
        self._as_read, self._as_converted = as_read, snapshot(converted)
        self._converted_version = None if converted.is_inference() else converted._version
        numbers = on_host(host)
        lengths = np.diff(numbers)
        self.first, self.total = int(numbers[0]), int(numbers[-1] - numbers[0])
        self.max_seqlen, self.min_seqlen = int(lengths.max(initial=0)), int(lengths.min()) if lengths.size else 0
        self.sum_of_squares = int(lengths.dot(lengths))
        self.digest = hash(numbers.tobytes())
        self.cache = Cache(converted.device)

    def match(self, offsets: Tensor) -> bool:
        """Whether ``offsets``, which are the tensor that was read or ``converted``, were not changed since."""
        return snapshot(offsets) == (self._as_converted if offsets is self.converted else self._as_read)

    def match_both(self, offsets: Tensor, cu_seqlens: Tensor) -> bool:
        """``match`` for both tensors in less host time: of ``converted``, only the version counter is compared."""
        if self._as_read is None:
            return True
        read, converted = (cu_seqlens, offsets) if offsets is self.converted else (offsets, cu_seqlens)
        return snapshot(read) == self._as_read and converted._version == self._converted_version


# Offsets → facts. The keys are weak references, so a new tensor with the id of a freed one is not mistaken for it.
_facts_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Converted offsets → a weak reference to the offsets that they were made from, as callers may pass either.
_source_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def read_offsets(offsets: Tensor) -> tuple[Tensor, HostFacts]:
    """Read ``offsets`` (B+1,) once: a device sync the first time this tensor object is passed, and after each change.

    Inference tensors have no version counter, so they are read each time.

    Returns:
        ``offsets``, or the tensor that they were converted from if neither was changed since; and its facts.

    Raises:
        TypeError: not a tensor.
        ValueError: not one-dimensional int32 or int64, empty, decreasing, negative, above the int32 range, or on the
            meta device.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"offsets must be a torch.Tensor, got {type(offsets).__name__}: pass torch.tensor([0, 3, 7]).")
    offsets = plain(offsets)
    facts: HostFacts | None = _facts_of.get(offsets)
    if facts is not None and facts.match(offsets):
        return offsets, facts
    reference = _source_of.get(offsets)
    source = None if reference is None else reference()
    if source is not None:
        facts = _facts_of.get(source)
        if facts is not None and facts.converted is offsets and facts.match(source) and facts.match(offsets):
            return source, facts
    return offsets, _read(offsets)


def _read(offsets: Tensor) -> HostFacts:
    if offsets.is_nested or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        shape = "nested" if offsets.is_nested else tuple(offsets.shape)
        raise ValueError(
            f"offsets must be a (B+1,) tensor of int32 or int64, got shape {shape} and {offsets.dtype}: "
            "pass the running sum of the lengths with a leading 0, or use SequenceLayout.from_lengths."
        )
    check_readable(offsets, "offsets")
    if offsets.numel() == 0:
        raise ValueError("offsets is empty: B sequences have B+1 offsets, so an empty batch is torch.tensor([0]).")
    as_read = snapshot(offsets)
    with torch.inference_mode(offsets.is_inference()), torch._C._DisableFuncTorch(), _no_modes():
        host = offsets.detach().to("cpu", torch.int64, copy=True)
        converted = offsets.detach().to(torch.int64 if offsets.dtype == torch.int32 else torch.int32)
        numbers = host.numpy()
    falls = numbers[1:] < numbers[:-1]  # not by their difference, which may overflow
    if falls.any():
        fall = int(falls.argmax())
        raise ValueError(
            f"offsets fall from {numbers[fall]} to {numbers[fall + 1]} at index {fall + 1}: they must never "
            "decrease. If these are lengths, pass them to SequenceLayout.from_lengths."
        )
    if numbers[0] < 0 or numbers[-1] > INT32_MAX:
        bad = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise ValueError(f"offsets must lie in 0 … {INT32_MAX}, which is what the kernels can address; got {bad}.")
    return cache_facts(offsets, HostFacts(as_read, host, converted))


def cache_facts(offsets: Tensor, facts: HostFacts) -> HostFacts:
    """Cache ``facts`` for ``offsets`` and for ``facts.converted``, as long as the offsets live."""
    if not offsets.is_inference():
        _facts_of[offsets] = facts
        _source_of[facts.converted] = weakref.ref(offsets)
    return facts


@outside_of_graphs  # a graph would turn NumPy's numbers into constants or fake tensors
def facts_of_lengths(lengths: Ints, device: torch.device) -> tuple[Tensor, HostFacts]:
    """New int64 offsets (B+1,) on ``device`` for ``lengths`` (B,) on the host, and their facts, without a device sync.

    Raises:
        ValueError: a negative length, or more tokens than 2³¹ − 1.
    """
    if lengths.size and lengths.min() < 0:
        at = int(lengths.argmin())
        raise ValueError(f"lengths[{at}] is {lengths[at]}: a sequence has zero or more tokens.")
    ends = np.zeros(lengths.size + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    if ends[-1] > INT32_MAX or lengths.max(initial=0) > INT32_MAX:  # both, because the sum may overflow
        raise ValueError(
            f"the lengths add up to {sum(map(int, lengths))} tokens, past the kernels' limit of {INT32_MAX}: "
            "pass fewer sequences at a time."
        )
    with creating_cached_tensors():  # inference tensors would have no version counter
        host = torch.from_numpy(ends)
        offsets = to_device(ends, device) if device.type != "cpu" else host.clone()
        return offsets, cache_facts(offsets, HostFacts(snapshot(offsets), host, offsets.to(torch.int32)))


def _no_modes() -> AbstractContextManager[Any]:
    """Within the block, all dispatch modes are off."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def creating_cached_tensors() -> Iterator[None]:
    """Within the block, tensors are made without inference mode, gradients, modes and transforms, for all callers."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch(), _no_modes():
        yield


def plain(tensor: Tensor) -> Tensor:
    """A tensor without the wrappers of function transforms, which have no values that the host can read."""
    while isinstance(tensor, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def on_host(tensor: Tensor) -> Ints:
    with torch._C._DisableFuncTorch():
        return plain(tensor).detach().cpu().numpy()


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """A tensor of ``numbers`` on ``device``, without a sync: the driver makes its own copy of unpinned memory."""
    with creating_cached_tensors():
        return torch.from_numpy(numbers).to(device, non_blocking=True)
