"""FlashAttention-4 without the host time of its interface, which takes longer than its kernels in small calls.

The interface chooses kernels, allocates memory and calls compiled functions. All but the tensors is the same for each
layer of a model. So the second call is recorded, and later calls allocate and call the same. A call that does more than
that is never recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch_private import TorchDispatchMode

_ALLOCATE = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty"}
_ALLOCATE_ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}
_VIEW = {"aten.detach", "aten.view", "aten.transpose", "aten.alias"}


class LaunchAgain:
    """`function(*tensors)`, which calls FlashAttention-4 and returns its results, for tensors of one geometry."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function
        self._calls = 0
        self._recording: Recording | None = None

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        if self._recording is not None:
            return self._recording.run(tensors)
        self._calls += 1
        if self._calls != 2:  # a layout that is used once is not worth a recording
            return self._function(*tensors)
        recorder = _Recorder()
        with _compiled_functions_seen_by(recorder), recorder:
            results = self._function(*tensors)
        self._recording = recorder.finish(tensors, results)
        return results


@dataclass(frozen=True)
class Recording:
    """Allocations, and calls of compiled functions. A `_Slot` among their arguments stands for a tensor."""

    memory: list[tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]]
    calls: list[tuple[Callable[..., object], list[Any]]]
    results: list[_Slot]

    def run(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        tensors = [x if x is None else x.detach() for x in inputs]
        tensors += [allocate(*args, **options) for allocate, args, options in self.memory]
        for compiled, arguments in self.calls:
            compiled(*[tensors[x.number] if type(x) is _Slot else x for x in arguments])
        return tuple([tensors[slot.number] for slot in self.results])  # type: ignore[misc]


@dataclass(frozen=True)
class _Slot:
    """The number of an input, or of a tensor that was allocated, counted after the inputs."""

    number: int


class _Recorder(TorchDispatchMode):
    """Sees the operators and the compiled functions that a call of the interface runs in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[bool, Tensor]] = []  # whether it is of zeros
        self.calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.does_more = False
        self.thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func.overloadpacket)
        if name in _ALLOCATE or name in _ALLOCATE_ZEROS:
            self.made.append((name in _ALLOCATE_ZEROS, result))
        else:
            self.does_more |= name not in _VIEW
        return result

    def finish(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor]) -> Recording | None:
        """The recording; None if the call did more than allocate memory and call compiled functions."""
        tensors = [(i, x) for i, x in enumerate([*inputs, *[x for _, x in self.made]]) if x is not None]
        slots = {_place(x): _Slot(i) for i, x in tensors}
        addresses = {x.untyped_storage().data_ptr() for _, x in tensors}

        def slot(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.untyped_storage().data_ptr() not in addresses:
                return x  # also the offsets, which are the same tensors in each call
            return slots[_place(x)]

        try:
            calls = [(compiled, [slot(x) for x in arguments]) for compiled, arguments in self.calls]
            outputs = [slots[_place(x)] for x in results]
        except KeyError:  # a part of a tensor
            return None
        return None if self.does_more or not calls else Recording([_allocation(*x) for x in self.made], calls, outputs)


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _allocation(zeros: bool, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]:
    options = {"dtype": x.dtype, "device": x.device}
    if zeros:
        return torch.zeros, (x.shape,), options
    return torch.empty_strided, (x.shape, x.stride()), options


@dataclass
class _SeenFunctions:
    """A cache of compiled functions, whose calls a recorder sees."""

    cache: Any
    recorder: _Recorder

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __setitem__(self, key: object, compiled: object) -> None:
        self.cache[key] = compiled

    def __getitem__(self, key: object) -> Callable[..., object]:
        compiled = self.cache[key]

        def call(*arguments: Any) -> object:
            if threading.get_ident() == self.recorder.thread:
                self.recorder.calls.append((compiled, arguments))
            return compiled(*arguments)

        return call


_lock = threading.Lock()


@contextmanager
def _compiled_functions_seen_by(recorder: _Recorder) -> Iterator[None]:
    from flash_attn.cute import interface

    with _lock:
        before = {x: x.compile_cache for x in vars(interface).values() if hasattr(x, "compile_cache")}
        for function, cache in before.items():
            function.compile_cache = _SeenFunctions(cache, recorder)
        try:
            yield
        finally:
            for function, cache in before.items():
                function.compile_cache = cache
