"""Train sentence embeddings with the trainer of sentence-transformers, padded and packed. The losses agree.

``nta.patch`` finds the model inside the SentenceTransformer. The task is to find the second half of a paragraph from
its first half. The model has random weights, and the text is Python's documentation, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from shared_data import PAD, VOCABULARY, paragraphs, tokenizer
from transformers import BertConfig, BertModel, PrinterCallback, set_seed

import nt_attention as nta


def make_model(folder: str, hidden_size: int) -> SentenceTransformer:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * hidden_size, pad_token_id=PAD, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    words = tokenizer()
    words.model_max_length = 256
    words.save_pretrained(folder)
    return SentenceTransformer(folder, device="cpu")


def train(patched: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The loss at every step, the time in seconds, and the counts of the handle."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, options.hidden_size)
        handle = nta.patch(model, on_fallback="raise") if patched else None  # the only new line
        arguments = SentenceTransformerTrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, log_level="error",
        )  # fmt: skip
        texts = paragraphs(256, 16 * options.steps)
        pairs = [{"first": text[: len(text) // 2], "second": text[len(text) // 2 :]} for text in texts]
        trainer = SentenceTransformerTrainer(
            model, args=arguments, train_dataset=Dataset.from_list(pairs), loss=MultipleNegativesRankingLoss(model)
        )
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
