"""Run a benchmark and keep its output in the form of the kept results.

    python benchmarks/keep.py DIR NAME ARGUMENT ...   `python ARGUMENT ...` as a section of DIR/NAME_DEVICE.md
    python benchmarks/keep.py --merge DIR             the results in DIR replace those of benchmarks/results

DEVICE is the name of the GPU, such as h200, or "cpu". A section has the command, the commit, the machine, the versions,
and the standard output of the command. DIR/index.toml gets an entry for it. The standard error, and the output of a
command that fails, are appended to DIR/NAME_DEVICE.err.

The commit is that of the working tree, which must have no changes in code, or that of the environment variable COMMIT
where there is no git. Replacing a result means its whole file, and all of its entries in the index.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("nt_attention", "benchmarks/*.py", "examples", "tests")
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
    "sentence-transformers",
)


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


def machine() -> tuple[str, bool]:
    """The names of the GPUs, or of the CPU with its threads; and whether it is a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "" and shutil.which("nvidia-smi"):
        of_these = ["-i", visible] if visible else []
        names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *of_these).splitlines()
        return (f"{len(names)} × " if len(names) > 1 else "") + names[0], True
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.environ.get('OMP_NUM_THREADS', os.cpu_count())} threads", False


def versions() -> str:
    installed = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    packages = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    return ", ".join([*packages, f"Python {platform.python_version()}", str(datetime.date.today())])


def entry(file: str, command: str, name: str, gpu: bool, commit: str) -> str:
    """The text of an entry in the index. A string of JSON is one of TOML."""
    values = {"file": file, "part": command.partition(" ")[2], "command": command, "machine": name, "gpu": gpu}
    values |= {"commit": commit, "basis": "stated"}
    return "\n".join(
        ["[[result]]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())]
    )


def keep(folder: Path, result: str, arguments: list[str]) -> int:
    commit, (name, gpu) = measured_commit(), machine()
    device = next((word.lower() for word in name.split() if word[1:].isdigit()), "gpu") if gpu else "cpu"
    file, command = f"{result}_{device}.md", shlex.join(["python", *arguments])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{result}_{device}.err", "a") as errors:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        run = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(
            run, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        if done.returncode:
            errors.write(done.stdout)
            return done.returncode
    with open(folder / file, "a") as text:
        text.write(f"`{command}`, at commit {commit}\n\n{name}; {versions()}\n\n{done.stdout.strip()}\n\n")
    with open(folder / "index.toml", "a") as index:
        index.write(entry(file, command, name, gpu, commit) + "\n\n")
    return 0


def merge(folder: Path) -> None:
    for file in folder.glob("*.md"):
        (RESULTS / file.name).write_text(file.read_text().rstrip("\n") + "\n")
    head, *entries = (RESULTS / "index.toml").read_text().split("[[result]]\n")
    new = (folder / "index.toml").read_text().split("[[result]]\n")[1:]
    files = {each.partition("\n")[0] for each in new}
    kept = [each.rstrip("\n") for each in [*entries, *new] if each in new or each.partition("\n")[0] not in files]
    (RESULTS / "index.toml").write_text(head + "\n\n".join(f"[[result]]\n{each}" for each in kept) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--merge"] and len(sys.argv) == 3:
        merge(Path(sys.argv[2]))
    elif len(sys.argv) > 3:
        sys.exit(keep(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3:]))
    else:
        sys.exit(__doc__)
