"""The results as a plot: a bar for each implementation on each workload, relative to "auto". Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .implementations import NESTED, PADDED, UNMASKED
from .measure import Measurement, Result
from .table import Report, label, milliseconds
from .workloads import Workload

# of Okabe and Ito's colours, which colour-blind readers tell apart; names stand beside the bars as well
OURS, THEIRS = "#0072B2", {PADDED: "#D55E00", UNMASKED: "#E69F00", NESTED: "#CC79A7"}
FORMATS = (".svg", ".png", ".pdf")


def reason_against(path: Path) -> str | None:
    """Why no plot can be written to this file, or None."""
    if path.suffix not in FORMATS:
        return f"a picture's name ends in one of {', '.join(FORMATS)}, got {str(path)!r}."
    if not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r} for the picture: make it first."
    return missing()


def missing() -> str | None:
    return None if importlib.util.find_spec("matplotlib") else "a picture needs matplotlib: pip install matplotlib"


def draw(report: Report, path: Path) -> None:
    """A panel for forwards and one for forwards with backward; a bar to the right of 1 is slower than "auto"."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    rows = [(workload, name, result) for workload, results in report.results for name, result in _ran(results)]
    columns = 2 if any(result.both for _, _, result in rows) else 1
    positions = _bar_positions([workload for workload, _, _ in rows])
    height = 1.6 + 0.24 * (positions[-1] + 1 if positions else 1)
    figure = Figure(figsize=(4 + 4.2 * columns, height), layout="constrained")
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    bases = {workload.name: results.get("auto") for workload, results in report.results}
    for i, (panel, title) in enumerate(zip(panels, ("forward", "forward + backward"), strict=False)):
        ratios = [1.0]
        for position, (workload, name, result) in zip(positions, rows, strict=True):
            auto = bases[workload.name]
            base = auto.measurements[i] if auto else None
            ratios.append(_bar(panel, position, result.measurements[i], base, THEIRS.get(name, OURS)))
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(ratios) < 300 else (1,)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.axvline(1, color="#444444", lw=0.8)
        panel.set_xlim(min(ratios) / 1.2, max(ratios) * max(3, max(ratios) / min(ratios)) ** 0.5)  # room for numbers
        panel.set_title(title, fontsize=11)
        panel.set_xlabel("time over that of auto")
        panel.grid(axis="x", color="#dddddd", lw=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    _name(panels[0], positions, rows)
    figure.suptitle("; ".join(list(report.about.values())[1:]), fontsize=8, wrap=True)
    with matplotlib.rc_context({"svg.hashsalt": "nt_attention"}):  # the same numbers give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def _ran(results: dict[str, Result]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in results.items() if result.has_run]


def _bar_positions(workloads: list[Workload]) -> list[float]:
    """Where each bar stands, from the top, with room for a workload's name above its first."""
    positions: list[float] = []
    for i, workload in enumerate(workloads):
        begins = i == 0 or workloads[i - 1] is not workload
        positions.append((positions[-1] + 1 if positions else 0.0) + (1.6 if begins else 0.0))
    return positions


def _bar(panel: Any, position: float, each: Measurement, base: Measurement | None, colour: str) -> float:
    """One bar from 1 to the time over the base's, with its numbers behind it. Returns that ratio."""
    behind: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    time = "–" if each.ms is None else f"{milliseconds(each.ms)} ms{' ✗' if each.wrong else ''}"
    if each.ms is None or base is None or base.ms is None:
        panel.annotate(time, (1, position), color="#666666", **behind)
        return 1.0
    ratio = each.ms / base.ms
    if each is base:
        panel.plot([1], [position], marker="D", color=colour, ms=5)
    panel.barh(position, ratio - 1, left=1, height=0.78, color=colour, hatch="///" if each.wrong else None)
    what = each.chosen if each is base else f"{ratio:.2f} ×"
    panel.annotate(f"{what}, {time}", (max(ratio, 1), position), **behind)
    return ratio


def _name(panel: Any, positions: list[float], rows: list[tuple[Workload, str, Result]]) -> None:
    """Implementations beside their bars, and each workload above its own."""
    panel.set_yticks(positions, [name for _, name, _ in rows], fontsize=8)
    panel.set_ylim((positions[-1] if positions else 0) + 0.8, 0)
    before = None
    for position, (workload, _, _) in zip(positions, rows, strict=True):
        if workload is not before:
            panel.annotate(
                label(workload), (0, position - 0.95), xycoords=("axes fraction", "data"), va="center",
                fontsize=9, weight="bold", bbox={"color": "white", "pad": 1.5},
            )  # fmt: skip
        before = workload
