"""Measure whether `patch` would make a Hugging Face model faster on some texts or lengths."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from .._estimate import MOST_BATCHES, estimate
from .environment import device_name, devices, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a model; without weights there, they are random")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--lengths", type=Path, metavar="FILE", help="a number of tokens in each line")
    data.add_argument("--text", type=Path, metavar="FILE", help='texts, one in a line; .jsonl: objects with "text"')
    add("--batch", type=positive, default=32, metavar="ROWS", help="rows in each batch, in their order (default: 32)")
    add("--training", action="store_true", help="forward and backward; default: the forward in evaluation mode")
    add("--seconds", type=positive, default=20, help="about how long to measure (default: 20)")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--device", choices=devices(), default=devices()[0])


def main(options: argparse.Namespace) -> int:
    dtype = getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "bfloat16"))
    try:
        from ..hf.pretrained import load_model  # imports transformers

        batches = _batches(options)
        model = load_model(options.model, options.device, dtype)
        result = estimate(model, batches, training=options.training, seconds=options.seconds)
    except (ImportError, OSError, ValueError) as error:
        options.error(str(error))
    print(f"{device_name(torch.device(options.device))}; {dtype}\n{result}")
    return 0


def _batches(options: argparse.Namespace) -> Iterable[Any]:
    """Lists of lengths, or padded batches of token ids. Files with errors raise an OSError or a ValueError."""
    file, rows = options.lengths or options.text, options.batch
    with file.open(encoding="utf-8") as opened:
        lines = [line for line in islice(opened, MOST_BATCHES * rows) if line.strip()]
    items: list[Any] = lines
    try:
        if options.lengths:
            items = list(map(int, lines))
        elif file.suffix == ".jsonl":
            items = [json.loads(line)["text"] for line in lines]
    except (KeyError, TypeError, ValueError):
        needed = "a number of tokens" if options.lengths else 'an object with a field "text"'
        raise ValueError(f"{file}: each line must be {needed}.") from None
    batches = [items[i : i + rows] for i in range(0, len(items), rows)]
    if options.lengths:
        return batches
    from ..hf.pretrained import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    return (tokenizer(texts, padding=True, truncation=True, return_tensors="pt") for texts in batches)
