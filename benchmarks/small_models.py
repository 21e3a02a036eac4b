"""Training of a small encoder with sentence-transformers, as its users write it: padded, patched, with CUDA graphs.

    python benchmarks/small_models.py pairs [--save FILE]              MiniLM-L6's shape, 128 pairs, on a GPU
    python benchmarks/small_models.py triplets                         three forwards a step
    python benchmarks/small_models.py cross                            a cross-encoder
    python benchmarks/small_models.py pairs --model bert --rows 426    the device takes the time, not the host
    python benchmarks/small_models.py causal --rows 64                 a language model of Qwen3-0.6B's shape
    python benchmarks/small_models.py pairs --warm-up 2000             memory over many steps
    python benchmarks/small_models.py pairs --total 500                the time of 500 steps from the first one on

MultipleNegativesRankingLoss (``cached``: CachedMultipleNegativesRankingLoss; ``cross``: binary cross-entropy of the two
texts in one row), AdamW, autocast to bf16 with float32 weights, no dropout, random weights and words. Lengths are
lognormal, with other ones in each of 64 batches. Each way trains a model of its own from the same weights on the same
batches. First the ways run one after another: the time of the first 50 steps with everything that is compiled and
captured there, the losses of these, and memory. Then they run by turns, 10 steps each: medians of wall-clock times from
device sync to device sync. With ``--busy``, the profiler says how long the device is busy in a step. Memory is what the
allocator has reserved for a way, with its model. With ``--total`` the ways run by turns, 50 steps each, from their
first step on, and the result is the time of all steps, captures included.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers
from by_turns import device_busy_ms, show, synchronize, wall_clock_ms
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import BertConfig, BertModel, BertTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import nt_attention as nta

losses: Any = importlib.import_module("sentence_transformers.losses")  # they have other places in newer versions
models: Any = importlib.import_module("sentence_transformers.models")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BATCHES = 64 if GPU else 2
WORDS = 5000 if GPU else 50
SHAPES: dict[str, dict[str, int]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}
QWEN = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 32000,
} if GPU else {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip
COLUMNS = {"pairs": 2, "triplets": 3, "cached": 2, "cross": 2, "causal": 1}  # texts in a row
PATCHES: dict[str, dict[str, Any] | None] = {
    "padded": None,
    "patch": {},
    'cuda_graphs="training"': {"cuda_graphs": "training"},
    'cuda_graphs="auto"': {"cuda_graphs": "auto"},
}


@dataclass
class Way:
    """One way to train.

    Attributes:
        step: trains on batch number i, and returns the loss.
        handle: of the patch.
        first_seconds: the time of the first 50 steps.
        losses: those of these.
        memory: GiB, after the first 200 steps and at the end of the warm-up.
    """

    step: Callable[[int], torch.Tensor]
    handle: Any
    done: int = 0
    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def run(self) -> torch.Tensor:
        self.done += 1
        return self.step(self.done - 1)


def save_model(folder: str, shape: str) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(WORDS))]
    vocabulary = Path(folder) / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizerFast(vocab_file=str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(words), **SHAPES[shape], **dropout)).save_pretrained(folder)


def make_texts(rows: int, columns: int) -> list[list[list[str]]]:
    """Batch → column → texts of 3 to 200 words."""
    draw = random.Random(1)

    def text() -> str:
        length = max(3, min(200, int(draw.lognormvariate(3.3, 0.8))))
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(length))

    return [[[text() for _ in range(rows)] for _ in range(columns)] for _ in range(BATCHES)]


def make_way(folder: str, task: str, texts: list[list[list[str]]], options: dict[str, Any] | None) -> Way:
    make = {"cross": cross_encoder, "causal": language_model}.get(task, sentence_encoder)
    model, loss_of, batches = make(folder, task, texts)
    handle = None if options is None else nta.patch(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=GPU)  # as the Trainer does

    def step(i: int) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Way(step, handle)


# A model, the loss of a batch, and the batches
Task = tuple[Any, Callable[[Any], torch.Tensor], list[Any]]


def sentence_encoder(folder: str, task: str, texts: list[list[list[str]]]) -> Task:
    transformer = models.Transformer(folder, max_seq_length=256)
    pooling = models.Pooling(transformer.get_word_embedding_dimension())
    model = SentenceTransformer(modules=[transformer, pooling], device=DEVICE).train()
    loss_of: Any = losses.MultipleNegativesRankingLoss(model)
    if task == "cached":
        loss_of = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=64)
    tokenize = getattr(model, "preprocess", model.tokenize)  # its name in newer versions
    batches = [[_on_device(tokenize(column)) for column in batch] for batch in texts]
    return model, lambda batch: loss_of([dict(features) for features in batch], None), batches


def cross_encoder(folder: str, task: str, texts: list[list[list[str]]]) -> Task:
    model = CrossEncoder(folder, num_labels=1, max_length=512, device=DEVICE).train()
    labels = (torch.arange(len(texts[0][0]), device=DEVICE) % 2).float()
    batches = [_on_device(model.preprocess(list(zip(*batch, strict=True)))) for batch in texts]

    def loss_of(features: dict[str, Any]) -> torch.Tensor:
        scores = model(dict(features))["scores"].view(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)

    return model, loss_of, batches


def language_model(folder: str, task: str, texts: list[list[list[str]]]) -> Task:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN)).train()
    batches = []
    for (column,) in texts:
        lengths = torch.tensor([4 * len(text.split()) for text in column])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.randint(3, QWEN["vocab_size"], mask.shape, generator=torch.Generator().manual_seed(0)) * mask
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        batches.append(_on_device(batch))
    return model, lambda batch: model(**batch, use_cache=False).loss, batches


def _on_device(features: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in features.items()}


def reserved_gib() -> float:
    """What the allocator holds after it has returned what it can."""
    if not GPU:
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved() / 2**30


def warm_up(make: Callable[[], Way], steps: int) -> Way:
    """Make a way, and run its first steps. The memory of ways that exist already is not counted."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    before = reserved_gib()
    way = make()
    synchronize()
    began = time.perf_counter()
    first = [way.run() for _ in range(min(50, steps))]
    synchronize()
    way.first_seconds = time.perf_counter() - began
    way.losses = [float(x) for x in first]
    for i in range(len(first), steps):
        way.run()
        if i == 199:
            way.memory.append(reserved_gib() - before)
    way.memory.append(reserved_gib() - before)
    return way


