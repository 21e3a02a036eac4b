"""Lists the kept results whose code has changed since they were measured. Needs git and the standard library only.

    python tools/stale_results.py [--strict] [NAME ...]

    NAME        a part of the name of a result: only these results, with everything that changed
    --strict    exit status 1 if a result is stale

benchmarks/results/index.toml names for each result the command and the commit that was measured. From the program of
the command, this tool follows names to the functions, classes, methods, constants and data files that it uses, and to
what these use. What is reached in this way, at the measured commit or at HEAD, counts if it differs between the two.
Comments, docstrings, formatting, and moves to another file do not count.

More is reached than runs: each backend that could be selected on this type of device, and each method whose name is
used somewhere. Not reached is what has no name in the code: a module whose name is put together when it runs.

A result is measured again, and its commit changed in the index, or the change is known not to matter: this command
only shows where to look. Where the history is not complete (a shallow clone), it says which commits it can't find.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
FOLDERS = ("", "benchmarks/", "examples/", "tests/helpers/")  # where programs import from
KERNELS = "nt_attention/kernels/"
ONLY_ON_CPU = (f"{KERNELS}backends/cpu.py",)
ONLY_ON_GPU = (
    *(
        f"{KERNELS}{name}"
        for name in ("token_tiled/", "split_kv/", "launch.py", "bounds_kernels.py", "tree_kernels.py")
    ),
    *(f"{KERNELS}{name}" for name in ("backends/flash", "backends/torch_", "measured/", "verified/", "cost_model.py")),
    "nt_attention/graphs/",
)
# Folders that count if the program imports what is behind them: `patch` looks for Hugging Face models if transformers
# is imported, and for the rest a figure is that of a model that was checked before, on one rank.
BY_IMPORT = {
    "nt_attention/hf/": "transformers|sentence_transformers|trl|nt_attention.hf",
    **{f"nt_attention/hf/check/{name}.py": "nt_attention.hf.check" for name in ("find", "plans", "rows")},
    "nt_attention/distributed/": "torch.distributed|nt_attention.distributed",
}
NO_METHODS = {"Generic", "NamedTuple", "Protocol"}  # bases that call no methods of their subclasses
SHOWN = 3  # changed definitions of a result


@dataclass(frozen=True)
class Result:
    """An entry of the index; its fields are described there."""

    file: str
    command: str
    machine: str
    gpu: bool
    commit: str
    basis: str
    part: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.part}" if self.part else self.file


@dataclass(frozen=True)
class Definition:
    """A top-level function, class without its methods, method, constant, data file, or what else a file does ("").

    Attributes:
        text: Its code in one formatting, without docstrings.
        names: The dotted names that it uses: ``("nta", "patch")``.
        words: The names of attributes that it reads, and its strings.
        bases: The base classes of a class.
    """

    text: str
    names: frozenset[tuple[str, ...]] = frozenset()
    words: frozenset[str] = frozenset()
    bases: frozenset[tuple[str, ...]] = frozenset()


@dataclass(frozen=True)
class Source:
    """A file. ``imports`` maps a local name to a module and the name in it, which is "" for the module itself."""

    definitions: dict[str, Definition]
    imports: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Row:
    """What changed since a result was measured: lines by file and name. None if the commit is not in this clone."""

    result: Result
    changes: dict[tuple[str, str], int] | None


def read_index(root: Path = ROOT) -> list[Result]:
    with open(root / RESULTS / "index.toml", "rb") as file:
        return [Result(**entry) for entry in tomllib.load(file)["result"]]


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def has_commit(root: Path, commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0


def dotted(node: ast.AST) -> tuple[str, ...]:
    """``a.b.c`` as a tuple; () for what does not begin with a name."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (begin := dotted(node.value)):
        return (*begin, node.attr)
    return ()


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of code without annotations, and without the parts of dotted names."""
    yield node
    for field, value in ast.iter_fields(node) if not dotted(node) else ():
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child)


def define(statements: Iterable[ast.stmt]) -> Definition:
    nodes = [node for statement in statements for node in walk(statement)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    modules = {tuple(each.split(".")) for each in strings if each.startswith("nt_attention.")}  # for import_module
    names = {dotted(node) for node in nodes} | modules
    words = {each for each in strings if each.isidentifier()} | {name for each in names for name in each[1:]}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    bases = {dotted(base) for each in statements if isinstance(each, ast.ClassDef) for base in each.bases}
    text = "\n".join(map(ast.unparse, statements))
    return Definition(text, frozenset(names - {()}), frozenset(words), frozenset(bases))


def read_imports(tree: ast.Module, module: str, is_package: bool) -> dict[str, tuple[str, str]]:
    imports = {}
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                whole = each.name if each.asname else each.name.partition(".")[0]
                imports[each.asname or whole] = (whole, "")
        elif isinstance(node, ast.ImportFrom):
            package = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*package, *([node.module] if node.module else [])])
            imports.update({each.asname or each.name: (source, each.name) for each in node.names})
    return imports


def parts_of(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a top-level statement defines, each with the code. Methods are parts of their own."""
    if isinstance(statement, ast.ClassDef):
        methods = [each for each in statement.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        yield from ((f"{statement.name}.{each.name}", each) for each in methods)
        statement.body = [each for each in statement.body if each not in methods] or [ast.Pass()]
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield statement.name, statement
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        yield from ((name, statement) for name in sorted(names))
    elif not isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield "", statement


@cache
def read(root: Path, blob: str, path: str) -> Source:
    text = git(root, "cat-file", "blob", blob)
    if not path.endswith(".py"):
        return Source({"": Definition(text)}, {})
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    groups = defaultdict(list)
    for statement in tree.body:
        for name, part in parts_of(statement):
            groups[name].append(part)
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imports = read_imports(tree, module, path.endswith("__init__.py"))
    return Source({name: define(group) for name, group in groups.items()}, imports)


class Tree:
    """The files of a commit."""

    def __init__(self, root: Path, commit: str) -> None:
        self.root = root
        lines = git(root, "ls-tree", "-r", commit, "--", "nt_attention", *FOLDERS[1:]).splitlines()
        blobs = {path: head.split()[2] for head, path in (line.split("\t") for line in lines)}
        self.blobs = {path: blob for path, blob in blobs.items() if path.endswith((".py", ".json"))}
        self.data = defaultdict[str, list[str]](list)  # folder → data files
        for path in self.blobs:
            if path.endswith(".json"):
                self.data[path.rpartition("/")[0]].append(path)
        self.source = cache(lambda path: read(root, self.blobs[path], path))
        self.uses = cache(lambda path, name: frozenset(self._uses(path, name)))
        self.file_of = cache(self._file_of)

    def _file_of(self, module: str) -> str | None:
        name = module.replace(".", "/")
        paths = (f"{folder}{name}{end}" for folder in FOLDERS for end in (".py", "/__init__.py"))
        return next((path for path in paths if path in self.blobs), None)

    def resolve(self, path: str, names: tuple[str, ...]) -> tuple[str, str] | None:
        """The file and the name in it that dotted names stand for in a file; "*" is everything in the file."""
        source = self.source(path)
        if names[0] in source.definitions:
            return path, names[0]
        module, name = source.imports.get(names[0], (names[0] if names[0] == "nt_attention" else "", ""))
        chain = (*([name] if name else []), *names[1:])
        while target := self.file_of(module):
            if not chain:
                return target, "*"
            if target != path and (resolved := self.resolve(target, chain)):
                return resolved
            module, chain = f"{module}.{chain[0]}", chain[1:]
        return None

    def _uses(self, path: str, name: str) -> Iterator[tuple[str, str]]:
        """What a definition refers to, what its file does besides, and the data files in folders that it names."""
        source = self.source(path)
        if name == "*":
            imported = source.imports if path.endswith("__init__.py") else ()
            yield from ((path, each) for each in source.definitions)
            yield from (target for each in imported if (target := self.resolve(path, (each,))))
            return
        this = source.definitions[name]
        if "" in source.definitions:
            yield path, ""
        yield from (target for names in this.names if (target := self.resolve(path, names)))
        if not all(base[-1:] <= ("",) or base[-1] in NO_METHODS or self.resolve(path, base) for base in this.bases):
            yield from ((path, each) for each in source.definitions if each.startswith(f"{name}."))
        for word in this.words:
            yield from ((each, "") for each in self.data.get(f"{path.rpartition('/')[0]}/{word}", ()))

    def reached(self, programs: Iterable[str], skipped: tuple[str, ...]) -> dict[tuple[str, str], Definition]:
        reached: dict[tuple[str, str], Definition] = {}
        words: set[str] = set()
        methods = defaultdict[str, set[tuple[str, str]]](set)  # of classes that are reached
        stack = [(path, "*") for path in programs]
        seen = set(stack)
        while stack:
            path, name = stack.pop()
            new = self.uses(path, name)
            if name != "*":
                definitions = self.source(path).definitions
                reached[path, name] = definitions[name]
                words |= {name.rpartition(".")[2], *definitions[name].words}
                for each in definitions:
                    if each.startswith(f"{name}."):
                        methods[each.rpartition(".")[2]].add((path, each))
            for each in [each for each in methods if each in words or each.startswith("__")]:
                new = new | methods.pop(each)
            new = {each for each in new - seen if not each[0].startswith(skipped)}
            seen |= new
            stack += new
        return reached

    @cached_property
    def places(self) -> dict[tuple[str, str], list[str]]:
        """Name and text of each definition → the files that have it."""
        places = defaultdict(list)
        for path in self.blobs:
            for name, each in self.source(path).definitions.items():
                places[name, each.text].append(path)
        return places

    def has(self, path: str, name: str, text: str, other: Tree) -> bool:
        """Whether this commit has a definition of another one: in the same file, or moved to one without that name."""
        paths = self.places.get((name, text), [])
        return path in paths or any(not other.defines(each, name) for each in paths)

    def defines(self, path: str, name: str) -> bool:
        return path in self.blobs and name in self.source(path).definitions


@cache
def tree_of(root: Path, commit: str) -> Tree:
    return Tree(root, commit)


def programs_of(command: str, tree: Tree) -> list[str]:
    """The files that a command runs. Of pytest: the whole package."""
    if "-m pytest" in command:
        return [path for path in tree.blobs if path.startswith("nt_attention/")]
    commands = [
        f"nt_attention/cli/{name.replace('-', '_')}.py" for name in re.findall(r"-m nt_attention (\S+)", command)
    ]
    return sorted({path for path in [*commands, *re.findall(r"\S+\.py", command)] if path in tree.blobs})


def not_timed(result: Result, programs: list[str], tree: Tree) -> tuple[str, ...]:
    """What the program reaches by name and the figure does not depend on."""
    if "-m pytest" in result.command:
        return ()
    modules = {module for path in programs for module, _ in tree.source(path).imports.values()}
    folders = [each for each, names in BY_IMPORT.items() if not any(re.match(names, module) for module in modules)]
    return (*folders, *(ONLY_ON_CPU if result.gpu else ONLY_ON_GPU))


def changes(root: Path, result: Result) -> dict[tuple[str, str], int]:
    """How many lines differ in what is reached, by file and name. What is anywhere in the other commit has moved."""
    old, new = tree_of(root, result.commit), tree_of(root, "HEAD")
    programs = programs_of(result.command, new)
    ignored = not_timed(result, programs, new)
    lines: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    files = {}
    for side, (tree, other) in enumerate(((old, new), (new, old))):
        reached = tree.reached([path for path in programs if path in tree.blobs], ignored)
        for (path, name), this in sorted(reached.items(), key=lambda each: each[0]):
            if not other.has(path, name, this.text, tree):
                files[name or path] = path
                lines[name or path][side].extend(this.text.splitlines())
    return {(files[name], name): count_changes(*both) for name, both in lines.items()}


def count_changes(old: list[str], new: list[str]) -> int:
    return sum(line[0] in "+-" for line in difflib.unified_diff(old, new, n=0) if line[:3] not in ("+++", "---"))


def examine(root: Path, result: Result) -> Row:
    return Row(result, changes(root, result) if has_commit(root, result.commit) else None)


def reasons(row: Row, limit: int | None) -> Iterator[str]:
    """The files that changed, those with most lines first, and in each of them the definitions."""
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for (path, name), count in (row.changes or {}).items():
        files[path][name] = count
    ranked = sorted(files.items(), key=lambda each: -sum(each[1].values()))
    for path, names in ranked[:limit]:
        most = sorted(names, key=lambda name: -names[name])
        shown = ", ".join(f"{name if name != path else ''} {names[name]:,}".lstrip() for name in most[:limit])
        rest = f" and {len(most) - limit} more" if limit and len(most) > limit else ""
        yield f"    {path}: {shown}{rest}"
    if limit and len(ranked) > limit:
        yield f"    and {len(ranked) - limit} more files"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only results with this in their names, in full")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a result is stale")
    options = parser.parse_args(argv)
    results = [
        each for each in read_index(root) if not options.names or any(name in each.name for name in options.names)
    ]
    rows = [examine(root, result) for result in results]
    for row in rows:
        lines = "not in this clone" if row.changes is None else f"{sum(row.changes.values()):,} lines changed"
        print(f"{row.result.name}, measured at {row.result.commit}: {lines}")
        print(*reasons(row, None if options.names else SHOWN), sep="\n", end="\n" if row.changes else "")
    stale = sum(bool(row.changes) for row in rows)
    unknown = sum(row.changes is None for row in rows)
    print(f"\n{stale} of {len(rows)} results are stale.", end="")
    print(f" Of {unknown}, the commit is not in this clone: `git fetch --unshallow`." if unknown else "")
    return int(options.strict and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
