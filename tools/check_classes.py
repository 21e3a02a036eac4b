"""Checks how a small model of each text class of transformers is packed, and keeps what was found.

    python tools/check_classes.py [TYPE ...] [--jobs N] [--write FILE]

Each class runs the check of `nta.patch` (`hf/check/`) on a small model with random weights (`small_models.py`), in
float32. The result is kept in `tools/checked_classes/VERSION.json`, VERSION being that of transformers, from which
`supported_models.py` makes tables and the data of the search field. No program reads it: a model is checked itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing import TimeoutError as NoResultError
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from small_models import CannotBuildError, build_small, on_meta_device, text_classes

from nt_attention.hf import families
from nt_attention.hf.check.find import NotPackableError, find_plan

FOLDER = Path(__file__).with_name("checked_classes")
SECONDS = 120  # for one class
TASKS = 40  # of a process, which keeps the code of all classes that it has run


class TooLongError(BaseException):
    """A class takes too long. No `except Exception` in the code of a model or of the check catches it."""


def begin() -> None:
    """Begin a process that checks some classes."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGALRM, _late)


def _late(*_: Any) -> None:
    raise TooLongError


def checked(row: tuple[str, str, str]) -> dict[str, Any]:
    """What the check finds for a class: its plan, or the reason why there is none."""
    signal.alarm(SECONDS)
    try:
        return _entry(row) | _found(row)
    except TooLongError:
        return _entry(row) | _NO_RESULT
    except BaseException as error:  # the code of any class
        return _entry(row) | {"reason": f"its check raises {type(error).__name__}: {error}"[:200]}
    finally:
        signal.alarm(0)


_NO_RESULT = {"reason": f"its check has no result after {SECONDS} s"}


def _entry(row: tuple[str, str, str]) -> dict[str, Any]:
    return dict(zip(("type", "class", "head"), row, strict=True))


def _found(row: tuple[str, str, str]) -> dict[str, Any]:
    try:
        if (reason := families.why_not_packed(on_meta_device(*row[:2]))) is not None:  # BigBird changes its attention
            return {"reason": reason}
        model = build_small(*row[:2], [torch.float32])
    except Exception as error:  # the code of any class
        why = " ".join(str(error).split())
        kind = "" if isinstance(error, CannotBuildError) else f"{type(error).__name__}: "
        return {"reason": f"no small model could be built: {kind}{why}"[:200]}
    try:
        plan = find_plan(model)
    except NotPackableError as error:
        return {"reason": str(error)}
    return {"plan": {x.name: getattr(plan, x.name) for x in fields(plan) if _is_set(plan, x)}}


def _is_set(plan: Any, field: Any) -> bool:
    return bool(getattr(plan, field.name) != field.default)


def results(rows: list[tuple[str, str, str]], jobs: int) -> Iterator[dict[str, Any]]:
    """The entries of classes, in their order. A class that blocks in C code, or ends its process, has none."""
    while rows:
        done = 0
        with get_context("spawn").Pool(jobs, begin, maxtasksperchild=TASKS) as pool:
            found = pool.imap(checked, rows)
            for row in rows:
                done += 1
                try:
                    yield found.next(SECONDS + 60)
                except NoResultError:
                    yield _entry(row) | _NO_RESULT
                    break  # other processes begin after it
        rows = rows[done:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, such as bert; by default all")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="by default the kept file, if all types run")
    options = parser.parse_args(argv)
    rows = [row for row in text_classes() if not options.types or row[0] in options.types]
    entries = []
    for entry in results(rows, options.jobs):
        entries.append(entry)
        print(json.dumps(entry), flush=True)
    file = options.write or (None if options.types else FOLDER / f"{transformers.__version__}.json")
    if file is not None:
        file.parent.mkdir(exist_ok=True)
        file.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
    packed = {entry["type"] for entry in entries if "plan" in entry}
    print(f"{len(packed)} of {len({entry['type'] for entry in entries})} model types are packed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
