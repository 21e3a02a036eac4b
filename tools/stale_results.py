"""Lists the kept results whose code has changed since they were measured. Needs git and the standard library only.

    python tools/stale_results.py [--strict]        --strict: exit status 1 if a result is stale

benchmarks/results/index.toml names for each result the commit that was measured and the code that its figures depend
on. Between that commit and HEAD, every changed line of this code counts. Python files are compared without comments,
docstrings and formatting. A file that was renamed is compared with the file that it was.

A result is measured again, and its commit changed in the index, or the change is known not to matter: this command
only shows where to look. Where the history is not complete (a shallow clone), it says which commits it can't find.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
NO_BLOB = "0" * 40


@dataclass(frozen=True)
class Result:
    """An entry of the index; its fields are described there."""

    file: str
    command: str
    machine: str
    gpu: bool
    commit: str
    basis: str
    code: list[str]
    part: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.part}" if self.part else self.file


@dataclass(frozen=True)
class Change:
    """A file that differs between two commits: its paths and blobs, "" and zeros where there is none."""

    old_path: str
    new_path: str
    old_blob: str
    new_blob: str

    def concerns(self, code: list[str]) -> bool:
        return any(path == each or path.startswith(each + "/") for path in self.paths for each in code)

    @property
    def paths(self) -> set[str]:
        return {self.old_path, self.new_path} - {""}


@dataclass(frozen=True)
class Row:
    """A line of the table. ``commits`` and ``lines`` are None where the commit is not in this clone."""

    result: Result
    commits: int | None
    lines: int | None


def read_index(root: Path = ROOT) -> list[Result]:
    with open(root / RESULTS / "index.toml", "rb") as file:
        return [Result(**entry) for entry in tomllib.load(file)["result"]]


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def has_commit(root: Path, commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0


@cache
def changes(root: Path, commit: str) -> list[Change]:
    """All files that differ between a commit and HEAD."""
    fields = iter(git(root, "diff", "--raw", "--abbrev=40", "-z", "-M", commit, "HEAD").split("\0"))
    found = []
    for header in fields:
        if not header:
            break
        *_, old_blob, new_blob, status = header.split()
        path = next(fields)
        new_path = next(fields) if status[0] == "R" else path
        found.append(
            Change("" if status == "A" else path, "" if status == "D" else new_path, old_blob, new_blob),
        )
    return found


@cache
def changed_lines(root: Path, old_blob: str, new_blob: str, is_python: bool) -> int:
    """How many lines of code were added or removed."""
    old, new = (
        [] if blob == NO_BLOB else code_lines(git(root, "cat-file", "blob", blob), is_python)
        for blob in (old_blob, new_blob)
    )
    difference = difflib.unified_diff(old, new, n=0)
    return sum(line[0] in "+-" for line in difference if not line.startswith(("+++", "---")))


def code_lines(text: str, is_python: bool) -> list[str]:
    """The lines of a file; of a Python file in one formatting, without comments and docstrings."""
    if not is_python:
        return text.splitlines()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def examine(root: Path, result: Result) -> Row:
    if not has_commit(root, result.commit):
        return Row(result, None, None)
    touched = [change for change in changes(root, result.commit) if change.concerns(result.code)]
    paths = sorted({path for change in touched for path in change.paths})
    commits = int(git(root, "rev-list", "--count", f"{result.commit}..HEAD", "--", *paths)) if paths else 0
    lines = sum(
        changed_lines(root, each.old_blob, each.new_blob, (each.new_path or each.old_path).endswith(".py"))
        for each in touched
    )
    return Row(result, commits, lines)


def table(rows: list[Row]) -> Iterator[str]:
    cells = [("result", "measured at", "commits since", "code lines changed")]
    for row in rows:
        found = ("not in this clone", "–") if row.lines is None else (f"{row.commits:,}", f"{row.lines:,}")
        cells.append((row.result.name, row.result.commit, *found))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, commit, *numbers in cells:
        counts = "  ".join(text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True))
        yield f"{name.ljust(widths[0])}  {commit.ljust(widths[1])}  {counts}"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a result is stale")
    options = parser.parse_args(argv)
    rows = [examine(root, result) for result in read_index(root)]
    print(*table(rows), sep="\n")
    stale = sum(bool(row.lines) for row in rows)
    unknown = sum(row.lines is None for row in rows)
    print(f"\n{stale} of {len(rows)} results are stale.", end="")
    print(f" Of {unknown}, the commit is not in this clone: `git fetch --unshallow`." if unknown else "")
    return int(options.strict and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
