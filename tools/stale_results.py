"""Lists the kept results whose code has changed since they were measured. Needs git and the standard library only.

    python tools/stale_results.py [--strict] [NAME ...]

    NAME        a part of the name of a result file: only these
    --strict    exit status 1 if a result is stale

Each section of a file in benchmarks/results names its command and the commit that was measured. From the program of the
command, this tool follows names to the functions, classes, methods and constants that have them, and on to what these
use. A result is stale if one of them differs between HEAD and its commit. Comments, docstrings, formatting, and moves
to another file do not count; neither do backends of the other type of device, the code for Hugging Face models in a
program that patches none, and the code for several ranks in a program that divides no batch. More is reached than runs,
because a name stands for all that have it. A run of the tests reaches the whole package.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^`python (.+)`, at commit ([0-9a-f]{7})$", re.MULTILINE)
FOLDERS = ("nt_attention", "benchmarks", "examples")
SHARED = ("benchmarks/by_turns.py", "benchmarks/workloads.py", "examples/shared_data.py")
KERNELS = "nt_attention/kernels/"
ONLY_ON_CPU = (f"{KERNELS}backends/cpu",)
ONLY_ON_GPU = (
    *(f"{KERNELS}{name}" for name in ("token_tiled/", "split_kv/", "launch.py", "bounds_kernels", "tree_kernels")),
    *(f"{KERNELS}{name}" for name in ("backends/flash", "backends/torch_", "measured/", "verified/", "cost_model.py")),
    "nt_attention/graphs/",
)
NEVER = ("nt_attention/hf/check/", "nt_attention/compat/")  # a figure is that of a model that was checked before
# Names of which a program that uses the folder has one.
CHANGES_MODELS = {"patch", "estimate"}
USES = {
    "nt_attention/hf/": CHANGES_MODELS | {"hf", "nt_attention/flash"},
    "nt_attention/hf/pack/": CHANGES_MODELS,
    "nt_attention/distributed/": {"shard"},
}
Definitions = dict[tuple[str, str], list[ast.stmt]]  # path and name → the code


def definitions(text: str) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module defines, each with the code, without docstrings. What has no name is ""."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            methods = [each for each in statement.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
            yield from ((each.name, each) for each in methods)
            statement.body = [each for each in statement.body if each not in methods] or [ast.Pass()]
            yield statement.name, statement
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield from ((node.id, statement) for node in ast.walk(statement) if is_target(node))
        elif not isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield "", statement


def is_target(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def names_in(statement: ast.stmt) -> set[str]:
    """The names and attributes that code reads, and its strings, for getattr and tables of names."""
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


@cache
def read(root: Path, commit: str) -> Definitions:
    """All definitions of a commit."""
    found: Definitions = defaultdict(list)
    archive = subprocess.run(["git", "archive", commit, *FOLDERS], cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            text = tar.extractfile(member).read().decode() if member.name.endswith((".py", ".json")) else ""
            if member.name.endswith(".json"):
                found[member.name, ""] = [ast.Expr(ast.Constant(text))]
            for name, statement in definitions(text) if member.name.endswith(".py") else ():
                found[member.name, name].append(statement)
    return found


def programs_of(command: str) -> list[str]:
    modules = re.findall(r"-m nt_attention (\S+)", command)
    return [*(f"nt_attention/cli/{name.replace('-', '_')}.py" for name in modules), *re.findall(r"\S+\.py", command)]


def reached(root: Path, commit: str, command: str, is_gpu: bool) -> set[tuple[str, str]]:
    """The names that the command reaches, each with its code."""
    programs, skipped = programs_of(command), (*NEVER, *(ONLY_ON_CPU if is_gpu else ONLY_ON_GPU))
    by_name: dict[str, list[tuple[str, str]]] = defaultdict(list)
    found = read(root, commit)
    of_programs = {name for key in found if key[0] in programs for each in found[key] for name in names_in(each)}
    if of_programs:
        skipped += tuple(folder for folder, names in USES.items() if not of_programs & names)
    for path, name in found:
        is_library = path.startswith("nt_attention/") and not path.startswith(("nt_attention/cli/", *skipped))
        if is_library or path in programs or path in SHARED:
            by_name[name].append((path, name))
    of_package = [key for keys in by_name.values() for key in keys]
    stack = [key for key in found if key[0] in programs] or of_package  # the tests have no program
    seen = set(stack)
    while stack:
        path, name = stack.pop()
        names = {name for each in found[path, name] for name in names_in(each)}
        new = {key for name in names for key in by_name.get(name, ())} - seen
        new |= {(path, "")} & found.keys() - seen
        seen |= new
        stack += new
    return {(name or path, ast.unparse(each)) for path, name in seen for each in found[path, name]}


def results(root: Path) -> Iterator[tuple[str, str, str]]:
    """The file, the command and the commit of each section."""
    for file in sorted((root / "benchmarks" / "results").glob("*.md")):
        yield from ((file.name, *section) for section in SECTION.findall(file.read_text()))


def changed(root: Path, file: str, command: str, commit: str) -> list[str] | None:
    """The names that changed since a result was measured. None if the commit is not in this clone."""
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=root, capture_output=True).returncode:
        return None
    is_gpu = not file.endswith("_cpu.md")
    before, now = (reached(root, each, command, is_gpu) for each in (commit, "HEAD"))
    return sorted({name for name, _ in before ^ now})


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only files with this in their names")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a result is stale")
    options = parser.parse_args(argv)
    chosen = [each for each in results(root) if any(name in each[0] for name in options.names or [""])]
    stale = 0
    for file, command, commit in chosen:
        names = changed(root, file, command, commit)
        stale += bool(names)
        shown = "not in this clone" if names is None else ", ".join(names[:8]) or "as measured"
        print(f"{file}, {commit}, `{command}`: {f'{len(names)} changed: ' if names else ''}{shown}")
    print(f"{stale} of {len(chosen)} results are stale.")
    return int(options.strict and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
