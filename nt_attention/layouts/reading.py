"""Reads each offsets tensor on the host once, and keeps what follows from it.

What was read, the `Facts`, is kept in two places. One table has the tensors of users: an entry holds until its tensor
is freed or changed in place. And the tensors that a layout makes carry the facts on their storage, so that they are
found again through views, graphs and checkpoints, after the layout is freed.

Dimensions: B sequences.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..compiler import check_readable, is_compiling, outside_of_graphs
from ..operators import define
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
    is None if a change could not be seen: of inference tensors there, and of the outputs of CUDA graphs.
    """
    if is_output_of_cuda_graph(tensor):
        return None
    if tensor.is_cpu:
        if tensor.is_contiguous():  # twice as fast as NumPy
            return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        with no_modes():
            return tensor.numpy().tobytes()
    if tensor.is_inference():
        return None
    return version_of(tensor), tensor.data_ptr(), tensor.numel()


class _Kept(NamedTuple):
    """A value that was made of a tensor, the snapshots it was made at, and a second tensor on which it depends."""

    state: tuple[object, ...]
    other: weakref.ref[Tensor] | None
    value: Any


# A tensor of a user → what was made of it, by key. The only table of tensors.
_kept: WeakTensorDict[dict[object, _Kept]] = WeakTensorDict()


def keep(
    tensor: Tensor, key: object, build: Callable[[], _T], other: Tensor | None = None, *, follows: bool = False
) -> _T:
    """What `build` makes of a tensor, kept until this tensor is freed or changed in place.

    If a change could not be seen, the value is made in each call.

    Args:
        tensor: the tensor. The value must not refer to it, or neither would be freed.
        key: what is made of it.
        build: makes the value.
        other: a second tensor on which the value depends.
        follows: whether the value follows changes that can't be seen, so that it is kept then too.
    """
    value: _T | None = kept(tensor, key, other)
    if value is None:
        state = _state(tensor, other)  # from before it is read
        value = build()
        if follows or None not in state:
            entries = _kept[tensor] = {
                name: entry
                for name, entry in (_kept.get(tensor) or {}).items()
                if entry.other is None or entry.other() is not None
            }
            entries[key] = _Kept(state, None if other is None else weakref.ref(other), value)
    return value


def kept(tensor: Tensor, key: object, other: Tensor | None = None) -> Any:
    """What `keep` has made of a tensor, if neither it nor `other` was changed since; else None."""
    entries = _kept.get(tensor)
    entry = None if entries is None else entries.get(key)
    if entry is None or (None if entry.other is None else entry.other()) is not other:
        return None
    return entry.value if entry.state == _state(tensor, other) else None


def _state(tensor: Tensor, other: Tensor | None) -> tuple[object, ...]:
    return (snapshot(tensor),) if other is None else (snapshot(tensor), snapshot(other))


