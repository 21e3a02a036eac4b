"""The time of a trainer's step on a patched model, and of the same trainer on the unpatched model.

    python benchmarks/trainers.py [--task sft dpo] [--rounds 3] [--save FILE]       on a CPU, TRL's trainers
    python benchmarks/trainers.py --device cuda [--save FILE]                       on a GPU, transformers' Trainer
    python benchmarks/trainers.py --device cuda --task classification --batch-size 32 --steps 100 --warm 50

On a CPU: SFT and DPO of a Llama (4 layers, 256 wide, float32) on paragraphs of Python's documentation. DPO's reference
model is patched as well. On a GPU: causal language modeling of a Llama of 8 layers (2048 wide, 32 / 8 heads, 32,000
tokens in its vocabulary, bf16) with its head and AdamW, on rows of lognormal lengths up to 4096. ``classification`` is
a BERT-base with float32 weights, autocast to bf16 and no dropout, on rows of lognormal lengths up to 128; its patch has
``cuda_graphs="auto"``. Weights are random.

Times are wall-clock times of whole steps: forward, backward, gradient clipping and optimizer, without the collator.
Padded and patched alternate round by round. Times are medians over all steps but the first ``--warm`` of a round. The
pad ratio is the number of positions that the model is called with, over the number of tokens.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from workloads import draw_lengths

import nt_attention as nta

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from shared_data import llama_config, padded_batch, paragraphs, tokenizer


@dataclass
class Way:
    """One way to run a trainer, and its measurements."""

    seconds: list[float] = field(default_factory=list)  # of every counted step
    losses: list[float] = field(default_factory=list)  # of the first round
    positions: int = 0
    tokens: int = 0
    calls: dict[Any, int] = field(default_factory=dict)
    peak: float = 0.0


class Clock(TrainerCallback):
    """Times every step, on a GPU from device sync to device sync."""

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        self.way, self.cuda, self.warm, self.done = way, options.device == "cuda", options.warm, 0

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.done += 1
        if self.done > self.warm:
            self.way.seconds.append(self.now() - self.begun)


def given(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": folder, "max_steps": options.steps + options.warm, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "log_level": "error", "learning_rate": 1e-4, "seed": 0,
        "use_cpu": options.device == "cpu", "per_device_train_batch_size": options.batch_size,
    }  # fmt: skip


def small_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(llama_config(256, 4, 8))


def sft(model: Any, folder: str, options: argparse.Namespace) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": text} for text in paragraphs(options.length)])
    arguments = SFTConfig(**given(folder, options), bf16=False, gradient_checkpointing=False)
    return SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer())


def dpo(model: Any, folder: str, options: argparse.Namespace) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    texts = paragraphs(options.length)
    pairs = Dataset.from_list(
        [
            {"prompt": text[: len(text) // 3], "chosen": text[len(text) // 3 :], "rejected": other}
            for text, other in zip(texts, reversed(texts), strict=True)
        ]
    )
    arguments = DPOConfig(**given(folder, options), bf16=False, gradient_checkpointing=False)
    return DPOTrainer(model, args=arguments, train_dataset=pairs, processing_class=tokenizer())


def large_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).cuda()


def language(model: Any, folder: str, options: argparse.Namespace) -> Any:
    lengths = draw_lengths("lognormal:4096", 4 * 1024 * options.batch_size * options.steps, seed=276)
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(255, (n,), generator=generator).tolist()} for n in lengths]
    arguments = TrainingArguments(**given(folder, options), optim="adamw_torch_fused")
    return Trainer(
        model, arguments, train_dataset=rows, data_collator=lambda rows: padded_batch(r["input_ids"] for r in rows)
    )


def bert() -> BertForSequenceClassification:
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config).cuda()


def classification(model: Any, folder: str, options: argparse.Namespace) -> Any:
    count = options.batch_size * (options.steps + options.warm)
    lengths = draw_lengths("lognormal:128", 64 * count, seed=276)[:count]
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(300, 30000, (n,), generator=generator).tolist()} for n in lengths]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        batch = padded_batch(row["input_ids"] for row in rows)
        return {**batch, "labels": batch["input_ids"][:, 0] % 2}

    arguments = TrainingArguments(**given(folder, options), bf16=True, optim="adamw_torch_fused")
    return Trainer(model, arguments, train_dataset=rows, data_collator=collate)


# The model, its trainer, and options of `nta.patch`
TASKS: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any]]] = {
    "sft": (small_llama, sft, {}),
    "dpo": (small_llama, dpo, {}),
    "language": (large_llama, language, {}),
    "classification": (bert, classification, {"cuda_graphs": "auto"}),
}


def count_positions(model: Any, way: Way) -> Any:
    """Count the positions and tokens that the base model is called with, before packing."""

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            way.positions += mask.numel()
            way.tokens += int(mask.sum())

    return model.base_model.register_forward_pre_hook(look, with_kwargs=True)


def run(task: str, way: Way, patched: bool, first: bool, options: argparse.Namespace) -> None:
    make_model, make_trainer, patch = TASKS[task]
    set_seed(0)
    model = make_model()
    if task == "dpo":  # TRL loads the reference model from the path
        source = tempfile.mkdtemp()
        model.save_pretrained(source)
        model = LlamaForCausalLM.from_pretrained(source)
    handle = nta.patch(model, on_fallback="raise", **patch) if patched else None
    hook = count_positions(model, way) if first and not patched else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, folder, options)
        if patched and task == "dpo":  # TRL's own head calls the base model
            nta.patch(trainer.ref_model.base_model, on_fallback="raise")
        trainer.add_callback(Clock(way, options))
        trainer.remove_callback(transformers.PrinterCallback)
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    if options.device == "cuda":
        way.peak = torch.cuda.max_memory_allocated() / 2**30
    if first:
        way.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        way.calls = dict(handle.calls) if handle is not None else {}
    if hook is not None:
        hook.remove()


def measure(task: str, options: argparse.Namespace) -> str:
    padded, patched = Way(), Way()
    for number in range(options.rounds):
        run(task, padded, False, number == 0, options)
        run(task, patched, True, number == 0, options)
    assert set(patched.calls) == {None}, patched.calls
    before, after = statistics.median(padded.seconds), statistics.median(patched.seconds)
    ratio, waste = before / after, padded.positions / padded.tokens
    apart = max(abs(a - b) for a, b in zip(padded.losses, patched.losses, strict=True))
    memory = f" {padded.peak:.1f} → {patched.peak:.1f} |" if options.device == "cuda" else ""
    return (
        f"| {task} | {waste:.2f} | {1 / before:.3f} | {1 / after:.3f} | {ratio:.2f} × | {ratio / waste:.2f} |"
        f"{memory} {padded.losses[0]:.4f} → {padded.losses[-1]:.4f} | {apart:.1e} | {len(padded.seconds)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--task", nargs="+", choices=list(TASKS))
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each round")
    parser.add_argument("--warm", type=int, default=2, help="steps of each round that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=400, help="the characters of a paragraph that are used (CPU)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} threads of a CPU"
    memory = " peak GiB, padded → patched |" if options.device == "cuda" else ""
    lines = [
        f"`python benchmarks/trainers.py {' '.join(sys.argv[1:])}`: {device}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}.",
        "",
        "| task | pad ratio | padded steps/s | patched steps/s | ratio | of the pad ratio |"
        f"{memory} loss, first → last | largest difference of a loss | steps |",
        f"|---|---|---|---|---|---|{'---|' if memory else ''}---|---|---|",
    ]
    for task in options.task or (["language"] if options.device == "cuda" else ["sft", "dpo"]):
        lines.append(measure(task, options))
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        options.save.write_text(text)


if __name__ == "__main__":
    main()
