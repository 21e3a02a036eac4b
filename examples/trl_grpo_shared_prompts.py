"""Train with GRPO in TRL, and compute the prompt of each group once. Rewards and gradient norms stay the same.

TRL repeats a prompt in the row of each of its answers. The model has random weights, and the text is Python's
documentation, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from shared_data import llama_config, paragraphs, tokenizer
from transformers import LlamaForCausalLM, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl_grpo import letters

import nt_attention as nta


def train(shared: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The reward and the gradient norm at every step, and the handle."""
    set_seed(0)
    model = LlamaForCausalLM(llama_config(options.hidden_size))
    handle = nta.patch(model, shared_prefixes=shared)  # the only new line
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, max_steps=options.steps, per_device_train_batch_size=8, num_generations=8, learning_rate=1e-3,
            max_completion_length=16, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, bf16=False, log_level="error", optim="sgd",
        )  # fmt: skip
        prompts = Dataset.from_list([{"prompt": text} for text in paragraphs(300, 64)])
        trainer = GRPOTrainer(
            model, reward_funcs=letters, args=arguments, train_dataset=prompts, processing_class=tokenizer()
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"rewards": [x["reward"] for x in steps], "norms": [x["grad_norm"] for x in steps], "handle": handle}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args(argv)
    results = {"packed": train(False, options), "shared": train(True, options)}
    for name, result in results.items():
        steps = (f"{reward:.3f} ({norm:.4f})" for reward, norm in zip(result["rewards"], result["norms"], strict=True))
        print(f"{name:>9}  reward (gradient norm): " + "  ".join(steps))
    print(results["shared"]["handle"].prefixes)
    return results


if __name__ == "__main__":
    main()
