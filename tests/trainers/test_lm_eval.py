"""lm-evaluation-harness: a multiple-choice task with a few-shot prompt, on a model that shares prefixes."""

from __future__ import annotations

import pytest
import torch
from shared_data import llama_config, paragraphs, tokenizer
from transformers import LlamaForCausalLM, set_seed

import nt_attention as nta

lm_eval = pytest.importorskip("lm_eval")  # 25 packages, which `make test` does not install
from datasets import Dataset, DatasetDict, disable_progress_bars  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

disable_progress_bars()
SHOTS = 4


def documents(**_):
    """How does this paragraph go on? Each has four continuations, of other lengths."""
    texts = [text for text in paragraphs(120) if len(text) == 120][: SHOTS + 10]
    rows = [
        {
            "begin": text[:60],
            "choices": [other[60 : 90 + 8 * n] for n, other in enumerate(_turned(texts, at))],
            "gold": 0,
        }
        for at, text in enumerate(texts)
    ]
    return DatasetDict({"train": Dataset.from_list(rows[:SHOTS]), "test": Dataset.from_list(rows[SHOTS:])})


def _turned(texts, at):
    return [texts[(at + step) % len(texts)] for step in range(4)]


def task():
    return ConfigurableTask(
        config={
            "task": "continue_paragraphs",
            "custom_dataset": documents,
            "output_type": "multiple_choice",
            "fewshot_split": "train",
            "test_split": "test",
            "num_fewshot": SHOTS,
            "fewshot_config": {"sampler": "first_n"},
            "doc_to_text": "{{begin}}",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    )


def evaluate(model, batch_size):
    """The scores, and the log-likelihoods of all choices: (documents, choices)."""
    lm = HFLM(model, tokenizer=tokenizer(), batch_size=batch_size, max_length=2048)
    out = lm_eval.evaluate(lm, {"continue_paragraphs": task()}, bootstrap_iters=0, log_samples=True)
    samples = sorted(out["samples"]["continue_paragraphs"], key=lambda sample: sample["doc_id"])
    likelihoods = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
    scores = {name: x for name, x in out["results"]["continue_paragraphs"].items() if name.startswith("acc")}
    return scores, torch.tensor(likelihoods)


@pytest.mark.parametrize("batch_size", [1, 12])
def test_scores_of_multiple_choice(batch_size):
    set_seed(0)
    model = LlamaForCausalLM(llama_config(64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # else all log-likelihoods are nearly those of equal tokens
    scores, want = evaluate(model, batch_size)
    handle = nta.patch(model, shared_prefixes=True)
    got_scores, got = evaluate(model, batch_size)
    assert got_scores == scores
    assert want.shape == (10, 4)
    assert want.std() > 1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    if batch_size == 1:
        assert handle.prefixes.calls[None] == 0
    else:
        assert set(handle.prefixes.calls) == {None}
        assert handle.prefixes.computed < 0.4 * handle.prefixes.tokens
