"""Inference of small batches: padded, patched by ``nta.patch``, and patched with ``cuda_graphs=True``.

    python benchmarks/cuda_graphs.py [--parts speed batches replays torch] [--compiled] [--rounds 30] [--save FILE]

- **speed**: wall-clock times of batches of other lengths, the ways by turns, and the time for which the device is busy
  in a replay.
- **batches**: 1,000 batches of 1 to 64 rows. Each result is compared with that of the same model without graphs, and
  both with the model in float32, because matrix products of other sizes round differently.
- **replays**: 10,000 replays, and the memory before and after them.
- **torch**: the same times for ``nn.TransformerEncoder`` and ``VarlenMultiheadAttention``.

bf16, random weights, base models without dropout. Times are medians from device sync to device sync, in ms.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import by_turns, reserve_memory, show, wall_clock_ms
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import nt_attention as nta
from nt_attention.cli.timing import device_ms

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "6 × 384": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "12 × 768": {},
}
# model, rows, and the shortest and longest row
SPEED = [("6 × 384", 32, 4, 64), ("12 × 768", 8, 4, 64), ("12 × 768", 64, 4, 256), ("12 × 768", 64, 4, 512)]


def make(name: str) -> Any:
    torch.manual_seed(0)
    config = BertConfig(**MODELS[name], **NO_DROPOUT)  # of its own: `nta.patch` writes its attention to the config
    return BertModel._from_config(config, attn_implementation="sdpa").to(DEVICE, DTYPE).eval()


def draw(rows: int, shortest: int, longest: int) -> dict[str, Tensor]:
    """A padded batch of uniform lengths."""
    lengths = torch.randint(shortest, longest + 1, (rows,))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(5, 30000, mask.shape)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


@torch.inference_mode()
def speed(options: argparse.Namespace) -> list[str]:
    graphs = ["graphs", "graphs, compiled"] if options.compiled else ["graphs"]
    ways = ["padded", *(["padded, compiled"] if options.compiled else []), "auto", "always", *graphs]
    of_graphs = [f"fastest padded / {way} | device busy in a replay" for way in graphs]
    lines = [f"| model | rows | {' | '.join(ways + of_graphs)} |", "|---" * (2 + len(ways) + 2 * len(graphs)) + "|"]
    for name, rows, shortest, longest in SPEED:
        models = {way: make(name) for way in ways}
        nta.patch(models["auto"])
        nta.patch(models["always"], packing="always")
        handles = {way: nta.patch(models[way], cuda_graphs=True) for way in graphs}
        for way in ways:
            models[way] = torch.compile(models[way], dynamic=True) if "compiled" in way else models[way]
        batches = [draw(rows, shortest, longest) for _ in range(12)]
        for batch in batches:  # graphs are captured, and other lengths compiled
            for model in models.values():
                model(**batch)
        times: dict[str, list[float]] = {way: [] for way in models}
        for i in range(options.rounds):
            batch = draw(rows, shortest, longest)
            for way, model in models.items():
                took = wall_clock_ms(partial(model, **batch))
                times[way] += [took] if i >= 3 else []
        ms = {way: statistics.median(each) for way, each in times.items()}
        padded = min(each for way, each in ms.items() if "padded" in way)
        cells = [f"{ms[way]:.2f}" for way in models]
        for way, handle in handles.items():
            assert handle.graphs is not None
            assert set(handle.graphs.calls) == {None}, handle
            (of_module,) = handle.graphs._modules.values()
            busy = device_ms(list(of_module.graphs.values())[-1]._replay)  # the graph that ran last
            cells += [f"{padded / ms[way]:.2f} ×", f"{busy:.2f}"]
        lines.append(f"| {name} | {rows} of {shortest} to {longest} | {' | '.join(cells)} |")
    return lines


@torch.inference_mode()
def batches(options: argparse.Namespace) -> list[str]:
    lines = [
        "| lengths | batches | graphs | captured | of these after the first 500 | inputs and outputs of graphs, MiB "
        "| all memory, MiB | equal bits | largest error over the largest value: without graphs | with graphs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shortest, longest in ((4, 64), (4, 256)):
        eager, model, exact = make("6 × 384"), make("6 × 384"), make("6 × 384").float()
        nta.patch(eager, packing="always")
        handle = nta.patch(model, cuda_graphs=True)
        assert handle.graphs is not None
        torch.manual_seed(1)
        before, late, equal, errors = torch.cuda.memory_allocated(), 0, 0, [0.0, 0.0]
        for i in range(1000):
            rows = int(torch.randint(1, 65, ()))
            batch = draw(rows, shortest, longest)
            captured = handle.graphs.captured
            got, want = model(**batch), eager(**batch)
            late += (handle.graphs.captured - captured) if i >= 500 else 0
            equal += all(torch.equal(got[key], want[key]) for key in want)
            float32 = exact(**batch).last_hidden_state * batch["attention_mask"].unsqueeze(2)
            for j, out in enumerate((want, got)):
                error = (out.last_hidden_state - float32).abs().max() / float32.abs().max()
                errors[j] = max(errors[j], float(error))
        assert handle.graphs.calls == {None: 1000}, handle
        memory = (torch.cuda.memory_allocated() - before) / 2**20
        lines.append(
            f"| {shortest} to {longest} | 1,000 | {len(handle.graphs)} | {handle.graphs.captured} | {late} "
            f"| {handle.graphs.memory / 2**20:.1f} | {memory:.1f} | {equal} "
            f"| {errors[0]:.1e} | {errors[1]:.1e} |"
        )
        handle.remove()
    return lines


@torch.inference_mode()
def replays(options: argparse.Namespace) -> list[str]:
    model = make("6 × 384")
    handle = nta.patch(model, cuda_graphs=True)
    drawn = [draw(int(torch.randint(1, 65, ())), 4, 64) for _ in range(200)]
    for batch in drawn:
        model(**batch)
    torch.cuda.synchronize()
    before, began = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()), time.perf_counter()
    for i in range(10_000):
        model(**drawn[i % len(drawn)])
    torch.cuda.synchronize()
    seconds, after = time.perf_counter() - began, (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    allocated, reserved = (f"{a / 2**20:.1f} → {b / 2**20:.1f} MiB" for a, b in zip(before, after, strict=True))
    assert handle.graphs is not None
    return [
        f"10,000 replays of {len(handle.graphs)} graphs: {1e3 * seconds / 1e4:.2f} ms each; memory allocated "
        f"{allocated}, reserved {reserved}"
    ]


@torch.inference_mode()
def of_torch(options: argparse.Namespace) -> list[str]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    stock = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval().to(DEVICE, DTYPE)
    models = {"padded": stock, "patched": copy.deepcopy(stock), "with graphs": copy.deepcopy(stock)}
    nta.patch(models["patched"])
    nta.patch(models["with graphs"], cuda_graphs=True)
    lines = ["| module | batch | padded | packed | with graphs |", "|---|---|---|---|---|"]
    for rows, longest in ((32, 64), (64, 256)):
        lengths = torch.randint(4, longest + 1, (rows,))
        padding = (torch.arange(int(lengths.max())) >= lengths[:, None]).to(DEVICE)
        x = torch.randn(*padding.shape, 512, device=DEVICE, dtype=DTYPE)
        ms = by_turns({way: partial(m, x, src_key_padding_mask=padding) for way, m in models.items()}, options.rounds)
        cells = " | ".join(f"{ms[way]:.2f}" for way in models)
        lines.append(f"| nn.TransformerEncoder, 6 × 512 | {rows} of 4 to {longest} | {cells} |")
        layout = nta.SequenceLayout.from_lengths(lengths, device=DEVICE)
        tokens = torch.randn(layout.total, 512, device=DEVICE, dtype=DTYPE)
        eager = nta.VarlenMultiheadAttention(512, 8, batch_first=True, device=DEVICE, dtype=DTYPE).eval()
        graphs = nta.VarlenMultiheadAttention(512, 8, batch_first=True, device=DEVICE, dtype=DTYPE, cuda_graphs=True)
        modules = {"packed": eager, "with graphs": graphs.eval()}
        attend = {way: partial(m, tokens, tokens, tokens, layout=layout) for way, m in modules.items()}
        ms = by_turns(attend, options.rounds)
        lines.append(
            f"| VarlenMultiheadAttention, 512 | {rows} of 4 to {longest} | | {ms['packed']:.3f} "
            f"| {ms['with graphs']:.3f} |"
        )
    return lines


PARTS = {"speed": speed, "batches": batches, "replays": replays, "torch": of_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--compiled", action="store_true", help="also padded and graphs under torch.compile")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    reserve_memory()
    name = torch.cuda.get_device_name()
    lines = [f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, bf16; ms"]
    for part in options.parts:
        found = PARTS[part](options)
        print("\n".join(found), file=sys.stderr, flush=True)
        lines += ["", *found]
    show(lines, options.save)


if __name__ == "__main__":
    main()
