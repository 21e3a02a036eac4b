"""Supervised fine-tuning with TRL, patched before the trainer is built. The losses of padded and packed runs agree.

TRL computes the loss with a head of its own, which calls the base model. The patch packs there. The model has random
weights, and the text is Python's documentation, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from shared_data import llama_config, paragraphs, tokenizer
from transformers import LlamaForCausalLM, PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer

import nt_attention as nta


def train(patched: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The loss at every step, the time in seconds, and the counts of the handle."""
    set_seed(0)
    model = LlamaForCausalLM(llama_config(options.hidden_size))
    handle = nta.patch(model, on_fallback="raise") if patched else None  # the only new line
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, log_level="error",
        )  # fmt: skip
        texts = Dataset.from_list([{"text": text} for text in paragraphs(256, 16 * options.steps)])
        trainer = SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer())
        trainer.remove_callback(PrinterCallback)
        seconds = trainer.train().metrics["train_runtime"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "seconds": seconds, "calls": dict(handle.calls) if handle else {}}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args(argv)
    results = {"padded": train(False, options), "nta.patch": train(True, options)}
    for name, result in results.items():
        print(f"{name:>9}  {result['seconds']:6.2f} s  " + " ".join(f"{loss:.4f}" for loss in result["losses"]))
    return results


if __name__ == "__main__":
    main()