class Facts:
    """What the host knows of a layout, and what is derived from it. It never changes, and nobody else has its tensors.

    Attributes:
        host, numbers: (B+1,) int64, the offsets on the CPU, and the same in NumPy.
        device_offsets: (B+1,) int32, the same on the layout's device.
        first, total: the first offset, and the number of tokens after it.
        max_seqlen, min_seqlen, sum_of_squares: the maximum, the minimum and the sum of squares of the lengths.
        cache: all other derived values; see `SequenceLayout.cached`.
        layout: the layout of these facts without a bound, if somebody has it.
    """

    host: Tensor
    device_offsets: Tensor
    numbers: Ints
    first: int
    total: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int
    cache: Cache

    def __init__(self, host: Tensor, device_offsets: Tensor) -> None:
        self.host, self.device_offsets = host, device_offsets
        self.numbers = numbers = on_host(host)
        lengths = np.diff(numbers)
        self.first, self.total = int(numbers[0]), int(numbers[-1] - numbers[0])
        self.max_seqlen, self.min_seqlen = int(lengths.max(initial=0)), int(lengths.min()) if lengths.size else 0
        self.sum_of_squares = int(lengths.dot(lengths))
        self.cache = Cache(device_offsets.device)
        self.layout: weakref.ref[Any] | None = None
        self._handed_out: dict[object, weakref.ref[Tensor]] = {}

    @classmethod
    @outside_of_graphs  # in a graph, the numbers would become constants or fake tensors
    def of_lengths(cls, lengths: Ints, device: torch.device) -> Facts:
        """The facts of `lengths` (B,) on the host, without a sync.

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
        with creating_cached_tensors():
            return cls(torch.from_numpy(ends), to_device(ends.astype(np.int32), device))

    def hand_out(self, to: torch.dtype | Literal["operators"]) -> Tensor:
        """(B+1,) offsets by which the facts are found: int32 or int64 for users, or int32 for operators.

        Users do not get those of operators. A tensor that was handed out before, and that somebody still has, is
        returned again if it is unchanged.
        """
        reference = self._handed_out.get(to)
        tensor = None if reference is None else reference()
        if tensor is None or (to != "operators" and not self.are_in(tensor)):
            with creating_cached_tensors():
                tensor = self.device_offsets.to(torch.int32 if to == "operators" else to, copy=True)
            tensor.untyped_storage().owner = self  # type: ignore[attr-defined]
            self._handed_out[to] = weakref.ref(tensor)
        return tensor

    def are_in(self, offsets: Tensor) -> bool:
        """Whether these offsets, which were handed out, have the numbers of the layout, as far as can be known."""
        if offsets.shape != self.host.shape or offsets.storage_offset() or not offsets.is_contiguous():
            return False
        state = snapshot(offsets)
        if isinstance(state, bytes):
            return state == self.numbers.astype(np.int32 if offsets.dtype == torch.int32 else np.int64).tobytes()
        return isinstance(state, tuple) and state[0] == 0  # its version


class InGraph(NamedTuple):
    """The owner of offsets that a graph has made. A compiler may reuse their memory for other numbers in this graph.

    So only the operators to which the graph passes them may trust it, and nothing that reads offsets.

    Attributes:
        facts: of the offsets. The tensor may have more, if it was made of positions.
        size: the number of offsets in the tensor.
    """

    facts: Facts
    size: int


class Read(NamedTuple):
    """What was read of offsets, and the layouts that were made of it, by the bound of the lengths.

    Layouts are not kept in `Facts`: each has a tensor whose storage refers to its facts.
    """

    facts: Facts
    layouts: dict[int | None, Any]


def read_offsets(offsets: Tensor) -> Read:
    """Read `offsets` (B+1,) on the host.

    This syncs the first time that a tensor object is passed, and after each in-place change of it. On a GPU, inference
    tensors are read each time, because they have no version counter. So are the outputs of a compiled function that
    runs as a CUDA graph: each replay writes other values to them, without a change of their version. Offsets that a
    layout has handed out need no sync.

    Raises:
        TypeError: `offsets` is not a tensor.
        ValueError: the offsets are not one-dimensional int32 or int64, are empty, decreasing, negative or above the
            int32 range, or are on the meta device.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"offsets must be a torch.Tensor, got {type(offsets).__name__}: pass torch.tensor([0, 3, 7]).")
    if is_transformed():
        offsets = plain(offsets)
    read: Read | None = kept(offsets, "offsets")
    if read is not None:
        return read
    facts = _handed_out_with(offsets)
    if facts is not None:
        return Read(facts, {})
    check_offsets(offsets)
    return keep(offsets, "offsets", lambda: Read(_read(offsets), {}))


def facts_in_operator(offsets: Tensor) -> Facts:
    """The facts of the offsets that an operator in a graph gets. They are read if their storage is a copy."""
    owner = owner_of(offsets)
    if type(owner) is InGraph and offsets.numel() == owner.size:
        return owner.facts
    if type(owner) is Facts and offsets.shape == owner.host.shape:
        return owner
    check_offsets(offsets)
    return _read(offsets)


def _handed_out_with(offsets: Tensor) -> Facts | None:
    """The facts with which a layout has handed out these offsets, if they are unchanged."""
    owner = owner_of(offsets)
    return owner if type(owner) is Facts and owner.are_in(offsets) else None


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


