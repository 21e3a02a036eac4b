"""Run the README's Python blocks as one program in an environment that has a wheel and what it needs, and nothing else.

    python tools/try_wheel.py dist/nt_attention-0.1.0-py3-none-any.whl

What the wheel and its extra "hf" need, and what that needs, are links to the packages that are installed here, so that
nothing is downloaded. A version that does not fit is an error. The program runs in an empty folder, so that it can't
import the repository's own files.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(?:```|<!--- invisible-code-block: )python\n(.*?)^(?:```|-->)", re.DOTALL | re.MULTILINE)


def needed_by(package: Distribution, extras: set[str]) -> dict[str, Distribution]:
    """The installed packages that a package needs, and those that they need, by name."""
    found: dict[str, Distribution] = {}
    todo = [(package, extra) for extra in {"", *extras}]
    for dependent, extra in todo:
        for requirement in map(Requirement, dependent.requires or []):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            installed = found[requirement.name] = distribution(requirement.name)
            if not requirement.specifier.contains(installed.version, prereleases=True):
                raise SystemExit(f"{requirement} is needed, and {installed.version} is installed.")
            todo += [(installed, x) for x in {"", *requirement.extras} if (installed, x) not in todo]
    return found


def link(package: Distribution, site_packages: Path) -> None:
    for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
        target = site_packages / name
        if not target.exists():
            target.symlink_to(Path(str(package.locate_file(name))).resolve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args()
    if not options.wheel.name.endswith("-py3-none-any.whl"):
        parser.error(f"the wheel must run on every platform (py3-none-any), got {options.wheel.name}.")
    (metadata,) = (x for x in ZipPath(options.wheel).iterdir() if x.name.endswith(".dist-info"))
    if relative := re.findall(r"\]\((?!https:|#)[^)]*|src=\"(?!https:)[^\"]*", (metadata / "METADATA").read_text()):
        raise SystemExit(f"a package index does not resolve the links {relative}: see pyproject.toml.")
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "readme.py")
        program.write_text("\n".join(blocks))
        venv.create(Path(folder, "venv"), with_pip=True)
        python = Path(folder, "venv/bin/python")
        (site_packages,) = Path(folder, "venv/lib").glob("python*/site-packages")
        for package in needed_by(PathDistribution(metadata), {"hf"}).values():
            link(package, site_packages)
        install = ["install", "--quiet", "--no-index", f"{options.wheel.resolve()}[hf]"]  # fails if something lacks
        subprocess.run([python, "-m", "pip", *install], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([python, program], cwd=folder, env=environment, check=True)
        subprocess.run([python, "-m", "nt_attention"], cwd=folder, env=environment, check=True)
    print(f"{options.wheel.name}: the README's {len(blocks)} blocks run in an environment without other packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
