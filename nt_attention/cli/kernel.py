"""``python -m nt_attention kernel FOLDER``: the functions of flash-attn as a kernel of the package ``kernels``.

transformers loads it for an ``attn_implementation``, in programs that do not import this package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

PROGRAM = "from nt_attention.compat.flash_attn import *\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write, such as nt-flash")


def main(options: argparse.Namespace) -> int:
    for backend in ("cpu", "cuda", "rocm", "xpu"):
        metadata = {"id": f"nt_flash_{backend}", "name": "nt-flash", "version": 1, "license": "Apache-2.0"}
        variant = options.folder / "build" / f"torch-{backend}"
        try:
            variant.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            options.error(str(error))
        (variant / "metadata.json").write_text(
            json.dumps({**metadata, "python-depends": [], "backend": {"type": backend}})
        )
        (variant / "__init__.py").write_text(PROGRAM)
    print(f'export LOCAL_KERNELS="nt_attention/flash={options.folder.resolve()}"')
    return 0
