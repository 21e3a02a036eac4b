"""Run a benchmark and keep its output in the form of the kept results.

    python benchmarks/keep.py [--seconds N] DIR NAME ARGUMENT ...   `python ARGUMENT ...` → DIR/NAME_DEVICE.md
    python benchmarks/keep.py --merge DIR                           DIR/*.md → benchmarks/results and the pages
    python benchmarks/keep.py --pages                               the tables of the pages from benchmarks/results

DEVICE is the name of the GPU, such as h200, or "cpu". A section has the command, the commit, the machine, the versions,
and the standard output of the command. A command whose section exists already does not run again. After N seconds it is
stopped; what it has printed is kept if it has rows of a table. The standard error, and the output of a command that
fails, are appended to DIR/NAME_DEVICE.err.

The commit is that of the working tree, which must have no changes in code, or that of the environment variable COMMIT
where there is no git. In README.md and docs/, the lines between `<!-- result FILE N … -->` and `<!-- end -->` are the
tables number N, … of this file, counted from 1, and its commit.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("nt_attention", "benchmarks/*.py", "examples", "tests/helpers")
PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-4", "sentence-transformers")
SECTION = re.compile(r"^`python (?P<command>.+)`, at commit (?P<commit>[0-9a-f]{7})$", re.MULTILINE)
BLOCK = re.compile(r"(?<=<!-- result )(\S+)((?: \d+)+) -->\n.*?(?=<!-- end -->)", re.DOTALL)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def output_of(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def measured_commit() -> str:
    if commit := os.environ.get("COMMIT"):
        return commit[:7]
    if not (ROOT / ".git").exists():
        sys.exit("There is no git here: set COMMIT to the commit that is measured.")
    if changed := output_of("git", "status", "--porcelain", "--", *CODE):
        sys.exit(f"A result needs a commit, so commit these changes first:\n{changed}")
    return output_of("git", "rev-parse", "HEAD")[:7]


def machine() -> tuple[str, str]:
    """The names of the GPUs, or of the CPU with its threads; and the name for files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "" and shutil.which("nvidia-smi"):
        of_these = ["-i", visible] if visible else []
        names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *of_these).splitlines()
        name = (f"{len(names)} × " if len(names) > 1 else "") + names[0]
        return name, next((word.lower() for word in names[0].split() if word[1:].isdigit()), "gpu")
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.environ.get('OMP_NUM_THREADS', os.cpu_count())} threads", "cpu"


def versions() -> str:
    installed = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    packages = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    return ", ".join([*packages, f"Python {platform.python_version()}", str(datetime.date.today())])


def keep(folder: Path, result: str, arguments: list[str], seconds: float | None = None) -> int:
    commit, (name, device) = measured_commit(), machine()
    file, command = folder / f"{result}_{device}.md", shlex.join(arguments)
    if file.exists() and command in [each["command"] for each in SECTION.finditer(file.read_text())]:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = [sys.executable, "-u", "-W", "ignore", *arguments]
    status = 0
    with open(file.with_suffix(".err"), "a") as errors:
        try:
            options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": path}, "stderr": errors, "timeout": seconds}
            process = subprocess.run(run, **options, stdout=subprocess.PIPE)
            output, status = process.stdout.decode(), process.returncode
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode() + f"\n\nStopped after {seconds:.0f} s.\n"
            status = 0 if re.search(r"^\|[-: |]+\|\n\| ", output, re.MULTILINE) else 124
        if status:
            errors.write(output)
            return status
    with open(file, "a") as text:
        text.write(f"`python {command}`, at commit {commit}\n\n{name}; {versions()}\n\n{output.strip()}\n\n")
    return 0


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)


def fill(page: Path, text: str) -> str:
    """The text of a page with the tables of its results."""

    def block(match: re.Match[str]) -> str:
        file, numbers = RESULTS / match[1], [int(n) for n in match[2].split()]
        if not file.exists():
            return f"{match[1]}{match[2]} -->\n\nNot measured yet.\n\n"
        result = file.read_text()
        found = tables(result)
        shown = "\n".join(found[n - 1] for n in numbers if n <= len(found))
        commits = " and ".join(dict.fromkeys(f"`{each['commit']}`" for each in SECTION.finditer(result)))
        link = f"[{match[1]}]({os.path.relpath(file, page.parent)})"
        return f"{match[1]}{match[2]} -->\n\n{shown}\nResult: {link}, measured at {commits}.\n\n"

    return BLOCK.sub(block, text)


def fill_pages() -> None:
    for page in PAGES:
        page.write_text(fill(page, page.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", type=Path, metavar="DIR")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("run", nargs=argparse.REMAINDER, metavar="DIR NAME ARGUMENT …")
    options = parser.parse_args()
    if options.merge is not None:
        for file in options.merge.glob("*.md"):
            (RESULTS / file.name).write_text(file.read_text().rstrip("\n") + "\n")
    elif not options.pages:
        if len(options.run) < 3:
            parser.error("it needs DIR, NAME and the arguments of python")
        folder, result, *arguments = options.run
        return keep(Path(folder).absolute(), result, arguments, options.seconds)
    fill_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
