"""Shared by the benchmarks: calls timed by turns, so that noise affects all of them alike, and saved results."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARMUP = 3  # rounds


def by_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The wall-clock time of each call in ms, from device sync to device sync: the median over rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP + rounds):
        for name, call in calls.items():
            times[name].append(wall_clock_ms(call))
    return {name: statistics.median(each[WARMUP:]) for name, each in times.items()}


def wall_clock_ms(call: Callable[[], Any]) -> float:
    """The time of one call in ms, from device sync to device sync."""
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return 1e3 * (time.perf_counter() - began)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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


def device_busy_ms(calls: Iterable[Callable[[], Any]]) -> float:
    """The time in ms in which the GPU is busy in a call, the median over calls, according to the profiler.

    Measure it last: a process in which the profiler has run is slower.
    """
    times = []
    for call in calls:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            call()
            torch.cuda.synchronize()
        on_device = [e for e in profiler.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]
        times.append(sum(e.time_range.elapsed_us() for e in on_device) / 1e3)
    return statistics.median(times)


def slowest(value: float, device: str) -> float:
    """The largest value of all ranks."""
    number = torch.tensor(value, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def reserve_memory() -> None:
    """Let PyTorch's allocator take most of the GPU's memory at once, so that no call waits for more.

    Batches of other lengths need tensors of other sizes. The first way to run such a batch would have to wait.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        torch.empty(int(0.9 * free), dtype=torch.uint8, device="cuda")


def show(lines: Sequence[str], save: Path | None) -> None:
    """Print the result of this benchmark, and save it with the command that was run."""
    print("\n".join(lines))
    if save is not None:
        command = " ".join(["python benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        save.write_text("\n".join([f"`{command}`", "", *lines]) + "\n")
