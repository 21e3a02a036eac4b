"""``python -m nt_attention``: the environment and every backend's state; ``bench`` and ``check``, see ``--help``."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence

COMMANDS = {
    "bench": "put every backend side by side with padded SDPA and NestedTensor SDPA, in one run",
    "check": "check this machine's backends",
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m nt_attention", description="Without a command: the environment, and every backend's state."
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        command.set_defaults(
            refuse=command.error, command_line=shlex.join(["python", "-m", "nt_attention", *arguments])
        )
        if arguments[:1] == [name]:  # the others are not imported
            importlib.import_module(f".cli.{name}", __package__).add_arguments(command)
    options = parser.parse_args(arguments)
    module = importlib.import_module(f".cli.{options.command or 'environment'}", __package__)
    status: int = module.main(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
