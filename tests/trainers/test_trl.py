"""TRL's trainers: the losses and gradient norms of every step are those of the unpatched model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile

import pytest
import torch
from shared_data import llama_config, paragraphs, tokenizer
from sweeps import sweep_except
from training import assert_same, run
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, set_seed

trl = pytest.importorskip("trl")
from datasets import Dataset, disable_progress_bars  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

import nt_attention as nta  # noqa: E402
from nt_attention import NotPackedWarning  # noqa: E402

disable_progress_bars()
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 48))]
LIBRARY = f"TRL {trl.__version__}"


@functools.cache
def saved():
    """A folder with a model, which DPO and company load again for their reference."""
    folder = tempfile.mkdtemp(prefix="nt_attention_trl_")
    set_seed(0)
    LlamaForCausalLM(llama_config(32)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def causal():
    return LlamaForCausalLM.from_pretrained(saved())


def judge():
    config = llama_config(32)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def common(folder, **more):
    """Adam would make steps of full size out of gradients that are nothing but rounding."""
    return {"optim": "sgd",
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error",
        "bf16": False, "learning_rate": 3e-3, **more,
    }  # fmt: skip


def texts():
    return Dataset.from_list([{"text": text} for text in TEXTS])


def pairs():
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in TEXTS]
    return [
        {"prompt": prompt, "chosen": rest, "rejected": other[::-1]}
        for (prompt, rest), (_, other) in itertools.pairwise(halves)
    ]


def long_pairs():
    return [
        {**pair, "prompt": text[:40] + pair["prompt"]} for pair, text in zip(pairs(), paragraphs(90, 48), strict=False)
    ]


def long_prompts():
    return [text[: 40 + 3 * (i % 7)] for i, text in enumerate(paragraphs(90, 48))]


def sft(folder, model, peft_config=None, **more):
    arguments = trl.SFTConfig(**common(folder, **more))
    return trl.SFTTrainer(
        model, args=arguments, train_dataset=texts(), processing_class=tokenizer(), peft_config=peft_config
    )


def sft_evaluated(folder, model):
    arguments = trl.SFTConfig(**common(folder, eval_strategy="steps", eval_steps=3))
    return trl.SFTTrainer(
        model, args=arguments, train_dataset=texts(), eval_dataset=texts(), processing_class=tokenizer()
    )


def dpo(folder, model, peft_config=None, data=None, **more):
    arguments = trl.DPOConfig(**common(folder, **more))
    data = data or Dataset.from_list(pairs())
    return trl.DPOTrainer(
        model, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=peft_config
    )


def kto(folder, model, preferences=None):
    rows = [
        {"prompt": pair["prompt"], "completion": pair[which], "label": which == "chosen"}
        for pair in preferences or pairs()
        for which in ("chosen", "rejected")
    ]
    arguments = trl.KTOConfig(**common(folder))
    return trl.KTOTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def letters(completions, **_):
    return [float(sum(map(str.isalpha, completion))) for completion in completions]


def online(kind, config, folder, model, prompts=None, **more):
    arguments = config(
        **common(folder, num_generations=2, max_completion_length=9, beta=0.1, **more),
    )
    prompts = prompts or [text[: 5 + 3 * (i % 7)] for i, text in enumerate(TEXTS)]
    prompts = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    return kind(model, reward_funcs=letters, args=arguments, train_dataset=prompts, processing_class=tokenizer())


def reward(folder, model, preferences=None):
    arguments = trl.RewardConfig(**common(folder))
    data = [
        {"chosen": p["prompt"] + p["chosen"], "rejected": (p["prompt"] if preferences else "") + p["rejected"]}
        for p in preferences or pairs()
    ]
    return trl.RewardTrainer(model, args=arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer())


TRAINERS = {
    "SFT": (causal, sft),
    "SFT, evaluation": (causal, sft_evaluated),
    "SFT, LoRA": (causal, functools.partial(sft, peft_config=LORA)),
    "SFT, padding_free=True": (causal, functools.partial(sft, padding_free=True, max_length=None)),
    "SFT, packing=True": (causal, functools.partial(sft, packing=True, max_length=64)),
    "SFT, checkpointing off": (causal, functools.partial(sft, gradient_checkpointing=False)),
    "DPO": (causal, dpo),
    "DPO, LoRA": (causal, functools.partial(dpo, peft_config=LORA)),
    "KTO": (causal, kto),
    "GRPO": (causal, lambda folder, model: online(trl.GRPOTrainer, trl.GRPOConfig, folder, model)),
    "RLOO": (causal, lambda folder, model: online(trl.RLOOTrainer, trl.RLOOConfig, folder, model)),
    "reward": (judge, reward),
}
# Rows that TRL lays end to end are kept apart by flash attention alone: unpatched on sdpa each sees those before it.
KEPT_APART = {"SFT, padding_free=True": "SFT", "SFT, packing=True": None}


@functools.cache
def unpatched(name):
    make_model, make_trainer = TRAINERS[name]
    with tempfile.TemporaryDirectory() as folder:
        return run(make_model, functools.partial(make_trainer, folder), None)


@pytest.mark.parametrize(
    ("name", "when"),
    sweep_except(
        itertools.product(TRAINERS, ["before", "after"]),
        *(("SFT", "before"), ("SFT, LoRA", "after"), ("SFT, packing=True", "before"), ("DPO", "after")),
        ("reward", "after"),
    ),
)
def test_trl_losses_and_gradient_norms(name, when, record, tmp_path):
    make_model, make_trainer = TRAINERS[name]
    got = run(make_model, functools.partial(make_trainer, tmp_path), when)
    record(LIBRARY, name, when, got.handle)
    wanted = KEPT_APART.get(name, name)
    if wanted is not None:
        assert_same(got, unpatched(wanted), 1e-5 if name in ("GRPO", "RLOO") else 1e-4)
    assert got.handle.calls[None] >= 3


SHARED = {  # prompts of 40 tokens or more
    "DPO": lambda folder, model: dpo(folder, model, data=Dataset.from_list(long_pairs())),
    "KTO": lambda folder, model: kto(folder, model, long_pairs()),
    "reward": lambda folder, model: reward(folder, model, long_pairs()),
    "GRPO": lambda folder, model: online(trl.GRPOTrainer, trl.GRPOConfig, folder, model, long_prompts()),
    "RLOO": lambda folder, model: online(trl.RLOOTrainer, trl.RLOOConfig, folder, model, long_prompts()),
}


@pytest.mark.parametrize("name", sweep_except(SHARED, "reward"))
def test_shared_prefixes(name, tmp_path):
    make_model, make_trainer = TRAINERS[name][0], functools.partial(SHARED[name], tmp_path)
    got = run(make_model, make_trainer, "before", shared_prefixes=True)
    assert_same(got, run(make_model, make_trainer, None), 1e-5 if name in ("GRPO", "RLOO") else 1e-4)
    prefixes = got.handle.prefixes
    assert prefixes.calls[None] >= 3
    assert prefixes.computed < 0.85 * prefixes.tokens


def fused_batch():
    lengths, length = [16, 5, 9, 2], 16
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, 250, mask.shape).masked_fill(~mask, 256)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


@pytest.mark.parametrize("when", ["before", "after"])
def test_trl_fused_lm_head(when):
    model, batch = causal(), fused_batch()
    copied = causal()
    add_fused_lm_head(copied, outputs=("log_probs", "entropy"))
    want = copied(**batch, fused_lm_head=True)
    if when == "before":
        nta.patch(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if when == "after":
        nta.patch(model)
    with pytest.warns(NotPackedWarning) if when == "after" else contextlib.nullcontext():
        got = model(**batch, fused_lm_head=True)
    assert got.log_probs.shape == (4, 15)
    for name in ("loss", "log_probs", "entropy", "label_mask"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_trl_fused_lm_head_after_remove_and_patch():
    model, batch = causal(), fused_batch()
    first = nta.patch(model)
    add_fused_lm_head(model)
    first.remove()
    want = model(**batch, fused_lm_head=True).log_probs
    with nta.patch(model) as second, pytest.warns(NotPackedWarning, match="the head of this call runs padded"):
        got = model(**batch, fused_lm_head=True).log_probs
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert second.calls[None] == 1
    assert not first.calls
