"""How long a call takes. On a GPU the device's time alone, the host's alone, or both; what is timed alone is kept from
waiting for the other. On a CPU by the clock on the wall."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def call_ms(function: Callable[[], Any], device: torch.device, patience: float) -> tuple[float, bool]:
    """A call's time in ms, and whether it was timed but once, because it takes more than ``patience`` seconds.

    That of the device (``device_ms``) on a GPU, by the clock on the wall (``cpu_ms``) on a CPU.
    """
    seconds = once(function, device)
    if seconds > patience:
        seconds = once(function, device)  # the first may have compiled something
    if seconds > patience:
        return 1e3 * seconds, True
    return (device_ms if device.type == "cuda" else cpu_ms)(function), False


def once(function: Callable[[], Any], device: torch.device) -> float:
    """One call in seconds by the clock on the wall, to its end."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    began = time.perf_counter()
    function()
    finish()
    return time.perf_counter() - began


def cpu_ms(function: Callable[[], Any], seconds: float = 1.0) -> float:
    """A call's time on the CPU in ms: the median over the calls of about so many ``seconds``, 3 to 100 of them."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < 100 and sum(times) < seconds):
        times.append(once(function, torch.device("cpu")))
    return 1e3 * statistics.median(times)


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
