"""All combinations, by groups that are run together: every pair of axes is gone through in full."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .changes import HIDDEN, ORIGINS, Change, changes_of_lengths, changes_of_values
from .entries import ENTRIES, Entry
from .forms import Form, Padded
from .modes import MODES
from .run import Combination

# One representative of each kind of change, for the product with all modes.
SOME = ("mul_", "mul_ of a view")


def _origins(entry: Entry) -> list[str]:
    return [name for name, origin in ORIGINS.items() if not origin.shared or entry.self_attention]


def _changes(entry: Entry) -> list[Change]:
    values = changes_of_values(list(entry.inputs), list(entry.outputs))
    if entry.meaning == "rows":
        values = [change for change in values if not change.other]  # the forms differ
    weight = [] if entry.meaning == "rows" or entry.meaning.startswith("varlen") else [Change("weight", "mul_ in no_grad")]
    return values + weight


def _lengths(entry: Entry) -> list[Change]:
    if entry.carrier is None:
        return []
    found = changes_of_lengths(entry.sides)
    if entry.form is Padded or Padded in entry.outputs.values():  # whose tokens would stand elsewhere
        found = [change for change in found if change.moment != "before forward"]
    return found


def _called_with(entry: Entry, mode: str) -> bool:
    how = MODES[mode]
    if how.packed_only and entry.form is not Form:
        return False
    if how.packed_only and not entry.meaning.startswith(("varlen", "rows")):
        return False
    fixed = entry.carries and not entry.inside and entry.form is not Padded and entry.carrier is not None
    return not (fixed and how.lengths != "first" and not mode.startswith("compile"))


def groups() -> dict[str, list[Combination]]:
    """By a name: what one test runs."""
    found: dict[str, list[Combination]] = {}
    for entry in ENTRIES.values():
        modes = [mode for mode in MODES if _called_with(entry, mode)]
        sets = {
            "changes by origins": _changes_by_origins(entry),
            "changes of lengths": _changes_of_lengths(entry),
            **{mode: _changes_in_mode(entry, mode) for mode in modes if mode != "eager"},
        }
        for name, combinations in sets.items():
            listed = list(dict.fromkeys(combinations))
            if listed:
                found[f"{entry.name} | {name}"] = listed
    return found


def _changes_by_origins(entry: Entry) -> Iterator[Combination]:
    if "lengths" in entry.families:
        yield from (Combination(entry.name, "nonleaf", Change(), "eager", b) for b in entry.backends)
        return
    changes = [Change(), *_changes(entry)]
    for origin, change, backend in itertools.product(_origins(entry), changes, entry.backends):
        yield Combination(entry.name, origin, change, "eager", backend)


def _changes_of_lengths(entry: Entry) -> Iterator[Combination]:
    for change, backend in itertools.product(_lengths(entry), entry.backends):
        yield Combination(entry.name, "nonleaf", change, "eager", backend)


def _changes_in_mode(entry: Entry, mode: str) -> Iterator[Combination]:
    how = MODES[mode]
    fixed = entry.carries and not entry.inside and entry.form is not Padded
    backends = entry.backends[:1] if how.traced or "lengths" in entry.families else entry.backends
    values = [] if "lengths" in entry.families else _changes(entry)
    some = [change for change in values if change.how in SOME or change.other or change.target == "weight"]
    lengths = [
        change
        for change in _lengths(entry)
        if change.how in ("copy_", *HIDDEN[:2])
        and not (how.traced and how.lengths != "first")
        and not (how.traced and fixed and not mode.startswith("compile"))
    ]
    origins = ["nonleaf", "leaf", "chunks"] if entry.self_attention else ["nonleaf", "leaf"]
    if how.through not in ("backward", "twice"):
        some, lengths = (some if how.through == "func.grad" else []), []
    if how.packed_only:
        origins = ["nonleaf"]
    if how.before or "lengths" in entry.families:
        origins = ["nonleaf"]
    if how.traced:
        origins = ["nonleaf"]
    for origin, backend in itertools.product(origins, backends):
        yield Combination(entry.name, origin, Change(), mode, backend)
    for change, backend in itertools.product([*some, *lengths], backends):
        yield Combination(entry.name, "nonleaf", change, mode, backend)
