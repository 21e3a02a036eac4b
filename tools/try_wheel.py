"""Install a wheel in an empty environment, and run the README's Python blocks there as one program.

    python tools/try_wheel.py dist/nt_attention-0.1.0-py3-none-any.whl [--torch 2.13.0]

The program runs in an empty folder, so that it can't import the repository's own files.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", help="the version to install; the newest, if left out")
    options = parser.parse_args()
    if not options.wheel.name.endswith("-py3-none-any.whl"):
        parser.error(f"the wheel must run on every platform (py3-none-any), got {options.wheel.name}.")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "readme.py")
        program.write_text("\n".join(blocks))
        venv.create(Path(folder, "venv"), with_pip=True)
        python = Path(folder, "venv/bin/python")
        torch = f"torch=={options.torch}" if options.torch else "torch"
        subprocess.run([python, "-m", "pip", "install", "--quiet", torch], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"{options.wheel.resolve()}[hf]"], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([python, program], cwd=folder, env=environment, check=True)
        subprocess.run([python, "-m", "nt_attention"], cwd=folder, env=environment, check=True)
    print(f"{options.wheel.name}: the README's {len(blocks)} blocks run in an empty environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
