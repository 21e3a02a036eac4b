"""Steps of a causal model on rows that begin with the same tokens: padded, packed, and with shared prefixes.

    python benchmarks/shared_prefixes.py [--rounds 9] [--width 256] [--layers 4] [--trainers] [--save FILE]

On a GPU in bf16, else on two threads of a CPU in float32. The ways run by turns, on the same batch; times are medians
in ms. A step is a forward, and a backward where the batch is for training. The model is a Llama with random weights.
Lengths are lognormal.

    GRPO        4 prompts of at most 512 tokens, with 8 answers of at most 64 each, logits of the answers
    DPO         4 pairs, prompts of 256 tokens, answers of at most 64, logits of all tokens
    evaluation  32 rows with 384 common tokens and 16 of their own, without gradients
    nothing     16 rows that share nothing

`--trainers` runs steps of TRL's trainers on Python's documentation instead, on a CPU: packed, and with shared prefixes.
The model has random weights, and the tokenizer is trained on the documentation. Trainers of both ways run by turns,
step by step, and times are medians over all steps but the first two: forward, backward, clipping and optimizer, and of
GRPO also generation and rewards, whose time is given by itself.

    GRPO        2 prompts of at most 512 tokens, with 8 answers of at most 64 each
    DPO         8 pairs, prompts of at most 256 tokens, answers of at most 64; the reference model is patched too
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import trainers
from by_turns import by_turns, show
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed

import nt_attention as nta
from nt_attention.cli.environment import device_name

VOCABULARY = 8192
SMALL_VOCABULARY = 1024  # of the trainers: then the head has 8 % of the weights, as in models with 8 · 10⁹


def lognormal(count: int, most: int) -> list[int]:
    draws = torch.empty(count).log_normal_(0.0, 0.6) * most / 2
    return draws.long().clamp(min=4, max=most).tolist()


def rows_of(prompts: list[int], answers: list[list[int]]) -> list[Tensor]:
    """Rows of a prompt and an answer, prompt by prompt."""
    rows = []
    for length, group in zip(prompts, answers, strict=True):
        prompt = torch.randint(1, VOCABULARY, (length,))
        rows += [torch.cat([prompt, torch.randint(1, VOCABULARY, (answer,))]) for answer in group]
    return rows


def batches() -> dict[str, tuple[list[Tensor], int, bool]]:
    """Name → rows, the number of last positions whose logits are kept (0 for all), and whether it trains."""
    prompts = lognormal(4, 512)
    return {
        "GRPO": (rows_of(prompts, [lognormal(8, 64) for _ in prompts]), 64, True),
        "DPO": (rows_of([256] * 4, [lognormal(2, 64) for _ in range(4)]), 0, True),
        "evaluation": (rows_of([384], [[16] * 32]), 16, False),
        "nothing": (rows_of([0] * 16, [[n] for n in lognormal(16, 512)]), 0, True),
    }


def run(model: Any, batch: dict[str, Any], trains: bool) -> None:
    with torch.set_grad_enabled(trains):
        logits = model(**batch).logits
        if trains:
            logits.float().square().mean().backward()
            model.zero_grad(set_to_none=True)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """A BPE of Python's documentation."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        topics.values(), SMALL_VOCABULARY, show_progress=False, special_tokens=["<pad>", "<end>"]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token="<pad>", eos_token="<end>")


