"""The index of the kept results, the command that finds stale results, and the results that the documentation names."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STALE = runpy.run_path(str(ROOT / "tools" / "stale_results.py"))
INDEX = STALE["read_index"]()
COMMITS = {file: {entry.commit for entry in INDEX if entry.file == file} for file in {each.file for each in INDEX}}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LINK = re.compile(r"\]\([^)\s]*benchmarks/results/([^)#\s]*)[^)]*\)(?:,\s+measured\s+at\s+`(\w+)`)?")
COMMIT = re.compile(r"measured\s+at\s+`")
HEADING = re.compile(r"^#+ ", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
GPU = re.compile(r"\b(H100|H200|GPU)\b")
FIGURE = re.compile(r"\d\s?(×|ms|µs|TFLOPS|GiB|tokens/s|steps/s)|\d\.\d+ / \d")

PERFORMANCE = re.compile(r"\]\([^)\s]*performance\.md\)")
HEADLINE = re.compile(r"(\d+(?:\.(\d+))?)\s(×|GiB)")
MEASURED = HEADLINE.findall((ROOT / "docs" / "performance.md").read_text())


def sections(text):
    """The text under each heading, without code."""
    return HEADING.split(CODE_BLOCK.sub("", text))


def blocks(section):
    """Paragraphs, list items, and rows of tables; a row together with the paragraph before the table and its header."""
    joined = re.sub(r"\n\n(?=\|)", "\n", section)
    for block in re.split(r"\n\s*\n", joined):
        lead, is_table, rows = block.partition("\n|--")
        if is_table:
            yield from (f"{lead}\n{row}" for row in rows.splitlines()[1:])
        else:
            yield from re.split(r"\n(?=\s*[-*] )", block)


def unknown_figures(block, section):
    """The block. If its section links to docs/performance.md, without the figures that this page has, rounded."""

    def keep(match):
        figure, decimals, unit = match.groups()
        rounded = {f"{float(x):.{len(decimals or '')}f}" for x, _, its_unit in MEASURED if its_unit == unit}
        return "" if figure in rounded else match[0]

    return HEADLINE.sub(keep, block) if PERFORMANCE.search(section) else block


def check_page(text):
    """Messages about figures of a GPU without a result, and results with another commit than the index names."""
    problems = []
    if len(COMMIT.findall(text)) != sum(bool(commit) for _, commit in LINK.findall(text)):
        problems.append("a commit is not in the form `[result](FILE), measured at `COMMIT``, which is checked")
    for section in sections(text):
        links = LINK.findall(section)
        for file, commit in links:
            if file not in {"", "index.toml", *COMMITS}:
                problems.append(f"{file} is not in benchmarks/results/index.toml")
            elif commit and commit not in COMMITS[file]:
                problems.append(f"{file} is said to be measured at {commit}, the index names {COMMITS[file]}")
        if not any(commit for _, commit in links):
            problems += [
                f"no result for a GPU figure: {block.strip()[:80]!r}: write `([result](../benchmarks/results/FILE), "
                "measured at `COMMIT`)` into the section, with the commit of benchmarks/results/index.toml"
                for block in blocks(section)
                if GPU.search(block) and FIGURE.search(unknown_figures(block, section))
            ]
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_gpu_figures_name_a_kept_result_and_its_commit(page):
    assert check_page(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("On an H200 it takes 3.4 ms.", "no result"),
        ("On an H200, ms:\n\n| a |\n|---|\n| 3.4 ms |", "no result"),
        ("| a | b |\n|---|---|\n| on a GPU | x |\n| on a CPU | 3.4 ms |", None),
        ("- on a GPU 4.4 × as fast", "no result"),
        (
            "On an H200 it takes 3.4 ms.\n\n# Next\n\n[r](benchmarks/results/trainers_h200.md), measured at `8e74535`",
            "no",
        ),
        ("On an H200 3.4 ms ([r](benchmarks/results/trainers_h200.md), measured at `1234567`).", "said to be"),
        ("On an H200 3.4 ms ([r](../benchmarks/results/trainers_h200.md), measured at `8e74535`).", None),
        ("[r](benchmarks/results/no_such_file.md)", "is not in"),
        ("[r](benchmarks/results/trainers_h200.md), of which half was measured at `8e74535`", "not in the form"),
        ("On an H200 **4.3 ×** ([all](docs/performance.md)).", None),
        ("On an H200 **99.9 ×** ([all](docs/performance.md)).", "no result"),
        ("On an H200 3.4 ms ([all](docs/performance.md)).", "no result"),
        ("On a GPU, choose 2 streams.\n\nOn a CPU it takes 3.4 ms.", None),
        ("```\nH200: 3.4 ms\n```", None),
    ],
)
def test_rule_for_gpu_figures(text, problem):
    problems = check_page(text)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_every_kept_result_is_in_the_index():
    assert {path.name for path in RESULTS.iterdir()} - {"index.toml"} == set(COMMITS)


def test_measured_commits_are_in_the_history():
    if not (ROOT / ".git").exists() or STALE["git"](ROOT, "rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the whole history")
    assert [entry.name for entry in INDEX if not STALE["has_commit"](ROOT, entry.commit)] == []


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry.name)
def test_entry_of_the_index(entry):
    assert re.fullmatch("[0-9a-f]{7}", entry.commit)
    assert entry.basis in ("stated", "history")
    assert entry.gpu == ("NVIDIA" in entry.machine)
    assert STALE["programs_of"](entry.command, STALE["tree_of"](ROOT, "HEAD")) != []


FILES = {
    "nt_attention/__init__.py": "from .public import double, unused\nfrom .classes import Number, Sizes\n",
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
def subtract(x, y):
    return x - y
""",
    "nt_attention/classes.py": """
class Number:
    def half(self):
        return open(FOLDER / "data" / "table.json")
    def third(self):
        return 3
class Sizes(dict):
    def __missing__(self, key):
        return self.get(key)
    def values(self):
        return 4
""",
    "nt_attention/data/table.json": "[1, 2]\n",
    "nt_attention/kernels/__init__.py": "",
    "nt_attention/kernels/backends/__init__.py": "",
    "nt_attention/kernels/backends/cpu.py": "def run():\n    return 1\n",
    "nt_attention/kernels/backends/torch_flash.py": "def run():\n    return 2\n",
    "benchmarks/show.py": "def show(x):\n    print(x)\n",
    "benchmarks/measure.py": """
import nt_attention as nta
from nt_attention.kernels.backends import cpu, torch_flash
from show import show
show(nta.double(nta.Number().half()) + cpu.run() + torch_flash.run(), nta.Sizes())
""",
}


