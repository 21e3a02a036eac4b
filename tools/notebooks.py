"""Runs the notebooks that the site shows, and keeps what they print in them.

    python tools/notebooks.py

tools/docs_links.py makes a page of each. tests/project/test_examples.py runs every notebook, and compares the outputs.
`%` commands are shown and not run. Needs the standard library, and what the notebooks import.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SHOWN = {"patch_a_model.ipynb": "start.md"}  # in examples/ → in docs/
# What differs from machine to machine: times, ratios of times, rounding errors, whether an equal model was checked.
MEASURED = re.compile(
    r"\d+(?:\.\d+)?(?= ms\b| ×)|\d\.\de-\d\d|(?<=difference )[\d.e-]+"
    r"|(?<=checked )(?:on this model in [\d.]+ s|before, on an equal model)"
)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as Jupyter does: what it prints, then the value of an expression in its last line."""
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    value, printed, outputs = None, io.StringIO(), list[dict[str, Any]]()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def masked(outputs: list[dict[str, Any]]) -> str:
    """The outputs of a cell without the numbers that differ from machine to machine."""
    return MEASURED.sub("#", json.dumps(outputs, ensure_ascii=False))


def markdown(notebook: dict[str, Any]) -> str:
    """A notebook with its outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "bash" if source.startswith("%") else "python"
        parts.append(f"```{language}\n{source.removeprefix('%')}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text")})
            html = "".join(data["text/html"]) if "text/html" in data else None
            text = html or "```text\n" + "".join(data["text/plain"]).rstrip() + "\n```"
            parts.append(f'<div class="output" markdown="{int(html is None)}">\n\n{text}\n\n</div>')
    return "\n\n".join(parts) + "\n"


def main() -> None:
    for name in SHOWN:
        path = EXAMPLES / name
        notebook, namespace = json.loads(path.read_text("utf-8")), dict[str, Any]()
        for cell in code_cells(notebook):
            source = "".join(cell["source"])
            cell["outputs"] = [] if source.startswith("%") else run_cell(source, namespace)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
