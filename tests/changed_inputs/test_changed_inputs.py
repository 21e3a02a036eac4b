"""Inputs that are changed in place around a call, in all argument combinations: right results, or an error.

A combination is an entry, where its inputs come from, what is changed in place, how it is run, and the backend. Each
is run three times: by the oracle in float64 on functions without side effects, by this package, and, where this package
raises, by the same program of stock operations. It may raise where stock raises, or where `documented.py` says so.

`cd tests && PYTHONPATH=helpers python -m changed_inputs` runs all of them and prints what they gave. `--only REGEX`
selects them by name.
"""

from __future__ import annotations

import pathlib

import pytest

from .combine import groups
from .documented import EXCEPTIONS, documented
from .entries import ENTRIES
from .modes import MODES
from .run import judge

GROUPS = groups()


@pytest.mark.parametrize("group", GROUPS)
def test_right_or_refused(group: str) -> None:
    wrong = []
    for combination in GROUPS[group]:
        verdict = judge(combination, documented)
        if verdict.kind == "wrong":
            wrong.append(f"{combination.label}: {verdict.what}")
    assert not wrong, f"{len(wrong)} of {len(GROUPS[group])}:\n" + "\n".join(wrong)


def test_at_most_ten_exceptions_each_with_its_page() -> None:
    assert len(EXCEPTIONS) <= 10
    for known in EXCEPTIONS:
        assert (pathlib.Path(__file__).parent.parent.parent / known.page).is_file(), known.page


def test_every_entry_is_run_in_every_kind_of_mode() -> None:
    """A table that is filtered by mistake would pass everything."""
    names = {combination.entry for group in GROUPS.values() for combination in group}
    modes = {combination.mode for group in GROUPS.values() for combination in group}
    assert names == set(ENTRIES)
    assert modes == set(MODES)
    assert sum(map(len, GROUPS.values())) > 15_000
