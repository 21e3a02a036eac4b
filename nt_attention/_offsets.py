"""Reading offsets on the host, once for each tensor, and caching what they say.

Dimensions: B sequences.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ._tracing import check_readable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[Any]

INT32_MAX = 2**31 - 1
_MISSING: Any = object()


class Cache:
    """What was derived from some offsets, by key: at most ``MOST_ENTRIES``, of which the oldest goes first.

    What is used while a CUDA graph is captured stays, because replaying the graph reads it.
    """

    MOST_ENTRIES = 64
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._may_be_captured = device.type == "cuda"
        self._entries: dict[object, Any] = {}
        self._captured: dict[object, Any] = {}

    def find_or_build(self, key: object, build: Callable[[], Any], other: Cache | None = None) -> Any:
        """The value of ``key``, built the first time. With ``other``, it is kept as long as both caches are."""
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


class Snapshot:
    """A tensor as it was when it was read: tells whether it was changed in place since.

    On a CPU the memory itself is compared, so changes through NumPy or ``.data`` are found. On other devices they are
    not, because they raise no version counter.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.version = None if tensor.is_inference() else tensor._version
        self.data_ptr, self.numel = tensor.data_ptr(), tensor.numel()
        self.content = _content(tensor)

    def matches(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, the one that was read, has the same content. Assumed of inference tensors.

        They have no version counter, so what is read from them is not cached.
        """
        if self.version is None:
            return True
        if self.version != tensor._version or self.data_ptr != tensor.data_ptr():
            return False
        if self.content is None:
            return self.numel == tensor.numel()
        return self.content == _content(tensor)


def _content(tensor: Tensor) -> object:
    """The numbers of a tensor on the CPU, to compare; None for one on another device."""
    if not tensor.is_cpu:
        return None
    if tensor.is_contiguous():  # a sixth of the time of tolist for few numbers, and less for many
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    with _no_modes():
        return tensor.tolist()


@dataclass(frozen=True)
class HostFacts:
    """What was read from an offsets tensor in one device sync. Holds no reference to it, or it would never be freed."""

    snapshot: Snapshot  # of the offsets as they were read
    host: Tensor  # (B+1,) int64, a copy on the CPU
    converted: Tensor  # (B+1,) the offsets in the other of int32 and int64, on their own device
    converted_snapshot: Snapshot  # of ``converted`` as it was made
    first: int
    total: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int  # of the lengths
    digest: int  # equal for equal offsets, and hardly for others
    cache: Cache  # whatever else was derived; see SequenceLayout.cached

    def match(self, offsets: Tensor) -> bool:
        """Whether ``offsets``, the tensor that was read or ``converted``, are unchanged since."""
        snapshot = self.converted_snapshot if offsets is self.converted else self.snapshot
        return snapshot.matches(offsets)


# By weak reference: an offsets tensor that is freed is not mistaken for another one.
_facts_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The int32 tensor made from an int64 one (or the other way), to what it was made from: layers are handed either.
_source_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def read_offsets(offsets: Tensor) -> tuple[Tensor, HostFacts]:
    """Read ``offsets`` (B+1,) once: a device sync the first time this tensor object is passed, and after each change.

    Inference tensors have no version counter, so they are read each time.

    Returns:
        ``offsets``, or the tensor that they were converted from where neither was changed since; and what it says.

    Raises:
        TypeError: not a tensor.
        ValueError: not one-dimensional int32 or int64, empty, falling anywhere, negative, or past the int32 range; or
            on the meta device.
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
    snapshot = Snapshot(offsets)
    with torch.inference_mode(offsets.is_inference()), torch._C._DisableFuncTorch(), _no_modes():
        host = offsets.detach().to("cpu", torch.int64, copy=True)
        converted = offsets.detach().to(torch.int64 if offsets.dtype == torch.int32 else torch.int32)
        numbers = host.numpy()
    falls = numbers[1:] < numbers[:-1]  # a difference may overflow
    if falls.any():
        fall = int(falls.argmax())
        raise ValueError(
            f"offsets fall from {numbers[fall]} to {numbers[fall + 1]} at index {fall + 1}: they must never "
            "decrease. If these are lengths, pass them to SequenceLayout.from_lengths."
        )
    if numbers[0] < 0 or numbers[-1] > INT32_MAX:
        bad = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise ValueError(f"offsets must lie in 0 … {INT32_MAX}, which is what the kernels can address; got {bad}.")
    return cache_facts(offsets, snapshot, host, converted)


def cache_facts(offsets: Tensor, snapshot: Snapshot, host: Tensor, converted: Tensor) -> HostFacts:
    """The facts of valid ``offsets``, found by them and by ``converted`` from now on."""
    numbers = on_host(host)
    lengths = np.diff(numbers)
    facts = HostFacts(
        snapshot=snapshot,
        host=host,
        converted=converted,
        converted_snapshot=Snapshot(converted),
        first=int(numbers[0]),
        total=int(numbers[-1] - numbers[0]),
        max_seqlen=int(lengths.max(initial=0)),
        min_seqlen=int(lengths.min()) if lengths.size else 0,
        sum_of_squares=int(lengths.dot(lengths)),
        digest=hash(numbers.tobytes()),
        cache=Cache(offsets.device),
    )
    if snapshot.version is not None:
        _facts_of[offsets] = facts
        _source_of[converted] = weakref.ref(offsets)
    return facts


def facts_of_lengths(lengths: Ints, device: torch.device) -> tuple[Tensor, HostFacts]:
    """New offsets (B+1,) on ``device`` for ``lengths`` (B,) on the host, and their facts, without a device sync.

    Raises:
        ValueError: a negative length, or more tokens than 2³¹ − 1.
    """
    if lengths.size and lengths.min() < 0:
        at = int(lengths.argmin())
        raise ValueError(f"lengths[{at}] is {lengths[at]}: a sequence has zero or more tokens.")
    ends = np.zeros(lengths.size + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    if ends[-1] > INT32_MAX or lengths.max(initial=0) > INT32_MAX:  # a longer one may overflow the sum
        raise ValueError(
            f"the lengths add up to {sum(map(int, lengths))} tokens, past the kernels' limit of {INT32_MAX}: "
            "pass fewer sequences at a time."
        )
    with creating_cached_tensors():  # offsets with a version, by which they are known again
        host = torch.from_numpy(ends)
        offsets = to_device(ends, device) if device.type != "cpu" else host.clone()
        return offsets, cache_facts(offsets, Snapshot(offsets), host, offsets.to(torch.int32))


def _no_modes() -> AbstractContextManager[Any]:
    """Within the block, no dispatch mode sees operators or makes their results."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def creating_cached_tensors() -> Iterator[None]:
    """Tensors made in the block serve all callers: no inference mode, graph, dispatch mode or transform owns them."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch(), _no_modes():
        yield


def plain(tensor: Tensor) -> Tensor:
    """A tensor without the wrappers of function transforms, whose values the host can't read."""
    while isinstance(tensor, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def on_host(tensor: Tensor) -> Ints:
    with torch._C._DisableFuncTorch():
        return plain(tensor).detach().cpu().numpy()


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """A tensor of ``numbers``; the host need not wait, as the driver stages what is not pinned."""
    with creating_cached_tensors():
        return torch.from_numpy(numbers).to(device, non_blocking=True)
