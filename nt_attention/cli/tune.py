"""``python -m nt_attention tune``: measure the backends on this GPU, and fit the expected times of the cost model.

The calls that decide most come first: head dims 64 and 128 in 16 bits. After each kind of calls the file is written, so
a run can end at any time. ``kernels/cost_model.py`` has the model, ``kernels/measurements.py`` who reads the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..functional import plan
from ..kernels import cost_model, measurements
from ..kernels.call_size import CallSize
from ..kernels.measurements import Card, dims_of
from . import timing
from .calls import CAUSAL, CaseInputs, NotSupportedError, Workload, attention, chosen, draw_lengths
from .environment import device_name, devices, output_file

# (lengths, tokens, share of the heads, query heads of a key head); odd lengths, where flash_attn_4 with softcap is slow
GRID = (
    *(("uniform:16", 32768, 1.0, 1), ("equal:64", 16384, 1.0, 1), ("lognormal:64", 16384, 1.0, 4)),
    *(("lognormal:256", 2048, 1.0, 1), ("lognormal:512", 65536, 1.0, 4), ("lognormal:2048", 32768, 1.0, 1)),
    *(("equal:1009", 16384, 1.0, 4), ("lognormal:8192", 65536, 1.0, 4), ("one long", 32500, 1.0, 1)),
    *(("equal:16001", 16001, 1.0, 1), ("lognormal:1024", 262144, 0.25, 1), ("equal:1501", 1501, 0.5, 1)),
)
# (sequences, queries of each, keys, query heads of a key head)
FEW_QUERIES = (
    *((64, 1, "lognormal:8192", 4), (8, 1, "lognormal:8192", 4), (1, 1, "equal:65536", 4), (256, 1, "equal:512", 4)),
    *((16, 4, "lognormal:4096", 4), (64, 1, "lognormal:2048", 1), (32, 1, "lognormal:8192", 32)),
    *((512, 1, "uniform:256", 1), (1, 64, "equal:32768", 4), (1, 128, "equal:16384", 4)),
    *((12, 4, "uniform:256", 4), (256, 1, "lognormal:512", 32), (8, 1, "uniform:512", 1)),
)
HEADS_OF_FEW = 32
# (sequences, most queries of each, keys, query heads of a key head)
MORE_KEYS = (
    *((64, 64, "lognormal:2048", 1), (64, 64, "lognormal:2048", 4), (24, 128, "lognormal:8192", 1)),
    *((256, 24, "lognormal:1024", 1), (512, 20, "uniform:256", 1), (16, 32, "uniform:2048", 4)),
    *((32, 32, "equal:4096", 1), (8, 256, "equal:8009", 4), (128, 32, "equal:577", 1), (1024, 8, "uniform:128", 4)),
)
# kind of call → options, which the batches have by turns; of two windows, the fit learns what pairs and tokens take
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "causal": (CAUSAL,),
    "full": ({},),
    cost_model.MORE_KEYS: ({},),
    cost_model.FEW_QUERIES: (CAUSAL,),
    "narrow window behind": tuple(CAUSAL | {"window_size": (left, 0)} for left in (127, 31)),
    "window behind": tuple(CAUSAL | {"window_size": (left, 0)} for left in (511, 2047)),
    "narrow window": tuple({"window_size": (size, size)} for size in (64, 16)),
    "nonlinear": (CAUSAL | {"softcap": 30.0},),
    "sinks": (CAUSAL | {"sinks": True},),
    "window": tuple({"window_size": (size, size)} for size in (256, 1024)),
}
HEAD_DIMS = ("64", "128", "256", "96", "32", "192/128", "192", "512", "384")
WIDTH = 1024  # of all heads
BACKENDS = {
    torch.bfloat16: ("token_tiled", "flash_attn_4", "torch_flash", "flash_attn_2"),
    torch.float32: ("token_tiled", "torch_efficient"),
}
ABOVE_256 = ("token_tiled", "torch_efficient")  # head dims
SHARE_OF_FLOAT32 = 4  # a fourth of the tokens: its kernels take many times as long
BURST, REPEATS = 0.001, 3  # seconds
Unit = tuple[torch.dtype, str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=devices(), default=devices()[0])
    add("--minutes", type=float, default=2.0, help="after this time, no further kind of calls is measured; default: 2")
    add("--save", type=output_file, metavar="FILE", help="default: the file of this GPU in your cache")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if device.type != "cuda":
        options.error("tune is for a GPU: on a CPU there are no expected times.")
    torch.cuda.set_device(device.index or 0)
    gpu, versions = device_name(device), measurements.versions()
    print(f"{gpu}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    try:
        file = options.save or output_file(str(measurements.user_file(gpu)))
        before = read_file(file, gpu)
    except (argparse.ArgumentTypeError, ValueError) as error:
        options.error(str(error))
    header = {"command": options.command_line, "date": str(date.today()), "gpu": gpu}
    tune(header | {"card": Card.of(device)._asdict(), "versions": versions}, before, file, 60 * options.minutes, device)
    return 0


def read_file(file: Path, gpu: str) -> dict[str, Any]:
    """The content of a file, empty if there is none. A ValueError if it is of another GPU, or can't be read."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
        of = content["gpu"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} can't be read: delete it, or pass another file to --save.") from error
    if of != gpu:
        raise ValueError(f"{file} has times of {of}, and this GPU is {gpu}: pass another file to --save.")
    return content


