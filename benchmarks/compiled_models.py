"""A model in eager and under torch.compile: padded, patched by ``nta.patch``, and with rows packed by hand.

    python benchmarks/compiled_models.py {bert,modernbert,llama,encoder} [--lengths lognormal:512] [--save FILE]

- BERT-base and ModernBERT-base: the loss is the mean of the output. 16384 tokens a batch.
- Llama: 8 layers (2048 wide) with labels. 8192 tokens a batch, because the padded logits of more do not fit into 80 GB.
- nn.TransformerEncoder: 4 layers, E=1024, 16 heads, feed-forward 4096. 32768 tokens a batch.

"With graphs" is ``nta.patch(model, cuda_graphs="training")``. The padded logits of Llama in inference are too large for
graphs. "With graphs, compiled" of the encoder has compiled layers.

Random weights, bf16, no dropout. Each step has a batch of other lengths, padded to a multiple of 8, which no way has
met before. All ways run it by turns. Times are medians of wall-clock times, from device sync to device sync. Models are
compiled with ``dynamic=True``. A captured CUDA graph is replayed with the batch that it was captured with. The device's
own time is that of its kernels, according to the profiler, which runs after all timing.

Without a GPU it is a test run of small models in float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from by_turns import device_busy_ms, reserve_memory, show, wall_clock_ms
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ModernBertConfig, ModernBertModel
from workloads import draw_lengths

import nt_attention as nta

GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if GPU else (torch.device("cpu"), torch.float32)
TINY = {} if GPU else {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip
WARMUP = 6  # steps, in which programs are compiled


def loss_of(out: Any) -> Tensor:
    """The loss, or the mean of the output."""
    if isinstance(out, Tensor):
        return out.float().mean()
    return out.loss if out.get("loss") is not None else out.last_hidden_state.mean()


@dataclass
class Way:
    """One way to run a model: its function, its parameters, how it takes a batch, and the times in ms."""

    run: Callable[..., Any]
    model: nn.Module
    inputs: Callable[[nta.SequenceLayout, Tensor], dict[str, Any]]
    steps: tuple[str, ...] = ("infer", "train")
    ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    def infer(self, batch: dict[str, Any]) -> Any:
        with torch.no_grad():
            return self.run(**{name: x for name, x in batch.items() if name != "labels"})

    def train(self, batch: dict[str, Any]) -> None:
        loss_of(self.run(**batch)).backward()
        for parameter in self.parameters:
            parameter.grad = None


def hugging_face(kind: Any, config: Any) -> dict[str, Way]:
    labels = "For" in kind.__name__

    def make(implementation: str) -> Any:
        torch.manual_seed(0)
        own = copy.deepcopy(config)  # a model writes its attention to its config
        return kind._from_config(own, attn_implementation=implementation).to(DEVICE, DTYPE)

    def padded(layout: nta.SequenceLayout, ids: Tensor) -> dict[str, Any]:
        mask = pad(layout, torch.ones_like(ids))
        batch = {"input_ids": pad(layout, ids), "attention_mask": mask}
        return batch | ({"labels": batch["input_ids"].masked_fill(mask == 0, -100)} if labels else {})

    def by_hand(layout: nta.SequenceLayout, ids: Tensor) -> dict[str, Any]:
        batch = {
            "input_ids": ids[None], "position_ids": layout.position_ids[None],
            "cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens,
            "max_length_q": layout.max_seqlen, "max_length_k": layout.max_seqlen,
        }  # fmt: skip
        if labels:
            batch |= {"labels": ids.masked_fill(layout.position_ids == 0, -100)[None], "use_cache": False}
        return batch

    patched, stock, registered = make("sdpa"), make("sdpa"), make(nta.hf.register())
    nta.patch(patched, on_fallback="raise")
    ways = both("padded", stock, padded) | both("patched", patched, padded)
    if GPU:
        captured = make("sdpa"), make("sdpa")  # one each, because compiled and other graphs count to one limit
        for model in captured:
            nta.patch(model, on_fallback="raise", cuda_graphs="training")
        steps = ("train",) if labels else ("infer", "train")
        compiled = torch.compile(captured[1], dynamic=True)
        ways["patched, with graphs"] = Way(captured[0], captured[0], padded, steps)
        ways["patched, with graphs, compiled"] = Way(compiled, captured[1], padded, steps)
    return ways | both("packed by hand", registered, by_hand)


def encoder() -> dict[str, Way]:
    layers, width, heads = (4, 1024, 16) if GPU else (2, 64, 4)

    def make() -> nn.Module:
        torch.manual_seed(0)
        options = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        layer = nn.TransformerEncoderLayer(width, heads, **options, device=DEVICE, dtype=DTYPE)
        return nn.TransformerEncoder(layer, layers)

    def padded(layout: nta.SequenceLayout, ids: Tensor) -> dict[str, Any]:
        rows = table[ids]
        padding = pad(layout, torch.ones_like(ids)) == 0
        return {"src": pad(layout, rows).requires_grad_(), "src_key_padding_mask": padding}

    patched, stock = make(), make()
    table = torch.randn(30000, width, device=DEVICE, dtype=DTYPE)
    nta.patch(patched, on_fallback="raise")
    ways = both("padded", stock, padded) | both("patched", patched, padded)
    if GPU:
        captured = make(), make()
        for model in captured:
            nta.patch(model, on_fallback="raise", cuda_graphs="training")
        for layer in captured[1].layers:
            layer.compile(dynamic=True)
        ways["patched, with graphs"] = Way(captured[0], captured[0], padded)
        ways["patched, with graphs, compiled"] = Way(captured[1], captured[1], padded)
    return ways


def pad(layout: nta.SequenceLayout, packed: Tensor) -> Tensor:
    """(T, …) → (B, L, …), where L is a multiple of 8: with other lengths, padded sdpa copies its mask for each head."""
    return nta.SequenceLayout.from_offsets(layout.offsets, max_seqlen=-(-layout.max_seqlen // 8) * 8).pad(packed)


def both(name: str, model: nn.Module, inputs: Callable[..., dict[str, Any]]) -> dict[str, Way]:
    compiled = torch.compile(model, dynamic=True)
    return {name: Way(model, model, inputs), f"{name}, compiled": Way(compiled, model, inputs)}


MODELS: dict[str, tuple[Callable[[], dict[str, Way]], tuple[str, ...]]] = {
    "bert": (
        lambda: hugging_face(BertModel, without_dropout(BertConfig(**TINY))),
        ("lognormal:512", "lognormal:128"),
    ),
    "modernbert": (
        lambda: hugging_face(ModernBertModel, ModernBertConfig(**TINY)), ("lognormal:512",)
    ),
    "llama": (
        lambda: hugging_face(LlamaForCausalLM, LlamaConfig(**LLAMA | TINY)), ("lognormal:512",)
    ),
    "encoder": (encoder, ("lognormal:2048", "lognormal:128")),
}  # fmt: skip


def without_dropout(config: Any) -> Any:
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return config


def draw(name: str, distribution: str, seed: int) -> tuple[nta.SequenceLayout, Tensor]:
    tokens = {"encoder": 32768, "llama": 8192}.get(name, 16384) if GPU else 512
    layout = nta.SequenceLayout.from_lengths(draw_lengths(distribution, tokens, seed), device=DEVICE)
    return layout, torch.randint(5, 100 if TINY else 30000, (layout.total,), device=DEVICE)


def compare(found: dict[str, Way], batch: tuple[nta.SequenceLayout, Tensor]) -> None:
    """Raise if the output of a way differs from that of padded."""
    layout = batch[0]

    def tokens(way: Way) -> Tensor:
        out = way.infer(way.inputs(*batch))
        rows = out if isinstance(out, Tensor) else out.logits if "logits" in out else out.last_hidden_state
        return (rows[0] if rows.shape[:2] == (1, layout.total) else layout.pack(rows)).float()

    want = tokens(found["padded"])
    for name, way in found.items():
        error = ((tokens(way) - want).norm(dim=-1) / want.norm(dim=-1)).median()
        if not error < 0.05:
            raise SystemExit(f"{name}: tokens differ from padded by {error:.3f} of their norm")


def measure(name: str, distribution: str, found: dict[str, Way], what: str, steps: int) -> None:
    """Times `steps` batches by turns, into the ways. A way that fails has no times."""
    found = {way_name: way for way_name, way in found.items() if what in way.steps}
    for way in found.values():
        way.model.train(what == "train")
        way.ms[distribution, what] = []
    for seed in range(WARMUP + steps):
        batch = draw(name, distribution, seed)
        for way_name, way in list(found.items()):
            inputs = way.inputs(*batch)
            try:
                ms = wall_clock_ms(lambda way=way, inputs=inputs: getattr(way, what)(inputs))
            except RuntimeError as error:  # as in a padded model with cuDNN's attention
                print(f"{way_name} fails: {str(error)[:80]}", file=sys.stderr, flush=True)
                del found[way_name], way.ms[distribution, what]
                continue
            way.ms[distribution, what] += [ms] if seed >= WARMUP else []
    medians = [f"{way_name} {statistics.median(way.ms[distribution, what]):.2f}" for way_name, way in found.items()]
    print(f"{name}, {distribution}, {what}:", *medians, sep=" | ", file=sys.stderr, flush=True)


def replay_ms(name: str, distribution: str, way: Way, steps: int = 4) -> float:
    """The time of inference in a captured CUDA graph, the median over the batches of `busy_ms`."""
    way.model.eval()
    times = []
    for seed in range(WARMUP, WARMUP + steps):
        inputs = way.inputs(*draw(name, distribution, seed))
        way.infer(inputs)  # reads the lengths, as a graph can't do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            way.infer(inputs)
        times += [wall_clock_ms(graph.replay) for _ in range(5)]
    return statistics.median(times)


def busy_ms(name: str, distribution: str, way: Way, what: str, steps: int = 4) -> float:
    """The time in which the device is busy in a step, the median over `steps` batches."""
    way.model.train(what == "train")
    batches = (way.inputs(*draw(name, distribution, seed)) for seed in range(WARMUP, WARMUP + steps))
    return device_busy_ms(partial(getattr(way, what), inputs) for inputs in batches)


def table(name: str, found: dict[str, Way]) -> list[str]:
    lines = []
    if GPU and "packed by hand" in found:  # before the profiler runs
        for distribution in {distribution for distribution, _ in found["packed by hand"].ms}:
            ms = replay_ms(name, distribution, found["packed by hand"])
            lines.append(f"| {name}, {distribution} | inference | packed by hand, a captured CUDA graph | {ms:.2f} | |")
    for distribution, what in found["patched, compiled"].ms:
        base = found["patched, compiled"].ms[distribution, what]
        for way_name, way in found.items():
            if (ms := way.ms.get((distribution, what))) is None:
                continue
            ratio = statistics.median(a / b for a, b in zip(ms, base, strict=True))
            busy = f"{busy_ms(name, distribution, way, what):.2f}" if GPU else ""
            lines.append(
                f"| {name}, {distribution} | {'training' if what == 'train' else 'inference'} | {way_name} | "
                f"{statistics.median(ms):.2f} ({ratio:.2f} ×) | {busy} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--lengths", nargs="+", help="distributions of lengths, such as lognormal:512")
    parser.add_argument("--ways", nargs="+", help='ways besides "padded" and "patched, compiled"; default: all')
    parser.add_argument("--steps", type=int, default=16 if GPU else 4)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    machine = torch.cuda.get_device_name() if GPU else "CPU"
    make, distributions = MODELS[options.model]
    reserve_memory()
    found = make()
    if options.ways is not None:
        if unknown := set(options.ways) - found.keys():
            parser.error(f"there is no way {unknown.pop()!r}: pass some of {list(found)}.")
        found = {name: way for name, way in found.items() if name in ("padded", "patched, compiled", *options.ways)}
    for distribution in options.lengths or distributions:
        for way in found.values():
            way.model.eval()
        compare(found, draw(options.model, distribution, 1000))
        for what in ("infer", "train"):
            measure(options.model, distribution, found, what, options.steps)
    lines = [
        f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}, {str(DTYPE)[6:]}; "
        "wall-clock ms; × is over patched, compiled",
        "",
        "| model | | way | wall-clock | the device is busy for |",
        "|---|---|---|---|---|",
        *table(options.model, found),  # profiles: nothing is timed after it
    ]
    show(lines, options.save)


if __name__ == "__main__":
    main()
