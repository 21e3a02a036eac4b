"""Every example runs, on little data, and says what it should."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {"embed_paragraphs": ["--limit", "12", "--batch-size", "4"]}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path(str(path))["main"](ARGUMENTS.get(path.stem, []))
    assert capsys.readouterr().out
    if path.stem == "embed_paragraphs":
        assert result["difference"] < 1e-5
        assert (tmp_path / "demo-output" / "embed_paragraphs.png").stat().st_size > 10_000


def test_the_ten_lines_are_ten_lines_that_run(capsys):
    lines = runpy.run_path(str(EXAMPLES / "embed_paragraphs.py"))["TEN_LINES"]
    assert len(lines.splitlines()) == 10
    exec(lines, {})
    assert "tensor" in capsys.readouterr().out