def total_times(ways: dict[str, Way], steps: int) -> list[str]:
    """Lines of a table: the time of the first steps of each way, captures included. The ways run by turns, 50 each."""
    seconds = dict.fromkeys(ways, 0.0)
    for begin in range(0, steps, 50):
        for name, way in ways.items():
            synchronize()
            began = time.perf_counter()
            for _ in range(min(50, steps - begin)):
                way.run()
            synchronize()
            seconds[name] += time.perf_counter() - began
    without = "patch" if "patch" in ways else next(iter(ways))
    lines = [f"| way | seconds of {steps} steps | relative to {without} | graphs, captures |", "|---|---|---|---|"]
    for name, way in ways.items():
        ratio = seconds[name] / seconds[without]
        lines.append(f"| {name} | {seconds[name]:.2f} | {ratio:.3f} | {graphs_of(way)} |")
    return lines


def graphs_of(way: Way) -> str:
    graphs = getattr(way.handle, "graphs", None)
    return "" if graphs is None else f"{len(graphs)}, {graphs.captured}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(COLUMNS))
    parser.add_argument("--model", default="minilm" if GPU else "tiny", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=128 if GPU else 4)
    parser.add_argument("--ways", nargs="+", default=list(PATCHES), choices=list(PATCHES))
    parser.add_argument("--packing", default="auto", choices=["auto", "always"])
    parser.add_argument("--warm-up", type=int, default=200 if GPU else 6, help="steps")
    parser.add_argument("--rounds", type=int, default=6 if GPU else 1, help="of 10 steps of each way")
    parser.add_argument("--total", type=int, default=0, metavar="STEPS", help="measure the time of all steps instead")
    parser.add_argument("--busy", action="store_true", help="measure how long the device is busy")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    texts = make_texts(options.rows, COLUMNS[options.task])
    ways: dict[str, Way] = {}
    device = torch.cuda.get_device_name() if GPU else "CPU"
    words = statistics.mean(len(text.split()) + 2 for batch in texts for column in batch for text in column)
    shape = f"{options.model}, {options.rows} {options.task} of {words:.1f} tokens a text"
    if options.task == "causal":
        shape = f"Qwen3-0.6B's shape, {options.rows} rows of {4 * words - 8:.0f} tokens"
    title = (
        f"{device}, torch {torch.__version__}, transformers {transformers.__version__}, sentence-transformers "
        f"{sentence_transformers.__version__}; {shape}"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.model)
        for name in options.ways:
            patch = PATCHES[name]
            patch = None if patch is None else {**patch, "packing": options.packing}
            make = partial(make_way, folder, options.task, texts, patch)
            if options.total:
                ways[name] = make()
                continue
            ways[name] = warm_up(make, options.warm_up)
            print(f"{name}: {ways[name].first_seconds:.1f} s for the first steps", flush=True)
            for _ in range(10):
                ways[name].ms.append(wall_clock_ms(ways[name].run))
            print(f"  {statistics.median(ways[name].ms):.2f} ms a step\n{ways[name].handle or ''}", flush=True)
            ways[name].ms.clear()
    if options.total:
        show([title, "", *total_times(ways, options.total)], options.save)
        return
    for _ in range(options.rounds):
        for way in ways.values():
            way.ms += [wall_clock_ms(way.run) for _ in range(10)]
    lines = [
        f"{title}; ms a step",
        "",
        "| way | median | quartiles | speedup | the device is busy for | first 50 steps, s "
        "| loss differs by | GiB after 200 steps, at the end | graphs, captures |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = next(iter(ways.values()))
    for name, way in ways.items():
        low, middle, high = statistics.quantiles(way.ms, n=4)
        cells = [
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{statistics.median(first.ms) / middle:.2f} ×",
            f"{device_busy_ms([way.run] * 6):.2f}" if options.busy and GPU else "",
            f"{way.first_seconds:.1f}",
            f"{max(abs(x / y - 1) for x, y in zip(way.losses, first.losses, strict=True)):.1e}",
            ", ".join(f"{x:.2f}" for x in way.memory),
            graphs_of(way),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, way in ways.items():
        if way.handle is not None:
            graphs = {} if way.handle.graphs is None else way.handle.graphs.counted()
            waits = way.handle.counts.waits
            lines += ["", f"{name}: {dict(way.handle.calls)}; graphs {graphs}; waits {waits.waits} of {waits.calls}"]
    show(lines, options.save)


if __name__ == "__main__":
    main()
