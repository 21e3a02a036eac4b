"""Train a Llama with the Hugging Face Trainer: padded, padded with ``nta.patch``, and packed rows. The losses agree.

There are two ways to train without padding in a program that uses Trainer. Patch the model and change nothing else, or
select our attention by name and let ``DataCollatorWithFlattening`` pack each batch into one row. The model has random
weights, and the text is Python's own documentation as bytes, so nothing is downloaded. At full size, on a GPU:
``python examples/fine_tune_with_trainer.py --device cuda --bf16 --hidden-size 1024 --layers 16 --length 2048``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from shared_data import llama_config, padded_batch, paragraphs
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import nt_attention as nta

Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]


def examples(length: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in paragraphs(length)]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return padded_batch(row["input_ids"] for row in rows)


def make_model(options: argparse.Namespace, attention: str) -> PreTrainedModel:
    set_seed(0)
    config = llama_config(options.hidden_size, options.layers, options.heads)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def train(
    model: PreTrainedModel, collate: Collate, options: argparse.Namespace, folder: str, steps: int
) -> dict[str, Any]:
    """The loss at every step, and the time of the training in seconds."""
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=options.batch_size, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=0, use_cpu=options.device == "cpu",
        bf16=options.bf16, log_level="error",
    )  # fmt: skip
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    trainer = Trainer(model, arguments, train_dataset=examples(options.length), data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    seconds = trainer.train().metrics["train_runtime"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "seconds": seconds}


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="characters that count of a paragraph")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    options = parser.parse_args(argv)

    packed_rows = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ways = {
        "padded": ("sdpa", pad, False),
        "padded, nta.patch": ("sdpa", pad, True),
        "packed rows, nta.hf.register": (nta.hf.register(), packed_rows, False),
    }
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        train(make_model(options, "sdpa"), pad, options, folder, 1)  # warm up
        for name, (attention, collate, patched) in ways.items():
            model = make_model(options, attention)
            with nta.patch(model) if patched else nullcontext() as handle:
                result = train(model, collate, options, folder, options.steps)
            curves[name] = result["losses"]
            print(f"{name:>28}  {result['seconds']:7.2f} s  " + " ".join(f"{loss:.4f}" for loss in curves[name]))
            if handle is not None:
                print(f"{handle.calls[None]} batches ran packed")
    return curves


if __name__ == "__main__":
    main()
