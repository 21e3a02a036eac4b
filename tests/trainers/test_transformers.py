"""transformers' Trainer and its pipelines, as unpatched."""

from __future__ import annotations

import functools
import itertools
import tempfile
import warnings

import numpy as np
import pytest
import transformers
from cuda_graphs import GPU, cuda_graphs  # noqa: F401
from shared_data import llama_config, padded_batch, paragraphs, tokenizer
from sweeps import sweep_except
from token_tiled_cases import IGNORED_WARNINGS
from training import assert_same, run
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

import nt_attention as nta
from nt_attention import NotPackedWarning

LIBRARY = f"transformers {transformers.__version__}"
TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 48))]
ROWS = [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in TEXTS]


def causal():
    return LlamaForCausalLM(llama_config(32))


def collate(rows):
    return padded_batch([row["input_ids"] for row in rows])


def accuracy(prediction):
    real = prediction.label_ids[:, 1:] != -100
    guessed = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    assert guessed.shape[:2] == prediction.label_ids.shape
    return {"accuracy": (guessed.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:])[real].mean()}


def make_trainer(folder, model, **more):
    given = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error",
        "optim": "sgd", "learning_rate": 3e-3, **more,
    }  # fmt: skip
    return Trainer(
        model, TrainingArguments(**given), train_dataset=ROWS, eval_dataset=ROWS[:12], data_collator=collate,
        compute_metrics=accuracy,
    )  # fmt: skip


WAYS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "evaluation with compute_metrics": {"eval_strategy": "steps", "eval_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "lengths grouped": {"train_sampling_strategy": "group_by_length"},
    "bf16": {"bf16": True},
}


@functools.cache
def unpatched(name):
    with tempfile.TemporaryDirectory() as folder:
        return run(causal, functools.partial(make_trainer, folder, **WAYS[name]), None)


@pytest.mark.parametrize(
    ("name", "when"),
    sweep_except(
        itertools.product(WAYS, ["before", "after"]),
        *(("accumulation", "after"), ("reentrant checkpointing", "after"), ("NEFTune", "before"), ("bf16", "before")),
        ("evaluation with compute_metrics", "before"),
    ),
)
def test_trainer_losses_and_gradient_norms(name, when, record, tmp_path):
    got, want = run(causal, functools.partial(make_trainer, tmp_path, **WAYS[name]), when), unpatched(name)
    record(LIBRARY, f"Trainer, {name}", when, got.handle)
    assert_same(got, want, 1e-2 if name == "bf16" else 1e-5)
    if name == "NEFTune":
        assert got.handle.calls == {"NEFTune scales its noise by the length of a row": 3}
    else:
        assert got.handle.calls[None] >= 3
        assert set(got.handle.calls) <= {None, "there is no padding to skip"}
    if "evaluation" in name:
        for key in ("eval_loss", "eval_accuracy"):
            assert abs(got.more[key] - want.more[key]) < 1e-5


@IGNORED_WARNINGS[0]
@pytest.mark.skipif(GPU, reason="graphs are fake, and run on the CPU")
@pytest.mark.parametrize(
    "name", sweep_except(["accumulation", "evaluation with compute_metrics", "bf16"], "accumulation")
)
def test_trainer_with_cuda_graphs(name, cuda_graphs, tmp_path):  # noqa: F811
    got = run(causal, functools.partial(make_trainer, tmp_path, **WAYS[name]), "before", cuda_graphs="training")
    assert_same(got, unpatched(name), 1e-2 if name == "bf16" else 1e-5)
    assert got.handle.graphs.calls.total() >= 2  # the first call is compared, and runs without a graph
    assert set(got.handle.graphs.calls) == {None}


