"""sentence-transformers: encoding, its trainer's losses and gradient norms, and CrossEncoder, as unpatched."""

from __future__ import annotations

import functools
import itertools
import tempfile
import warnings

import pytest
import sentence_transformers
import torch
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from shared_data import paragraphs, tokenizer
from sweeps import sweep_except
from training import assert_same, run
from transformers import BertConfig, BertForSequenceClassification, BertModel, set_seed

import nt_attention as nta

Dataset = pytest.importorskip("datasets").Dataset

LIBRARY = f"sentence-transformers {sentence_transformers.__version__}"
TEXTS = [text[: 9 + 13 * (i % 5)] for i, text in enumerate(paragraphs(90, 48))]
PAIRS = Dataset.from_list([{"anchor": text[: len(text) // 2], "positive": text} for text in TEXTS])
LABELLED = Dataset.from_list(
    [{"one": text[: len(text) // 2], "two": TEXTS[i - i % 2], "label": float(i % 2)} for i, text in enumerate(TEXTS)]
)


@functools.cache
def saved(kind):
    folder = tempfile.mkdtemp(prefix="nt_attention_st_")
    set_seed(0)
    config = BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        pad_token_id=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    words = tokenizer()
    words.model_max_length = 128
    words.save_pretrained(folder)
    return folder


def embedder():
    return SentenceTransformer(saved(BertModel), device="cpu")


def judge():
    return CrossEncoder(saved(BertForSequenceClassification), device="cpu", num_labels=1)


def given(folder):
    return {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 8, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error",
        "optim": "sgd", "learning_rate": 3e-3,
    }  # fmt: skip


def contrast(loss, folder, model, **more):
    arguments = SentenceTransformerTrainingArguments(**given(folder), **more)
    return SentenceTransformerTrainer(model, args=arguments, train_dataset=PAIRS, loss=loss(model))


def rank(folder, model):
    arguments = CrossEncoderTrainingArguments(**given(folder))
    return CrossEncoderTrainer(model, args=arguments, train_dataset=LABELLED, loss=BinaryCrossEntropyLoss(model))


cached = functools.partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4)
TRAINERS = {
    "MultipleNegativesRankingLoss": (embedder, functools.partial(contrast, losses.MultipleNegativesRankingLoss)),
    "CachedMultipleNegativesRankingLoss": (embedder, functools.partial(contrast, cached)),
    "checkpointing": (
        embedder,
        functools.partial(contrast, losses.MultipleNegativesRankingLoss, gradient_checkpointing=True),
    ),
    "CrossEncoderTrainer": (judge, rank),
}


@pytest.mark.parametrize(
    ("name", "when"),
    sweep_except(
        itertools.product(TRAINERS, ["before", "after"]),
        *(("CachedMultipleNegativesRankingLoss", "after"), ("CrossEncoderTrainer", "before")),
    ),
)
def test_sentence_transformers_losses_and_gradient_norms(name, when, record, tmp_path):
    make_model, make_trainer = TRAINERS[name]
    want = run(make_model, functools.partial(make_trainer, tmp_path / "want"), None)
    got = run(make_model, functools.partial(make_trainer, tmp_path / "got"), when)
    record(LIBRARY, name, when, got.handle)
    assert_same(got, want, 1e-4)
    assert set(got.handle.calls) == {None}
    assert got.handle.calls[None] >= 3


def test_sentence_transformers_encode_and_predict(record):
    for name, make_model, call in (
        ("encode", embedder, lambda model: model.encode(TEXTS, batch_size=8, convert_to_tensor=True)),
        ("CrossEncoder.predict", judge, lambda model: torch.tensor(model.predict(list(itertools.pairwise(TEXTS))))),
    ):
        model = make_model()
        want = call(model)
        with nta.patch(model) as handle:
            got = call(model)
        record(LIBRARY, name, "after", handle)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert set(handle.calls) <= {None, "there is no padding to skip"}
        assert handle.calls[None] > 0


def test_dict_of_features_that_is_used_again():
    """The first call adds its embeddings to the dict, which the second call passes to the model."""
    model = embedder().eval()
    features = model.preprocess(TEXTS[:4])
    with torch.no_grad(), nta.patch(model) as handle:
        first = model(features)["sentence_embedding"].clone()
        assert "token_embeddings" in features
        torch.testing.assert_close(model(features)["sentence_embedding"], first)
    assert handle.calls == {None: 2}


@pytest.mark.parametrize("attend", [False, True])
def test_query_expansion_that_reads_hidden_positions_runs_padded(attend):
    """ColBERT scores the states of positions that the mask hides. Documents have none."""
    model = embedder().eval()
    model[0].query_expansion = {"strategy": "fixed", "attend": attend, "length": 32, "token": "a"}
    features = model.preprocess(TEXTS[:4], task="query")
    assert "query_expansion_positions" in features
    documents = model.preprocess(TEXTS[:4])
    with torch.no_grad():
        want = model[0](dict(features))["token_embeddings"]
        with nta.patch(model) as handle, warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            got = model[0](dict(features))["token_embeddings"]
            model[0](dict(documents))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(shown) == (0 if attend else 1)
    assert handle.calls[None] >= 1
