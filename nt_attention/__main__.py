"""``python -m nt_attention``: the environment, and every backend with its state."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from . import __version__
from .kernels.select import BACKENDS, available_backends


def main() -> None:
    print(f"nt_attention {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    for package in ("transformers", "flash-attn", "flash-attn-4", "triton"):
        try:
            print(f"  {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package}: not installed")
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        print(f"  cuda:{i} {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}")
    print("backends:")
    for name, missing in available_backends().items():
        print(f"  {name:<12} {BACKENDS[name].about if missing is None else 'not here: ' + missing}")


if __name__ == "__main__":
    main()
