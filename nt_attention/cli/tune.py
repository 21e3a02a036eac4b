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

from ..kernels import cost_model, measurements
from ..kernels.measurements import Card, dims_of
from . import held_out, timing
from .environment import device_name, devices, minutes, output_file, positive
from .implementations import CaseInputs, NotSupportedError, backend
from .workloads import CAUSAL, SHORT, Workload, draw_lengths

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


def _windows(*sizes: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    return tuple((CAUSAL if right == 0 else {}) | {"window_size": (left, right)} for left, right in sizes)


# kind of call → options, which the batches have by turns; of two windows, the fit learns what pairs and tokens take
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "causal": (CAUSAL,),
    "full": ({},),
    cost_model.FEW_QUERIES: (CAUSAL,),
    "narrow window behind": _windows((127, 0), (31, 0)),
    "window behind": _windows((511, 0), (2047, 0)),
    "narrow window": _windows((64, 64), (16, 16)),
    "nonlinear": (CAUSAL | {"softcap": 30.0},),
    "sinks": (CAUSAL | {"sinks": True},),
    "window": _windows((256, 256), (1024, 1024)),
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
    add("--minutes", type=minutes, help="the time after which no further kind of calls is measured; default: 2")
    add("--head-dims", nargs="+", choices=HEAD_DIMS, help="default: all; the others in FILE are kept")
    add("--save", type=output_file, metavar="FILE", help="default: the file of this GPU in your cache")
    add("--rows", type=output_file, metavar="FILE", help="also write the measured times to this file")
    add("--held-out", type=positive, metavar="N", help="compare auto with the fastest backend on N random batches")
    add("--seed", type=int, default=0, help="the seed of these batches; default: 0")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    if device.type != "cuda":
        options.error("tune is for a GPU: on a CPU there are no expected times.")
    if options.held_out and (options.save or options.head_dims):
        options.error("--held-out only compares: leave out --save and --head-dims.")
    torch.cuda.set_device(device.index or 0)
    packages = ", ".join(f"{name} {version}" for name, version in measurements.versions().items())
    print(f"{device_name(device)}; {packages}")
    if options.held_out:
        return held_out.main(options, device)
    try:
        file = options.save or output_file(str(measurements.user_file(device_name(device))))
        check_file(file, device_name(device))
    except (argparse.ArgumentTypeError, ValueError) as error:
        options.error(str(error))
    header = {"command": options.command_line, "date": str(date.today()), "gpu": device_name(device)}
    header |= {"card": Card.of(device)._asdict(), "versions": measurements.versions()}
    tune(header, file, list(units(options.head_dims)), 60 * (options.minutes or 2.0), device, options.rows)
    return 0


def check_file(file: Path, gpu: str) -> None:
    """Raise a ValueError if a file has numbers of another GPU, or can't be read."""
    if not file.is_file():
        return
    try:
        of = json.loads(file.read_text("utf-8"))["gpu"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} can't be read: delete it, or pass another file to --save.") from error
    if of != gpu:
        raise ValueError(f"{file} has times of {of}, and this GPU is {gpu}: pass another file to --save.")


def units(head_dims: list[str] | None = None) -> Iterator[Unit]:
    """What is measured at once: (dtype, head dims, kind of call), in the order of importance."""
    dims = [dim for dim in HEAD_DIMS if dim in (head_dims or HEAD_DIMS)]
    first = [dim for dim in dims if dim in ("64", "128")]
    yield from ((torch.bfloat16, dim, kind) for kind in KINDS for dim in first)
    yield from ((torch.bfloat16, dim, kind) for dim in dims if dim not in first for kind in KINDS)
    kinds = [kind for kind in KINDS if kind not in ("nonlinear", "sinks")]
    yield from ((torch.float32, dim, kind) for dim in dims if max(dims_of(dim)) <= 256 for kind in kinds)


def tune(
    header: dict[str, Any], file: Path, todo: list[Unit], seconds: float, device: torch.device, rows_file: Path | None
) -> None:
    """Measure and fit unit by unit, and write the file after each. What it has of other units is kept."""
    before = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    costs, errors = before.get("costs", {}), before.get("error of the fit (median, largest)", {})
    began, kept = time.perf_counter(), {}
    for i, unit in enumerate(todo):
        if i and time.perf_counter() - began > seconds:
            left = ", ".join(dict.fromkeys(f"{name_of(dtype)} {dim}" for dtype, dim, _ in todo[i:]))
            print(f"the time is over; not measured, or not every kind: head dims {left}")
            break
        measured = measure(*unit, device)
        dtype, dims, kind = name_of(unit[0]), unit[1], unit[2]
        for direction in {direction for direction, _ in measured}:
            costs.setdefault(dtype, {}).setdefault(direction, {}).setdefault(kind, {}).pop(dims, None)
        for (direction, name), rows in measured.items():
            numbers, median, largest = fit(rows)
            where = f"{dtype} {direction} {kind} {dims} {name}"
            kept[where], errors[where] = rows, (round(median, 3), round(largest, 3))
            costs[dtype][direction][kind].setdefault(dims, {})[name] = numbers
            print(f"{where:<52} off by {median:.1%} in the median, {largest:.1%} at most: {numbers}", flush=True)
        content = header | {"error of the fit (median, largest)": errors, "costs": costs}
        unfinished = file.with_suffix(".unfinished")
        text = re.sub(r"\[[^\[\]]*\]", lambda row: re.sub(r"\s+", " ", row[0]), json.dumps(content, indent=1))
        unfinished.write_text(text + "\n", "utf-8")  # each list in one line
        unfinished.replace(file)  # other programs may read the file at any time
        if rows_file:
            rows_file.write_text(json.dumps(kept) + "\n", "utf-8")
    print(f"saved in {file}")


def name_of(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else "16-bit"


def workloads(dtype: torch.dtype, dims: str, kind: str) -> list[Workload]:
    """The batches on which a kind of calls is measured."""
    share = SHARE_OF_FLOAT32 if dtype == torch.float32 else 1
    if kind == cost_model.FEW_QUERIES:
        return [of_few_queries(*each, dims, share) for each in FEW_QUERIES]
    (head_dim, value_dim), found = dims_of(dims), []
    for (text, tokens, of_heads, group), options in zip(GRID, itertools.cycle(KINDS[kind])):
        if text == "one long":
            lengths: tuple[int, ...] = (tokens // 4 // share, *SHORT[: 800 // share])
        else:
            distribution, _, most = text.partition(":")
            lengths = draw_lengths(f"{distribution}:{min(int(most), tokens // share)}", tokens // share, seed=9)
        kv_heads = max(1, int(of_heads * WIDTH / head_dim) // group)
        heads = (kv_heads * group, kv_heads)
        found.append(Workload(text, text, lengths, *heads, head_dim, options, value_dim=value_dim))
    return found


def of_few_queries(sequences: int, queries: int, keys: str, group: int, dims: str, share: int) -> Workload:
    distribution, _, most = keys.partition(":")
    longest = int(most) // share
    lengths = draw_lengths(f"{distribution}:{longest}", sequences * longest, seed=9)[:sequences]
    (head_dim, value_dim), key_lengths = dims_of(dims), tuple(max(queries, n) for n in lengths)
    heads = HEADS_OF_FEW, HEADS_OF_FEW // group
    return Workload(keys, keys, (queries,) * sequences, *heads, head_dim, CAUSAL, key_lengths, value_dim)


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
                prepared = backend(name, inputs, direction == "both")
                function = prepared.both if direction == "both" else prepared.forward
                us = 1000 * timing.device_ms(function, REPEATS, BURST)
            except NotSupportedError:
                continue
            except (RuntimeError, ValueError) as error:  # the kernel fails, refuses the size, or has no memory
                print(f"{name} failed on {workload.about} × {dims}, {kind}: {(str(error).splitlines() or [''])[0]}")
                continue
            rows[direction, name].append((us, *inputs.counts(direction == "both")))
    return rows


def fit(rows: list[tuple[float, ...]]) -> tuple[list[float], float, float]:
    """The numbers of the cost model, and the median and the largest of the relative errors of the fit."""
    table = np.array(rows)
    times, counts = table[:, 0], table[:, 1:]
    numbers = nonnegative_least_squares(counts / times[:, None], np.ones(len(times)))
    off = np.abs(counts @ numbers / times - 1)
    return [float(f"{x:.5g}") for x in numbers], float(np.median(off)), float(off.max())


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that minimizes ‖a x − b‖. It has few columns, so all sets of those with x > 0 are tried."""
    best, least = np.zeros(a.shape[1]), float(b @ b)
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            part = a[:, columns] / scale[list(columns)]
            x = np.linalg.lstsq(part, b, rcond=None)[0]
            error = float(np.square(part @ x - b).sum())
            if (x >= 0).all() and error < least:
                best, least = np.zeros(a.shape[1]), error
                best[list(columns)] = x / scale[list(columns)]
    return best
