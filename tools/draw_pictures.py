"""Draws the pictures of the documentation: docs/pictures/*.svg. Needs matplotlib.

    python tools/draw_pictures.py

- data_flow.svg: how a batch goes through varlen_attention.
- token_tiled.svg: one batch, tiled by sequence and by token, from the plan that the kernels run.

Each file contains what it shows as JSON, so that tests/project/test_pictures.py can compare it with the plan. The
background is transparent, and all colours can be read on white and on black.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from nt_attention import SequenceLayout
from nt_attention.kernels.masks import Window
from nt_attention.kernels.token_tiled.plan import Plan

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
BLUE, ORANGE, INK = "#3f83d1", "#d88228", "#76808b"


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches with one invisible axis over all of it: 100 wide, downwards from 0."""
    figure = Figure(figsize=(width, height), facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(100 * height / width, 0))
    axes.axis("off")
    return figure, axes


def flow_data() -> dict[str, list[str]]:
    return {
        "inputs": ["padded batch\n+ mask", "NestedTensor\n(jagged)", "packed row +\nposition_ids or\ncu_seqlens"],
        "packed": [
            "values (T, …) + SequenceLayout",
            "the tokens without padding, and where each sequence begins",
            "made once per batch, not once per layer",
        ],
        "attention": ["varlen_attention", "check → select a backend → run"],
        "backends": [
            "GPU: token_tiled · flash_attn_4 · flash_attn_2 · torch_flash · torch_efficient · flex",
            "CPU: cpu · any device: reference",
        ],
        "output": ["output (T, H, Dv)", "then back to the form of the input"],
        "results": ["padded batch", "NestedTensor", "packed row"],
    }


def data_flow(data: dict[str, list[str]]) -> Figure:
    figure, axes = blank(7.2, 7.0)

    def box(x: float, y: float, width: float, height: float, lines: list[str], bold: bool = False) -> None:
        shape = FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=1.2", fc="none", ec=BLUE, lw=1.2
        )
        axes.add_patch(shape)
        step = height / (len(lines) + 1)
        for i, line in enumerate(lines):
            weight = "bold" if bold and i == 0 else "normal"
            where = (x + width / 2, y + height / 2 + (i - (len(lines) - 1) / 2) * step * 1.15)
            axes.text(*where, line, fontsize=10.5, color=INK, ha="center", va="center", fontweight=weight)

    def arrow(x: float, y: float, to_x: float, to_y: float) -> None:
        style = {"arrowstyle": "-|>", "color": BLUE, "lw": 1.2, "shrinkA": 1, "shrinkB": 1}
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)

    for x, form, result in zip((18.0, 50.0, 82.0), data["inputs"], data["results"], strict=True):
        box(x - 14, 3, 28, 13, [form])
        arrow(x, 16, 50 + (x - 50) * 0.8, 22)
        arrow(50 + (x - 50) * 0.8, 82, x, 88)
        box(x - 14, 88, 28, 6, [result])
    box(4, 22, 92, 14, data["packed"], bold=True)
    arrow(50, 36, 50, 41)
    box(4, 41, 92, 10, data["attention"], bold=True)
    arrow(50, 51, 50, 56)
    box(4, 56, 92, 11, data["backends"])
    arrow(50, 67, 50, 72)
    box(4, 72, 92, 10, data["output"], bold=True)
    return figure


LENGTHS = [12, 7, 19, 3, 10, 5, 14, 100, 6, 21, 9, 15, 4, 11, 8, 17, 2, 13]
ROWS, KEYS = 64, 32  # of a tile, and of the blocks of keys that it goes through


def tiles_data() -> list[dict[str, Any]]:
    """For both ways to tile: a title, the sequences, and the blocks of keys of each tile as (key, query)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    layout = SequenceLayout.from_lengths(LENGTHS, device=device)
    plan = Plan.make(layout, layout, Window(), False)
    ends = [0, *accumulate(LENGTHS)]
    found = []
    for title, shared in (("a tile begins where a sequence begins", 0), ("short sequences share a tile", ROWS)):
        tiles = plan.query_tiles(ROWS, shared).tolist()
        blocks = [
            (key, begin)
            for begin, end in tiles
            for key in range(int(plan.queries.lo[begin]), int(plan.queries.hi[end - 1]), KEYS)
        ]
        ratio = len(blocks) * ROWS * KEYS / sum(length**2 for length in LENGTHS)
        title = f"{title}\n{len(tiles)} tiles, computed pairs / needed pairs = {ratio:.1f}"
        found.append({"title": title, "ends": ends, "blocks": [list(block) for block in blocks]})
    return found


def token_tiled(data: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 5.4), facecolor="none")
    for axes, each in zip(figure.subplots(1, 2, sharey=True), data, strict=True):
        ends = each["ends"]
        for begin, end in pairwise(ends):
            axes.add_patch(Rectangle((begin, begin), end - begin, end - begin, color=BLUE, lw=0))
        for corner in each["blocks"]:
            axes.add_patch(Rectangle(corner, KEYS, ROWS, fill=True, fc=f"{ORANGE}20", ec=ORANGE, lw=0.8))
        axes.set(xlim=(-4, ends[-1] + ROWS), ylim=(ends[-1] + ROWS, -4), aspect="equal", xlabel="keys")
        axes.set_title(each["title"], fontsize=10)
    figure.axes[0].set_ylabel("queries")
    figure.tight_layout()
    return figure


# A picture's name → what it shows, which JSON can hold, and the function that draws this.
DRAWINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Figure]]] = {
    "data_flow": (flow_data, data_flow),
    "token_tiled": (tiles_data, token_tiled),
}


def main() -> None:
    colors = {"text": "color", "axes": "edgecolor", "xtick": "color", "ytick": "color"}
    matplotlib.rcParams |= {f"{part}.{name}": INK for part, name in colors.items()}
    matplotlib.rcParams |= {"axes.labelcolor": INK, "axes.titlecolor": INK, "axes.facecolor": "none"}
    matplotlib.rcParams |= {"svg.fonttype": "none", "font.family": "sans-serif"}
    for name, (data, draw) in DRAWINGS.items():
        matplotlib.rcParams["svg.hashsalt"] = name  # the same file each time
        shown = data()
        metadata = {"Date": None, "Creator": None, "Description": json.dumps(shown, ensure_ascii=False)}
        draw(shown).savefig(PICTURES / f"{name}.svg", format="svg", metadata=metadata)


if __name__ == "__main__":
    main()
