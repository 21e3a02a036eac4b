"""The tables of supported models in docs/reference/hugging_face.md say what the shipped proofs say."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODELS = runpy.run_path(str(ROOT / "tools" / "supported_models.py"))
PROOFS = sorted((ROOT / "nt_attention" / "hf" / "prove" / "proofs").iterdir())


def entry(model_type, head, reason=None):
    return {"type": model_type, "head": head, "proof": {} if reason is None else {"reason": reason}}


def test_page_is_up_to_date(capsys):
    assert MODELS["main"](["--check"]) == 0, capsys.readouterr().out


def test_page_that_is_not_up_to_date(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nafter\n")
    assert MODELS["main"](["--check"], page) == 1
    assert "run python tools/supported_models.py" in capsys.readouterr().out
    assert MODELS["main"]([], page) == 0
    assert MODELS["main"](["--check"], page) == 0
    text = page.read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    assert "old" not in text
    assert "`bert`" in text


def test_tables(tmp_path):
    file = tmp_path / "5.0.0.json"
    state = "tokens of sequence 2 depend on sequence 1: layers.0 ({}) keeps a state along the row"
    entries = [
        *(entry("b", head) for head in ("QA", "base", "causal LM")),
        *(entry("a-2", head) for head in ("base", "causal LM", "QA")),
        *(entry("c", head, state.format(head)) for head in ("base", "token")),
        *(entry("d", head, None if head == "base" else state) for head in ("base", "token")),
        entry("e", "base", "another reason"),
        entry("f", "base", "layers.0 (F) raises RuntimeError: sizes must match"),
    ]
    file.write_text(json.dumps(entries))
    rows = [line for line in MODELS["tables"](file).splitlines() if line.startswith("| `") and "model_type" not in line]
    assert rows == [
        "| `a-2`, `b` | base, causal LM, QA |",
        "| `d` | base |",
        "| `c`, `d` (token) | a layer keeps a state along the row |",
        "| `e` | another reason |",
        "| `f` | its code raises an error on a packed row |",
    ]


@pytest.mark.parametrize("file", PROOFS, ids=lambda file: file.stem)
def test_heads_of_the_proofs_are_known(file):
    assert {entry["head"] for entry in json.loads(file.read_text())} <= set(MODELS["HEADS"].split(", "))


def test_rows_packed_by_hand_are_never_wrong_in_a_patched_class():
    """Registered classes can be: those that call none of our functions, which the page lists."""
    entries = MODELS["read_outcomes"](MODELS["OUTCOMES"])
    assert len(entries) > 850
    assert not [entry["class"] for entry in entries if "WRONG" in json.dumps(entry.get("patch", {}))]