def _read(offsets: Tensor) -> Facts:
    with creating_cached_tensors():
        host = offsets.detach().to("cpu", torch.int64, copy=True)
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
    with creating_cached_tensors():
        return Facts(host, offsets.detach().to(torch.int32, copy=True))


@outside_of_graphs  # it would be compiled again for each number of sequences
def facts_where(begins: Ints, device: torch.device) -> Facts:
    """The facts of N tokens on `device`. A sequence begins wherever `begins` (N,) is not 0, as `begins[0]` must be."""
    return Facts.of_lengths(np.diff(begins.nonzero()[0], append=len(begins)), device)


@outside_of_graphs
def read_positions(position_ids: Tensor) -> Facts:
    """Read positions (R, L): a sequence begins where one is not the previous position plus 1, and with each row."""
    rows = torch.atleast_2d(position_ids.long())  # the difference of smaller integer types could overflow
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows.diff(dim=1) != 1
    return facts_where(on_host(begins.flatten()), position_ids.device)


def _read_in_graph(numbers: Tensor, token: Tensor | None, rows: int) -> Facts:
    """Read what a graph may have computed: a compiler may have reused the tensor object, for other numbers.

    So it is read again, unless it was read in this forward of the model, which passes it to all of its layers.
    """
    if not rows:
        facts = _handed_out_with(numbers)
        if facts is None:
            check_offsets(numbers)
            earlier = kept(numbers, "offsets")  # it was read outside of graphs
            facts = None if earlier is None else earlier.facts
        if facts is not None:
            return facts
    read = None if token is None else owner_of(token)
    now = snapshot(numbers)
    before, facts, _ = (None, None, None) if read is None else read.get(id(numbers), (None, None, None))
    if facts is None or before != now:
        facts = read_positions(numbers.expand(rows, -1)) if rows else _read(numbers)
        if read is not None:
            read[id(numbers)] = now, facts, numbers  # with the tensor, so that no other one gets its id
    return facts


def _offsets_in_graph(numbers: Tensor, token: Tensor | None, rows: int) -> Tensor:
    facts = _read_in_graph(numbers, token, rows)
    with creating_cached_tensors():
        size = rows * numbers.shape[1] + 1 if rows else numbers.shape[0]
        made = facts.device_offsets.new_full((size,), facts.total)
        made[: facts.host.shape[0]] = facts.device_offsets
    made.untyped_storage().owner = InGraph(facts, size)  # type: ignore[attr-defined]
    return made


def _fake_offsets(numbers: Tensor, token: Tensor | None, rows: int) -> Tensor:
    size = rows * numbers.shape[1] + 1 if numbers.dim() == 2 else numbers.shape[0]
    return numbers.new_empty(size, dtype=torch.int32)


# numbers: (B+1,) offsets, with `rows` 0; or (1 or R, L) positions of R rows. token: the forward token of the model. The
# result is (B+1,) or (R·L+1,) int32, the offsets, then the total.
define("offsets(Tensor numbers, Tensor? token, SymInt rows) -> Tensor", _offsets_in_graph, _fake_offsets)

TOKEN_SHAPE = (1, 1, 0, 0)  # as a mask, it raises an error in all attention functions but ours


def _new_token(device: torch.device) -> Tensor:
    token = torch.empty(TOKEN_SHAPE, dtype=torch.int8, device=device)
    token.untyped_storage().owner = {}  # type: ignore[attr-defined]
    return token


def new_forward_token(device: torch.device) -> Tensor:
    """A tensor of a graph that is made once in each forward of a model. What its layers read is kept on its storage."""
    token: Tensor = torch.ops.nt_attention.forward_token.default(device)
    return token


# As an operator with random results, so that compilers do not replace it by a constant.
define(
    "forward_token(Device device) -> Tensor",
    _new_token,
    lambda device: torch.empty(TOKEN_SHAPE, dtype=torch.int8, device=device),
    random=True,
)


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
    """The object that is kept in the storage of a tensor or its alias, or None."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "owner", None)
