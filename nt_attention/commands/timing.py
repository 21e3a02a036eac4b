"""GPU times: the device's alone, the host's alone, and both. What is timed alone is kept from waiting for the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def device_ms(function: Callable[[], Any], repeats: int = 7) -> float:
    """A call's time on the device in ms: the median over ``repeats``, each the mean of a burst of calls."""
    function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    host = time.perf_counter() - began  # an upper bound: it may have waited for a full queue
    torch.cuda.synchronize()
    total = time.perf_counter() - began
    calls = max(3, min(50, int(0.02 / total)))
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e9 * min(0.1, 1.5 * host * calls + 1e-3)))  # cycles, at about 2 GHz
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def wall_ms(function: Callable[[], Any], calls: int = 20, repeats: int = 9) -> float:
    """A call's time in ms as the user sees it, the host's and the device's part: the median over bursts of calls."""
    return 1e3 * _bursts(function, calls, repeats, to_the_end=True)


def host_us(function: Callable[[], Any], calls: int = 200, repeats: int = 7) -> float:
    """The host's time for a call in µs, while the device keeps up: the median over bursts of calls."""
    return 1e6 * _bursts(function, calls, repeats, to_the_end=False)


def _bursts(function: Callable[[], Any], calls: int, repeats: int, *, to_the_end: bool) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        if to_the_end:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)
