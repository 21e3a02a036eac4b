"""Train with GRPO in TRL on a patched model: generation runs padded, with a cache, and training runs packed.

The reward is the share of letters in the generated text. Losses and gradient norms agree with the padded model. The
model has random weights, and the text is Python's documentation, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from shared_data import llama_config, paragraphs, tokenizer
from transformers import LlamaForCausalLM, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

import nt_attention as nta


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]


def train(model: LlamaForCausalLM, prompts: list[str], steps: int, answers: int = 4) -> dict[str, list[float]]:
    """The reward and the gradient norm at every step. Each prompt gets this number of answers."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, max_steps=steps, per_device_train_batch_size=8, num_generations=answers, learning_rate=1e-3,
            max_completion_length=16, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, bf16=False, log_level="error", optim="sgd",
        )  # fmt: skip
        data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        trainer = GRPOTrainer(
            model, reward_funcs=letters, args=arguments, train_dataset=data, processing_class=tokenizer()
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"rewards": [step["reward"] for step in logged], "norms": [step["grad_norm"] for step in logged]}


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the reward and the gradient norm of every step, for each way to train."""
    for name, result in results.items():
        steps = (f"{reward:.3f} ({norm:.4f})" for reward, norm in zip(result["rewards"], result["norms"], strict=True))
        print(f"{name:>9}  reward (gradient norm): " + "  ".join(steps))


def run(patched: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The steps, and the counts of the handle."""
    set_seed(0)
    model = LlamaForCausalLM(llama_config(options.hidden_size))
    handle = nta.patch(model) if patched else None  # the only new line
    prompts = [text[: 5 + 7 * (i % 8)] for i, text in enumerate(paragraphs(64, 64))]
    return {**train(model, prompts, options.steps), "calls": dict(handle.calls) if handle else {}}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args(argv)
    results = {"padded": run(False, options), "nta.patch": run(True, options)}
    show(results)
    for why, count in results["nta.patch"]["calls"].items():
        print(f"{count:>5} calls {'packed' if why is None else f'padded: {why}'}")
    return results


if __name__ == "__main__":
    main()
