"""Reading offsets on the host, once for each tensor, and caching what they say.

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


def snapshot(tensor: Tensor) -> object:
    """The state of a tensor: two of them are equal unless it was changed in place in between.

    On a CPU the memory itself is compared, so changes through NumPy or ``.data`` are found. On other devices they are
    not, because they raise no version counter. Inference tensors have no counter: their changes are not found.
    """
    if tensor.is_inference():
        return None
    address = tensor.data_ptr()
    if not tensor.is_cpu:
        return tensor._version, address, tensor.numel()
    if tensor.is_contiguous():  # a sixth of the time of tolist for few numbers, and less for many
        return tensor._version, address, ctypes.string_at(address, tensor.nbytes)
    with _no_modes():
        return tensor._version, address, tensor.tolist()


class HostFacts:
    """What one device sync tells about an offsets tensor. Holds no reference to it, or it would never be freed.

    Attributes:
        host: (B+1,) int64, a copy on the CPU.
        converted: (B+1,) the offsets in the other of int32 and int64, on their own device.
        sum_of_squares: of the lengths.
        digest: equal for equal offsets, and hardly for others.
        cache: whatever else was derived; see ``SequenceLayout.cached``.
    """

    def __init__(self, as_read: object, host: Tensor, converted: Tensor) -> None:
        """``as_read``: the offsets' snapshot."""
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
        """Whether ``offsets``, the tensor that was read or ``converted``, are unchanged since."""
        return snapshot(offsets) == (self._as_converted if offsets is self.converted else self._as_read)

    def match_both(self, offsets: Tensor, cu_seqlens: Tensor) -> bool:
        """``match`` for both dtypes, in less host time: of the converted one, changes that raise its version alone."""
        if self._as_read is None:
            return True
        read, converted = (cu_seqlens, offsets) if offsets is self.converted else (offsets, cu_seqlens)
        return snapshot(read) == self._as_read and converted._version == self._converted_version


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
    as_read = snapshot(offsets)
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
    return cache_facts(offsets, HostFacts(as_read, host, converted))


def cache_facts(offsets: Tensor, facts: HostFacts) -> HostFacts:
    """Have ``facts`` found by ``offsets``, and by what they were converted to, as long as the offsets live."""
    if not offsets.is_inference():
        _facts_of[offsets] = facts
        _source_of[facts.converted] = weakref.ref(offsets)
    return facts


@outside_of_graphs  # NumPy's numbers would become constants or fake tensors there
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
        return offsets, cache_facts(offsets, HostFacts(snapshot(offsets), host, offsets.to(torch.int32)))


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
