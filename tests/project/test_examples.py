"""Every example and notebook runs with little data and gives the documented results."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_in_processes

from nt_attention.hf.check import plans

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NOTEBOOKS = runpy.run_path(str(EXAMPLES.parent / "tools" / "notebooks.py"))
# The trainers of these are also tested in tests/trainers.
HEAVY = (
    *("fine_tune_with_trainer", "sentence_embeddings", "sentence_transformers_training"),
    *("embeddings_and_rerankers", "fine_tune_with_trl", "shared_prompts"),
)


def files(pattern):
    return [
        pytest.param(path, id=path.stem, marks=pytest.mark.sweep if path.stem in HEAVY else ())
        for path in sorted(EXAMPLES.glob(pattern))
        if path.stem != "shared_data"
    ]


ARGUMENTS = {
    "sentence_embeddings": ["--limit", "24", "--batch-size", "8", "--repeats", "1"],
    "embed_paragraphs": ["--every", "200", "--batch-size", "4"],
    "long_context": ["--steps", "3", "--length", "256"],
    "fine_tune_lora": ["--steps", "4", "--hidden-size", "32"],
    "fine_tune_with_trainer": ["--steps", "5", "--hidden-size", "32"],
    "sentence_transformers_training": ["--steps", "4", "--hidden-size", "32"],
}


def long_context_on_each_rank(path, arguments):
    sys.path.append(str(EXAMPLES))
    program = runpy.run_path(path)
    result = program["train"](program["options_of"](arguments))
    return result["losses"], result["tokens"]


@pytest.mark.parametrize("path", files("*.py"))
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
    if path.stem == "sentence_embeddings":
        for values in result.values():
            assert values["packed"] > 0
            assert values["difference"] < 1e-5 < values["spread"]
    if path.stem == "sentence_transformers_training":
        padded, patched = (torch.tensor(result[name]["losses"]) for name in ("padded", "nta.patch"))
        assert len(padded) == 4
        torch.testing.assert_close(patched, padded, rtol=0, atol=1e-4)
        assert set(result["nta.patch"]["calls"]) == {None}


@pytest.mark.parametrize("path", files("*.ipynb"))
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setattr(plans, "_kept", {})  # its models are checked, as in a process of its own
    install, *cells = NOTEBOOKS["code_cells"](json.loads(path.read_text("utf-8")))
    assert "".join(install["source"]).startswith("%pip install")
    namespace = {}
    for cell in cells:
        outputs = NOTEBOOKS["run_cell"]("".join(cell["source"]).replace("LIMIT = 256", "LIMIT = 24"), namespace)
        if path.name in NOTEBOOKS["SHOWN"]:
            kept = NOTEBOOKS["masked"](cell["outputs"])
            assert kept == NOTEBOOKS["masked"](outputs), "run `python tools/notebooks.py`"
        else:
            assert not cell["outputs"], "clear the outputs"
    handle = namespace.get("handle")
    assert handle is None or handle.calls[None] > 0
    if path.stem == "patch_a_model":
        assert namespace["difference"] < 1e-5
    if path.stem == "embeddings_and_rerankers":
        assert max(namespace["embeddings_differ"], namespace["scores_differ"]) < 1e-5
        assert namespace["scorer_handle"].calls[None] > 0
    if path.stem == "nested_tensors":
        losses = namespace["losses"]
        assert sum(losses[-5:]) < sum(losses[:5])
    if path.stem == "fine_tune_with_trl":
        losses = {name: torch.tensor(values) for name, values in namespace["losses"].items()}
        assert len(losses["padded"]) == 4
        torch.testing.assert_close(losses["packed"], losses["padded"], rtol=0, atol=1e-4)
    if path.stem == "shared_prompts":
        for what in ("reward", "grad_norm"):
            padded, *others = (torch.tensor([step[what] for step in each]) for each in namespace["steps"].values())
            for each in others:
                torch.testing.assert_close(each, padded, rtol=1e-4, atol=1e-5)
        assert handle.prefixes.computed < 0.5 * handle.prefixes.tokens


def test_ten_lines_of_the_demo_run(capsys):
    lines = runpy.run_path(str(EXAMPLES / "embed_paragraphs.py"))["TEN_LINES"]
    assert len(lines.splitlines()) == 10
    exec(lines, {})
    assert "tensor" in capsys.readouterr().out


def test_first_block_of_the_readme_prints_what_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(plans, "_kept", {})
    readme = (EXAMPLES.parent / "README.md").read_text("utf-8")
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL).groups()
    exec(code, {})
    printed = capsys.readouterr().out
    assert NOTEBOOKS["MEASURED"].sub("#", printed) == NOTEBOOKS["MEASURED"].sub("#", shown)
