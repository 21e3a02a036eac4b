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
                if GPU.search(block) and FIGURE.search(block)
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
    assert [path for path in entry.code if not (ROOT / path).exists()] == []


CODE = "def double(x):\n    y = x + x\n    return y\n" + "".join(f"\n\nlong_enough_{i} = {i}\n" for i in range(5))


@pytest.fixture
def repository(tmp_path):
    """A repository with one result, whose code is in code.py and old.py."""

    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(**files):
        for name, text in files.items():
            path = tmp_path / f"{name}.py"
            path.unlink() if text is None else path.write_text(text)
        git("add", "--all")
        git("commit", "--quiet", "--message", "change")
        return git("rev-parse", "--short=7", "HEAD").strip()

    git("init", "--quiet")
    measured = commit(code=CODE, other="y = 1\n")
    index = tmp_path / "benchmarks" / "results" / "index.toml"
    index.parent.mkdir(parents=True)

    def write_index(commit):
        index.write_text(
            f'[[result]]\nfile = "a.md"\ncommand = "c"\nmachine = "m"\ngpu = false\ncommit = "{commit}"\n'
            'basis = "stated"\ncode = ["code.py", "new.py"]\n'
        )

    write_index(measured)
    return tmp_path, commit, write_index


def run(root, capsys, *arguments):
    status = STALE["main"](list(arguments), root)
    STALE["changes"].cache_clear()
    return status, capsys.readouterr().out


def test_result_is_stale_if_its_code_changed(repository, capsys):
    root, commit, _ = repository
    commit(other="y = 2\n")
    assert run(root, capsys, "--strict")[0] == 0
    commit(code=CODE.replace("x + x", "2 * x"))
    status, text = run(root, capsys, "--strict")
    assert status == 1
    assert re.search(r"a\.md +\w{7} +1 +2\n", text)
    assert "1 of 1 results are stale" in text
    assert run(root, capsys)[0] == 0


def test_comments_docstrings_and_renames_do_not_count(repository, capsys):
    root, commit, _ = repository
    described = CODE.replace("x):\n", 'x):\n    """Twice x."""\n').replace("return y", "return (y)  # twice")
    commit(code=described)
    assert run(root, capsys, "--strict")[0] == 0
    commit(code=None, new=described)
    assert run(root, capsys, "--strict")[0] == 0


def test_commit_that_is_not_in_the_clone(repository, capsys):
    root, _, write_index = repository
    write_index("0123abc")
    status, text = run(root, capsys, "--strict")
    assert status == 0
    assert "not in this clone" in text
