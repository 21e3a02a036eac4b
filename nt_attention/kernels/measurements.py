"""What was measured on GPUs: the numbers of the cost model, and which of them hold for a GPU.

Each file has the numbers of one GPU, with its name, what it reports about itself, the versions and the error of the
fit. `python -m nt_attention tune` writes them. They are used in this order: the user's file for a GPU of this name, in
the cache directory; the file of this name in `measured/`; another file there, that of the nearest GPU, scaled by what
the two report.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._warnings import warn

# µs for each call; ns for each head and sequence, for each head and token, for each head and 1000 pairs, for each key
# of the query that sees the most, and for each key head and sequence
Row = tuple[float, float, float, float, float, float]
# ("float32" or "16-bit", "forward" or "both", kind of call) → head dims (D, Dv) → backend → row
Costs = dict[tuple[str, str, str], dict[tuple[int, int], dict[str, Row]]]
# Operations of the tensor cores of a multiprocessor in a clock, relative to capability 9.0; others as the next lower.
_OPERATIONS = {(0, 0): 0.125, (8, 0): 0.5, (8, 6): 0.25, (9, 0): 1.0, (10, 0): 2.0, (12, 0): 0.25}
_OF_A_COMPUTE_UNIT = 0.5  # of an AMD GPU


class Card(NamedTuple):
    """What a GPU reports about itself.

    Attributes:
        multiprocessors: Their number.
        clock: The highest clock of a multiprocessor, in MHz.
        bandwidth: Of the memory, in GB/s.
        operations: Of a multiprocessor in a clock, relative to an H100.
    """

    multiprocessors: float
    clock: float
    bandwidth: float
    operations: float

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """What `torch.cuda.get_device_properties` reports. A number is 0 if it is unknown."""
        about = torch.cuda.get_device_properties(device)
        capability = (about.major, about.minor)
        operations = _OPERATIONS[max(each for each in _OPERATIONS if each <= capability)]
        if torch.version.hip:
            operations = _OF_A_COMPUTE_UNIT
        # two transfers in each clock of the memory
        bytes_per_s = 2e3 * getattr(about, "memory_clock_rate", 0) * getattr(about, "memory_bus_width", 0) / 8
        clock = getattr(about, "clock_rate", 0) / 1e3
        return cls(about.multi_processor_count, clock, round(bytes_per_s / 1e9), operations)

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Of the memory, of all multiprocessors, and of one."""
        return self.bandwidth, self.multiprocessors * self.clock * self.operations, self.clock * self.operations


class Table(NamedTuple):
    """The numbers of a file, and `about`, where they are from, as `explain` prints it."""

    costs: Costs
    about: str


def tables(device: torch.device) -> tuple[Table, ...]:
    """The numbers for a device, in the order in which they are used."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return tables_for(None, None)
    return tables_for(torch.cuda.get_device_name(device), Card.of(device))


@functools.cache
def tables_for(name: str | None, card: Card | None) -> tuple[Table, ...]:
    """`tables` for a GPU of this name; None for a device about which nothing is known, such as that of fake tensors."""
    files = {file.name: json.loads(file.read_text("utf-8")) for file in _shipped()}
    user = [] if name is None else [each for each in [_of_user(name)] if each is not None]
    exact = None if name is None else files.pop(f"{slug(name)}.json", None)
    if card is None and exact is None and files:
        exact = next(iter(files.values()))
    shipped = [] if exact is None else [Table(read_costs(exact["costs"]), f"measured on {exact['gpu']}")]
    return (*user, *shipped, *([] if card is None or not files else [_nearest(list(files.values()), card)]))


@functools.cache
def warn_if_estimated(device: torch.device) -> None:
    """Warn, once for each GPU of a process, that nobody measured kernels on a GPU of this name."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    name = torch.cuda.get_device_name(device)
    if user_file(name).is_file() or any(file.name == f"{slug(name)}.json" for file in _shipped()):
        return
    warn(
        f"nobody has measured the backends on {name}, so backend='auto' selects by times that are scaled from another "
        "GPU: run `python -m nt_attention tune`. It takes 2 minutes, and some batches may be several times as fast."
    )


