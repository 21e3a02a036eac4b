"""Every example runs with little data and gives the documented results."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_in_processes

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# The trainers of these are also tested in tests/trainers.
HEAVY = (
    *("fine_tune_with_trainer", "sentence_embeddings", "sentence_transformers_training", "trl_grpo", "trl_sft"),
    "trl_grpo_shared_prompts",
)
PROGRAMS = [
    pytest.param(path, id=path.stem, marks=pytest.mark.sweep if path.stem in HEAVY else ())
    for path in sorted(EXAMPLES.glob("*.py"))
    if path.stem != "shared_data"
]
ARGUMENTS = {
    "embed_paragraphs": ["--limit", "12", "--batch-size", "4"],
    "long_context": ["--steps", "3", "--length", "512"],
    "fine_tune_lora": ["--steps", "4", "--hidden-size", "32"],
    "fine_tune_with_trainer": ["--steps", "5", "--hidden-size", "32"],
    "sentence_transformers_training": ["--steps", "4", "--hidden-size", "32"],
    "trl_grpo": ["--steps", "3", "--hidden-size", "32"],
    "trl_grpo_shared_prompts": ["--steps", "2", "--hidden-size", "32"],
    "trl_sft": ["--steps", "4", "--hidden-size", "32"],
    "sentence_embeddings": ["--limit", "24", "--batch-size", "8", "--repeats", "1"],
}


def long_context_on_each_rank(path, arguments):
    sys.path.append(str(EXAMPLES))
    program = runpy.run_path(path)
    result = program["train"](program["options_of"](arguments))
    return result["losses"], result["tokens"]


@pytest.mark.parametrize("path", PROGRAMS)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    result = runpy.run_path(str(path))["main"](ARGUMENTS.get(path.stem, []))
    assert capsys.readouterr().out
    if path.stem == "embed_paragraphs":
        assert result["difference"] < 1e-5
        assert (tmp_path / "demo-output" / "embed_paragraphs.png").stat().st_size > 10_000
    if path.stem == "fine_tune_with_trainer":
        padded, *others = (torch.tensor(curve) for curve in result.values())
        assert (len(padded), len(others)) == (5, 2)
        assert padded[-1] < padded[0]
        for curve in others:
            torch.testing.assert_close(curve, padded, rtol=0, atol=1e-4)
    if path.stem == "fine_tune_lora":
        assert result["packed"] == 4
        assert max(result["gradients"]) < 1e-5
        torch.testing.assert_close(torch.tensor(result["patched"]), torch.tensor(result["padded"]), rtol=0, atol=1e-4)
    if path.stem == "long_context":
        assert result["losses"][-1] < result["losses"][0]
        for losses, tokens in run_in_processes(2, long_context_on_each_rank, str(path), ARGUMENTS[path.stem]):
            np.testing.assert_allclose(losses, result["losses"], rtol=1e-4)
            for part, total in zip(tokens, result["tokens"], strict=True):
                assert part in (total // 2, total - total // 2)
    if path.stem in ("trl_sft", "sentence_transformers_training"):
        padded, patched = (torch.tensor(result[name]["losses"]) for name in ("padded", "nta.patch"))
        assert len(padded) == 4
        torch.testing.assert_close(patched, padded, rtol=0, atol=1e-4)
        assert set(result["nta.patch"]["calls"]) == {None}
    if path.stem == "trl_grpo":
        for what in ("rewards", "norms"):
            padded, patched = (torch.tensor(result[name][what]) for name in ("padded", "nta.patch"))
            torch.testing.assert_close(patched, padded, rtol=1e-4, atol=1e-5)
        assert result["nta.patch"]["calls"][None] == 3
    if path.stem == "trl_grpo_shared_prompts":
        for what in ("rewards", "norms"):
            packed, shared = (torch.tensor(result[name][what]) for name in ("packed", "shared"))
            torch.testing.assert_close(shared, packed, rtol=1e-4, atol=1e-5)
        prefixes = result["shared"]["handle"].prefixes
        assert prefixes.computed < 0.5 * prefixes.tokens
    if path.stem == "sentence_embeddings":
        for found in result.values():
            assert found["packed"] > 0
            assert found["difference"] < 1e-5 < found["spread"]


def test_ten_lines_of_the_demo_run(capsys):
    lines = runpy.run_path(str(EXAMPLES / "embed_paragraphs.py"))["TEN_LINES"]
    assert len(lines.splitlines()) == 10
    exec(lines, {})
    assert "tensor" in capsys.readouterr().out
