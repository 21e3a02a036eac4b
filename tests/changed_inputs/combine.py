"""All combinations, in groups that run together. Every pair of tables is combined in full."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from .changes import (
    HIDDEN,
    OFFSETS,
    ORIGINS,
    Change,
    changes_of_lengths,
    changes_of_other_rows,
    changes_of_results,
    changes_of_values,
)
from .entries import ENTRIES, Entry
from .forms import BOUNDED, Form, Padded
from .modes import MODES
from .run import Combination

# One representative of each kind of change, for the product with all modes.
SOME = ("mul_", "copy_", "mul_ of a detached view")

# These modes take seconds for an entry, so they run for some entries of each kind. NestedTensors can't be traced.
PACKED = r"/(packed|from_offsets, inside)/self|^VarlenMulti.*(inside|padded)|to_nested/from_offsets"
COSTLY = {
    "compile aot_eager": r"/(packed|nested|transposed|from_offsets, inside)/self|^VarlenMulti.*(nested|inside)",
    "export": f"{PACKED}|Encoder/padded",
    "export strict": r"/from_offsets, inside/self|^VarlenMulti.*inside",
}


def _too_costly(entry: Entry, mode: str) -> bool:
    wanted = COSTLY.get(mode.split(",")[0])
    return wanted is not None and not re.search(wanted, entry.name)


def _origins(entry: Entry) -> list[str]:
    return [name for name, origin in ORIGINS.items() if not origin.shared or entry.self_attention]


def _changes(entry: Entry) -> list[Change]:
    values = changes_of_values(list(entry.inputs), list(entry.outputs))
    if entry.meaning.startswith("rows"):
        values = [change for change in values if not change.other]  # the forms differ
    weight = (
        []
        if entry.meaning.startswith("rows") or entry.meaning.startswith("varlen")
        else [Change("weight", "mul_ in no_grad")]
    )
    return values + weight


def _lengths(entry: Entry) -> list[Change]:
    if entry.carrier is None:
        return []
    found = changes_of_lengths(entry.sides)
    if entry.form is Padded or Padded in entry.outputs.values():  # tokens would have other positions
        found = [change for change in found if change.moment != "before forward"]
    if "from_offsets-view" in entry.name:  # a view keeps the values of a tensor that gets other memory
        found = [change for change in found if change.how != "set_"]
    return found


def _called_with(entry: Entry, mode: str) -> bool:
    how = MODES[mode]
    if how.packed_only and entry.form is not Form:
        return False
    if how.packed_only and not entry.meaning.startswith(("varlen", "rows")):
        return False
    if how.traced and ("outside" in entry.name or _too_costly(entry, mode)):
        return False
    if "from_nested, inside" in entry.name and re.search(r"func\.grad", mode):
        return False  # torch can't make a NestedTensor there
    return not (entry.outside and how.lengths != "first" and not mode.startswith("compile"))


def groups() -> dict[str, list[Combination]]:
    """The combinations of each test, by its name."""
    found: dict[str, list[Combination]] = {}
    for entry in ENTRIES.values():
        sets = [("changes by origins", _changes_by_origins(entry)), ("changes of lengths", _changes_of_lengths(entry))]
        for mode in MODES:
            if mode != "eager" and _called_with(entry, mode):
                name = mode.split(",")[0] if MODES[mode].traced else mode  # one graph serves all lengths
                sets.append((name, _changes_in_mode(entry, mode)))
        for name, combinations in sets:
            listed = list(dict.fromkeys(combinations))
            if listed:
                found.setdefault(f"{entry.name} | {name}", []).extend(listed)
    return found


def select(groups: dict[str, list[Combination]]) -> dict[str, list[Combination]]:
    """A small part of every group, for `make test`: each pair of parts of a combination at least once, see `_pairs`."""
    covered: set[tuple[str, ...]] = set()
    selected: dict[str, list[Combination]] = {}
    for name, combinations in groups.items():
        for combination in combinations:
            pairs = _pairs(combination)
            if not pairs <= covered:
                covered |= pairs
                selected.setdefault(name, []).append(combination)
    return selected


def _pairs(combination: Combination) -> set[tuple[str, ...]]:
    """What a selection must contain. Graphs are in fewer pairs: they take seconds to compile."""
    entry, mode, change = combination.of, combination.mode, combination.change
    if combination.how.traced:
        compiler = mode.split(",")[0]
        # a change of lengths may compile the graph again
        how = "lengths" if change.target == "lengths" else change.how
        return {(mode,), (compiler, how), (compiler, change.moment)}
    pairs = {(mode, change.how, change.moment)}
    pairs |= {(entry.name, mode), (entry.name, combination.origin), (entry.name, combination.backend)}
    kind = entry.meaning if entry.only_lengths else entry.name
    label = change.other if change.target == "layout" else change.label
    return pairs | {(kind, label), (combination.origin, change.how), (combination.backend, label)}


def _changes_by_origins(entry: Entry) -> Iterator[Combination]:
    """Every change in every way on results of operations; a few ways on inputs that come from elsewhere."""
    if entry.only_lengths:
        yield from (Combination(entry.name, "nonleaf", Change(), "eager", b) for b in entry.backends)
        return
    changes = _changes(entry)
    for origin, backend in itertools.product(_origins(entry), entry.backends):
        yield Combination(entry.name, origin, Change(), "eager", backend)
    for change, backend in itertools.product(changes, entry.backends):
        yield Combination(entry.name, "nonleaf", change, "eager", backend)
    for origin, change in itertools.product(_origins(entry), changes):
        if change.how in SOME or change.other:
            yield Combination(entry.name, origin, change, "eager", entry.backends[0])


def _changes_of_lengths(entry: Entry) -> Iterator[Combination]:
    for change, backend in itertools.product(_lengths(entry), entry.backends):
        yield Combination(entry.name, "nonleaf", change, "eager", backend)
    for change in _results(entry):
        yield Combination(entry.name, "nonleaf", change, "eager", entry.backends[0])


def _results(entry: Entry) -> list[Change]:
    """Changes that must not matter: of what a layout hands out, and of other rows of the table."""
    results = changes_of_results(entry.sides) if entry.outside else []
    if entry.carrier in BOUNDED.values():  # only the device knows the offsets, and that they were changed
        results = [change for change in results if change.other not in OFFSETS or change.how not in HIDDEN]
    return results + (changes_of_other_rows() if entry.carrier is not None and entry.carrier.is_row else [])


def _changes_in_mode(entry: Entry, mode: str) -> Iterator[Combination]:
    """Every origin and backend without a change, and every change in one or two ways."""
    how = MODES[mode]
    backends = entry.backends[:1] if how.traced else entry.backends
    if how.packed_only or how.traced or how.before or entry.only_lengths:
        origins = ["nonleaf"]
    else:
        origins = ["nonleaf", "leaf", "transposed", *(["one tensor", "chunks"] if entry.self_attention else [])]
    for origin, backend in itertools.product(origins, backends):
        yield Combination(entry.name, origin, Change(), mode, backend)
    if how.lengths != "first" or how.through not in ("backward", "twice", "func.grad"):
        return
    values = [] if entry.only_lengths else _changes(entry)
    ways = SOME[:1] if how.traced else SOME
    some = [change for change in values if change.how in ways or change.other or change.target == "weight"]
    hows = ("copy_", *HIDDEN[:2], *(["in inference_mode"] if how.before else []))
    in_inference = how.before == "made in inference_mode"
    wanted = ("", "position_ids", *([] if entry.carrier in BOUNDED.values() and in_inference else ["offsets"]))
    results = [change for change in _results(entry) if change.other in wanted]
    lengths = [change for change in _lengths(entry) if change.how in hows]
    lengths += [change for change in results if change.how == ("in inference_mode" if in_inference else "copy_")]
    if how.through == "func.grad" or (how.traced and entry.outside and not mode.startswith("compile")):
        lengths = []  # the trace contains this layout, or runs forward and backward at once
    if how.traced:  # a compiled function gets the layout as an argument
        moments = ("before backward", *(["before forward"] if entry.outside and mode.startswith("compile") else []))
        lengths = [change for change in lengths if change.moment in moments]
    if mode.startswith("checkpoint"):  # it recomputes with the changed weight, in stock as well
        some = [change for change in some if change.target != "weight"]
        lengths = [change for change in lengths if entry.outside and change.how not in HIDDEN]
        lengths = [change for change in lengths if change.other not in OFFSETS]  # it recomputes with the changed layout
    if entry.meaning == "rows in a view" and (how.traced or mode.startswith("checkpoint")):
        some = []  # torch decides there what is a view
    if "/transposed/" in entry.name and mode.startswith("compile aot_eager"):
        some = []  # torch 2.13 misses these changes in a stock program as well
    for change in [*some, *lengths]:
        yield Combination(entry.name, "nonleaf", change, mode, entry.backends[0])
