"""The kept results, the tables of the pages that come from them, and the command that finds stale results."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STALE = runpy.run_path(str(ROOT / "tools" / "stale_results.py"))
KEEP = runpy.run_path(str(ROOT / "benchmarks" / "keep.py"))
LINK = re.compile(r"\]\([^)\s]*benchmarks/results/([^)#\s]+)\)")
SENTENCE = re.compile(r"[^|\n][^|]*?(?:\.\s|\n\n|$)")
GPU_FIGURE = re.compile(r"(?=.*\b(?:H100|H200)\b)(?=.*\d\s?(?:×|ms\b|µs|TFLOPS|GiB|tokens/s))", re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", KEEP["BLOCK"].sub("", text), flags=re.DOTALL)


@pytest.mark.parametrize("page", KEEP["PAGES"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_have_the_tables_of_the_results_and_few_other_figures(page):
    text = page.read_text()
    assert KEEP["fill"](page, text) == text, "run `python benchmarks/keep.py --pages`"
    assert {name for name in LINK.findall(text) if not (RESULTS / name).exists()} == set()
    if page.name != "README.md":
        assert [each for each in SENTENCE.findall(without_blocks(text)) if GPU_FIGURE.match(each)] == []


def test_every_result_names_its_command_and_commit():
    found = {file for file, _, _ in STALE["results"](ROOT)}
    assert found == {path.name for path in RESULTS.iterdir()}


FILES = {
    "nt_attention/public.py": """
from . import parts
def double(x):
    y = parts.add(x, x)
    return y
def unused():
    return 1
""",
    "nt_attention/parts.py": """
FACTOR = 1
def add(x, y):
    return FACTOR * (x + y)
class Number:
    def half(self):
        return 2
    def third(self):
        return 3
""",
    "nt_attention/kernels/backends/cpu.py": "def run():\n    return 1\n",
    "nt_attention/kernels/backends/torch_flash.py": "def run():\n    return 2\n",
    "benchmarks/by_turns.py": "def show(x):\n    print(x)\n",
    "benchmarks/measure.py": """
import nt_attention as nta
from by_turns import show
show(nta.double(nta.Number().half()) + cpu.run())
""",
    "examples/shared_data.py": "",
}


@pytest.fixture
def repository(tmp_path):
    """A repository with a program and one result of it. Returns its root, and a function that commits files."""

    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", "--all")
        git("commit", "--quiet", "--message", "change")
        return git("rev-parse", "--short=7", "HEAD").strip()

    git("init", "--quiet")
    section = f"`python benchmarks/measure.py --fast`, at commit {commit(FILES)}\n"
    (tmp_path / "benchmarks" / "results").mkdir()
    for device in ("cpu", "h200"):
        (tmp_path / "benchmarks" / "results" / f"a_{device}.md").write_text(section)
    return tmp_path, commit


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("nt_attention/public.py", "return y", "return y + 0", "both"),
        ("nt_attention/public.py", "double(x):", 'double(x):  # ok\n    """Twice."""', ""),
        ("nt_attention/public.py", "return 1", "return 2", ""),
        ("nt_attention/parts.py", "x + y", "y + x", "both"),
        ("nt_attention/parts.py", "FACTOR = 1", "FACTOR = 2", "both"),
        ("nt_attention/parts.py", "return 2", "return 3", "both"),
        ("nt_attention/parts.py", "return 3", "return 4", ""),
        ("nt_attention/kernels/backends/cpu.py", "return 1", "return 3", "cpu"),
        ("nt_attention/kernels/backends/torch_flash.py", "return 2", "return 3", "h200"),
        ("benchmarks/by_turns.py", "print(x)", "print(2 * x)", "both"),
        ("benchmarks/measure.py", "show(nta", "show(1 + nta", "both"),
    ],
)
def test_result_is_stale_if_what_it_uses_changed(file, old, new, stale, repository, capsys):
    root, commit = repository
    assert old in FILES[file]
    commit({file: FILES[file].replace(old, new)})
    STALE["read"].cache_clear()  # HEAD is another commit
    for device in ("cpu", "h200"):
        is_stale = stale in (device, "both")
        assert STALE["main"](["--strict", device], root) == is_stale
        assert f"{int(is_stale)} of 1 results are stale" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "counted"),
    [
        ("run()", set()),
        ("make('nt_attention/flash'); run()", {"hf/route"}),
        ("nta.patch(model); run()", {"hf/route", "hf/pack"}),
        ("layout.shard(mesh); run()", {"distributed"}),
    ],
)
def test_folders_count_for_programs_that_use_them(program, counted, repository):
    root, commit = repository
    folders = ("hf/route", "hf/pack", "distributed")
    files = {f"nt_attention/{each}/code.py": f"def run():\n    return {each!r}\n" for each in folders}
    at = commit({**files, "benchmarks/measure.py": program})
    found = {code for _, code in STALE["reached"](root, at, "benchmarks/measure.py", True)}
    assert {each for each in folders if any(repr(each) in code for code in found)} == counted


def test_commit_that_is_not_in_the_clone(repository, capsys):
    root, _ = repository
    (root / "benchmarks" / "results" / "a_cpu.md").write_text("`python benchmarks/measure.py`, at commit 0123abc\n")
    assert STALE["main"](["--strict", "cpu"], root) == 0
    assert "not in this clone" in capsys.readouterr().out


def test_results_are_kept(tmp_path, monkeypatch):
    keep = KEEP["keep"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COMMIT", "456789abcdef")
    table = 'print("| a |\\n|---|\\n| 1 |", flush=True)'
    assert keep(tmp_path, "two", ["-c", table]) == 0
    assert keep(tmp_path, "two", ["-c", table]) == 0  # it is there already
    assert keep(tmp_path, "two", ["-c", 'print("lost", 1 / 0)']) == 1
    assert keep(tmp_path, "two", ["-c", f"{table}; import time; time.sleep(60)"], seconds=3) == 0
    assert keep(tmp_path, "two", ["-c", "import time; time.sleep(60)"], seconds=0.1) == 124
    text = (tmp_path / "two_cpu.md").read_text()
    assert [each["commit"] for each in KEEP["SECTION"].finditer(text)] == ["456789a"] * 2
    assert KEEP["tables"](text) == ["| a |\n|---|\n| 1 |\n"] * 2
    assert "Stopped after 3 s." in text
    assert "ZeroDivisionError" in (tmp_path / "two_cpu.err").read_text()


@pytest.mark.parametrize("script", ["on_this_gpu.sh", "on_this_cpu.sh"])
def test_scripts_run_programs_that_exist(script):
    text = (ROOT / "benchmarks" / script).read_text()
    programs = re.findall(r"^ *keep \d+ \S+ (?:-m .*?)?(\S+\.py)", text, re.MULTILINE)
    assert len(programs) == len(re.findall(r"^ *keep ", text, re.MULTILINE)) > 3
    assert [name for name in programs if not (ROOT / name).exists()] == []