def units() -> Iterator[Unit]:
    """What is measured at once: (dtype, head dims, kind of call), in the order of importance."""
    yield from ((torch.bfloat16, dims, kind) for kind in KINDS for dims in HEAD_DIMS[:2])
    yield from ((torch.bfloat16, dims, kind) for dims in HEAD_DIMS[2:] for kind in KINDS)
    kinds = [kind for kind in KINDS if kind not in ("nonlinear", "sinks")]
    yield from ((torch.float32, dims, kind) for dims in HEAD_DIMS if max(dims_of(dims)) <= 256 for kind in kinds)


def tune(header: dict[str, Any], before: dict[str, Any], file: Path, seconds: float, device: torch.device) -> None:
    """Measure and fit unit by unit, and write the file after each. What it has of other units is kept."""
    costs, errors = before.get("costs", {}), before.get("error of the fit (median, largest)", {})
    began = time.perf_counter()
    for i, (dtype, dims, kind) in enumerate(units()):
        if i and time.perf_counter() - began > seconds:
            print(f"the time is over before {kind} calls of head dims {dims} in {name_of(dtype)}")
            break
        measured = measure(dtype, dims, kind, device)
        for direction in {direction for direction, _ in measured}:
            costs.setdefault(name_of(dtype), {}).setdefault(direction, {}).setdefault(kind, {})[dims] = {}
        for (direction, name), rows in measured.items():
            numbers, median, largest = fit(rows)
            where = f"{name_of(dtype)} {direction} {kind} {dims} {name}"
            errors[where] = (round(median, 3), round(largest, 3))
            costs[name_of(dtype)][direction][kind][dims][name] = numbers
            print(f"{where:<52} off by {median:.1%} in the median, {largest:.1%} at most: {numbers}", flush=True)
        content = header | {"error of the fit (median, largest)": errors, "costs": costs}
        unfinished = file.with_suffix(".unfinished")
        text = re.sub(r"\[[^\[\]]*\]", lambda row: re.sub(r"\s+", " ", row[0]), json.dumps(content, indent=1))
        unfinished.write_text(text + "\n", "utf-8")  # each list in one line
        unfinished.replace(file)  # other programs may read the file at any time
    print(f"saved in {file}")


