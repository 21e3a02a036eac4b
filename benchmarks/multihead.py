"""VarlenMultiheadAttention on NestedTensors and nn.MultiheadAttention on the padded batch, on this GPU, bf16.

    python benchmarks/multihead.py [--workload E] [--embed-dim 768] [--heads 12] [--save FILE]

Times are wall-clock times, medians over blocks of calls with one device sync at the end of each. nn.MultiheadAttention
is called with key_padding_mask and need_weights=False. For inference it runs in eval and in training mode, which take
different paths, and the shorter time counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import host_us
from torch import nn
from workloads import WORKLOADS

import nt_attention as nta
from nt_attention.cli.timing import device_ms, wall_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="E", choices=WORKLOADS)
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    workload, embed_dim = WORKLOADS[options.workload], options.embed_dim

    torch.manual_seed(0)
    stock = nn.MultiheadAttention(embed_dim, options.heads, batch_first=True, device="cuda", dtype=torch.bfloat16)
    module = nta.VarlenMultiheadAttention.from_torch(stock)
    layout = nta.SequenceLayout.from_lengths(workload.lengths, device="cuda")
    values = torch.randn(layout.total, embed_dim, device="cuda", dtype=torch.bfloat16)
    ragged = torch.nested.nested_tensor_from_jagged(values, layout.offsets).requires_grad_()
    padded = layout.pad(values).requires_grad_()
    padding = layout.pad(torch.ones(layout.total, device="cuda")) == 0
    grad_ragged = torch.nested.nested_tensor_from_jagged(torch.randn_like(values), layout.offsets)
    grad_padded = torch.randn_like(padded)

    def ours() -> torch.Tensor:
        return module(ragged, ragged, ragged)[0]

    def theirs() -> torch.Tensor:
        return stock(padded, padded, padded, key_padding_mask=padding, need_weights=False)[0]

    def packed() -> torch.Tensor:
        return module(values, values, values, layout=layout)[0]

    def infer(function: Callable[[], Any], training: bool) -> float:
        for m in (stock, module):
            m.train(training)
        with torch.no_grad():
            return wall_ms(function)

    with torch.no_grad():
        want = layout.pack(stock.train()(padded, padded, padded, key_padding_mask=padding, need_weights=False)[0])
        got = module.eval()(ragged, ragged, ragged)[0].values()
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)

    rows = {"forward": (infer(ours, False), min(infer(theirs, False), infer(theirs, True)))}
    for m in (stock, module):
        m.train()
    weights = [list(m.parameters()) for m in (module, stock)]

    def both_ours() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ours(), [ragged, *weights[0]], grad_ragged)

    def both_theirs() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(theirs(), [padded, *weights[1]], grad_padded)

    rows["forward + backward"] = wall_ms(both_ours), wall_ms(both_theirs)
    rows["forward + backward, device time alone"] = device_ms(both_ours), device_ms(both_theirs)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, workload {workload.name} ({workload.about}, "
        f"{len(workload.lengths)} sequences), E={embed_dim}, {options.heads} heads; ms of wall-clock time",
        "",
        "| | VarlenMultiheadAttention, NestedTensor | nn.MultiheadAttention, padded | ratio |",
        "|---|---|---|---|",
        *(f"| {name} | {a:.3f} | {b:.3f} | {b / a:.2f} |" for name, (a, b) in rows.items()),
        "",
    ]
    with torch.no_grad():
        module.eval()
        q = values.unflatten(-1, (options.heads, -1))
        linear = nn.functional.linear
        gemms = device_ms(lambda: linear(linear(values, stock.in_proj_weight)[:, :embed_dim], stock.out_proj.weight))
        lines.append(f"Device time of the forward {device_ms(ours):.3f} ms, of its two GEMMs {gemms:.3f} ms.")
        host = [host_us(f, 50) for f in (ours, packed, lambda: nta.varlen_attention(q, q, q, layout))]
        lines.append(
            "Host time, inference: module {:.0f} µs, on packed tensors {:.0f}, varlen_attention {:.0f}.".format(*host)
        )
    print("\n".join(lines))
    if options.save:
        options.save.write_text(
            "\n".join([f"`python benchmarks/multihead.py {' '.join(sys.argv[1:])}`", "", *lines]) + "\n"
        )


if __name__ == "__main__":
    main()
