"""The environment and the state of every backend: what ``python -m nt_attention`` prints without a command."""

from __future__ import annotations

import argparse
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from .. import __version__
from ..kernels import registry, support
from ..kernels.measurements import package_version
from ..kernels.select import ENVIRONMENT_VARIABLE


def main(options: argparse.Namespace) -> int:
    print(f"nt_attention {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    for package in ("transformers", "flash-attn", "flash-attn-4", "triton"):
        print(f"  {package} {package_version(package) or '(not installed)'}")
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        major, minor = torch.cuda.get_device_capability(device)
        print(f"  {device} {device_name(device)}, compute capability {major}.{minor}; support: {support.basis(device)}")
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        note = "" if named in (*registry.backends(), "auto") else ", which is not a backend"
        print(f"  {ENVIRONMENT_VARIABLE} is {named!r}{note}")
    print("backends:")
    width = max(map(len, registry.backends()))
    for name, backend in registry.backends().items():
        missing = backend.missing()
        print(f"  {name:<{width}}  {backend.about if missing is None else 'not available: ' + missing}")
    return 0


def devices() -> list[str]:
    """The values of ``--device``; the first one is the default."""
    gpus = torch.cuda.device_count()
    return [*(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus)), "cpu"]


def backends_of(device: torch.device) -> list[str]:
    """The backends that can run on a device."""
    backends = registry.backends().values()
    return [each.name for each in backends if each.device_type in (None, device.type) and each.missing() is None]


def output_file(text: str) -> Path:
    file = Path(text)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a directory, got {text!r}")
    return file


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 1, got {text!r}")
    return int(text)


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the name of the CPU and the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = (line.partition(":") for line in (info.read_text().splitlines() if info.exists() else []))
    names = (value.strip() for name, _, value in lines if name.startswith("model name"))
    return f"{next(names, platform.machine())}, torch threads: {torch.get_num_threads()}"
