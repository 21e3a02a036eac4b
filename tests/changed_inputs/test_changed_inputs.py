"""Inputs that are changed in place around a call, in all argument combinations: right results, or an error.

A combination is an entry, where its inputs come from, what is changed in place, how it is run, and the backend. Each
is run three times: by the oracle in float64 on functions without side effects, by this package, and, where this package
raises, by the same program of stock operations. It may raise where stock raises, or where `documented.py` says so.

`pytest --whole-sweeps tests/changed_inputs` runs all of them. `-k` selects groups by name.
"""

from __future__ import annotations

import pathlib

import pytest

from .changes import MOMENTS, OPERATIONS, ORIGINS, WAYS
from .combine import groups, select
from .documented import EXCEPTIONS, documented
from .entries import ENTRIES
from .modes import MODES
from .run import Combination, judge

GROUPS = groups()
SELECTED = select(GROUPS)
OTHERS = {name: [x for x in all_of if x not in set(SELECTED.get(name, ()))] for name, all_of in GROUPS.items()}
OTHERS = {name: combinations for name, combinations in OTHERS.items() if combinations}


def check(combinations: list[Combination]) -> None:
    wrong = []
    for combination in combinations:
        verdict = judge(combination, documented)
        if verdict.kind == "wrong":
            wrong.append(f"{combination.label}: {verdict.what}")
    assert not wrong, f"{len(wrong)} of {len(combinations)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("group", SELECTED)
def test_right_result_or_error(group: str) -> None:
    check(SELECTED[group])


@pytest.mark.sweep
@pytest.mark.parametrize("group", OTHERS)
def test_right_result_or_error_in_all_other_combinations(group: str) -> None:
    check(OTHERS[group])


def test_at_most_ten_exceptions_each_with_its_page() -> None:
    assert len(EXCEPTIONS) <= 10
    for known in EXCEPTIONS:
        assert (pathlib.Path(__file__).parent.parent.parent / known.page).is_file(), known.page


def test_every_entry_is_run_in_every_kind_of_mode() -> None:
    """A table that is filtered by mistake would pass everything."""
    for table in (GROUPS, SELECTED):
        combinations = [combination for group in table.values() for combination in group]
        assert {combination.entry for combination in combinations} == set(ENTRIES)
        assert {combination.mode for combination in combinations} == set(MODES)
        assert {combination.origin for combination in combinations} == set(ORIGINS)
        assert {combination.change.moment for combination in combinations} == {"", *MOMENTS}
        assert {combination.change.how for combination in combinations} == {"", *OPERATIONS, *WAYS}
    assert sum(map(len, GROUPS.values())) > 15_000
    both = [combination for table in (SELECTED, OTHERS) for group in table.values() for combination in group]
    assert len(both) == len(set(both)) == sum(map(len, GROUPS.values()))
