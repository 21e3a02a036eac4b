"""What one ragged batch over 4 to 64 GPUs may cost. A simulation.

    python benchmarks/simulate_context_parallel.py [--network 25] [--save FILE]

Forward and backward of one call of attention: 32 query heads, 8 key heads, head dim 128, bfloat16, causal. GPUs are in
hosts of 8, with NVLink inside of a host and a network between hosts. First the batches of `context_parallel.py` over 2
and 4 GPUs, beside what was measured; then batches with 8,192 tokens for each GPU.

Rows, bytes and visible pairs are exact: they are counted from the library's plans. The times are a model:

- Kernels: FLOPs at a fixed rate, and a time for each token, which matters for short sequences. Both are fitted to the
  times of one GPU and of "no exchange" of two GPUs in `MEASURED`.
- Exchange: a collective takes as long as its slowest GPU. A GPU sends and receives at once, over both links at once.
  Messages of any size get the full bandwidth.
- Copies: what is exchanged is read and written 3 times. Of keys, these are all that the queries of a GPU see.
- Latency: a fixed time for each collective. It is chosen to fit the times of two GPUs.
- Host: not modelled. Its time matters for few tokens.
- Nothing overlaps. In the library, other heads or whole sequences can run during the exchange of keys.

The network is an assumption: one NIC of 400 Gb/s for each GPU, without congestion. NVLink has the rate that was
measured between two GPUs. The plan for all GPUs does not know which of them share a host. The share of linear is the
time on one GPU over that of all GPUs together. The time on one GPU is modelled too: the batch of 64 GPUs may not fit
into the memory of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from by_turns import show
from context_parallel import DIM, HEADS, KV_HEADS, workloads
from numpy.typing import NDArray
from workloads import draw_lengths

from nt_attention.distributed.planner import Mask, ShardPlan, chunk_sizes, make_plan, needed_keys

# GPUs → batch → ms of calls in a row: on one GPU, with the exchange, and with no exchange.
# From torchrun benchmarks/context_parallel.py, on two and on four NVIDIA H100.
MEASURED: dict[int, dict[str, tuple[float, float, float]]] = {
    2: {
        "160 short, 64k": (6.64, 3.37, 3.38),
        "11 with a long tail, 16k": (4.24, 2.85, 2.42),
        "one of 16k": (12.67, 7.00, 6.49),
        "one of 131k": (818.4, 413.5, 412.5),
    },
    4: {
        "160 short, 64k": (6.58, 1.75, 1.74),
        "11 with a long tail, 16k": (4.14, 1.88, 1.37),
        "one of 16k": (12.59, 4.26, 3.28),
    },
}
HOST = 8  # GPUs
TOKENS = 8192  # of a GPU
MASK = Mask.of(True, (-1, -1))
FLOPS = 14 * HEADS * DIM  # of a visible pair, forward and backward
HEAD_BYTES = 2 * DIM  # of one head of a row, in bfloat16
PAIR_BYTES = 2 * KV_HEADS * HEAD_BYTES  # of a row of keys and values
COPIES = 3 * 2  # reads and writes
Array = NDArray[Any]


@dataclass(frozen=True)
class Way:
    """A way to run a batch over P GPUs."""

    pairs: Array  # (P,) visible pairs of each GPU
    tokens: Array  # (P,)
    copied: Array  # (P,) bytes
    collectives: Sequence[Array]  # (P, P) each: the bytes that a GPU receives from each


def over_keys(lengths: Sequence[int], ranks: int) -> Way:
    """The exchange of keys over all GPUs."""
    plan = make_plan(lengths, ranks, MASK)
    rows = rows_received(plan, lengths)
    tokens = np.array(chunk_sizes(sum(lengths), ranks))
    if not rows.any():  # all sequences are whole on a GPU
        return Way(np.array(plan.work), tokens, np.zeros(ranks), [])
    seen = [sum(p.stop for p in own) if cut else 0 for own, cut in zip(plan.pieces, plan.cut, strict=True)]
    copied, received = COPIES * PAIR_BYTES * np.array(seen), PAIR_BYTES * rows
    return Way(np.array(plan.work), tokens, copied, [received, received.T])


def rows_received(plan: ShardPlan, lengths: Sequence[int]) -> Array:
    """(P, P) the rows of keys that each rank receives from each."""
    rows = np.zeros((len(plan.cut),) * 2, np.int64)
    for receiver, own in enumerate(plan.cut):
        needed = needed_keys(MASK.seen(own, lengths), own)
        for sender, pieces in enumerate(plan.cut):
            for piece in pieces:
                for first, last in needed.get(piece.sequence, ()):
                    rows[receiver, sender] += max(0, min(last, piece.stop) - max(first, piece.start))
    assert rows.sum(1).tolist() == list(plan.received)
    return rows


@dataclass(frozen=True)
class Model:
    """The figures of GPUs and links."""

    tflops: float  # of one GPU, forward and backward
    token: float  # ns
    nvlink: float = 255  # GB/s of a GPU, in each direction
    network: float = 50
    memory: float = 2000  # GB/s that a copy reads and writes
    latency: float = 100  # µs of a collective

    def kernels(self, pairs: Array, tokens: Array) -> Array:
        """The time of the kernels of each GPU, in ms."""
        return FLOPS * pairs / self.tflops / 1e9 + self.token * tokens / 1e6

    def exchange(self, collectives: Sequence[Array]) -> float:
        """The time to send bytes, in ms."""
        each = [[inside / self.nvlink, between / self.network] for inside, between in map(by_link, collectives)]
        return sum(max(float(max(x.sum(0).max(), x.sum(1).max())) for x in links) for links in each) / 1e6

    def total(self, way: Way) -> float:
        """The time of forward and backward on the slowest GPU, in ms."""
        on_gpu = (self.kernels(way.pairs, way.tokens) + way.copied / self.memory / 1e6).max()
        return float(on_gpu) + self.exchange(way.collectives) + self.latency / 1e3 * len(way.collectives)


def by_link(received: Array) -> tuple[Array, Array]:
    """The bytes that GPUs receive from others of their host, and from other hosts."""
    hosts = np.arange(len(received)) // HOST
    same = hosts[:, None] == hosts
    return received * (same & ~np.eye(len(received), dtype=bool)), received * ~same


def fit_kernels() -> list[float]:
    """`tflops` and `token`, with the least squares of relative errors."""
    rows, times = [], []
    for name, (one, *_, no_exchange) in MEASURED[2].items():
        plan, tokens = make_plan(workloads(1)[name], 2, MASK), sum(workloads(1)[name])
        rows += [(FLOPS * sum(plan.work) / 1e15, tokens / 1e6), (FLOPS * max(plan.work) / 1e15, tokens / 2e6)]
        times += [one, no_exchange]
    flops, token = np.linalg.lstsq(np.array(rows) / np.array(times)[:, None], np.ones(len(times)))[0]
    return [round(1e6 / flops), round(token)]


def compare(model: Model, ranks: int) -> list[str]:
    """A table of modelled and measured times on 2 or 4 GPUs."""
    lines = [f"| {ranks} GPUs | one GPU, ms: measured | model | share of linear: measured | model | "
             "slowest work over the mean | rows received |", "|---" * 7 + "|"]  # fmt: skip
    for name in MEASURED[2]:
        lengths, measured = workloads(1)[name], MEASURED[ranks].get(name)
        modelled = float(model.kernels(MASK.pairs(np.array(lengths)).sum(), sum(lengths)))
        cells = ["–" if measured is None else f"{measured[0]:.4g}", f"{modelled:.3g}"]
        cells += ["–" if measured is None else f"{measured[0] / measured[1] / ranks:.0%}"]
        cells += [f"{modelled / model.total(over_keys(lengths, ranks)) / ranks:.0%}"]
        plan = make_plan(lengths, ranks, MASK)
        lines.append(f"| {name} | {' | '.join(cells)} | {plan.imbalance:.3f} | {max(plan.received)} |")
    return [*lines, ""]


def batches(ranks: int) -> dict[str, list[int]]:
    """Name → lengths, with 8,192 tokens for each GPU."""
    total = TOKENS * ranks
    count = total // 6000
    tail = [min(131072, 2048 * count // (2 * i + 1)) for i in range(count)]  # quantiles of Pareto's distribution
    return {
        "short: about 400 tokens each": list(draw_lengths("lognormal:1700", total, seed=6)),
        "half and short: one sequence has half of the tokens": [
            total // 2, *draw_lengths("lognormal:1700", total - total // 2, seed=6)],
        "long tail: from 1,024 tokens to 131,072 (Pareto, exponent 1), mean about 6,000": fitted(tail, total),
        "one sequence": [total],
    }  # fmt: skip


def fitted(lengths: Sequence[int], total: int) -> list[int]:
    """As many of the lengths as fit, and the rest."""
    ends = np.minimum(np.cumsum([*lengths, total]), total)
    return [length for length in np.diff(ends, prepend=0).tolist() if length]


def simulate(model: Model, ranks: int, lengths: Sequence[int]) -> str:
    """A row of a table."""
    pairs, way = MASK.pairs(np.array(lengths)).sum(), over_keys(lengths, ranks)
    total, exchange = model.total(way), model.exchange(way.collectives)
    links = [by_link(each) for each in way.collectives]
    inside, between = (sum((x[i].sum(1) for x in links), np.zeros(ranks)).max() / 1e6 for i in range(2))
    kernels = float(model.kernels(way.pairs, way.tokens).max())
    imbalance, share = way.pairs.max() * ranks / pairs, float(model.kernels(pairs, sum(lengths))) / ranks / total
    cells = [f"{x:,.1f}" for x in (inside, between)] + [f"{x:.2f}" for x in (imbalance, kernels, exchange, total)]
    return f"| {ranks} | {' | '.join(cells)} | {share:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = asdict(Model(*fit_kernels()))
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    model = Model(**{name: getattr(args, name) for name in defaults})
    lines = ['A simulation. Only the columns "measured" were measured, on NVIDIA H100.', "",
             f"{model.tflops:g} TFLOP/s, {model.token:g} ns for each token. NVLink "
             f"{model.nvlink:g} GB/s, copies {model.memory:g} GB/s, {model.latency:g} µs for each collective. An "
             f"assumption: the network, {model.network:g} GB/s.", "",
             *compare(model, 2), *compare(model, 4),
             "MB: received by the GPU with the most, forward and backward. Work: visible pairs of the slowest GPU over "
             "the mean. All: with copies and latency.", ""]  # fmt: skip
    for name in batches(1):
        lines += [f"**{name}**", "", "| GPUs | MB inside the host | MB between hosts | work | kernels, ms | "
                  "exchange, ms | all, ms | share of linear |", "|---" * 8 + "|"]  # fmt: skip
        lines += [*[simulate(model, ranks, batches(ranks)[name]) for ranks in args.gpus], ""]
    show(lines[:-1], args.save)


if __name__ == "__main__":
    main()
