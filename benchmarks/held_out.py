"""How much slower ``"auto"`` is than the fastest backend, on random batches, on this GPU.

    python benchmarks/held_out.py [--batches N] [--seed N] [--minutes N] [--processes N] [--rows FILE]

The batches are drawn: lengths, heads, head dims and masks. Expected times are fitted to others (`tune`). Every
backend that can run a batch takes part but ``flex``, which compiles for each, and the reference. Bursts take turns.
The times are those of the device. A call takes at least the host's time, unless a CUDA graph replays it: the second
ratio is of the longer of both. With ``--processes`` the kernels are compiled first, in as many processes, which share
the caches of compiled kernels on the disk (flash-attn-4: ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1``).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from by_turns import host_us
from workloads import CAUSAL, Workload, draw_lengths

from nt_attention.cli.calls import CaseInputs, attention
from nt_attention.cli.environment import device_name, output_file, positive
from nt_attention.cli.timing import device_ms
from nt_attention.cli.tune import counts
from nt_attention.functional import explain
from nt_attention.kernels.cost_model import FEW_ROWS
from nt_attention.kernels.measurements import versions
from nt_attention.kernels.select import Explanation

HEAD_DIMS = (64, 64, 64, 128, 128, 128, 256, 96, 32, (192, 128), 80, 192)
_WINDOWS: tuple[dict[str, Any], ...] = ({"windows": (63, 4096)}, {"windows": (63, 1024), "sided": 2})
MASKS = (*(CAUSAL,) * 3, {}, {}, *_WINDOWS, CAUSAL | {"softcap": 30.0})
LENGTHS = ("lognormal", "lognormal", "uniform", "equal", "one long")
MOST_PRODUCTS = 2e11  # head dim × visible pairs of all heads, about 1 ms on an H100
ROUNDS, BURST = 7, 0.003  # seconds
LEFT_OUT = ("flex", "reference")
Times = dict[str, float]


@dataclass
class Result:
    """The times of the backends on a batch: of the device and of the host, in ms, and the expected ones, in µs."""

    about: str
    direction: str
    auto: str
    times: Times
    host: Times
    expected: Times
    counts: tuple[float, ...] = field(repr=False)

    def ratio(self, with_host: bool = False) -> float:
        times = {name: max(ms, self.host[name] if with_host else 0.0) for name, ms in self.times.items()}
        return times[self.auto] / min(times.values())

    def __str__(self) -> str:
        times = []
        for name, ms in sorted(self.times.items(), key=lambda item: item[1]):
            expected = f", expected {self.expected[name] / 1000:.3f}" if name in self.expected else ""
            times.append(f"{name} {ms:.3f} (host {self.host[name]:.3f}{expected})")
        ratios = f"{self.ratio():.2f} ({self.ratio(True):.2f})"
        return f"{ratios}  {self.direction:<7}  {self.about}; auto is {self.auto}; ms: {', '.join(times)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=positive, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="after this time, no further batch is measured")
    parser.add_argument("--processes", type=int, default=0, help="that compile the kernels first")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("K", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=output_file, metavar="FILE", help="also write the measured times to this file")
    options, device = parser.parse_args(), torch.device("cuda")
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    if options.compile:
        of_this, of_all = options.compile
        source = random.Random(options.seed)
        for i, workload in enumerate([draw(source) for _ in range(options.batches)]):
            if i % of_all == of_this:
                list(callable_backends(workload, CaseInputs.random(workload, device, torch.bfloat16)))
        return
    print(f"{device_name(device)}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    compile_in_processes(options)
    run(options, device)


def compile_in_processes(options: argparse.Namespace) -> None:
    """Call each backend on the batches once, in processes with a part of the batches each."""
    this = [sys.executable, "-W", "ignore", __file__, "--seed", str(options.seed), "--batches", str(options.batches)]
    parts = [[*this, "--compile", str(k), str(options.processes)] for k in range(options.processes)]
    for process in [subprocess.Popen(part, stdout=subprocess.DEVNULL) for part in parts]:
        process.wait()


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Draw batches and print each result, then a summary."""
    source, began, results = random.Random(options.seed), time.perf_counter(), []
    for i in range(options.batches):
        if options.minutes and time.perf_counter() - began > 60 * options.minutes:
            print(f"the time is over after {i} of {options.batches} batches")
            break
        for result in compare(draw(source), device):
            results.append(result)
            print(result, flush=True)
        if options.rows:
            text = json.dumps([dataclasses.asdict(each) for each in results], indent=1)
            options.rows.write_text(text + "\n", "utf-8")
    print(summary(results, options.seed))


def summary(results: list[Result], seed: int) -> str:
    """The ratios of each direction, and the worst five results."""
    lines = [f"\nseed {seed}; the time of auto over that of the fastest backend:"]
    for direction, with_host in itertools.product(("forward", "both"), (False, True)):
        ratios = sorted(each.ratio(with_host) for each in results if each.direction == direction)
        if ratios:
            most = ratios[math.ceil(0.9 * len(ratios)) - 1]
            numbers = f"median {statistics.median(ratios):.3f}, 90 % at most {most:.3f}, largest {ratios[-1]:.3f}"
            about = f"{direction}, {'device or host' if with_host else 'device'}"
            lines.append(f"{about:<23}  {len(ratios):>3} batches: {numbers}")
    worst = sorted(results, key=lambda each: -each.ratio())[:5]
    return "\n".join([*lines, "the worst:", *map(str, worst)])