def _nearest(files: list[dict[str, Any]], card: Card) -> Table:
    """The numbers of the GPU with the most similar bandwidth and FLOPs, scaled to `card`."""

    def ratios(file: dict[str, Any]) -> tuple[float, float, float]:
        measured = Card(**file["card"]).speeds
        return tuple(a / b if a and b else 1.0 for a, b in zip(measured, card.speeds, strict=True))  # type: ignore[return-value]

    file = min(files, key=lambda each: math.hypot(*map(math.log, ratios(each)[:2])))
    memory, all_multiprocessors, one_multiprocessor = ratios(file)
    factors = (1.0, all_multiprocessors, memory, all_multiprocessors, one_multiprocessor, all_multiprocessors)
    costs = {
        key: {
            dim: {name: tuple(x * by for x, by in zip(row, factors, strict=True)) for name, row in rows.items()}
            for dim, rows in by_dim.items()
        }
        for key, by_dim in read_costs(file["costs"]).items()
    }
    speeds = f"{1 / memory:.2f} × its bandwidth and {1 / all_multiprocessors:.2f} × its FLOPs"
    if not all(card.speeds):
        speeds = "which reports no clock or bandwidth"
    return Table(costs, f"estimated for this GPU from {file['gpu']}, {speeds}")  # type: ignore[arg-type]


def _of_user(name: str) -> Table | None:
    """The user's numbers for a GPU of this name; None, with a warning if there is a file, if they can't be read."""
    file = user_file(name)
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text("utf-8"))
        measured, now = dict(content["versions"]), versions()
        changed = [
            f"{each} {measured[each]}, now {now.get(each, 'none')}"
            for each in measured
            if measured[each] != now.get(each)
        ]
        about = "measured on this GPU" + (f" with {'; '.join(changed)}" if changed else "")
        return Table(read_costs(content["costs"]), about)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn(f"{file} is not read ({error!r}): run python -m nt_attention tune again, or delete it.")
        return None


def read_costs(written: Mapping[str, Any]) -> Costs:
    """The numbers as they are in a file.

    Raises:
        ValueError, TypeError, AttributeError: they are no such numbers.
    """
    return {
        (dtype, direction, kind): {
            dims_of(dims): {name: _row(row) for name, row in rows.items()} for dims, rows in by_head_dims.items()
        }
        for dtype, by_direction in written.items()
        for direction, by_kind in by_direction.items()
        for kind, by_head_dims in by_kind.items()
    }


def _row(numbers: list[float]) -> Row:
    a, b, c, d, e, f = row = tuple(map(float, numbers))
    if not all(0 <= x < math.inf for x in row):
        raise ValueError(f"numbers must be ≥ 0, got {numbers}")
    return a, b, c, d, e, f


def dims_of(which: str) -> tuple[int, int]:
    """The head dims (D, Dv) of a key in a file: "64", or "192/128" if they differ."""
    head_dim, _, value_dim = which.partition("/")
    return int(head_dim), int(value_dim or head_dim)


def slug(name: str) -> str:
    """The name of a GPU, as it is in names of files: "NVIDIA H200" → "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def user_file(name: str) -> Path:
    """The user's file for a GPU of this name: in `$NT_ATTENTION_CACHE`, by default `~/.cache/nt_attention`."""
    return cache_directory() / "measured" / f"{slug(name)}.json"


def cache_directory() -> Path:
    """The directory of what is kept for the user."""
    path = os.environ.get("NT_ATTENTION_CACHE")
    if not path:
        path = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nt_attention")
    return Path(path)


def _shipped() -> list[Any]:
    """The files of the package, by name; not those of calls in which sequences share prefixes."""
    folder = resources.files(__package__) / "measured"
    files = [file for file in folder.iterdir() if file.name.endswith(".json") and not file.name.startswith("trees_")]
    return sorted(files, key=lambda file: file.name, reverse=True)


def versions() -> dict[str, str]:
    """The versions of torch and of the installed packages that have kernels."""
    found = {name: package_version(name) for name in ("torch", "triton", "flash-attn", "flash-attn-4")}
    return {name: version for name, version in found.items() if version is not None}


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
