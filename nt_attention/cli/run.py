"""Run a program in which every Hugging Face model and every Transformer of torch.nn is patched when it is complete."""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType
from typing import Any, Literal, get_args

from .._patch_all import PatchAllHandle, patch_all
from ..patching.building import after_import
from ..patching.handle import CheckMode

GRAPHS: dict[str | None, Literal[True, "training", "auto"]] = {
    "inference": True,
    "training": "training",
    "auto": "auto",
}


def _parser() -> argparse.ArgumentParser:
    name = "python -m nt_attention run"
    usage = f"{name} [options] (SCRIPT | -m MODULE | -) [arguments of the program]"
    parser = argparse.ArgumentParser(name, usage=usage, description=__doc__, allow_abbrev=False)
    parser.add_argument("--packing", choices=["auto", "always"], default="auto", help="always: also small batches")
    parser.add_argument(
        "--on-fallback", choices=["warn", "raise", "silent"], default="warn", help="if a call can't run packed"
    )
    parser.add_argument("--cuda-graphs", choices=list(GRAPHS), help="run packed calls as CUDA graphs")
    parser.add_argument("--shared-prefixes", action="store_true", help="compute first tokens of rows once")
    parser.add_argument("--check", choices=get_args(CheckMode), default="first", help="when packed calls are compared")
    parser.add_argument("--no-summary", action="store_true", help="print no summary at the end")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run a program as ``python`` does, as ``__main__``. The patches stay to the end of the process.

    Raises:
        SystemExit: status 2 for invalid arguments, and what the program raises.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    program = options.module or options.script
    if not program:
        parser.error("pass a file, - for stdin, or -m and a module")
    handle = patch_all(
        packing=options.packing,
        on_fallback=options.on_fallback,
        cuda_graphs=GRAPHS.get(options.cuda_graphs, False),
        shared_prefixes=options.shared_prefixes,
        check=options.check,
    )
    ours = arguments[: len(arguments) - len(program) - (options.module is not None)]
    after_import("accelerate.commands.launch", functools.partial(_launch_patched, ["run", *ours]))
    if not options.no_summary and os.environ.get("RANK", "0") == "0":  # torchrun: the first of its processes
        atexit.register(_print_summary, handle, os.getpid())
    sys.argv[:] = program
    # Pickles, and processes that are started with spawn, find the program under these names.
    main_module = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    vars(main_module).update(__builtins__=builtins, __annotations__={})
    if options.module:
        _run_as_main(program[0])
    else:
        _run_script(program[0], vars(main_module))


def _print_summary(handle: PatchAllHandle, process: int) -> None:
    if os.getpid() == process:  # not in forks
        print(handle, file=sys.stderr)


def _launch_patched(ours: list[str], file: Any) -> None:
    """Let `accelerate launch`, and ``trl sft`` that calls it, start programs with this command."""
    launch: Callable[[Any], None] = file.launch_command

    @functools.wraps(launch)
    def launch_command(args: Any) -> None:
        if not args.no_python:
            program = [*(["-m"] if args.module else []), args.training_script]
            args.training_script_args = [*ours, *program, *args.training_script_args]
            args.module, args.training_script = True, __package__.partition(".")[0]
            atexit.unregister(_print_summary)  # the programs print theirs
        launch(args)

    file.launch_command = launch_command


def _run_as_main(module: str, alter_argv: bool = True) -> None:
    """What ``python -m`` calls. `runpy.run_module` would restore ``__main__`` before threads have ended."""
    run: Callable[[str, bool], None] = vars(runpy)["_run_module_as_main"]
    run(module, alter_argv)


def _run_script(path: str, variables: dict[str, Any]) -> None:
    """Run a file, a directory or zip file with a ``__main__.py``, or stdin, as ``python PATH`` does."""
    if path == "-":
        _set_first_path("")
        variables.update(__file__="<stdin>", __loader__=BuiltinImporter, __cached__=None)
        exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), variables)
        return
    if pkgutil.get_importer(path) is not None:
        sys.path[: 0 if sys.flags.safe_path else 1] = [os.path.abspath(path)]
        _run_as_main("__main__", False)
        return
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as opened:
            code = pkgutil.read_code(opened)
        with io.open_code(file) as opened:
            code = code or compile(opened.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        print(f"{sys.orig_argv[0]}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    variables.update(__file__=file, __loader__=SourceFileLoader("__main__", file), __cached__=None)
    exec(code, variables)


def _set_first_path(path: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = path
