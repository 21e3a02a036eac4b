"""Draw docs/token_tiled.svg: one batch, tiled by sequence and by token. Run it from the repository's root."""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from nt_attention import SequenceLayout
from nt_attention.kernels.masks import Window
from nt_attention.kernels.token_tiled.plan import Plan

LENGTHS = [12, 7, 19, 3, 10, 5, 14, 100, 6, 21, 9, 15, 4, 11, 8, 17, 2, 13]
ROWS, KEYS = 64, 32  # of a tile, and of the blocks of keys that it goes through


def draw(axes, plan: Plan, layout: SequenceLayout, shared: int, title: str) -> None:
    useful = computed = 0
    for begin, end in zip(plan.offsets[:-1], plan.offsets[1:], strict=True):
        axes.add_patch(Rectangle((begin, begin), end - begin, end - begin, color="#4878a8", lw=0))
        useful += (end - begin) ** 2
    tiles = plan.query_tiles(ROWS, shared).tolist()
    for begin, end in tiles:
        first, last = int(plan.queries.lo[begin]), int(plan.queries.hi[end - 1])
        blocks = -(-(last - first) // KEYS)
        for block in range(blocks):
            corner = (first + block * KEYS, begin)
            axes.add_patch(Rectangle(corner, KEYS, ROWS, fill=True, fc="#d8822820", ec="#d88228", lw=0.8))
        computed += blocks * KEYS * ROWS
    axes.set(xlim=(-4, layout.total + 40), ylim=(layout.total + 40, -4), aspect="equal", xlabel="keys")
    axes.set_title(f"{title}\n{len(tiles)} tiles, {computed / useful:.1f} × the pairs that are asked for", fontsize=10)


def main() -> None:
    layout = SequenceLayout.from_lengths(LENGTHS)
    plan = Plan.make(layout, layout, Window(), False)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5.4), sharey=True)
    draw(left, plan, layout, 0, "a tile begins where a sequence begins")
    draw(right, plan, layout, ROWS, "short sequences share a tile")
    left.set_ylabel("queries")
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "token_tiled"  # the same file each time
    figure.savefig("docs/token_tiled.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
