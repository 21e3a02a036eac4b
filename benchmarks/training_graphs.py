"""Training with CUDA graphs: ``nta.patch(model, cuda_graphs="training")`` against PyTorch's own, on one GPU.

    python benchmarks/training_graphs.py {bert:128,bert:512,modernbert:512} [--steps 32] [--save FILE]

The ways, each of them with a model of its own, for batches that are padded on the GPU:

- **patched**, and **patched, compiled** with ``dynamic=True``.
- **with graphs**, and **with graphs, compiled**: patched with ``cuda_graphs="training"``.
- **reduce-overhead**: the batch is packed into a row, whose size is rounded up to a bucket. The row runs in
  ``torch.compile(model, mode="reduce-overhead", fullgraph=True)``, compiled for each bucket (static) or for all of them
  (dynamic). The layout has bounds, so the host reads nothing in the compiled model. The step includes the packing.

BERT-base and ModernBERT-base, random weights, bf16, no dropout. Lengths are lognormal up to 128 or 512. Batches have a
little less than 12288, 14336 and 16384 tokens, by turns. Each step has a batch of other lengths. A step is a forward, a
loss, a backward, and the end of the gradients. Times are medians of wall-clock times, from device sync to device sync.
The time for which the device is busy is that of its kernels, by the profiler, which runs after all timing.

Without a GPU it is a test run of small models in float32.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import device_busy_ms, show, wall_clock_ms
from compiled_models import DEVICE, DTYPE, GPU, TINY, pad, without_dropout
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AttentionInterface, BertConfig, BertModel, ModernBertConfig, ModernBertModel
from transformers.masking_utils import AttentionMaskInterface
from workloads import draw_lengths

import nt_attention as nta

BUCKETS = (12288, 14336, 16384) if GPU else (256, 384, 512)
SEQUENCES = {128: 1024, 512: 512}  # the bound of the number of sequences, by the largest length
WARMUP = 12  # steps: 4 for each bucket
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertModel, BertConfig, {"add_pooling_layer": False}),
    "modernbert": (ModernBertModel, ModernBertConfig, {}),
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row (1, H, N, D), whose offsets the host never reads."""
    layout = nta.SequenceLayout.from_offsets(cu_seq_lens_q, max_seqlen=max_length_q, max_tokens=query.shape[2])
    window = -1 if sliding_window is None else sliding_window - 1
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = nta.varlen_attention(*packed, layout, window_size=(window, window), scale=scaling)
    return out[None], None


AttentionInterface.register("nt_attention_bounds", attention)
AttentionMaskInterface.register("nt_attention_bounds", lambda *_, **__: None)


