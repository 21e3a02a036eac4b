"""GPU times without the host's: work is queued behind a pause of the device, long enough for the host to get ahead."""

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


def host_us(function: Callable[[], Any], calls: int = 200, repeats: int = 7) -> float:
    """The median over ``repeats`` of the host's time for a call, in µs, while the device keeps up."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - began) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)
