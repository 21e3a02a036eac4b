"""Where each sequence of a packed batch begins and ends.

Dimensions: B sequences, T tokens in all of them, L positions in a padded row.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ._tracing import check_readable, is_traced, is_tracing, refuse_jit_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[Any]

_T = TypeVar("_T")
_INT32_MAX = 2**31 - 1
MISSING: Any = object()


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

    def find(self, key: object) -> Any:
        """The value of ``key``, or ``MISSING``."""
        value = self._entries.get(key, MISSING)
        if value is MISSING:
            return self._captured.get(key, MISSING)
        if self._may_be_captured and torch.cuda.is_current_stream_capturing():
            self._captured[key] = value
        return value

    def add(self, key: object, value: Any) -> None:
        with self._lock:
            self._entries[key] = value
            if len(self._entries) > self.MOST_ENTRIES:
                del self._entries[next(iter(self._entries))]
        if self._may_be_captured and torch.cuda.is_current_stream_capturing():
            self._captured[key] = value

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class HostFacts:
    """What one device sync told about an offsets tensor. Holds no reference to it, or neither would ever be freed."""

    at: Snapshot  # the offsets as they were read
    host: Tensor  # (B+1,) int64, a copy on the CPU
    other: Tensor  # (B+1,) the offsets in the other of int32 and int64, on their own device
    other_at: Snapshot  # ``other`` as it was made
    first: int
    total: int
    max_seqlen: int
    min_seqlen: int
    sum_of_squares: int  # of the lengths
    digest: int  # equal for equal offsets, and hardly for others
    cache: Cache  # whatever else was derived; see SequenceLayout.cached


class Snapshot:
    """A tensor as it was when it was read: tells whether it was changed in place since.

    On a CPU the memory itself is compared, so changes through NumPy or ``.data`` are seen. On other devices they are
    not, because they raise no version counter.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.version = None if tensor.is_inference() else tensor._version
        self.data_ptr, self.numel = tensor.data_ptr(), tensor.numel()
        self.content = _content(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, the one that was read, has the same content still. Not known of an inference tensor."""
        if self.version is None or self.version != tensor._version or self.data_ptr != tensor.data_ptr():
            return False
        if self.content is None:
            return self.numel == tensor.numel()
        return self.content == _content(tensor)


def _content(tensor: Tensor) -> object:
    """What a tensor on the CPU holds, to compare; None for one on another device."""
    if not tensor.is_cpu:
        return None
    if tensor.is_contiguous():  # a sixth of the time of tolist for few numbers, and less for many
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    with _no_modes():
        return tensor.tolist()


# By weak reference: an offsets tensor that is freed is not mistaken for another one.
_facts_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The int32 tensor made from an int64 one (or the other way), to what it was made from: layers are handed either.
_source_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def read_offsets(offsets: Tensor) -> tuple[Tensor, HostFacts]:
    """Read ``offsets`` (B+1,) once: a device sync the first time this tensor object is seen, and after each change.

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
    offsets = _plain(offsets)
    known: HostFacts | None = _facts_of.get(offsets)
    if known is not None and known.at.holds(offsets):
        return offsets, known
    made_from = _source_of.get(offsets)
    source = None if made_from is None else made_from()
    if source is not None:
        known = _facts_of.get(source)
        if known is not None and known.other is offsets and known.at.holds(source) and known.other_at.holds(offsets):
            return source, known
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
    at = Snapshot(offsets)
    with torch.inference_mode(offsets.is_inference()), torch._C._DisableFuncTorch(), _no_modes():
        host = offsets.detach().to("cpu", torch.int64, copy=True)
        other = offsets.detach().to(torch.int64 if offsets.dtype == torch.int32 else torch.int32)
        numbers = host.numpy()
    falls = numbers[1:] < numbers[:-1]  # a difference may overflow
    if falls.any():
        fall = int(falls.argmax())
        raise ValueError(
            f"offsets fall from {int(host[fall])} to {int(host[fall + 1])} at index {fall + 1}: they must never "
            "decrease. If these are lengths, pass them to SequenceLayout.from_lengths."
        )
    if int(host[0]) < 0 or int(host[-1]) > _INT32_MAX:
        bad = int(host[0]) if int(host[0]) < 0 else int(host[-1])
        raise ValueError(f"offsets must lie in 0 … {_INT32_MAX}, which is what the kernels can address; got {bad}.")
    return _remember_facts(offsets, at, host, other)


def _no_modes() -> AbstractContextManager[Any]:
    """Within the block, no dispatch mode sees operators or makes their results."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def creating_cached_tensors() -> Iterator[None]:
    """Tensors made here serve whoever asks next: they belong to no evaluation, graph or function transform."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
        yield


def _plain(tensor: Tensor) -> Tensor:
    """A tensor without the wrappers of function transforms, which the host can't look into."""
    while isinstance(tensor, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _on_host(tensor: Tensor) -> Ints:
    with torch._C._DisableFuncTorch():
        return _plain(tensor).detach().cpu().numpy()


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _remember_facts(offsets: Tensor, at: Snapshot, host: Tensor, other: Tensor) -> HostFacts:
    numbers = _on_host(host)
    lengths = np.diff(numbers)
    facts = HostFacts(
        at=at,
        host=host,
        other=other,
        other_at=Snapshot(other),
        first=int(host[0]),
        total=int(host[-1] - host[0]),
        max_seqlen=int(lengths.max(initial=0)),
        min_seqlen=int(lengths.min()) if lengths.size else 0,
        sum_of_squares=int(lengths.dot(lengths)),
        digest=hash(numbers.tobytes()),
        cache=Cache(offsets.device),
    )
    if facts.at.version is not None:
        _facts_of[offsets] = facts
        _source_of[other] = weakref.ref(offsets)
    return facts


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The lengths of a ragged batch, in every form that a kernel or a reshape asks for.

    Made by one of the ``from_*`` constructors, each of which reads the device at most once; nothing after that does.
    Layouts made again from the same offsets tensor share what is known of it.

    Attributes:
        offsets: (B+1,) int64, where each sequence begins in the packed rows, then the end of the last.
        cu_seqlens: the same as int32.
        total: T, the number of tokens.
        max_seqlen: the longest sequence, or the larger bound that the maker gave.
        min_seqlen: the shortest sequence.
        sum_of_squares: of the lengths, the (query, key) pairs of attention without a mask.
        host_offsets: ``offsets`` on the CPU.
        padded_length: L of the padded batch that this layout was read from, else None.
        padded_index: (T,) int64, where each token stands in the flattened (B·L) batch, else None.
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

    @classmethod
    def from_offsets(cls, offsets: Tensor, max_seqlen: int | None = None) -> SequenceLayout:
        """The layout of ``offsets`` (B+1,) int32 or int64, which begin at 0 and never fall.

        Args:
            offsets: kept as this layout's ``offsets`` (int64) or ``cu_seqlens`` (int32), not copied.
            max_seqlen: a bound on the longest sequence to use in its place, so that shapes stay fixed over batches.

        Syncs with the device once, the first time that it sees this tensor. A change of ``offsets`` in place is seen
        when they are passed again, and a layout that was made before the change can't be used any more. What PyTorch
        does not record is not seen on a GPU: writing to ``offsets.data``.

        In a graph of torch.compile, torch.export or make_fx the lengths are left to the operators in it, and the layout
        has no lengths to tell.

        Raises:
            ValueError: malformed offsets, or a ``max_seqlen`` that is below the longest sequence.
        """
        refuse_jit_trace()
        if is_traced(offsets):
            from .traced import TracedLayout  # which builds on this file

            return cast(SequenceLayout, TracedLayout(offsets))
        return cls.from_facts(*read_offsets(offsets), max_seqlen)

    @classmethod
    def from_facts(cls, offsets: Tensor, facts: HostFacts, max_seqlen: int | None = None) -> SequenceLayout:
        """``from_offsets``, for offsets that have been read."""
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
            offsets=offsets if wide else facts.other,
            cu_seqlens=facts.other if wide else offsets,
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
            device: where the layout lives; a tensor's own device if left out, else the CPU.

        Syncs once if ``lengths`` is a tensor on a device; a list costs none.

        Raises:
            ValueError: lengths that are negative, not integers, not one-dimensional, or more tokens than 2³¹ − 1.
        """
        refuse_jit_trace()
        how = "pass a list such as [5, 0, 9]. For a mask, use SequenceLayout.from_attention_mask."
        if isinstance(lengths, Tensor):
            check_readable(lengths, "lengths")
        with creating_cached_tensors(), _no_modes():
            if isinstance(lengths, Tensor):
                given = _plain(lengths)
            else:
                try:
                    given = torch.tensor(lengths, device="cpu")
                except (TypeError, ValueError, RuntimeError) as error:
                    raise ValueError(
                        f"lengths must be one integer for each sequence, got {lengths!r}: {how}"
                    ) from error
            if given.dim() != 1 or not (_is_integer(given) or given.numel() == 0):
                raise ValueError(
                    f"lengths must be one integer for each sequence, got shape {tuple(given.shape)} and {given.dtype}: "
                    f"{how}"
                )
            device = given.device if device is None else torch.device(device)
            return cls._from_host_lengths(given.detach().to("cpu", torch.int64).numpy(), device)

    @classmethod
    def _from_host_lengths(cls, lengths: Ints, device: torch.device) -> SequenceLayout:
        if lengths.size and lengths.min() < 0:
            at = int(lengths.argmin())
            raise ValueError(f"lengths[{at}] is {lengths[at]}: a sequence has zero or more tokens.")
        ends = np.zeros(lengths.size + 1, np.int64)
        lengths.cumsum(out=ends[1:])
        if ends[-1] > _INT32_MAX or lengths.max(initial=0) > _INT32_MAX:  # a longer one may overflow the sum
            raise ValueError(
                f"the lengths add up to {sum(map(int, lengths))} tokens, past the kernels' limit of {_INT32_MAX}: "
                "pass fewer sequences at a time."
            )
        with creating_cached_tensors(), _no_modes():  # offsets with a version, by which they are known again
            host = torch.from_numpy(ends)
            offsets = to_device(ends, device) if device.type != "cpu" else host.clone()
            facts = _remember_facts(offsets, Snapshot(offsets), host, offsets.to(torch.int32))
        return cls.from_facts(offsets, facts)

    @classmethod
    def from_nested(cls, nested: Tensor) -> SequenceLayout:
        """The layout of a jagged or strided NestedTensor; of its tokens alone, where it has holes between them."""
        from . import nested as nested_module  # nested.py builds on this file

        return nested_module.unwrap(nested, "nested").layout

    @classmethod
    def from_attention_mask(cls, mask: Tensor) -> SequenceLayout:
        """The layout of the tokens of a padded batch, from its mask (B, L): True or 1 where a token is.

        The padding may stand on the left, on the right or in between; ``pack`` and ``pad`` go from and to these very
        places. This is Hugging Face's ``attention_mask``; for a ``key_padding_mask``, whose True means padding, pass
        ``~mask``. Syncs once.

        Raises:
            ValueError: not two-dimensional, or a value other than 0 and 1 (an additive mask of 0 and −inf, say).
        """
        refuse_jit_trace()
        if not isinstance(mask, Tensor) or mask.is_nested or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) and not mask.is_nested else type(mask).__name__
            raise ValueError(f"mask must be a (B, L) tensor with 1 where a token is, got {shape}.")
        check_readable(mask, "mask")
        mask = _plain(mask)
        batch, length = mask.shape
        mask = mask.detach()
        # one copy tells the host all, and what is left to do is little for a batch that fits a device
        if mask.dtype == torch.bool:
            here = _on_host(mask)
        else:
            told = _on_host((mask != 0) + 2 * (mask != (mask != 0)))
            if (told > 1).any():
                raise ValueError(
                    f"mask holds {mask.flatten()[int(told.argmax())].item()}, and only 0 (padding) and 1 (a token) "
                    "have a meaning here. For an additive mask, pass mask == 0."
                )
            here = told > 0
        places = here.reshape(-1).nonzero()[0]
        ends = places.searchsorted(length * np.arange(batch + 1))
        lengths = np.diff(ends)
        layout = cls._from_host_lengths(lengths, mask.device)
        some = lengths > 0
        spans = places[ends[1:][some] - 1] - places[ends[:-1][some]] + 1
        object.__setattr__(layout, "has_holes", bool((spans > lengths[some]).any()))
        object.__setattr__(layout, "padded_length", length)
        object.__setattr__(layout, "padded_index", to_device(places, mask.device))
        return layout

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> SequenceLayout:
        """The layout of packed rows, from the positions (T,) or (R, T) of their tokens.

        A sequence begins at every row's start and wherever a position is not the one before it plus one, so sequences
        may count from 0, or from another number as RoBERTa's do. Rows are laid end to end. Syncs once.

        Raises:
            ValueError: not an integer tensor of one or two dimensions.
        """
        if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2) or not _is_integer(position_ids):
            got = (
                f"shape {tuple(position_ids.shape)} and {position_ids.dtype}"
                if isinstance(position_ids, Tensor)
                else type(position_ids).__name__
            )
            raise ValueError(f"position_ids must be a (T,) or (R, T) tensor of integers, got {got}.")
        refuse_jit_trace()
        check_readable(position_ids, "position_ids")
        rows = position_ids.long()  # a narrow integer type would wrap around in the difference
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[:, 1:] = rows.diff(dim=1) != 1
        return layout_where(_on_host(begins.flatten()), position_ids.device)

    @property
    def batch_size(self) -> int:
        """B, the number of sequences."""
        return self.host_offsets.numel() - 1

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, the tokens of each sequence."""
        return self.cached("lengths", self._own_offsets.diff)

    @property
    def sequence_ids(self) -> Tensor:
        """(T,) int64, the sequence that each token belongs to."""

        def build() -> Tensor:
            if self.device.type == "cpu":  # where this is the quicker way; on a GPU it launches three times as much
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
        """(N,) int64 each: the sequence of every row and its position there; of rows past the end, any."""
        ids, positions = self.sequence_ids, self.position_ids
        if rows > self.total:
            ids, positions = (torch.nn.functional.pad(x, (0, rows - self.total)) for x in (ids, positions))
        return ids, positions

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_facts"}  # made again by __setstate__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_facts"] = _remember_facts(
            self.offsets, Snapshot(self.offsets), self.host_offsets, self.cu_seqlens
        )

    def check_unchanged(self, name: str) -> None:
        """Refuse a layout whose offsets were changed in place: they describe other sequences than it does.

        Raises:
            ValueError: they were changed. ``name`` is the argument's, for the message.
        """
        if torch.compiler.is_compiling():
            return  # there is no telling
        facts = self._facts
        at, read, other = facts.at, self.offsets, self.cu_seqlens
        if facts.other is read:
            read, other = other, read
        if at.version is not None and not (at.holds(read) and facts.other_at.version == other._version):
            raise ValueError(
                f"the offsets of {name} were changed in place after it was made: make a new layout from them with "
                "SequenceLayout.from_offsets(offsets), or make it from a copy of the offsets."
            )

    def check_saved(self) -> None:
        """For a backward: refuse to go by ``cu_seqlens`` that were changed in place since the forward.

        Raises:
            RuntimeError: they were changed.
        """
        if not self._holds(self.cu_seqlens):
            raise RuntimeError(
                "the cu_seqlens of a layout, which are needed for gradient computation, have been modified by an "
                "inplace operation: give each forward its own, for example cu_seqlens.clone()."
            )

    @property
    def digest(self) -> int:
        """A number that is equal for equal offsets, and hardly for others."""
        return self._facts.digest

    def _holds(self, offsets: Tensor) -> bool:
        """Whether ``offsets``, in one of the two dtypes, are as they were read; there is no telling in a graph."""
        if torch.compiler.is_compiling():
            return True
        at = self._facts.other_at if offsets is self._facts.other else self._facts.at
        return at.version is None or at.holds(offsets)

    @property
    def _own_offsets(self) -> Tensor:
        """``offsets`` as they were read; the caller's own tensor may have been changed since."""
        return self.offsets if self._holds(self.offsets) else self.cu_seqlens.long()

    def cached(self, key: object, build: Callable[[], _T], other: SequenceLayout | None = None) -> _T:
        """What ``build`` made the first time ``key`` was asked for, kept as long as the offsets are.

        Where it follows from an ``other`` layout as well, it is kept as long as both layouts' offsets are. The result
        must not hold ``offsets`` or ``cu_seqlens`` themselves, or neither would ever be freed.
        """
        if torch.compiler.is_compiling():
            return build()  # what a graph makes of it is not to be kept
        cache = self._facts.cache
        if other is not None:
            key = (key, "with")
            by_other = cache.find(key)
            if by_other is MISSING:
                cache.add(key, by_other := WeakIdKeyDictionary())
            value = by_other.get(other._facts.cache, MISSING)
        else:
            value = cache.find(key)
        if value is MISSING:
            with creating_cached_tensors(), _no_modes():  # which may make tensors without numbers
                value = build()
            if other is None:
                cache.add(key, value)
            else:
                by_other[other._facts.cache] = value
        return cast(_T, value)

    def same_lengths(self, other: SequenceLayout) -> bool:
        """Whether both have the same sequences; answered on the host."""
        return self.host_offsets is other.host_offsets or torch.equal(self.host_offsets, other.host_offsets)

    def extended(self, extra: int) -> SequenceLayout:
        """The layout in which every sequence is ``extra`` tokens longer."""

        def build() -> SequenceLayout:
            return SequenceLayout._from_host_lengths(np.diff(self.host_offsets.numpy()) + extra, self.device)

        return self.cached(("extended", extra), build)

    @property
    def reversed(self) -> SequenceLayout:
        """The layout of the rows in reverse order: the last sequence first."""
        return self.cached(
            "reversed", lambda: self._from_host_lengths(np.diff(self.host_offsets.numpy())[::-1], self.device)
        )

    def pack(self, padded: Tensor) -> Tensor:
        """The tokens (T, …) of a padded batch (B, L, …).

        L is that of the mask that this layout was read from; else the tokens stand at each row's left, and L is at
        least ``max_seqlen``.

        Raises:
            ValueError: another number of rows, too few positions, or another device.
        """
        _check_tensor(padded, "padded")
        self._check_device(padded, "padded")
        self.check_unchanged("this layout")
        refuse_jit_trace()
        length = padded.shape[1] if padded.dim() >= 2 else -1
        exact = self.padded_length is not None
        wanted = self.padded_length if self.padded_length is not None else self._longest
        if padded.dim() < 2 or padded.shape[0] != self.batch_size or (length != wanted if exact else length < wanted):
            raise ValueError(
                f"padded must be ({self.batch_size}, {wanted}{'' if exact else ' or more'}, …) for this layout, "
                f"got {tuple(padded.shape)}."
            )
        return padded.flatten(0, 1).index_select(0, self._index(length))

    def pad(self, values: Tensor, value: float = 0.0) -> Tensor:
        """The padded batch (B, L, …) of tokens (T, …), with ``value`` where there is none.

        L and the places are those of the mask that this layout was read from, else ``max_seqlen``, tokens first.

        Raises:
            ValueError: fewer rows than the layout has tokens, or another device.
        """
        _check_tensor(values, "values")
        self.check_rows(values, "values")
        self.check_unchanged("this layout")
        refuse_jit_trace()
        length = self.padded_length if self.padded_length is not None else self.max_seqlen
        shape = (self.batch_size, length, *values.shape[1:])
        return scatter_rows(values[: self.total], self._index(length), shape, value)

    def to_nested(self, values: Tensor) -> Tensor:
        """The jagged NestedTensor (B, j, …) of tokens (T, …), ragged by this layout's own ``offsets`` object."""
        from . import nested as nested_module  # nested.py builds on this file

        _check_tensor(values, "values")
        self.check_rows(values, "values")
        self.check_unchanged("this layout")
        return nested_module.wrap(values, self)

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        """``values`` (N, …) with ``value`` in the rows past ``total``, which belong to no sequence."""
        if values.shape[0] == self.total:
            return values
        past = torch.arange(values.shape[0], device=values.device) >= self.total
        return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)

    @staticmethod
    def require(given: object, name: str) -> SequenceLayout:
        """Refuse what is not a layout; in a graph, what stands for it there, so that one graph serves all lengths.

        Raises:
            TypeError: anything but a SequenceLayout.
            ValueError: its offsets were changed in place.
        """
        if isinstance(given, SequenceLayout):
            if is_tracing():
                return SequenceLayout.from_offsets(given.offsets)
            given.check_unchanged(name)
            return given
        from .traced import TracedLayout  # which builds on this file

        if not isinstance(given, TracedLayout):
            raise TypeError(
                f"{name} must be a SequenceLayout, got {type(given).__name__}: pass "
                "SequenceLayout.from_offsets(offsets), .from_lengths(lengths), or .from_attention_mask(mask) and pack."
            )
        return SequenceLayout.from_offsets(given.offsets) if is_tracing() else cast(SequenceLayout, given)

    def check_rows(self, values: Tensor, name: str) -> None:
        """Refuse a tensor that this layout can't describe: on another device, or shorter than ``total``."""
        self._check_device(values, name)
        if values.dim() == 0 or values.shape[0] < self.total:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but the layout's {self.batch_size} sequences have "
                f"{self.total} tokens: pass at least that many rows, tokens first."
            )

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        """Refuse keys and values that are too few, or of which one has rows that the other lacks.

        Either may have more rows than ``total``; those are not read.
        """
        for name, x in (("key", key), ("value", value)):
            self.check_rows(x, name)
        if key.shape[0] != value.shape[0] and self.total != min(key.shape[0], value.shape[0]):
            raise ValueError(
                f"key and value must have the same tokens, got {tuple(key.shape)} and {tuple(value.shape)}."
            )

    def _check_device(self, tensor: Tensor, name: str) -> None:
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device} and the layout on {self.device}: "
                f"make the layout from offsets or lengths on {tensor.device}."
            )

    @property
    def _longest(self) -> int:
        return int(self.host_offsets.diff().max()) if self.batch_size else 0

    def _index(self, length: int) -> Tensor:
        """(T,) where each token stands in a flattened (B·length) batch."""
        if self.padded_index is not None:
            return self.padded_index
        return self.cached(("padded_index", length), lambda: self.sequence_ids * length + self.position_ids)


def _check_tensor(given: object, name: str) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}.")


def scatter_rows(values: Tensor, index: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """(B, L, …) of ``shape`` with row t of ``values`` (T, …) at place ``index[t]`` of B · L, and ``value`` elsewhere.

    ``index_copy_`` would save the values for its backward, which does not need them, and its result would be a view.
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


def layout_where(begins: Ints, device: torch.device) -> SequenceLayout:
    """The layout on ``device`` of N tokens; one begins a sequence where ``begins`` (N,) is not 0, the first too."""
    starts = begins.nonzero()[0]
    return SequenceLayout._from_host_lengths(np.diff(starts, append=len(begins)), device)


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """A tensor of ``numbers``; the host need not wait, as the driver stages what is not pinned."""
    with creating_cached_tensors():
        return torch.from_numpy(numbers).to(device, non_blocking=True)
