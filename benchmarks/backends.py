"""The backends, padded SDPA and NestedTensor SDPA on named workloads: `python -m nt_attention bench` for each of them.

    python benchmarks/backends.py [--workloads NAME …] [--heads N] [--kv-heads N] [--head-dim N] [--options NAME=VALUE]

The numbers of heads and the head dim are those of the workload, unless they are given. Other options are those of
`bench`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F
from workloads import WORKLOADS

from nt_attention.cli import bench
from nt_attention.cli.calls import CaseInputs, NotSupportedError, PreparedCall
from nt_attention.cli.environment import positive


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
    for name in ("--heads", "--kv-heads", "--head-dim"):
        parser.add_argument(name, type=positive)
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE")
    bench.add_measure_arguments(parser)
    options = parser.parse_args()
    names = options.workloads or (["small", "small causal"] if options.device == "cpu" else list("ABCDE"))
    workloads = []
    for workload in (WORKLOADS[name] for name in names):
        changed = {
            "heads": options.heads or workload.heads,
            "kv_heads": options.kv_heads or options.heads or workload.kv_heads,
            "head_dim": options.head_dim or workload.head_dim,
            "options": workload.options | dict(map(bench.parse_option, options.options)),
            "about": ", ".join([workload.about, *options.options]),
        }
        workloads.append(replace(workload, **changed))
    return bench.bench(workloads, options, shlex.join(["python", "benchmarks/backends.py", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
