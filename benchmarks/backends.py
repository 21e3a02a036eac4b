"""The backends, padded SDPA and NestedTensor SDPA on named workloads, in one table.

    python benchmarks/backends.py [--workloads NAME …] [--all] [--save FILE]

`python -m nt_attention bench` does the same for lengths and options of your own.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from by_turns import show
from torch import Tensor
from torch.nn import functional as F
from workloads import WORKLOADS

from nt_attention.cli import bench
from nt_attention.cli.calls import CaseInputs, NotSupportedError, PreparedCall
from nt_attention.cli.environment import backends_of, device_name

DEFAULT = ["A", "B", "C", "D", "E", "one long"]
SLOWER = ("flex", "torch_efficient", "split_kv")


def nested(inputs: CaseInputs) -> PreparedCall:
    """SDPA on three NestedTensors (B, j, H, D). Key heads are repeated before the timed part, in favor of SDPA."""
    layout, is_causal, (q, k, v) = inputs.layout, inputs.window.is_causal, inputs.qkv
    if inputs.options.get("softcap") or not (inputs.window.is_open or is_causal):
        raise NotSupportedError("SDPA on NestedTensors has no softcap and no window.")
    if is_causal and not (inputs.grad.is_cuda and layout.min_seqlen):
        raise NotSupportedError("SDPA on NestedTensors has no causal mask on a CPU or for sequences without tokens.")
    group = q.shape[1] // k.shape[1]
    plain = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    leaves = tuple(layout.to_nested(x).detach().requires_grad_() for x in plain)

    def attend() -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in leaves)
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)

    return PreparedCall(attend, leaves, layout.to_nested(inputs.grad).detach(), lambda x: x.values())


def main() -> int:
    bench.SDPA["NestedTensor SDPA"] = nested
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--all", action="store_true", help="also the slower backends, such as flex, which compiles")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    able = [name for name in backends_of(device) if name != "reference" and (options.all or name not in SLOWER)]
    names = ["auto", *able, *bench.SDPA]
    lines = [f"{device_name(device)}, {dtype}; ms of device time on a GPU, forward / forward + backward", ""]
    lines += [f"| lengths, heads × head dim | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    notes = []
    warnings.simplefilter("ignore")
    for name in options.workloads or (["small", "small causal"] if device.type == "cpu" else DEFAULT):
        workload = WORKLOADS[name]
        inputs = CaseInputs.random(workload, device, dtype)
        cells = []
        for each in names:
            backends, times, why = zip(*(bench.measure(each, inputs, both) for both in (False, True)), strict=True)
            chosen = f" ({', '.join(dict.fromkeys(backends))})" if each == "auto" else ""
            cells.append(" / ".join(f"{ms:.3f}" if ms else "–" for ms in times) + chosen)
            notes += [f"- {name}, {each}: {note}" for note in dict.fromkeys(why) if note]
        lines.append(f"| {workload} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    show([*lines, "", *notes], options.save)
    return int(any(": failed: " in note for note in notes))


if __name__ == "__main__":
    sys.exit(main())
