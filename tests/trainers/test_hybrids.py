"""Hybrids with LoRA inside of their mixers, in real trainers: losses of each step and adapters are as unpatched."""

from __future__ import annotations

import functools
import itertools
import tempfile

import pytest
from shared_data import END, PAD, VOCABULARY, padded_batch, paragraphs, tokenizer
from sweeps import sweep_except
from training import assert_same, run
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
from datasets import Dataset, disable_progress_bars  # noqa: E402

disable_progress_bars()
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": PAD, "eos_token_id": END,
    "bos_token_id": None,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
# Model type → fields of its config, the modules that LoRA adapts, and the tolerance of what they learn relative to the
# largest change. Qwen 3.5 computes its delta rule in float32, so the rounding depends on the CPU.
MODELS = {
    "lfm3": (SMALL, ["conv.in_proj", "conv.out_proj", "q_proj", "v_proj"], 1e-5),
    "qwen3_5_text": (
        {**SMALL, **DELTA},
        ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "linear_attn.out_proj", "q_proj", "v_proj"],
        1e-4,
    ),
}
TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 24))]
STEPS = 4


def make(name):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name][0])).double()


def lora(name):
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=MODELS[name][1], lora_dropout=0.0, init_lora_weights=False
    )


def arguments(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error",
        "optim": "sgd", "learning_rate": 0.1, **more,
    }  # fmt: skip


def by_trainer(name, folder, model, **more):
    model = peft.get_peft_model(model, lora(name))
    rows = [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in TEXTS]
    return Trainer(
        model, TrainingArguments(**arguments(folder, **more)), train_dataset=rows,
        data_collator=lambda rows: padded_batch([row["input_ids"] for row in rows]),
    )  # fmt: skip


def by_sft(name, folder, model, **more):
    return trl.SFTTrainer(
        model, args=trl.SFTConfig(**arguments(folder, bf16=False, **more)), processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]), peft_config=lora(name),
    )  # fmt: skip


TRAINERS = {
    "Trainer": by_trainer,
    "Trainer, checkpointing": functools.partial(
        by_trainer, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "SFT": by_sft,  # with gradient checkpointing
}


@functools.cache
def unpatched(trainer, name):
    with tempfile.TemporaryDirectory() as folder:
        return run(functools.partial(make, name), functools.partial(TRAINERS[trainer], name, folder), None)


@pytest.mark.parametrize(
    ("trainer", "name", "when"),
    sweep_except(itertools.product(TRAINERS, MODELS, ["before", "after"]), ("Trainer", "lfm3", "before")),
)
def test_losses_and_adapters(trainer, name, when, tmp_path):
    got = run(functools.partial(make, name), functools.partial(TRAINERS[trainer], name, tmp_path), when)
    want = unpatched(trainer, name)
    assert_same(got, want, 1e-5)
    assert got.handle.calls.pop(None) == STEPS
    # TRL's loss needs padded hidden states of the base model, which has run packed
    assert all(trainer == "SFT" and "add_fused_lm_head" in reason for reason in got.handle.calls)
    in_mixers = [path for path in want.changes if ".conv." in path or ".linear_attn." in path]
    assert len(in_mixers) == 2 * 3 * (len(MODELS[name][1]) - 2)  # two matrices for each target in three mixers
    largest = max(float(change.abs().max()) for change in want.changes.values())
    for path, change in want.changes.items():
        assert float(change.abs().max()) > 1e-3 * largest
        assert float((got.changes[path] - change).abs().max()) <= MODELS[name][2] * largest, path
