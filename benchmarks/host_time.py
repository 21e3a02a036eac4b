"""The host time of a forward with gradients on this GPU, on a batch that the device finishes quickly.

    python benchmarks/host_time.py [--save FILE]

For each backend: a direct call of its kernel, ``varlen_attention`` on packed tensors, and on NestedTensors that are
leaves or the results of a projection; then NestedTensor SDPA. Times are in µs, medians over bursts of calls in one run.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from by_turns import show
from torch.nn import functional as F

import nt_attention as nta
from nt_attention.cli.timing import host_us
from nt_attention.functional import plan
from nt_attention.kernels.select import BACKENDS

LENGTHS = [30, 7, 64, 27]
CALLS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    layout = nta.SequenceLayout.from_lengths(LENGTHS, device="cuda")
    us = functools.partial(host_us, calls=CALLS)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of host time, forward with gradients",
        "",
        "| backend | kernel alone | packed | overhead | NestedTensor | overhead | from a projection | overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, backend in BACKENDS.items():
        dtype = torch.float32 if name == "torch_efficient" else torch.bfloat16
        if backend.missing() or backend.backward is None or backend.device_type == "cpu":
            continue
        packed = [torch.randn(layout.total, 4, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
        plain = [x.detach() for x in packed]
        nested = [layout.to_nested(x).requires_grad_() for x in plain]
        projected = [layout.to_nested(x) for x in packed]
        call = plan(*packed, layout, backend=name).call
        attend = functools.partial(nta.varlen_attention, backend=name)
        raw = us(functools.partial(backend.forward, *plain, call))
        times = [us(functools.partial(attend, *packed, layout)), us(functools.partial(attend, *nested))]
        times.append(us(functools.partial(attend, *projected)))
        cells = " | ".join(f"{t:.0f} | {t - raw:.0f}" for t in times)
        lines.append(f"| {name} | {raw:.0f} | {cells} |")
    lines += ["", f"NestedTensor SDPA: {host_us(_nested_sdpa(layout), 20):.0f} µs."]
    show(lines, options.save)


def _nested_sdpa(layout: nta.SequenceLayout) -> Callable[[], torch.Tensor]:
    leaves = [
        torch.nested.nested_tensor_from_jagged(
            torch.randn(layout.total, 4, 64, device="cuda", dtype=torch.bfloat16), layout.offsets
        ).requires_grad_()
        for _ in range(3)
    ]
    return lambda: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves))


if __name__ == "__main__":
    main()
