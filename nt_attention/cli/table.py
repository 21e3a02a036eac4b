"""The results as a Markdown table with what belongs below it, and as numbers for machines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .accuracy import TOLERANCE
from .measure import Measurement, Result, worst
from .workloads import Workload


@dataclass
class Report:
    """The results until now.

    Attributes:
        about: the command, and the machine and versions that it ran on.
        unit: what a number is.
        implementations: names, in the order of the columns; times are relative to "auto" where it is one of them.
        results: those of each workload, by the implementation's name.
        host: the host's µs for a call by the implementation's name, or why there is none; empty on a CPU.
    """

    about: dict[str, str]
    unit: str
    dtype: torch.dtype
    implementations: list[str]
    results: list[tuple[Workload, dict[str, Result]]] = field(default_factory=list)
    host: dict[str, float | str] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        hosts = any(isinstance(x, str) and x.startswith("failed") for x in self.host.values())
        return hosts or any(result.is_bad for _, results in self.results for result in results.values())

    def leave_out_idle(self, names: Iterable[str]) -> None:
        """Drop the columns of those ``names`` that could run no workload; their reasons stay."""
        idle = {name for name in names if all(_is_idle(results[name]) for _, results in self.results)}
        self.implementations = [name for name in self.implementations if name not in idle]

    def markdown(self) -> str:
        command, *rest = self.about.values()
        lines = [f"`{command}`", "", f"{'; '.join(rest)}.", "", self.unit, ""]
        lines += [f"| batch | {' | '.join(self.implementations)} |", "|---" * (1 + len(self.implementations)) + "|"]
        for workload, results in self.results:
            cells = [_cell(results[name], results.get("auto")) for name in self.implementations]
            lines.append(f"| {label(workload)} | {' | '.join(cells)} |")
        lines += _below(self)
        if self.host:
            lines += ["", "Host time for a call on a tiny batch, forward, with gradients wanted:", ""]
            lines += [f"| {' | '.join(self.implementations)} |", "|---" * len(self.implementations) + "|"]
            lines.append(f"| {' | '.join(_host_cell(self.host.get(name, '')) for name in self.implementations)} |")
        return "\n".join(lines) + "\n"

    def numbers(self) -> dict[str, Any]:
        """The report as JSON types."""
        workloads = [
            {
                "name": workload.name,
                "about": workload.about,
                "sequences": len(workload.lengths),
                "tokens": sum(workload.lengths),
                "key_tokens": sum(workload.keys),
                "heads": workload.heads,
                "kv_heads": workload.kv_heads,
                "head_dim": workload.head_dim,
                "value_dim": workload.value_width,
                "is_causal": workload.is_causal,
                "window_size": list(workload.window_size),
                "softcap": workload.softcap,
                "rivals": {name: _numbers(result) for name, result in results.items()},
            }
            for workload, results in self.results
        ]
        about = {**self.about, "unit": self.unit, "dtype": str(self.dtype)[6:], "tolerance": TOLERANCE[self.dtype]}
        return {**about, "batches": workloads, "host_us": self.host}


def _is_idle(result: Result) -> bool:
    return all(each.ms is None and not each.failed for each in result.measurements)


def _numbers(result: Result) -> dict[str, Any]:
    forward, both = result.forward, result.both or Measurement()
    reasons = list(dict.fromkeys(each.reason for each in result.measurements if each.reason))
    errors = {
        when: {name: _finite(x) for name, x in each.errors.items()}
        for when, each in (("forward", forward), ("both", both))
        if each.errors
    }
    return {
        "forward_ms": forward.ms,
        "both_ms": both.ms,
        "timed_once": [when for when, each in (("forward", forward), ("both", both)) if each.once],
        "max_error": None if result.max_error is None else _finite(result.max_error),
        "errors": errors,
        "agrees": None if not errors else not any(each.wrong for each in result.measurements),
        "failed": any(each.failed for each in result.measurements),
        "reason": " ".join(reasons) or None,
        "chosen": [each.chosen for each in result.measurements if each.chosen] or None,
    }


def _finite(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)  # JSON has no word for it


def label(workload: Workload) -> str:
    """A workload in a line: its name, sequences, heads × head dim."""
    heads = dict.fromkeys((workload.heads, workload.kv_heads))
    dims = dict.fromkeys((workload.head_dim, workload.value_width))
    number = f"{len(workload.lengths)} sequence{'s' if len(workload.lengths) != 1 else ''}"
    return f"{workload.name}: {number}, {workload.about}, {'/'.join(map(str, heads))} × {'/'.join(map(str, dims))}"


def _cell(result: Result, auto: Result | None) -> str:
    bases = [each.ms for each in auto.measurements] if auto else [None] * len(result.measurements)
    parts = [_part(each, base) for each, base in zip(result.measurements, bases, strict=True)]
    chosen = list(dict.fromkeys(each.chosen for each in result.measurements if each.chosen))
    return " / ".join(dict.fromkeys(parts) if result.forward.ms is None else parts) + "".join(
        f" {' / '.join(chosen)}" if chosen else ""
    )


def milliseconds(ms: float) -> str:
    return f"{ms:.{3 if ms < 10 else 1}f}"


def _part(each: Measurement, base: float | None) -> str:
    if each.ms is None:
        if each.failed:
            return f"failed: {(each.reason or '')[:80]}".replace("|", "\\|")
        return "out of memory" if each.reason == "out of memory" else "–"
    ratio = f" ({each.ms / base:.2f})" if base else ""
    return f"{milliseconds(each.ms)}{'†' if each.once else ''}{ratio}{' ✗' if each.wrong else ''}"


def _host_cell(time: float | str) -> str:
    if isinstance(time, float):
        return f"{time:.0f} µs"
    return time[:80].replace("|", "\\|") if time.startswith("failed") else "–"


def _below(report: Report) -> list[str]:
    """Why cells are empty or marked, and how exact the others are; each said once."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    apart: dict[str, list[str]] = defaultdict(list)
    errors: dict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    once = False
    for workload, results in report.results:
        for name, result in results.items():
            for what, each in zip(("", " with its backward"), result.measurements, strict=False):
                once |= each.once
                if each.reason and not (what and each.reason == result.forward.reason):
                    reasons[name + what, each.reason].append(workload.name)
                wrong += [f"- ✗ {workload.name}, {name}{what}: {x} is off by {each.errors[x]:.1e}." for x in each.wrong]
            if result.max_error is not None:
                errors[name].append(result.max_error)
            elif result.has_run:
                apart[name].append(workload.name)
    lines = [f"- {name} ({', '.join(names)}): {reason}" for (name, reason), names in reasons.items()]
    lines += wrong
    if once:
        lines.append("- † one call, not a median.")
    if errors:
        listed = ", ".join(f"{name} {worst(some):.1e}" for name, some in errors.items())
        lines.append(
            "- Largest relative L2 error of out and gradients on a sample, from float64 (✗ above "
            f"{TOLERANCE[report.dtype]:.0e}): {listed}."
        )
    if apart:
        listed = ", ".join(f"{name} ({', '.join(names)})" for name, names in apart.items())
        lines.append(f"- Not compared, because padding takes part or no sequence is short enough: {listed}.")
    return ["", *lines] if lines else []