@pytest.fixture
def repository(tmp_path):
    """A repository with a program and one result of it."""

    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if text is None else path.write_text(text)
        git("add", "--all")
        git("commit", "--quiet", "--message", "change")
        return git("rev-parse", "--short=7", "HEAD").strip()

    git("init", "--quiet")
    measured = commit(FILES)
    index = tmp_path / "benchmarks" / "results" / "index.toml"
    index.parent.mkdir(parents=True)

    def write_index(commit=measured, gpu=False):
        index.write_text(
            '[[result]]\nfile = "a.md"\ncommand = "python benchmarks/measure.py --fast"\nmachine = "m"\n'
            f'gpu = {str(gpu).lower()}\ncommit = "{commit}"\nbasis = "stated"\n'
        )

    write_index()
    return tmp_path, commit, write_index


def run(root, capsys, *arguments):
    STALE["tree_of"].cache_clear()  # HEAD is another commit
    status = STALE["main"](list(arguments), root)
    return status, capsys.readouterr().out


def edit(file, old, new):
    assert old in FILES[file]
    return {file: FILES[file].replace(old, new)}


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("nt_attention/public.py", "return y", "return y + 0", "public.py: double 2"),
        ("nt_attention/public.py", "return 1", "return 2", None),
        ("nt_attention/parts.py", "x + y", "y + x", "parts.py: add 2"),
        ("nt_attention/parts.py", "x - y", "-y + x", None),
        ("nt_attention/parts.py", "FACTOR = 1", "FACTOR = 2", "parts.py: FACTOR 2"),
        ("nt_attention/classes.py", "open(", "open(*", "classes.py: Number.half 2"),
        ("nt_attention/classes.py", "return 3", "return 4", None),
        ("nt_attention/classes.py", "return 4", "return 5", "classes.py: Sizes.values 2"),  # dict can call it
        ("nt_attention/data/table.json", "[1", "[0", "table.json: 2"),
        ("nt_attention/kernels/backends/cpu.py", "return 1", "return 2", "cpu.py: run 2"),
        ("nt_attention/kernels/backends/torch_flash.py", "return 2", "return 1", None),
        ("benchmarks/show.py", "print(x)", "print(2 * x)", "show.py: show 2"),
        ("benchmarks/measure.py", "show(nta", "show(1 + nta", "measure.py: 2"),
    ],
)
def test_result_is_stale_if_what_it_uses_changed(file, old, new, reason, repository, capsys):
    root, commit, _ = repository
    commit(edit(file, old, new))
    status, text = run(root, capsys, "--strict")
    assert status == (reason is not None)
    assert reason is None or reason in text
    assert f"{status} of 1 results are stale" in text
    assert run(root, capsys)[0] == 0


