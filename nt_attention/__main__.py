"""``python -m nt_attention``: the environment and every backend's state; or a command of ``COMMANDS``."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shlex
import sys
from collections.abc import Sequence

from . import __version__
from .kernels.measurements import package_version

COMMANDS = {
    "bench": "time every backend and padded SDPA on your lengths",
    "check": "compare every backend on this machine with the reference in float64",
    "estimate": "measure whether patch would make a Hugging Face model faster on your texts or lengths",
    "run": "run a program in which every Hugging Face model is patched",
    "tune": "measure the expected times of the backends on this GPU, by which auto selects",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return the exit status. Invalid ones raise a SystemExit of 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m nt_attention", description="Without a command: print the environment and every backend's state."
    )
    parser.add_argument("--version", action="store_true", help="print the versions of this and its packages, and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=f"{description[0].upper()}{description[1:]}.")
        command.set_defaults(error=command.error, command_line=shlex.join(["python", "-m", "nt_attention", *arguments]))
        if arguments[:1] == [name]:  # the modules of the other commands are not imported
            importlib.import_module(f".cli.{name}", __package__).add_arguments(command)
    options = parser.parse_args(arguments)
    if options.version:
        names = [name for name in ("torch", "transformers", "triton") if package_version(name)]
        print(f"nt_attention {__version__}", *(f"{name} {package_version(name)}" for name in names), sep=", ")
        return 0
    status: int = importlib.import_module(f".cli.{options.command or 'environment'}", __package__).main(options)
    return status


def run() -> int:
    """`main` as a program: "?" for characters that stdout can't encode; 1 and no message if the reader has ended.

    With ``run``, the program of the user has stdout as it is.
    """
    if sys.argv[1:2] == ["run"]:
        importlib.import_module(".cli.run", __package__).main(sys.argv[2:])
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it exits
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
