"""The pictures of ``--plot``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from .environment import output_file


def picture_file(text: str) -> Path:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'nt-attention[demo]'")
    if Path(text).suffix not in (".pdf", ".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must be a .png, .svg or .pdf, got {text!r}")
    return output_file(text)


def save_bars(file: Path, title: str, panels: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a panel for each measure, with a bar for each value. Those of this library are red."""
    from matplotlib.figure import Figure

    heights = [len(values) + 1.5 for values in panels.values()]
    figure = Figure(figsize=(8, 0.6 + 0.32 * sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (measure, values) in zip(rows, panels.items(), strict=True):
        colors = ["#d1495b" if name.startswith(("packed", "auto")) else "#8a8f98" for name in values]
        bars = axes.barh(list(values), list(values.values()), color=colors)
        axes.bar_label(bars, [f"{x:,.4g}" if x < 1000 else f"{x:,.0f}" for x in values.values()], padding=4)
        axes.set(xlabel=measure, xlim=(0, 1.15 * max(values.values(), default=1)))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
