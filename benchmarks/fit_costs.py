"""Measure the backends on this GPU and fit the cost model by which ``"auto"`` selects (``kernels/cost_model.py``).

    python benchmarks/fit_costs.py [--save FILE]

Times are device times of ``varlen_attention``, forward and forward + backward. Lengths are equal or lognormal, and
others than in ``python -m nt_attention bench``. Masks are full, causal and windows. The fit has four non-negative
numbers for each dtype, direction, mask and head dim, and minimizes the relative error, which is printed and saved.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

from nt_attention.cli.environment import versions
from nt_attention.cli.implementations import CaseInputs, NotSupportedError, backend
from nt_attention.cli.timing import device_ms
from nt_attention.cli.workloads import Workload, draw_lengths
from nt_attention.functional import plan
from nt_attention.kernels.cost_model import CallSize, mask_kind

TOKENS = 16384
EQUAL = (1, 40, 150, 700, 4000)
CAPS = (64, 300, 1200, 6000)
# kind of mask → options
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (128, 128)},
    "window behind": {"is_causal": True, "window_size": (600, 0)},
}
HEADS = {32: 16, 64: 16, 96: 8, 128: 8, 192: 4, 256: 4, 384: 4, 512: 4}
BACKENDS = {
    torch.bfloat16: ("token_tiled", "flash_attn_4", "torch_flash"),
    torch.float32: ("token_tiled", "torch_efficient"),
}


def workloads(head_dim: int, kinds: list[str]) -> list[Workload]:
    lengths = [(n,) * (TOKENS // n) for n in EQUAL]
    lengths += [draw_lengths(f"lognormal:{cap}", TOKENS, seed=9) for cap in CAPS]
    heads = HEADS[head_dim]
    return [
        Workload(f"{head_dim} {len(each)} {kind}", "", each, heads, heads, head_dim, MASKS[kind])
        for each in lengths
        for kind in kinds
    ]


def measure(dtype: torch.dtype, head_dim: int, kinds: list[str]) -> dict[tuple[str, str, str], list[tuple[float, ...]]]:
    """(direction, mask, backend) → rows of µs, 1, and thousands of a head's sequences, tokens and 1000 pairs."""
    rows = defaultdict(list)
    for workload in workloads(head_dim, kinds):
        inputs = CaseInputs.random(workload, torch.device("cuda"), dtype)
        call = plan(*inputs.qkv, inputs.layout, **inputs.options).call
        for name in BACKENDS[dtype]:
            try:
                prepared = backend(name, inputs, True)
            except NotSupportedError:
                continue
            size = CallSize.of(call)
            counts = (1.0, *(workload.heads / 1000 * x for x in (size.sequences, size.tokens, size.pairs / 1000)))
            mask = mask_kind(call.spec)
            for direction, function in (("forward", prepared.forward), ("both", prepared.both)):
                rows[direction, mask, name].append((1000 * device_ms(function, repeats=3), *counts))
    return rows


def fit(rows: list[tuple[float, ...]]) -> tuple[list[float], float, float]:
    """The four numbers, and the median and the largest of the relative errors of the fit."""
    table = np.array(rows)
    times, counts = table[:, 0], table[:, 1:]
    numbers, _ = nnls(counts / times[:, None], np.ones(len(times)))
    off = np.abs(counts @ numbers / times - 1)
    return [float(f"{x:.5g}") for x in numbers], float(np.median(off)), float(off.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--save", type=Path, help="the cost model to write, such as nt_attention/kernels/measured/sm90.json"
    )
    parser.add_argument(
        "--head-dims",
        type=int,
        nargs="+",
        default=list(HEADS),
        choices=HEADS,
        help="default: all; the others in FILE are kept",
    )
    parser.add_argument("--dtypes", nargs="+", default=["16-bit", "float32"], help="as --head-dims")
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS, help="as --head-dims")
    parser.add_argument("--rows", type=Path, help="also write the measured times to this file")
    options = parser.parse_args()
    header = {
        "command": f"python benchmarks/fit_costs.py {' '.join(sys.argv[1:])}",
        "date": str(datetime.date.today()),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
    }
    before = json.loads(options.save.read_text()) if options.save and options.save.exists() else {}
    table, worst, kept = before.get("costs", {}), before.get("error of the fit (median, largest)", {}), {}
    for dtype in BACKENDS:
        kind = "float32" if dtype == torch.float32 else "16-bit"
        if kind not in options.dtypes:
            continue
        for head_dim in options.head_dims:
            rows = measure(dtype, head_dim, options.masks)
            for (direction, mask, name), each in rows.items():
                numbers, median, largest = fit(each)
                by_mask = table.setdefault(kind, {}).setdefault(direction, {})
                by_mask.setdefault(mask, {}).setdefault(str(head_dim), {})[name] = numbers
                where = f"{kind} {direction} {mask} {head_dim} {name}"
                kept[where], worst[where] = each, (round(median, 3), round(largest, 3))
                print(f"{where:<45} off by {median:.1%} in the median, {largest:.1%} at most: {numbers}", flush=True)
            if options.save:  # after each head dim, so that an interrupted run keeps its results
                options.save.write_text(
                    json.dumps(header | {"error of the fit (median, largest)": worst, "costs": table}, indent=1) + "\n"
                )
            if options.rows:
                options.rows.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