def texts(tokenizer: PreTrainedTokenizerFast, lengths: list[int]) -> list[str]:
    """Passages of the documentation of these numbers of tokens, or nearly so."""
    ids = tokenizer("\n".join(topics.values()))["input_ids"]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [tokenizer.decode(ids[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def grpo(model: Any, tokenizer: PreTrainedTokenizerFast, given: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = texts(tokenizer, lognormal(64, 512))
    arguments = GRPOConfig(
        **given, per_device_train_batch_size=16, num_generations=8, max_completion_length=64, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    reward = lambda completions, **_: [float(sum(map(str.isalpha, text))) for text in completions]  # noqa: E731
    return GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer)


def dpo(model: Any, tokenizer: PreTrainedTokenizerFast, given: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    count = 128
    prompts = texts(tokenizer, lognormal(count, 256))
    answers = texts(tokenizer, lognormal(2 * count, 64))
    pairs = zip(prompts, answers[:count], answers[count:], strict=True)
    arguments = DPOConfig(**given, per_device_train_batch_size=8, bf16=False, gradient_checkpointing=False)
    data = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs])
    return DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)


class Turn(trainers.Clock):
    """Lets a trainer run one step, and then another trainer, in a thread of its own. Each has its random numbers."""

    def __init__(self, way: trainers.Way) -> None:
        super().__init__(way, cuda=False)
        self.mine, self.other = threading.Semaphore(0), threading.Semaphore(0)

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        super().on_step_end(*arguments, **more)
        state = torch.get_rng_state()
        self.other.release()
        self.mine.acquire()
        torch.set_rng_state(state)


def train(make_trainer: Any, turn: Turn, tokenizer: Any, config: LlamaConfig, options: Any, shares: bool) -> Any:
    """Run a trainer for some steps. Returns the counts of prefixes, and the seconds of generation of each step."""
    generation: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        set_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(folder)  # TRL loads the reference model from there
        handle = nta.patch(model, shared_prefixes=shares)
        given = {
            "output_dir": folder, "max_steps": options.rounds + trainers.WARM, "logging_steps": 1,
            "save_strategy": "no", "report_to": [], "disable_tqdm": True, "log_level": "error", "use_cpu": True,
            "learning_rate": 1e-4,
        }  # fmt: skip
        trainer = make_trainer(model, tokenizer, given)
        if getattr(trainer, "ref_model", None) is not None:
            nta.patch(trainer.ref_model.base_model, shared_prefixes=shares)
        if hasattr(trainer, "_generate_and_score_completions"):
            trainer._generate_and_score_completions = timed(trainer._generate_and_score_completions, generation)
        trainer.add_callback(turn)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    turn.way.losses += [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return handle.prefixes, generation[trainers.WARM :]


def by_turns_of_trainers(*calls: Any) -> list[Any]:
    """Run two functions of a `Turn` in threads, one step after another. Returns their results."""
    turns = [Turn(trainers.Way()) for _ in calls]
    turns[0].other, turns[1].other = turns[1].mine, turns[0].mine

    def run(turn: Turn, call: Any) -> Any:
        turn.mine.acquire()
        try:
            torch.set_num_threads(2)
            return turn.way, *call(turn)
        finally:
            turn.other.release()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, turn, call) for turn, call in zip(turns, calls, strict=True)]
        turns[0].mine.release()
        return [future.result() for future in futures]


def timed(function: Any, seconds: list[float]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    return run


def compare_trainers(options: argparse.Namespace, config: LlamaConfig) -> list[str]:
    import warnings

    warnings.simplefilter("ignore")
    tokenizer = trained_tokenizer()
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    config.vocab_size = len(tokenizer)
    lines = [
        "| trainer | tokens of a step | computed | generation, ms | packed, ms | shared, ms | packed / shared |"
        " without generation | largest difference of a gradient norm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, make_trainer in {"GRPO": grpo, "DPO": dpo}.items():
        calls = [
            functools.partial(train, make_trainer, tokenizer=tokenizer, config=config, options=options, shares=x)
            for x in (False, True)
        ]
        (packed, _, before), (shared, prefixes, after) = by_turns_of_trainers(*calls)
        steps = [1e3 * statistics.median(way.seconds) for way in (packed, shared)]
        generated = [1e3 * statistics.median(seconds or [0.0]) for seconds in (before, after)]
        apart = max(abs(a / b - 1) for a, b in zip(shared.losses, packed.losses, strict=True))
        ratio = (steps[0] - generated[0]) / (steps[1] - generated[1])
        lines.append(
            f"| {name} | {prefixes.tokens // prefixes.calls[None]} | {prefixes.computed // prefixes.calls[None]} |"
            f" {generated[1]:.0f} | {steps[0]:.0f} | {steps[1]:.0f} | {steps[0] / steps[1]:.2f} | {ratio:.2f} |"
            f" {apart:.1e} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trainers", action="store_true", help="steps of TRL's trainers")
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width, intermediate_size=3 * options.width, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=VOCABULARY, pad_token_id=0,
    )  # fmt: skip
    title = f"{device_name(torch.device(device))}, {platform.python_version()}, torch {torch.__version__}"
    if options.trainers:
        show([title, "", *compare_trainers(options, config)], options.save)
        return
    padded = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    packed, shared = copy.deepcopy(padded), copy.deepcopy(padded)
    nta.patch(packed, packing="always")
    handle = nta.patch(shared, packing="always", shared_prefixes=True)
    models = {"padded": padded, "packed": packed, "shared": shared}
    lines = [
        *(title, ""),
        "| batch | tokens | computed | padded | packed | shared | packed / shared |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (rows, keep, trains) in batches().items():
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "logits_to_keep": keep, "use_cache": False}
        for model in models.values():
            model.train(trains)
        tokens, computed = handle.prefixes.tokens, handle.prefixes.computed
        run(shared, batch, trains)
        tokens = int((ids != 0).sum())
        computed = handle.prefixes.computed - computed or tokens
        calls = {way: functools.partial(run, model, batch, trains) for way, model in models.items()}
        times = by_turns(calls, options.rounds)
        ratio = times["packed"] / times["shared"]
        shown = " | ".join(f"{times[way]:.1f}" for way in models)
        lines.append(f"| {name} | {tokens} | {computed} | {shown} | {ratio:.2f} |")
    show(lines, options.save)


if __name__ == "__main__":
    main()