@dataclass
class Batch:
    """A padded batch (B, L)."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, longest: int, seed: int) -> Batch:
        tokens = BUCKETS[seed % len(BUCKETS)] - seed * 7 % 200
        layout = nta.SequenceLayout.from_lengths(draw_lengths(f"lognormal:{longest}", tokens, seed), device=DEVICE)
        ids = torch.randint(5, 100 if TINY else 30000, (layout.total,), device=DEVICE)
        return cls(pad(layout, ids), pad(layout, torch.ones_like(ids)))


@dataclass
class Way:
    """One way to run a model. `run`: a batch → its outputs, and where they are tokens; the others are ignored."""

    model: nn.Module
    run: Callable[[Batch], tuple[Tensor, Tensor]]
    handle: Any = None
    ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    def backward(self, batch: Batch) -> Tensor:
        out, is_token = self.run(batch)
        scores = (out.float() @ DIRECTION[: out.shape[-1]]) * is_token
        loss = scores.square().sum() / is_token.sum()
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> None:
        self.backward(batch)
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self, batches: Sequence[Batch], exist: bool) -> tuple[float, list[Tensor]]:
        """The sum of the losses of these batches, and the gradients that they accumulate. `exist`: into zeros."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if exist else None
        loss = sum(float(self.backward(batch)) for batch in batches)
        grads = [torch.zeros(()) if x.grad is None else x.grad.float().cpu() for x in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return loss, grads


DIRECTION = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def make(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    kind, config, options = MODELS[name]
    own = without_dropout(config(**TINY))
    own.attention_dropout = 0.0
    return kind._from_config(own, attn_implementation=implementation, **options).to(DEVICE, DTYPE).train()


def patched(name: str, longest: int, graphs: bool, compiled: bool) -> Way:
    model = make(name, "sdpa")
    handle = nta.patch(model, on_fallback="raise", packing="always", **({"cuda_graphs": "training"} if graphs else {}))
    function = torch.compile(model, dynamic=True) if compiled else model

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        return function(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state, batch.mask

    return Way(model, run, handle)


def reduce_overhead(name: str, longest: int, dynamic: bool) -> Way:
    model = make(name, "nt_attention_bounds")
    sequences = SEQUENCES[longest]

    def forward(ids: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        out = model(input_ids=ids, position_ids=positions, cu_seq_lens_q=offsets, max_length_q=longest)
        return out.last_hidden_state

    compiled = torch.compile(forward, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        layout = nta.SequenceLayout.from_attention_mask(batch.mask)  # reads the mask, as a patched model does
        total, bucket = layout.total, next(size for size in BUCKETS if size >= layout.total)
        ids, positions = batch.ids.new_zeros(2, 1, bucket)
        ids[0, :total], positions[0, :total] = layout.pack(batch.ids), layout.position_ids
        offsets = layout.cu_seqlens.new_full((sequences + 1,), total)  # further sequences have no tokens
        offsets[: layout.batch_size + 1] = layout.cu_seqlens
        is_token = torch.arange(bucket, device=DEVICE) < total
        return compiled(ids, positions, offsets), is_token

    return Way(model, run)


WAYS: dict[str, Callable[[str, int], Way]] = {
    "patched": lambda *args: patched(*args, False, False),
    "patched, compiled": lambda *args: patched(*args, False, True),
    "with graphs": lambda *args: patched(*args, True, False),
    "with graphs, compiled": lambda *args: patched(*args, True, True),
    "reduce-overhead, dynamic": lambda *args: reduce_overhead(*args, True),
    "reduce-overhead, static": lambda *args: reduce_overhead(*args, False),
}
if not GPU:
    del WAYS["with graphs"], WAYS["with graphs, compiled"]


def log(*words: Any) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s", *words, file=sys.stderr, flush=True)


BEGAN = time.perf_counter()


def warm_up(name: str, longest: int, names: list[str], seconds: float) -> dict[str, Way]:
    """The ways that run. The reason why another one doesn't is printed. None begins after this time."""
    ways = {}
    for way_name in names:
        if GPU:
            torch.cuda.empty_cache()
        if time.perf_counter() - BEGAN > seconds:
            log(way_name, "is left out: there is no time")
            continue
        counters.clear()
        try:
            way = WAYS[way_name](name, longest)
            for seed in range(WARMUP):
                way.step(Batch.draw(longest, seed))
        except Exception:  # of any library: the other ways are compared all the same
            log(way_name, "failed:", traceback.format_exc())
            continue
        ways[way_name] = way
        log(
            way_name,
            "is warm;",
            f"{torch.cuda.memory_reserved() / 2**30 if GPU else 0:.1f} GiB;",
            dict(counters["inductor"]),
            dict(counters["stats"]),
            dict(counters["graph_break"]),
        )
    return ways


def compare(ways: dict[str, Way], longest: int) -> dict[str, str]:
    """The errors of the loss and of the gradients against `patched`.

    Of one batch; of three that accumulate; and of three that accumulate into gradients that are 0 before.
    """
    errors: dict[str, str] = dict.fromkeys(ways, "")
    for count, exist in ((1, False), (3, False), (3, True)):
        batches = [Batch.draw(longest, 1000 + i) for i in range(count)]
        loss, want = ways["patched"].gradients(batches, exist)
        least = 1e-3 * max(float(x.norm()) for x in want)  # the gradient of keys' biases is 0, but for rounding
        for way_name, way in ways.items():
            try:
                other, got = way.gradients(batches, exist)
            except Exception as error:  # as above
                errors[way_name] += f" {type(error).__name__};"
                log(way_name, count, exist, error)
                continue
            ratios = [float((a - b).norm() / b.norm().clamp(min=least)) for a, b in zip(got, want, strict=True)]
            errors[way_name] += f" {abs(other - loss) / abs(loss):.0e}, {max(ratios):.0e};"
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="a model and its largest length, such as bert:128")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=36 if GPU else 6)
    parser.add_argument("--warm-up-seconds", type=float, default=1e9, help="no way begins to compile after this time")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    name, _, number = options.workload.partition(":")
    longest = int(number)
    transformers.logging.set_verbosity_error()
    faulthandler.enable()
    torch._dynamo.config.recompile_limit = 64
    turn = (Path(tempfile.gettempdir()) / "training_graphs.lock").open("w")
    fcntl.flock(turn, fcntl.LOCK_SH)  # programs that start together compile together
    ways = warm_up(name, longest, options.ways, options.warm_up_seconds)
    if GPU:
        torch.cuda.empty_cache()
    fcntl.flock(turn, fcntl.LOCK_EX)  # and run alone
    log("runs alone")
    errors = compare(ways, longest)
    captured = {way_name: way.handle.graphs.captured for way_name, way in ways.items() if "with graphs" in way_name}
    for seed in range(WARMUP, WARMUP + options.steps):
        batch = Batch.draw(longest, seed)
        for way in ways.values():
            way.ms.append(wall_clock_ms(lambda way=way, batch=batch: way.step(batch)))
    log("timed")
    base = ways.get("with graphs, compiled", ways["patched"]).ms
    lines = [
        f"{torch.cuda.get_device_name() if GPU else 'CPU'}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {str(DTYPE)[6:]}; {name}, lognormal ≤ {longest}; ms a step",
        "",
        "| way | median | of 12288, 14336, 16384 tokens | over with graphs, compiled | the device is busy for "
        "| errors of loss and gradients: a batch; three that accumulate; three into zeros |",
        "|---|---|---|---|---|---|",
    ]
    for way_name, way in ways.items():
        of_bucket = [statistics.median(way.ms[(i - WARMUP) % 3 :: 3]) for i in range(3)]
        ratio = statistics.median(a / b for a, b in zip(way.ms, base, strict=True))
        steps = [partial(way.step, Batch.draw(longest, seed)) for seed in range(WARMUP, WARMUP + 6)]
        busy = f"{device_busy_ms(steps):.2f}" if GPU else ""  # nothing is timed after it
        cells = f"{statistics.median(way.ms):.2f} | {', '.join(f'{ms:.2f}' for ms in of_bucket)} | {ratio:.3f} | {busy}"
        lines.append(f"| {way_name} | {cells} |{errors.get(way_name, '')} |")
    for way_name, before in captured.items():
        graphs = ways[way_name].handle.graphs
        lines += ["", f"{way_name}: {before} graphs in the warm-up, {graphs.captured - before} later; {graphs.calls}"]
    show(lines, options.save)


if __name__ == "__main__":
    main()
