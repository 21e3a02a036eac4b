"""The environment, and every backend with its state: what ``python -m nt_attention`` prints without a command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from .. import __version__
from ..kernels import support
from ..kernels.select import BACKENDS, ENVIRONMENT_VARIABLE, available_backends


def main(options: argparse.Namespace) -> int:
    print(f"nt_attention {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    for package in ("transformers", "flash-attn", "flash-attn-4", "triton"):
        version = version_of(package)
        print(f"  {package}: not installed" if version is None else f"  {package} {version}")
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        print(f"  cuda:{i} {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}; support: ", end="")
        print(support.basis(torch.device("cuda", i)))
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        note = "" if named in (*BACKENDS, "auto") else ", which is no backend"
        print(f"  {ENVIRONMENT_VARIABLE} names {named!r}{note}")
    print("backends:")
    width = max(map(len, BACKENDS))
    for name, missing in available_backends().items():
        print(f"  {name:<{width}}  {BACKENDS[name].about if missing is None else 'not available: ' + missing}")
    return 0


def versions() -> dict[str, str]:
    """Of the packages whose kernels are run or timed, those that are installed."""
    packages = ("torch", "triton", "flash-attn", "flash-attn-4")
    return {name: version for name in packages if (version := version_of(name)) is not None}


def version_of(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