def draw(source: random.Random) -> Workload:
    """A random batch, of few queries in one of eight, and of more keys than queries in another one."""
    dims = source.choice(HEAD_DIMS)
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    heads = max(2, source.choice((512, 1024, 2048)) // head_dim)
    group = source.choice([n for n in (1, 1, 4) if heads % n == 0])  # kernels are compiled for each
    if source.random() < 1 / 8:
        return _of_few_queries(source, head_dim, value_dim)
    if source.random() < 1 / 8:
        return _of_more_keys(source, heads, group, head_dim, value_dim)
    options = dict(source.choice(MASKS))
    if "windows" in options:
        size, sided = round(_between(source, *options.pop("windows"))), options.pop("sided", 1)
        options |= {"window_size": (size, size)} if sided == 2 else CAUSAL | {"window_size": (size, 0)}
    kind, most, tokens = source.choice(LENGTHS), _between(source, 16, 32768), round(_between(source, 2048, 262144))
    while True:
        longest = min(round(most), tokens)
        lengths = _lengths(source, kind, longest, tokens)
        pairs = sum(n * min(n, 2 * options.get("window_size", (n, n))[0]) for n in lengths)
        if pairs * heads * head_dim <= MOST_PRODUCTS * (2 if options.get("is_causal") else 1):
            break
        tokens //= 2
    about = f"{kind} ≤ {longest}, {tokens} tokens, {heads}/{heads // group} × {head_dim}/{value_dim}, {options}"
    return Workload("drawn", about, lengths, heads, heads // group, head_dim, options, value_dim=value_dim)


def _lengths(source: random.Random, kind: str, longest: int, tokens: int) -> tuple[int, ...]:
    if kind != "one long":
        return draw_lengths(f"{kind}:{longest}", tokens, seed=source.randrange(2**32))
    short = draw_lengths("lognormal:256", max(1, tokens - longest), seed=source.randrange(2**32))
    return (longest, *short)


def _of_few_queries(source: random.Random, head_dim: int, value_dim: int) -> Workload:
    heads, group = source.choice(((32, 4), (64, 4), (16, 1), (32, 32)))
    queries = source.choice((1, 1, 1, max(1, FEW_ROWS // group)))
    most = round(_between(source, 128, 32768))
    sequences = max(1, round(_between(source, 1, min(512, 2**20 / most))))
    drawn = draw_lengths(f"{source.choice(LENGTHS[:4])}:{most}", sequences * most, seed=source.randrange(2**32))
    keys = drawn[:sequences]
    about = f"{sequences} × {queries} queries of ≤ {most} keys, {heads}/{heads // group} × {head_dim}/{value_dim}"
    more: dict[str, Any] = {"key_lengths": tuple(max(n, queries) for n in keys), "value_dim": value_dim}
    return Workload("drawn", about, (queries,) * len(keys), heads, heads // group, head_dim, CAUSAL, **more)


def _of_more_keys(source: random.Random, heads: int, group: int, head_dim: int, value_dim: int) -> Workload:
    """Cross-attention: some queries on longer sequences of keys."""
    most_keys = round(_between(source, 128, 8192))
    most = round(_between(source, 1, min(256, most_keys / 8)))
    sequences = max(1, round(_between(source, 1, min(512, 2**19 / most_keys))))
    kind = source.choice(LENGTHS[:4])
    keys = draw_lengths(f"{kind}:{most_keys}", sequences * most_keys, seed=source.randrange(2**32))[:sequences]
    queries = tuple(source.randint(1, most) for _ in keys)
    about = f"{len(keys)} × ≤ {most} queries of {kind} ≤ {most_keys} keys, "
    about += f"{heads}/{heads // group} × {head_dim}/{value_dim}"
    return Workload("cross", about, queries, heads, heads // group, head_dim, {}, keys, value_dim)


def _between(source: random.Random, least: float, most: float) -> float:
    """A random number whose logarithm is uniform."""
    return math.exp(source.uniform(math.log(least), math.log(most)))


def compare(workload: Workload, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Result]:
    """The forward and, if it does not decode, the forward + backward."""
    inputs, results = CaseInputs.random(workload, device, dtype), []
    for direction, explanation, functions in callable_backends(workload, inputs):
        if explanation.chosen not in functions:
            print(f"auto is {explanation.chosen}, which is not compared; {workload.about}")
            continue
        times = device_ms_by_turns(functions)
        host = {name: host_us(function) / 1000 for name, function in functions.items()}
        row, expected = counts(inputs, direction == "both"), explanation.expected_us or {}
        results.append(Result(workload.about, direction, explanation.chosen, times, host, expected, row))
    return results


def callable_backends(
    workload: Workload, inputs: CaseInputs
) -> Iterator[tuple[str, Explanation, dict[str, Callable[[], Any]]]]:
    """For each direction: why the backend is chosen, and the calls of all that can run, each called once."""
    decodes = workload.key_lengths is not None and workload.name != "cross"
    for direction in ("forward",) if decodes else ("forward", "both"):
        q, k, v = (x.detach().requires_grad_(direction == "both") for x in inputs.qkv)
        explanation = explain(q, k, v, inputs.layout, inputs.key_layout, **inputs.options)
        functions = {}
        for name, reasons in explanation.reasons.items():
            if reasons or name in LEFT_OUT:
                continue
            call = attention(name, inputs)
            function = call.both if direction == "both" else call.forward
            try:
                function()
                functions[name] = function
            except (RuntimeError, ValueError) as error:  # as in tune.py
                print(f"{name} failed: {(str(error).splitlines() or [''])[0]}; {workload.about}")
        yield direction, explanation, functions


def device_ms_by_turns(functions: dict[str, Callable[[], Any]]) -> Times:
    """The device time of each function in ms: the median over bursts of calls, which take turns."""
    times = [{name: device_ms(functions[name], 1, BURST) for name in functions} for _ in range(ROUNDS)]
    return {name: statistics.median(each[name] for each in times) for name in functions}


if __name__ == "__main__":
    main()
