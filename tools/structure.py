"""Counts the structure of the package, so that two versions of it can be compared. Needs the standard library only.

    python tools/structure.py [TREE]        TREE: the root of another checkout, such as a `git worktree`

Everything but the cycles is counted without the command line (``nt_attention/cli``, or ``commands`` in older versions).
The first two are also counted without ``nt_attention/compat``, whose signatures are those of other libraries.

- **Hand-ordered option lists**: lists in the code that name at least 4 options of an attention call one after another,
  in the order of their declaration (``OPTIONS``): a signature, a call, a tuple, a list, a set, a dict, a class body, or
  a string that is no docstring, such as an operator's schema. An item counts by its keyword, key, variable or
  attribute, also inside of ``float(x)`` or ``*x``; any other item ends the run. Two are not counted: the body of
  ``AttentionSpec``, which is the declaration, and calls of the public ``varlen_attention``, where each option stands
  beside its keyword.
- **Files that name softcap**, as an example of what one option costs.
- **Functions over 60 lines**, from ``def`` to the end without the docstring. Triton kernels are not counted.
- **Import cycles**: groups of modules that import each other, in functions and under TYPE_CHECKING as well.
- **Lines** of all Python files, and lines of the command line.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

OPTIONS = (
    ("is_causal",),
    ("causal_alignment", "lower_right"),
    ("window_size", "window_left", "window_right"),
    ("scale",),
    ("softcap",),
    ("score_mod",),
    ("mask_mod",),
    ("dropout_p",),
    ("deterministic",),
    ("batch_invariant",),
)
RANK = {name: rank for rank, names in enumerate(OPTIONS) for name in names}
MIN_OPTIONS = 4
MAX_LINES = 60
KINDS: dict[type, str] = {
    ast.FunctionDef: "signature",
    ast.ClassDef: "class body",
    ast.Call: "call",
    ast.Tuple: "tuple",
    ast.List: "list",
    ast.Set: "set",
    ast.Dict: "dict",
    ast.Constant: "string",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    for title, found in measure(parser.parse_args().tree).items():
        print(f"{title}: {found if isinstance(found, int) else len(found)}")
        for line in () if isinstance(found, int) else found:
            print(f"  {line}")


def measure(tree: Path) -> dict[str, int | list[str]]:
    """What was counted in ``tree``, by title: a number, or a line for each that was found."""
    files = sorted((tree / "nt_attention").rglob("*.py"))
    everything = {path.relative_to(tree): path.read_text(encoding="utf-8") for path in files}
    texts = {path: text for path, text in everything.items() if path.parts[1] not in ("cli", "commands")}
    modules = {path: ast.parse(text) for path, text in texts.items()}
    own = [path for path in modules if path.parts[1] != "compat"]

    def locations(of: Callable[[ast.Module], list[tuple[int, str]]], paths: Iterable[Path]) -> list[str]:
        return [f"{path}:{line} {what}" for path in paths for line, what in of(modules[path])]

    return {
        "hand-ordered option lists": locations(option_lists, own),
        "files that name softcap": [str(path) for path in own if "softcap" in texts[path]],
        f"functions over {MAX_LINES} lines": locations(long_functions, modules),
        "import cycles": [", ".join(cycle) for cycle in cycles(imports(everything))],
        "lines": sum(text.count("\n") for text in texts.values()),
        "lines of the command line": sum(text.count("\n") for path, text in everything.items() if path not in texts),
    }


def option_lists(module: ast.Module) -> list[tuple[int, str]]:
    """The line and kind of each hand-ordered option list."""
    unpacked = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Starred)}
    skipped = unpacked | {id(docstring.value) for node in ast.walk(module) if (docstring := _docstring(node))}
    return sorted(
        (node.lineno, KINDS[type(node)])
        for node in ast.walk(module)
        if isinstance(node, (ast.stmt, ast.expr))
        and type(node) in KINDS
        and id(node) not in skipped
        and _longest_run(_items(node)) >= MIN_OPTIONS
    )


def _docstring(node: ast.AST) -> ast.Expr | None:
    match node:
        case ast.Module(body=[first, *_]) | ast.ClassDef(body=[first, *_]) | ast.FunctionDef(body=[first, *_]):
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                return first
    return None


def _items(node: ast.AST) -> Iterator[str | None]:
    """The names of a list's items; None for an item without one."""
    match node:
        case ast.FunctionDef(args=arguments):
            yield from (each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        case ast.ClassDef(name=name, body=body) if name != "AttentionSpec":
            yield from (_name(line.target) for line in body if isinstance(line, ast.AnnAssign))
        case ast.Call(func=function, args=arguments, keywords=keywords) if _name(function) != "varlen_attention":
            yield from _elements(arguments)
            yield from (keyword.arg for keyword in keywords)
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            yield from _elements(elements)
        case ast.Dict(keys=keys):
            yield from map(_name, keys)
        case ast.Constant(value=str(text)):
            yield from (re.sub(r"=.*", "", part, flags=re.DOTALL).split(" ")[-1] for part in text.split(","))


def _elements(elements: list[ast.expr]) -> Iterator[str | None]:
    for element in elements:
        if isinstance(element, ast.Starred) and isinstance(element.value, (ast.Tuple, ast.List)):
            yield from _elements(element.value.elts)
        else:
            yield _name(element)


def _name(node: ast.expr | None) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case ast.Starred(value=inner) | ast.Call(args=[inner], keywords=[]):
            return _name(inner)
    return None


def _longest_run(names: Iterable[str | None]) -> int:
    """How many names of options stand one after another in the order of their declaration."""
    longest = run = 0
    last = -1
    for name in names:
        rank = RANK.get(name or "", -1)
        run = 0 if rank < 0 else run + 1 if rank >= last else 1
        last = rank
        longest = max(longest, run)
    return longest


def long_functions(module: ast.Module) -> list[tuple[int, str]]:
    """The line of each long function, with its name and length."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and not any("triton" in ast.unparse(each) for each in node.decorator_list):
            docstring = _docstring(node)
            lines = _lines(node) - (_lines(docstring) if docstring else 0)
            if lines > MAX_LINES:
                found.append((node.lineno, f"{node.name}, {lines} lines"))
    return found


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def imports(texts: dict[Path, str]) -> dict[str, set[str]]:
    """The modules that each module of the package imports, wherever the import statement stands."""
    names = {path: path.with_suffix("").parts for path in texts}
    names = {path: parts[:-1] if parts[-1] == "__init__" else parts for path, parts in names.items()}
    known = {".".join(parts) for parts in names.values()}
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        package = names[path] if path.name == "__init__.py" else names[path][:-1]
        targets = (target for node in ast.walk(ast.parse(text)) for target in _imported(node, package, known))
        graph[".".join(names[path])] = {target for target in targets if target in known}
    return graph


def _imported(node: ast.AST, package: tuple[str, ...], known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = package[: len(package) + 1 - node.level] if node.level else ()
        base = ".".join((*start, *(node.module or "").split("."))).rstrip(".")
        for alias in node.names:  # a submodule, or a name in the module
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules of which each reaches all others."""
    reachable = {module: _reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in reached if module in reachable[other]))
        for module, reached in reachable.items()
        if module in reached
    }
    return [list(group) for group in sorted(groups)]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


if __name__ == "__main__":
    main()
