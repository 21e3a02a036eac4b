"""Whether the device waits for the host, and which calls `cuda_graphs="auto"` captures because of that.

Nothing here waits for a device: the times of a call are read when a later call finds that they are known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

OFTEN = 3  # how many calls of a bucket come before it is captured
TIMED = 4  # the most calls of a bucket that are timed, without and with a graph
WARM_UP = 2  # calls in which kernels are compiled and tuned, which are not timed
CAPTURES, REPLAYS = 16, 8  # captures that need not pay, and replays that pay for one more
UNUSED = 1024  # calls of a module after which a graph is freed that none of them has used
LATE = 1.1  # if a call takes longer on the device than this times its host time, then the host waits
GAIN = 0.95  # a graph must take at most this times the time without it
SELDOM = "auto: its size has not come often enough"
DEVICE_BOUND = "auto: the device takes the time, not the host"
NO_GAIN = "auto: a graph takes as long as the call without it"
TOO_MANY = "auto: there are too many sizes for the number of calls"


def new_event() -> Any:
    """An event that is timed."""
    return torch.cuda.Event(enable_timing=True)


class Span:
    """The time that a call takes, from its first kernel to its last. `end` must be called when it has launched them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._first, self._last = new_event(), new_event()
        self._first.record(self._stream)
        self._began, self.host_ms = time.perf_counter(), 0.0

    def end(self) -> None:
        """The host has launched everything."""
        self.host_ms = 1e3 * (time.perf_counter() - self._began)
        self._was_reached = self._first.query()  # else the device is behind by more than this call
        self._last.record(self._stream)

    @property
    def is_known(self) -> bool:
        """Whether the device has ended the call."""
        return self.host_ms > 0 and self._last.query()

    @property
    def device_ms(self) -> float:
        """The time on the device, in which it may wait for the host."""
        return self._first.elapsed_time(self._last)

    @property
    def waits(self) -> bool:
        """Whether the device waited for the host: it has ended as soon as the host had launched everything."""
        return self._was_reached and self.device_ms <= LATE * self.host_ms


class HostWaits:
    """In how many calls of a model the device waits for the host. It is measured in some calls only.

    Attributes:
        calls, waits: the number of calls that were measured, and of those in which the device waited.
    """

    MEASURED = 32

    def __init__(self) -> None:
        self.calls = self.waits = self._begun = 0
        self._open: deque[Span] = deque()
        self._is_told = False

    def __reduce__(self) -> tuple[Any, ...]:
        return HostWaits, ()  # events can't be copied

    def begin(self, device: torch.device) -> Span | None:
        """Begin to measure a call; None if it is not measured."""
        self._begun += 1
        while self._open and self._open[0].is_known:
            self.calls, self.waits = self.calls + 1, self.waits + self._open.popleft().waits
        if device.type != "cuda" or not WARM_UP < self._begun <= WARM_UP + self.MEASURED:
            return None
        self._open.append(Span(device))
        return self._open[-1]

    def news(self) -> str | None:
        """The advice, once."""
        advice = None if self._is_told else self.advice
        self._is_told |= advice is not None
        return advice

    @property
    def advice(self) -> str | None:
        """What to tell the user, if the device waited in at least half of the calls."""
        if self.calls < self.MEASURED // 2 or 2 * self.waits < self.calls:
            return None
        share = f"{self.waits / self.calls:.0%}"
        return f'the GPU waits for the host in {share} of the calls: cuda_graphs="auto" may make a step faster'


@dataclass
class Times:
    """What is known of a bucket.

    Attributes:
        calls: the number of calls without a graph.
        without: up to four of these.
        replays: up to four replays of its graph.
    """

    calls: int = 0
    without: list[Span] = field(default_factory=list)
    replays: list[Span] = field(default_factory=list)
    _pays: bool | None = None

    @property
    def waits(self) -> bool | None:
        """Whether the device waits for the host without a graph; None if that is not known."""
        known = [span for span in self.without if span.is_known]
        return min(known, key=lambda span: span.host_ms).waits if known else None

    @property
    def pays(self) -> bool:
        """Whether the graph makes calls faster, or that is not known yet."""
        if self._pays is None and len(self.replays) == TIMED and all(span.is_known for span in self.replays):
            before = [span.device_ms for span in self.without if span.is_known]
            self._pays = not before or min(span.device_ms for span in self.replays) <= GAIN * min(before)
        return self._pays is not False


class Policy:
    """Decides which calls of a module are captured."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.forget()

    def forget(self) -> None:
        """The module was changed, so its calls may take another time."""
        self._times: dict[Hashable, dict[Any, Times]] = {}

    def times_of(self, key: Hashable, bucket: Any) -> Times:
        """What is known of a bucket, of calls with this key."""
        return self._times.setdefault(key, {}).setdefault(bucket, Times())

    def why_not(self, key: Hashable, bucket: Any) -> str | None:
        """Why a call that has no graph is not captured, or None. Counts the call."""
        own = self.times_of(key, bucket)
        own.calls += 1
        if not own.pays:
            return NO_GAIN
        # a smaller batch waits if a larger one does
        known = {size: x.waits for size, x in self._times[key].items()}
        if known[bucket] is False or any(waits is False and _covers(bucket, size) for size, waits in known.items()):
            return DEVICE_BOUND
        if own.calls <= OFTEN or not any(waits and _covers(size, bucket) for size, waits in known.items()):
            return SELDOM
        return TOO_MANY if self.captures >= CAPTURES + self.replays // REPLAYS else None

    def time_call(self, key: Hashable, bucket: Any, device: torch.device) -> Span | None:
        """Begin to time a call without a graph; None if that is known, or if it may compile kernels."""
        spans = self.times_of(key, bucket).without
        calls = sum(times.calls for times in self._times[key].values())
        return _time(spans, device) if calls > WARM_UP else None

    def time_replay(self, times: Times, device: torch.device) -> Span | None:
        """Count a replay of the graph of a bucket, and begin to time it; None if that is known."""
        self.replays += 1
        return _time(times.replays, device)


def _time(spans: list[Span], device: torch.device) -> Span | None:
    if len(spans) >= TIMED:
        return None
    spans.append(Span(device))
    return spans[-1]


def _covers(larger: Any, smaller: Any) -> bool:
    """Whether no size of a bucket is smaller than that of another one."""
    return all(x >= y for one, other in zip(larger, smaller, strict=True) for x, y in zip(one, other, strict=True))