def name_of(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else "16-bit"


def workloads(dtype: torch.dtype, dims: str, kind: str) -> Iterator[Workload]:
    """The batches on which a kind of calls is measured."""
    share, (head_dim, value_dim) = SHARE_OF_FLOAT32 if dtype == torch.float32 else 1, dims_of(dims)

    def lengths_of(text: str, tokens: int, of_tokens: int = share) -> tuple[int, ...]:
        distribution, _, most = text.partition(":")
        return draw_lengths(f"{distribution}:{min(int(most) // of_tokens, tokens)}", tokens, seed=9)

    if kind in (cost_model.FEW_QUERIES, cost_model.MORE_KEYS):
        is_few = kind == cost_model.FEW_QUERIES
        share = share if is_few else 1
        for sequences, most, text, group in FEW_QUERIES if is_few else MORE_KEYS:
            tokens = sequences * (int(text.partition(":")[2]) // share)
            keys = tuple(max(most if is_few else 1, n) for n in lengths_of(text, tokens, share)[:sequences])
            queries = (most,) * sequences
            if not is_few:
                queries = draw_lengths(f"uniform:{most}", sequences * most)[:sequences]
            of_keys = (HEADS_OF_FEW if is_few else max(8, WIDTH // head_dim)) // group
            yield Workload(text, text, queries, of_keys * group, of_keys, head_dim, KINDS[kind][0], keys, value_dim)
        return
    for (text, tokens, of_heads, group), options in zip(GRID, itertools.cycle(KINDS[kind])):
        if text == "one long":
            lengths = (tokens // 4 // share, *draw_lengths("lognormal:128")[: 800 // share])
        else:
            lengths = lengths_of(text, tokens // share, 1)
        kv_heads = max(1, int(of_heads * WIDTH / head_dim) // group)
        yield Workload(text, text, lengths, kv_heads * group, kv_heads, head_dim, options, value_dim=value_dim)


def counts(inputs: CaseInputs, backward: bool) -> tuple[float, ...]:
    """The numbers in which the expected time of a call is linear."""
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs.qkv)
    options = {name: x for name, x in inputs.options.items() if name != "sinks"}
    call = plan(q, k, v, inputs.layout, inputs.key_layout, backend="reference", **options)
    return cost_model.counts(call.spec, CallSize.of(call))


def measure(
    dtype: torch.dtype, dims: str, kind: str, device: torch.device
) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """(direction, backend) → rows of µs and the numbers in which an expected time is linear."""
    names: tuple[str, ...] = BACKENDS[dtype] if max(dims_of(dims)) <= 256 else ABOVE_256
    directions: tuple[str, ...] = ("forward", "both")
    if kind == cost_model.FEW_QUERIES:
        names, directions = (*names, "split_kv"), ("forward",)
    elif kind == "sinks":  # in the forward, they take each backend the same time
        directions = ("both",)
    rows = defaultdict(list)
    for workload in workloads(dtype, dims, kind):
        inputs = CaseInputs.random(workload, device, dtype)
        if kind == "sinks":
            sinks = torch.zeros(workload.heads, device=device)
            inputs = dataclasses.replace(inputs, options=inputs.options | {"sinks": sinks})
        for direction, name in itertools.product(directions, names):
            try:
                chosen(name, inputs, direction == "both")
                call = attention(name, inputs)
                us = 1000 * timing.device_ms(call.both if direction == "both" else call.forward, REPEATS, BURST)
            except NotSupportedError:
                continue
            except (RuntimeError, ValueError) as error:  # the kernel fails, refuses the size, or has no memory
                print(f"{name} failed on {workload.about} × {dims}, {kind}: {(str(error).splitlines() or [''])[0]}")
                continue
            rows[direction, name].append((us, *counts(inputs, direction == "both")))
    return rows


def fit(rows: list[tuple[float, ...]]) -> tuple[list[float], float, float]:
    """The numbers of the cost model, and the median and the largest of the relative errors of the fit."""
    times, *of_calls = np.array(rows).T
    relative = np.array(of_calls).T / times[:, None]
    numbers = nonnegative_least_squares(relative, np.ones(len(times)))
    off = np.abs(relative @ numbers - 1)
    return [float(f"{x:.5g}") for x in numbers], float(np.median(off)), float(off.max())


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that minimizes ‖a x − b‖. It has few columns, so all sets of those with x > 0 are tried."""
    best = np.zeros(a.shape[1])
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    for chosen_columns in itertools.product((False, True), repeat=a.shape[1]):
        x, columns = np.zeros(a.shape[1]), np.array(chosen_columns)
        x[columns] = np.linalg.lstsq(a[:, columns] / scale[columns], b, rcond=None)[0] / scale[columns]
        if (x >= 0).all() and np.linalg.norm(a @ x - b) < np.linalg.norm(a @ best - b):
            best = x
    return best
