"""Measure every backend on this GPU over a sweep of lengths, and fit what ``auto`` goes by (``kernels/cost_model.py``).

    python benchmarks/fit_costs.py [--save FILE]

Times are the device's, of ``varlen_attention`` and its gradients. The sweep has equal lengths and lognormal ones, none
of them the lengths that ``python -m nt_attention bench`` draws, full, causal and under windows. For each dtype,
direction, mask and head dim the fit has four numbers that are not negative and minimises the relative error; how far it
lies from the times is printed and kept.
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
from nt_attention.cli.implementations import backend
from nt_attention.cli.inputs import WorkloadTensors
from nt_attention.cli.lengths import Lengths
from nt_attention.cli.timing import device_ms
from nt_attention.cli.workloads import Workload
from nt_attention.functional import plan
from nt_attention.kernels.cost_model import CallSize, mask_kind

TOKENS = 16384
EQUAL = (1, 40, 150, 700, 4000)
CAPS = (64, 300, 1200, 6000)
# kind of mask → is_causal and window_size
MASKS = {
    "full": [(False, (-1, -1))],
    "causal": [(True, (-1, -1))],
    "window": [(False, (128, 128))],
    "window behind": [(True, (600, 0))],
}
HEADS = {32: 16, 64: 16, 96: 8, 128: 8, 192: 4, 256: 4}
BACKENDS = {
    torch.bfloat16: ("token_tiled", "flash_attn_4", "torch_flash"),
    torch.float32: ("token_tiled", "torch_efficient"),
}


def workloads(head_dim: int, kinds: list[str]) -> list[Workload]:
    lengths = [(n,) * (TOKENS // n) for n in EQUAL]
    lengths += [Lengths(kind="lognormal", number=cap).up_to(TOKENS, seed=9) for cap in CAPS]
    masks = [mask for kind in kinds for mask in MASKS[kind]]
    heads = HEADS[head_dim]
    return [
        Workload(f"{head_dim} {len(each)} {is_causal} {window}", "", each, heads, heads, head_dim, is_causal, window)
        for each in lengths
        for is_causal, window in masks
    ]


def measure(dtype: torch.dtype, head_dim: int, kinds: list[str]) -> dict[tuple[str, str, str], list[tuple[float, ...]]]:
    """(direction, mask, backend) → rows of µs, 1, and thousands of a head's sequences, tokens and 1000 pairs."""
    rows = defaultdict(list)
    for workload in workloads(head_dim, kinds):
        tensors = WorkloadTensors(workload, torch.device("cuda"), dtype)
        for name in BACKENDS[dtype]:
            implementation = backend(name)
            if implementation.reasons(tensors, True):
                continue
            prepared = implementation.prepare(tensors)
            call = plan(*tensors.qkv, tensors.layout, **tensors.options).call
            size = CallSize.of(call)
            counts = (1.0, *(workload.heads / 1000 * x for x in (size.sequences, size.tokens, size.pairs / 1000)))
            mask = mask_kind(call.spec)
            for direction, function in (("forward", prepared.forward), ("both", prepared.both)):
                rows[direction, mask, name].append((1000 * device_ms(function, repeats=3), *counts))
    return rows


def fit(rows: list[tuple[float, ...]]) -> tuple[list[float], float, float]:
    """The four numbers, and the median and the largest of the fit's relative errors."""
    table = np.array(rows)
    times, counts = table[:, 0], table[:, 1:]
    numbers, _ = nnls(counts / times[:, None], np.ones(len(times)))
    off = np.abs(counts @ numbers / times - 1)
    return [float(f"{x:.5g}") for x in numbers], float(np.median(off)), float(off.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="what auto is to go by: nt_attention/kernels/measured/sm90.json")
    parser.add_argument(
        "--head-dims", type=int, nargs="+", default=list(HEADS), choices=HEADS, help="the others are kept"
    )
    parser.add_argument("--dtypes", nargs="+", default=["16-bit", "float32"], help="likewise")
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS, help="likewise")
    parser.add_argument("--rows", type=Path, help="write the measured times to this file as well")
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
            if options.save:  # as far as it has come
                options.save.write_text(
                    json.dumps(header | {"error of the fit (median, largest)": worst, "costs": table}, indent=1) + "\n"
                )
            if options.rows:
                options.rows.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
