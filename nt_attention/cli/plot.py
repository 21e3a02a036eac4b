"""The results as a picture: bars by rival for every batch, in relation to "auto". Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .baselines import NESTED, PADDED, UNMASKED
from .measure import Pass, Result
from .table import Report, label, milliseconds
from .workloads import Batch

# of Okabe and Ito's colours, which colour-blind readers tell apart; names stand beside the bars as well
OURS, THEIRS = "#0072B2", {PADDED: "#D55E00", UNMASKED: "#E69F00", NESTED: "#CC79A7"}
FORMATS = (".svg", ".png", ".pdf")


def reason_against(path: Path) -> str | None:
    """Why a picture can't be drawn to this file, or None."""
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

    rows = [(batch, name, result) for batch, results in report.results for name, result in _ran(results)]
    columns = 2 if any(result.both for _, _, result in rows) else 1
    places = _places([batch for batch, _, _ in rows])
    figure = Figure(figsize=(4 + 4.2 * columns, 1.6 + 0.24 * (places[-1] + 1 if places else 1)), layout="constrained")
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    bases = {batch.name: results.get("auto") for batch, results in report.results}
    for i, (panel, title) in enumerate(zip(panels, ("forward", "forward + backward"), strict=False)):
        ratios = [1.0]
        for place, (batch, name, result) in zip(places, rows, strict=True):
            base = bases[batch.name]
            ratios.append(
                _bar(panel, place, result.passes[i], base.passes[i] if base else None, THEIRS.get(name, OURS))
            )
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
    _name(panels[0], places, rows)
    figure.suptitle("; ".join(list(report.about.values())[1:]), fontsize=8, wrap=True)
    with matplotlib.rc_context({"svg.hashsalt": "nt_attention"}):  # the same numbers give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def _ran(results: dict[str, Result]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in results.items() if any(each.ms is not None for each in result.passes)]


def _places(batches: list[Batch]) -> list[float]:
    """Where each bar stands, from the top, with room for a batch's name above its first."""
    places: list[float] = []
    for i, batch in enumerate(batches):
        begins = i == 0 or batches[i - 1] is not batch
        places.append((places[-1] + 1 if places else 0.0) + (1.6 if begins else 0.0))
    return places


def _bar(panel: Any, place: float, each: Pass, base: Pass | None, colour: str) -> float:
    """One bar from 1 to the time over the base's, with its numbers behind it. Returns that ratio."""
    behind: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    time = "–" if each.ms is None else f"{milliseconds(each.ms)} ms{' ✗' if each.wrong else ''}"
    if each.ms is None or base is None or base.ms is None:
        panel.annotate(time, (1, place), color="#666666", **behind)
        return 1.0
    ratio = each.ms / base.ms
    if each is base:
        panel.plot([1], [place], marker="D", color=colour, ms=5)
    panel.barh(place, ratio - 1, left=1, height=0.78, color=colour, hatch="///" if each.wrong else None)
    what = each.chosen if each is base else f"{ratio:.2f} ×"
    panel.annotate(f"{what}, {time}", (max(ratio, 1), place), **behind)
    return ratio


def _name(panel: Any, places: list[float], rows: list[tuple[Batch, str, Result]]) -> None:
    """Rivals beside their bars, and each batch above its own."""
    panel.set_yticks(places, [name for _, name, _ in rows], fontsize=8)
    panel.set_ylim((places[-1] if places else 0) + 0.8, 0)
    before = None
    for place, (batch, _, _) in zip(places, rows, strict=True):
        if batch is not before:
            panel.annotate(
                label(batch), (0, place - 0.95), xycoords=("axes fraction", "data"), va="center",
                fontsize=9, weight="bold", bbox={"color": "white", "pad": 1.5},
            )  # fmt: skip
        before = batch
