"""Which tests of a GPU are collected, and the table of their results (`make gpu`).

Runs every code block of README.md, of the pages in docs/ and of the package's docstrings (`make docs`).

- `python`, `pycon`: run; the blocks of a page are one program. In `pycon`, lines with `>>>` are compared with the
  output below them.
- `console`: each line that starts with `$ python` is run, and its output compared with the lines below it.
- `bash`, `text`, `toml`: shown only (installation, long benchmarks, files).

`...` in an expected output stands for any text. `<!--- skip: next if(CONDITION, reason="...") -->` skips the next
block.
"""

import doctest
import gc
import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

ROOT = Path(__file__).parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LANGUAGES = {"python", "pycon", "console", "bash", "text", "toml"}


def check_languages(document):
    """A block in a language that is not listed would not be run, and nobody would notice."""
    for region in FencedCodeBlockLexer(language=".*", mapping={"language": "language", "source": "source"})(document):
        if (language := region.lexemes["language"]) not in LANGUAGES:
            raise ValueError(f"{document.path}: a code block has the language {language!r}: use one of {LANGUAGES}.")
        if (language == "pycon") != region.lexemes["source"].startswith(">>>"):
            raise ValueError(f"{document.path}: blocks with the language pycon, and only those, begin with >>>.")
    return ()


def run_console(example):
    commands = []
    for line in example.parsed.splitlines(keepends=True):
        if line.startswith("$ "):
            commands.append([line[2:].strip(), ""])
        else:
            commands[-1][1] += line
    for command, expected in commands:
        program, *arguments = shlex.split(command)
        assert program == "python", f"only python can be run: {command}"
        run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
        if not doctest.OutputChecker().check_output(expected, run.stdout, OPTIONS):
            return f"$ {command}\nexpected:\n{expected}\ngot:\n{run.stdout}{run.stderr}"
    return None


def start_page(namespace):
    torch.manual_seed(0)


sessions = PythonCodeBlockParser(doctest_optionflags=OPTIONS)
sessions.codeblock_parser.language = "pycon"
pages = Sybil(
    parsers=[
        check_languages,
        SkipParser(),
        PythonCodeBlockParser(),
        sessions,
        CodeBlockParser(language="console", evaluator=run_console),
    ],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=start_page,
)
docstrings = Sybil(
    parsers=[DocTestParser(optionflags=OPTIONS)],
    patterns=["nt_attention/**/*.py", "nt_attention/*.py"],
    document_types={".py": PythonDocStringDocument},
    setup=start_page,
)
pytest_collect_file = (pages + docstrings).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expect", action="append", default=[], metavar="NAME==VERSION", help="what must be installed")
    parser.addoption("--whole-sweeps", action="store_true", help="all cases of sweeps, not a fixed eighth of them")
    parser.addoption("--least-sweeps", action="store_true", help="only sweeps of tests that have no other cases")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no page downloads weights
    # Small operations on many threads wait longer for each other than they compute. The variables are for processes
    # that tests start. With more threads, Inductor starts a process that compiles.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # The compiler's cache does not know our operators: a graph of an older checkout may expect other results of them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "inductor"))
    # A million objects of torch, transformers and the tests stay. By default, Python looks at all of them very often.
    gc.set_threshold(10_000, 20, 50)
    for expected in config.getoption("--expect"):
        name, _, version = expected.partition("==")
        installed = importlib.metadata.version(name).partition("+")[0]
        if installed != version:
            raise pytest.UsageError(f"{name} {installed} is installed, and {version} was asked for.")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are collected only where there is one. There, those that run on it join them."""
    if torch.cuda.is_available():
        for item in items:
            if {"GPU", "DEVICE"} & vars(getattr(item, "module", None) or object).keys():
                item.add_marker("gpu")  # its module asks whether there is one
            if "gpu" in item.keywords:
                item.user_properties.append(("backend", backend_of(item)))
        return
    config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
    items[:] = [item for item in items if "gpu" not in item.keywords]


def backend_of(item: pytest.Item) -> str:
    """The backend that a test is about, by its parameters or its folder; "any" if there is none."""
    from nt_attention import available_backends

    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    words = [x.partition(" ")[0] for x in (*values, *item.path.parts) if isinstance(x, str)]
    return next((x for x in words if x in available_backends()), "any")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What ran on the GPU: its name, the backend, and how many tests passed and failed."""
    if not torch.cuda.is_available():
        return
    counts = Counter(
        (name, {"error": "failed"}.get(outcome, outcome))
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        for key, name in getattr(report, "user_properties", ())  # reports of collection errors have none
        if key == "backend"
    )
    terminalreporter.section(torch.cuda.get_device_name())
    for name in sorted({name for name, _ in counts}):
        results = ", ".join(f"{counts[name, x]} {x}" for x in ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{torch.cuda.get_device_name()} | {name:15} | {results}")


def pytest_collection_finish() -> None:
    gc.freeze()  # what exists now is never garbage


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules say at the exit what is not freed