def test_backends_of_the_other_device_type_do_not_count(repository, capsys):
    root, commit, write_index = repository
    write_index(gpu=True)
    commit(edit("nt_attention/kernels/backends/cpu.py", "return 1", "return 2"))
    assert run(root, capsys, "--strict")[0] == 0
    commit(edit("nt_attention/kernels/backends/torch_flash.py", "return 2", "return 1"))
    assert run(root, capsys, "--strict")[0] == 1


def test_comments_docstrings_and_moves_do_not_count(repository, capsys):
    root, commit, _ = repository
    described = (
        FILES["nt_attention/public.py"]
        .replace("x):\n", 'x):\n    """Twice x."""\n')
        .replace("return y", "return (y)  # ok")
    )
    commit({"nt_attention/public.py": described})
    assert run(root, capsys, "--strict")[0] == 0
    moved = FILES["nt_attention/__init__.py"].replace(".public", ".moved")
    commit({"nt_attention/public.py": None, "nt_attention/moved.py": described, "nt_attention/__init__.py": moved})
    assert run(root, capsys, "--strict")[0] == 0


def test_commit_that_is_not_in_the_clone(repository, capsys):
    root, _, write_index = repository
    write_index("0123abc")
    status, text = run(root, capsys, "--strict")
    assert status == 0
    assert "not in this clone" in text


def test_results_are_kept_and_merged(tmp_path, monkeypatch):
    new, results = tmp_path / "new", tmp_path / "results"
    results.mkdir()
    entry = (
        '[[result]]\nfile = "{}_cpu.md"\ncommand = "c"\nmachine = "m"\ngpu = false\ncommit = "0123abc"\nbasis = ""\n'
    )
    (results / "index.toml").write_text("# about\n\n" + "\n".join(entry.format(name) for name in ("one", "two", "two")))
    keep = runpy.run_path(str(ROOT / "benchmarks" / "keep.py"))
    monkeypatch.setitem(keep["merge"].__globals__, "RESULTS", results)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COMMIT", "456789abcdef")
    assert keep["keep"](new, "two", ["-c", 'print("| 1 |")']) == 0
    assert keep["keep"](new, "two", ["-c", 'print("lost", 1 / 0)']) == 1
    keep["merge"](new)
    text = (results / "two_cpu.md").read_text()
    assert text.startswith("`python -c 'print(\"| 1 |\")'`, at commit 456789a\n")
    assert text.endswith("\n\n| 1 |\n")
    assert "ZeroDivisionError" in (new / "two_cpu.err").read_text()
    monkeypatch.setitem(STALE["read_index"].__globals__, "RESULTS", Path("results"))
    one, two = STALE["read_index"](tmp_path)
    assert (one.file, one.commit) == ("one_cpu.md", "0123abc")
    assert (two.file, two.commit, two.command) == ("two_cpu.md", "456789a", """python -c 'print("| 1 |")'""")


@pytest.mark.parametrize("script", ["on_this_gpu.sh", "on_this_cpu.sh"])
def test_scripts_run_programs_that_exist(script):
    text = (ROOT / "benchmarks" / script).read_text()
    parts = subprocess.run([ROOT / "benchmarks" / script, "--list"], capture_output=True, text=True, check=True).stdout
    assert set(parts.split()) <= set(re.findall(r"^part_(\w+)\(\)", text, re.MULTILINE))
    programs = re.findall(r"(?:benchmarks|examples|tests/helpers)/[\w/]+\.py", text)
    assert len(programs) > 6
    assert [name for name in programs if not (ROOT / name).exists()] == []
    wrong = subprocess.run(
        [ROOT / "benchmarks" / script, "--part", "none"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "There is no part 'none'" in wrong.stdout
