"""The time of a call: on the device alone, on the host alone, or by the wall clock."""

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
    """The device time of a call in ms, without the host's time: the median over bursts of calls, of some seconds."""
    return device_ms_by_turns({"": function}, repeats, seconds)[""]


def device_ms_by_turns(functions: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """`device_ms` of several functions, whose bursts take turns after a warm-up of each."""
    bursts = {name: Burst(function, seconds) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in bursts}
    for i in range(rounds):
        for name in sorted(bursts, reverse=bool(i % 2)):
            times[name].append(bursts[name]())
    return {name: statistics.median(each) for name, each in times.items()}


class Burst:
    """Calls of a function one after another. `burst()` returns the device time of one of them, in ms.

    The device sleeps until the host has queued the whole burst, so that it never waits for the host between two calls.
    """

    def __init__(self, function: Callable[[], Any], seconds: float) -> None:
        self.function = function
        function()  # which may compile
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        self.host = time.perf_counter() - began
        torch.cuda.synchronize()
        self.calls = max(1, min(50, int(seconds / (time.perf_counter() - began))))

    def __call__(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_on_device(int(2e9 * min(1.0, 1.5 * self.host * self.calls + 1e-3)))  # cycles, at about 2 GHz
        start.record()
        for _ in range(self.calls):
            self.function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.calls


def host_us(function: Callable[[], Any], calls: int = 10, repeats: int = 7) -> float:
    """The host time of a call in µs: the median over bursts that are short enough for the device's queue."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        times.append(1e6 * (time.perf_counter() - began) / calls)
    return statistics.median(times)
