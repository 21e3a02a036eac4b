"""The results as a Markdown table with what belongs below it, and as numbers for machines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .accuracy import TOLERANCE
from .measure import Pass, Result, worst
from .workloads import Batch


@dataclass
class Report:
    """What is known so far.

    Attributes:
        about: the command, and the machine and versions that it ran on.
        unit: what a number is.
        rivals: names, in the order of the columns; the others are put in relation to "auto", where it is there.
        results: those of each batch, by the rival's name.
        host: the host's µs for a call by the rival's name, or why there is none; empty on a CPU.
    """

    about: dict[str, str]
    unit: str
    dtype: torch.dtype
    rivals: list[str]
    results: list[tuple[Batch, dict[str, Result]]] = field(default_factory=list)
    host: dict[str, float | str] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        hosts = any(isinstance(x, str) and x.startswith("failed") for x in self.host.values())
        return hosts or any(result.is_bad for _, results in self.results for result in results.values())

    def leave_out_idle(self, names: Iterable[str]) -> None:
        """Drop the columns of those of these rivals that could run no batch; their reasons stay."""
        idle = {name for name in names if all(_is_idle(results[name]) for _, results in self.results)}
        self.rivals = [name for name in self.rivals if name not in idle]

    def markdown(self) -> str:
        command, *rest = self.about.values()
        lines = [f"`{command}`", "", f"{'; '.join(rest)}.", "", self.unit, ""]
        lines += [f"| batch | {' | '.join(self.rivals)} |", "|---" * (1 + len(self.rivals)) + "|"]
        for batch, results in self.results:
            cells = [_cell(results[name], results.get("auto")) for name in self.rivals]
            lines.append(f"| {label(batch)} | {' | '.join(cells)} |")
        lines += _below(self)
        if self.host:
            lines += ["", "Host time for a call on a tiny batch, forward, with gradients wanted:", ""]
            lines += [f"| {' | '.join(self.rivals)} |", "|---" * len(self.rivals) + "|"]
            lines.append(f"| {' | '.join(_host_cell(self.host.get(name, '')) for name in self.rivals)} |")
        return "\n".join(lines) + "\n"

    def numbers(self) -> dict[str, Any]:
        """Made of what JSON has."""
        batches = [
            {
                "name": batch.name,
                "about": batch.about,
                "sequences": len(batch.lengths),
                "tokens": sum(batch.lengths),
                "key_tokens": sum(batch.keys),
                "heads": batch.heads,
                "kv_heads": batch.kv_heads,
                "head_dim": batch.head_dim,
                "value_dim": batch.value_width,
                "is_causal": batch.is_causal,
                "window_size": list(batch.window_size),
                "softcap": batch.softcap,
                "rivals": {name: _numbers(result) for name, result in results.items()},
            }
            for batch, results in self.results
        ]
        about = {**self.about, "unit": self.unit, "dtype": str(self.dtype)[6:], "tolerance": TOLERANCE[self.dtype]}
        return {**about, "batches": batches, "host_us": self.host}


def _is_idle(result: Result) -> bool:
    return all(each.ms is None and not each.failed for each in result.passes)


def _numbers(result: Result) -> dict[str, Any]:
    forward, both = result.forward, result.both or Pass()
    reasons = list(dict.fromkeys(each.reason for each in result.passes if each.reason))
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
        "agrees": None if not errors else not any(each.wrong for each in result.passes),
        "failed": any(each.failed for each in result.passes),
        "reason": " ".join(reasons) or None,
        "chosen": [each.chosen for each in result.passes if each.chosen] or None,
    }


def _finite(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)  # JSON has no word for it


def label(batch: Batch) -> str:
    """A batch in a line: its name, sequences, heads × head dim."""
    heads = f"{batch.heads}" if batch.heads == batch.kv_heads else f"{batch.heads}/{batch.kv_heads}"
    widths = f"{batch.head_dim}" if batch.head_dim == batch.value_width else f"{batch.head_dim}/{batch.value_width}"
    number = f"{len(batch.lengths)} sequence{'s' if len(batch.lengths) != 1 else ''}"
    return f"{batch.name}: {number}, {batch.about}, {heads} × {widths}"


def _cell(result: Result, auto: Result | None) -> str:
    parts = [
        _part(each, base.ms if base is not None else None)
        for each, base in zip(result.passes, auto.passes if auto else [None] * len(result.passes), strict=True)
    ]
    chosen = list(dict.fromkeys(each.chosen for each in result.passes if each.chosen))
    return " / ".join(dict.fromkeys(parts) if result.forward.ms is None else parts) + "".join(
        f" {' / '.join(chosen)}" if chosen else ""
    )


def milliseconds(ms: float) -> str:
    return f"{ms:.{3 if ms < 10 else 1}f}"


def _part(each: Pass, base: float | None) -> str:
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
    for batch, results in report.results:
        for name, result in results.items():
            for what, each in zip(("", " with its backward"), result.passes, strict=False):
                once |= each.once
                if each.reason and not (what and each.reason == result.forward.reason):
                    reasons[name + what, each.reason].append(batch.name)
                wrong += [f"- ✗ {batch.name}, {name}{what}: {x} is off by {each.errors[x]:.1e}." for x in each.wrong]
            if result.max_error is not None:
                errors[name].append(result.max_error)
            elif any(each.ms is not None for each in result.passes):
                apart[name].append(batch.name)
    lines = [f"- {name} ({', '.join(names)}): {reason}" for (name, reason), names in reasons.items()]
    lines += wrong
    if once:
        lines.append("- † one call, not a median.")
    if errors:
        told = ", ".join(f"{name} {worst(some):.1e}" for name, some in errors.items())
        lines.append(
            "- Largest relative L2 error of out and gradients on a sample, from float64 (✗ above "
            f"{TOLERANCE[report.dtype]:.0e}): {told}."
        )
    if apart:
        told = ", ".join(f"{name} ({', '.join(names)})" for name, names in apart.items())
        lines.append(f"- Not compared, because padding takes part or no sequence is short enough: {told}.")
    return ["", *lines] if lines else []
