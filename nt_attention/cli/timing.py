"""The time of a call: on the device alone, or by the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

from ..torch_private import sleep_on_device


def wall_ms(function: Callable[[], Any], seconds: float = 1.0) -> float:
    """The wall-clock time of a call in ms: the median over blocks of calls, each with one device sync at its end."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=seconds).median


def device_ms(function: Callable[[], Any], repeats: int = 7, seconds: float = 0.02) -> float:
    """The device time of a call in ms, without the host's time: the median over bursts of calls, of some seconds.

    The device sleeps until the host has queued the whole burst, so that it never waits for the host between two calls.
    """
    function()  # which may compile
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    calls, times = max(1, min(50, int(seconds / (time.perf_counter() - began)))), []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_on_device(int(2e9 * min(1.0, 1.5 * host * calls + 1e-3)))  # cycles, at about 2 GHz
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)
