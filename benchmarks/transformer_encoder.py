"""nn.TransformerEncoder and nn.Transformer, patched and unpatched, and one encoder layer, compiled and eager.

    python benchmarks/transformer_encoder.py [--workloads A E] [--save FILE]

Encoder: 4 layers, E=1024, 16 heads, feed-forward 4096. Transformer: 6 + 6 layers, E=512, 8 heads, feed-forward 2048,
targets a quarter as long as their sources, causal. No dropout, bf16, padded batches with their key padding masks,
padded outputs. Times are wall-clock times, medians over rounds in which both alternate. In eval the unpatched encoder
takes its fast path, which skips padding too, also inside nn.Transformer. The single layer has VarlenMultiheadAttention
as its attention, runs on NestedTensors, and is compiled by torch.compile(fullgraph=True).

Without a GPU it is a test run: small models in float32, and no compiled layer.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from by_turns import by_turns, show
from torch import Tensor, nn
from workloads import WORKLOADS

import nt_attention as nta

GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if GPU else (torch.device("cpu"), torch.float32)


class Size(NamedTuple):
    """Layers (of an nn.Transformer in each of its halves), embed dim and heads. The feed-forward is 4 embed dims."""

    layers: int
    width: int
    heads: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of layers and of nn.Transformer."""
        width = {"d_model": self.width, "nhead": self.heads, "dim_feedforward": 4 * self.width}
        return width | {"dropout": 0.0, "batch_first": True, "device": DEVICE, "dtype": DTYPE}


ENCODER = Size(4, 1024, 16) if GPU else Size(2, 64, 4)
TRANSFORMER = Size(6, 512, 8) if GPU else Size(2, 64, 4)


class Padded(NamedTuple):
    """A padded batch: the layout, random rows (B, L, E), and the padding (B, L), True at padding."""

    layout: nta.SequenceLayout
    rows: Tensor
    padding: Tensor


def make_padded(lengths: list[int], width: int) -> Padded:
    layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
    rows = layout.pad(torch.randn(layout.total, width, device=DEVICE, dtype=DTYPE)).requires_grad_()
    return Padded(layout, rows, layout.pad(torch.ones(layout.total, device=DEVICE)) == 0)


def with_gradients(run: Callable[[], Tensor], grad: Tensor, inputs: list[Tensor]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(run(), inputs, grad)


def compare(
    name: str, stock: nn.Module, inputs: list[Padded], call: Callable[[nn.Module], Tensor], rounds: int
) -> list[str]:
    """Time a model and its patched copy. The output has the layout of the last input.

    Returns:
        Two rows of a table: training and eval.
    """
    patched = copy.deepcopy(stock)
    nta.patch(patched, on_fallback="raise")
    models = {"patched": patched.train(), "stock": stock.train()}
    runs = {name: functools.partial(call, model) for name, model in models.items()}
    layout, rows, padding = inputs[-1]
    torch.testing.assert_close(*(layout.pack(run().detach()) for run in runs.values()), rtol=0.05, atol=0.05)
    grad, leaves = torch.randn_like(rows).masked_fill(padding.unsqueeze(2), 0.0), [x.rows for x in inputs]
    steps = {k: with_gradients(run, grad, [*leaves, *models[k].parameters()]) for k, run in runs.items()}
    train = by_turns(steps, max(5, rounds // 3))
    for model in models.values():
        model.eval()
    with torch.inference_mode():
        infer = by_turns(runs, rounds)
    return [
        f"| {name}, {len(layout.lengths)} sequences | {what} | {t['patched']:.2f} | {t['stock']:.2f} | "
        f"{t['stock'] / t['patched']:.2f} |"
        for what, t in (("training", train), ("eval", infer))
    ]


def make_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(**ENCODER.options)


def encoder(name: str, rounds: int) -> list[str]:
    torch.manual_seed(0)
    stock = nn.TransformerEncoder(make_layer(), ENCODER.layers, enable_nested_tensor=True)
    source = make_padded(WORKLOADS[name].lengths, ENCODER.width)
    return compare(name, stock, [source], lambda m: m(source.rows, src_key_padding_mask=source.padding), rounds)


def transformer(name: str, rounds: int) -> list[str]:
    torch.manual_seed(0)
    layers = {"num_encoder_layers": TRANSFORMER.layers, "num_decoder_layers": TRANSFORMER.layers}
    stock = nn.Transformer(**TRANSFORMER.options, **layers)
    lengths = WORKLOADS[name].lengths
    source = make_padded(lengths, TRANSFORMER.width)
    target = make_padded([max(1, length // 4) for length in lengths], TRANSFORMER.width)
    mask = torch.ones(2 * target.rows.shape[1:2], dtype=torch.bool, device=DEVICE).triu(1)

    def call(model: nn.Module) -> Tensor:
        return model(
            source.rows,
            target.rows,
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=source.padding,
            tgt_key_padding_mask=target.padding,
            memory_key_padding_mask=source.padding,
        )

    return compare(name, stock, [source, target], call, rounds)


def one_layer(name: str, rounds: int) -> list[str]:
    layout = nta.SequenceLayout.from_lengths(WORKLOADS[name].lengths, device=DEVICE)
    torch.manual_seed(0)
    layer = make_layer()
    layer.self_attn = nta.VarlenMultiheadAttention.from_torch(layer.self_attn)
    compiled = torch.compile(layer, fullgraph=True)
    x, grad = (layout.to_nested(torch.randn(layout.total, ENCODER.width, device=DEVICE, dtype=DTYPE)) for _ in range(2))
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


def table(header: str, measure: Callable[[str, int], list[str]], names: list[str], rounds: int) -> list[str]:
    """A table with the rows of every workload."""
    columns = header.count("|") - 1
    return [header, "|---" * columns + "|", *(line for name in names for line in measure(name, rounds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["A", "E"] if GPU else ["small"], choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    names, rounds = options.workloads, options.rounds
    machine = torch.cuda.get_device_name() if GPU else "CPU"
    kind = "bf16" if GPU else "float32"
    lines = [
        f"{machine}, torch {torch.__version__}, {kind}, {ENCODER.layers} layers, E={ENCODER.width}; wall-clock ms",
        "",
        *table("| workload | | patched | nn.TransformerEncoder | ratio |", encoder, names, rounds),
        "",
        f"{TRANSFORMER.layers} + {TRANSFORMER.layers} layers, E={TRANSFORMER.width}, targets a quarter as long.",
        "",
        *table("| workload | | patched | nn.Transformer | ratio |", transformer, names, rounds),
    ]
    if GPU:
        of_layer = table("| workload | | compiled | eager | ratio |", one_layer, names[:1], rounds)
        lines += ["", "One layer on NestedTensors.", "", *of_layer]
    show(lines, options.save)


if __name__ == "__main__":
    main()