def test_trainer_predict(record, tmp_path):
    set_seed(0)
    trainer = make_trainer(tmp_path, causal())
    want = trainer.predict(ROWS[:12])
    with nta.patch(trainer.model) as handle:
        got = trainer.predict(ROWS[:12])
    record(LIBRARY, "Trainer, predict", "after", handle)
    assert got.predictions.shape == want.predictions.shape
    real = got.label_ids != -100
    np.testing.assert_allclose(got.predictions[real], want.predictions[real], rtol=1e-4, atol=1e-5)
    assert abs(got.metrics["test_accuracy"] - want.metrics["test_accuracy"]) < 1e-9
    assert handle.calls[None] >= 1


def bert(kind, **more):
    set_seed(0)
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        pad_token_id=256, **more,
    )  # fmt: skip
    return kind(config).eval()


def with_mask_token():
    found = tokenizer()
    found.add_special_tokens({"mask_token": "<mask>"})
    return found


PIPELINES = {
    "text-classification": (functools.partial(bert, BertForSequenceClassification, num_labels=3), TEXTS[:8]),
    "token-classification": (functools.partial(bert, BertForTokenClassification, num_labels=3), TEXTS[:8]),
    "fill-mask": (functools.partial(bert, BertForMaskedLM), [text[:7] + "<mask>" + text[7:] for text in TEXTS[:8]]),
    "text-generation": (causal, TEXTS[:8]),
}


def flat(found):
    if isinstance(found, dict):
        found = [found[key] for key in sorted(found)]
    return [x for part in found for x in flat(part)] if isinstance(found, list | tuple) else [found]


@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines(task, record):
    make_model, texts = PIPELINES[task]
    set_seed(0)
    model = make_model().eval()
    more = {"max_new_tokens": 5, "do_sample": False} if task == "text-generation" else {}
    words = with_mask_token()
    words.padding_side = "left" if more else "right"
    pipe = pipeline(task, model=model, tokenizer=words, device="cpu", batch_size=4)
    want = pipe(texts, **more)
    with nta.patch(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", NotPackedWarning)  # nobody expects generation to be packed
        got = pipe(texts, **more)
    record(LIBRARY, f"pipeline, {task}", "after", handle)
    assert len(flat(got)) == len(flat(want)) >= 8
    for mine, theirs in zip(flat(got), flat(want), strict=True):
        if isinstance(mine, str):
            assert mine == theirs
        else:
            assert abs(mine - theirs) < 1e-5
    assert (None in handle.calls) == (not more)


def test_continuous_batching_of_a_patched_model_is_refused(record):
    model = causal()
    asked = GenerationConfig(max_new_tokens=2, pad_token_id=256)
    with nta.patch(model), pytest.raises(ValueError, match=r"continuous batching|paged"):
        # a small cache: by default, it takes most of the machine's memory
        model.generate_batch([[5, 6, 7]], asked, ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32))
    record(LIBRARY, "generate_batch", "after", "refused: continuous batching hands attention a paged cache")


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, "training"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_trainer_losses_and_gradient_norms_on_a_gpu(when, cuda_graphs, record, tmp_path):  # noqa: F811
    def trainer(folder, model):
        return make_trainer(folder, model, bf16=True, use_cpu=False, per_device_train_batch_size=8)

    want = run(causal, functools.partial(trainer, tmp_path / "want"), None)
    got = run(causal, functools.partial(trainer, tmp_path / "got"), when, cuda_graphs=cuda_graphs)
    record(LIBRARY, f"Trainer, bf16, on a GPU{', with graphs' if cuda_graphs else ''}", when, got.handle)
    assert_same(got, want, 1e-2)
    assert set(got.handle.calls) == {None}
    assert not cuda_graphs or set(got.handle.graphs.calls) == {None}


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
def test_trainer_with_liger_kernel(when, record, tmp_path):
    pytest.importorskip("liger_kernel")

    def trainer(folder, model):
        return make_trainer(folder, model, use_liger_kernel=True, use_cpu=False)

    want = run(causal, functools.partial(trainer, tmp_path / "want"), None)
    got = run(causal, functools.partial(trainer, tmp_path / "got"), when)
    record(LIBRARY, "Trainer, use_liger_kernel=True", when, got.handle)
    assert_same(got, want, 1e-3)
    assert got.handle.calls[None] >= 3
