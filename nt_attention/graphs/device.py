"""A place on a device where CUDA graphs share memory: captures them, and runs them one after another."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ..torch_private import end_pool

Reasons = Iterator[tuple[object, str]]  # whether a reason holds, and the reason why a call can't run as a graph


class NotCapturedError(Exception):
    """A call can't run as a CUDA graph. The message says why.

    Attributes:
        begin: begins to time the call without a graph, and returns a `Span` or None; None if its time is not asked for.
    """

    def __init__(self, reason: str, begin: Callable[[], Any] | None = None) -> None:
        super().__init__(reason)
        self.begin = begin


def check(reasons: Reasons) -> None:
    """Raise a NotCapturedError with the first reason that holds."""
    for holds, reason in reasons:
        if holds:
            raise NotCapturedError(reason)


# cuBLAS keeps a workspace (32 MiB on Hopper) for each stream that it has seen, so streams are used again.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _stream(device: torch.device) -> torch.cuda.Stream:
    with suppress(IndexError):  # another thread may take the last one
        return _idle_streams[device].pop()
    return torch.cuda.Stream(device)


class Slot:
    """Captures graphs on a CUDA device, and runs them one after another, because they share memory.

    Attributes:
        gradients: where its graphs write the gradients of parameters. A backward returns copies.
        waiting: the call that waits for its backward. The next replay would overwrite what it needs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gradients: list[Tensor] = []
        self.waiting: weakref.ref[Any] | None = None
        self._stream, self._done = _stream(device), torch.cuda.Event()
        weakref.finalize(self, _idle_streams[device].append, self._stream).atexit = False
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def is_free(self) -> bool:
        """Whether no call waits for its backward. Autograd frees a call with its results."""
        return self.waiting is None or self.waiting() is None

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """A context that waits, on the current stream, until the one before is done."""
        torch.cuda.current_stream().wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(torch.cuda.current_stream())

    def wait(self) -> None:
        """Wait, on the host, until no graph runs, so that their tensors can be freed."""
        self._done.synchronize()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A context that runs on the stream of captures."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also after an error, because the call then runs without a graph
            torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """A function that replays the work of `function`, and what `function` returned.

        Raises:
            NotCapturedError: the work can't be captured.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        except (RuntimeError, NotCapturedError) as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves these to us
            with suppress(RuntimeError):
                end_pool(self._stream.device_index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            # The random number generator would raise an error in each later call, until another capture has ended.
            x = torch.zeros(1, device=self.device)
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
                x.zero_()
            if isinstance(error, torch.OutOfMemoryError | NotCapturedError):
                raise
            cause = error.__context__ or error  # the error at the end of a capture hides the first one
            raise NotCapturedError(f"a CUDA graph can't be captured: {str(cause).splitlines()[0]}") from error
        return graph.replay, outputs


def supports(tensor: Tensor) -> bool:
    """Whether calls with tensors on this device can run as graphs."""
    return tensor.is_cuda
