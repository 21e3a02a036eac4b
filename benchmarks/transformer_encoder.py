"""nn.TransformerEncoder on this GPU, patched and unpatched, and one encoder layer, compiled and eager.

    python benchmarks/transformer_encoder.py [--workloads A E] [--save FILE]

4 layers, E=1024, 16 heads, feed-forward 4096, no dropout, bf16, padded batches with their src_key_padding_mask, padded
outputs. Times are wall-clock times, medians over rounds in which both alternate. In eval the unpatched encoder takes
its fast path, which skips padding too. The single layer has VarlenMultiheadAttention as its attention, runs on
NestedTensors, and is compiled by torch.compile(fullgraph=True).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from by_turns import by_turns
from torch import Tensor, nn

import nt_attention as nta
from nt_attention.cli.workloads import WORKLOADS

CUDA = torch.device("cuda")
LAYERS, WIDTH, HEADS = 4, 1024, 16


def with_gradients(run: Callable[[], Tensor], grad: Tensor, inputs: list[Tensor]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(run(), inputs, grad)


def make_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, device=CUDA, dtype=torch.bfloat16
    )


def encoders(name: str, rounds: int) -> list[str]:
    lengths = WORKLOADS[name].lengths
    layout = nta.SequenceLayout.from_lengths(lengths, device=CUDA)
    torch.manual_seed(0)
    stock = nn.TransformerEncoder(make_layer(), LAYERS, enable_nested_tensor=True)
    patched = copy.deepcopy(stock)
    nta.patch(patched)
    padded = layout.pad(torch.randn(layout.total, WIDTH, device=CUDA, dtype=torch.bfloat16)).requires_grad_()
    padding = layout.pad(torch.ones(layout.total, device=CUDA)) == 0
    grad = torch.randn_like(padded).masked_fill(padding.unsqueeze(2), 0.0)
    models = {"patched": patched, "stock": stock}

    def call(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: model(padded, src_key_padding_mask=padding)

    for model in models.values():
        model.train()
    outs = [layout.pack(call(model)().detach()) for model in models.values()]
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.05)
    train = by_turns(
        {k: with_gradients(call(m), grad, [padded, *m.parameters()]) for k, m in models.items()}, max(5, rounds // 3)
    )
    for model in models.values():
        model.eval()
    with torch.inference_mode():
        infer = by_turns({k: call(m) for k, m in models.items()}, rounds)
    return [
        f"| {name}, {len(lengths)} sequences | {what} | {t['patched']:.2f} | {t['stock']:.2f} | "
        f"{t['stock'] / t['patched']:.2f} |"
        for what, t in (("training", train), ("eval", infer))
    ]


def one_layer(name: str, rounds: int) -> list[str]:
    layout = nta.SequenceLayout.from_lengths(WORKLOADS[name].lengths, device=CUDA)
    torch.manual_seed(0)
    layer = make_layer()
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    compiled = torch.compile(layer, fullgraph=True)
    x, grad = (layout.to_nested(torch.randn(layout.total, WIDTH, device=CUDA, dtype=torch.bfloat16)) for _ in range(2))
    x.requires_grad_()
    runs = {"compiled": lambda: compiled(x), "eager": lambda: layer(x)}
    layer.eval()  # in training, NestedTensor's dropout drops about one in 30 million values even with probability 0
    torch.testing.assert_close(*(run().values() for run in runs.values()), rtol=0.05, atol=0.05)
    layer.train()
    inputs = [x, *layer.parameters()]
    train = by_turns({k: with_gradients(run, grad, inputs) for k, run in runs.items()}, rounds)
    layer.eval()
    with torch.no_grad():
        infer = by_turns(runs, rounds)
    return [
        f"| {name} | {what} | {t['compiled']:.3f} | {t['eager']:.3f} | {t['eager'] / t['compiled']:.2f} |"
        for what, t in (("training", train), ("eval", infer))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["A", "E"], choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {LAYERS} layers, E={WIDTH}; wall-clock ms",
        "",
        "| workload | | patched | nn.TransformerEncoder | ratio |",
        "|---|---|---|---|---|",
        *(line for name in options.workloads for line in encoders(name, options.rounds)),
        "",
        "One layer on NestedTensors.",
        "",
        "| workload | | compiled | eager | ratio |",
        "|---|---|---|---|---|",
        *(line for name in options.workloads[:1] for line in one_layer(name, options.rounds)),
    ]
    print("\n".join(lines))
    if options.save:
        command = " ".join(["python benchmarks/transformer_encoder.py", *sys.argv[1:]])
        options.save.write_text("\n".join([f"`{command}`", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
