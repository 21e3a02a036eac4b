"""Products of parameters, of which ``make test`` runs a selection and ``make test-all`` more.

Cases that are marked ``sweep`` are not run by ``make test``. ``make test-all`` runs an eighth of those of each test.
``make test-ci`` runs a thirty-second of those of tests that have no other cases. Both run at least one, and always the
same ones. With ``--whole-sweeps``, or for a test that is named by ``file::test``, all of them run.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from torch import Tensor


def covering(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Combinations of the axes' values: all of two axes, and of more axes some in which every pair of values occurs.

    ``make test`` runs a selection of them; the others are marked ``sweep``.

    The selection's combination number i has value i of every axis, and shorter axes begin again. So each value occurs
    at least once. A value that an axis names several times is one value, which the selection takes more often.

    An axis may set several arguments: ``covering({"model_type, name": [("bert", "BertModel")], "side": ["left"]})``.
    """
    listed = [list(axis) for axis in axes.values()]
    values = [[x for i, x in enumerate(axis) if _index(axis, x) == i] for axis in listed]
    selected = {
        tuple(_index(axis, names[i % len(names)]) for axis, names in zip(values, listed, strict=True))
        for i in range(max(map(len, listed)))
    }
    several = ["," in names for names in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    if len(values) > 2:
        rows = sorted({rows[index] for index in selection(rows, 2)} | selected)
    params = []
    for which in rows:
        chosen = [axis[i] for axis, i in zip(values, which, strict=True)]
        flat = [x for part, many in zip(chosen, several, strict=True) for x in (part if many else [part])]
        marks = () if which in selected else pytest.mark.sweep
        params.append(pytest.param(*flat, marks=marks, id="-".join(map(_id, flat))))
    return pytest.mark.parametrize(", ".join(axes), params)


def sweep_except(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values as parameters; those that are not in ``kept`` are marked ``sweep``."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]), marks=() if value in kept else pytest.mark.sweep
        )
        for value in values
    ]


def _index(values: list[Any], value: Any) -> int:
    return next(i for i, x in enumerate(values) if x is value or (type(x) is type(value) is not Tensor and x == value))


def _id(value: Any) -> str:
    """As pytest names a value, and torch's dtypes and layouts by their names."""
    name = str(value) if str(value).startswith("torch.") else getattr(value, "__name__", None)
    return name or ("+".join(value) or "none" if isinstance(value, dict) else str(value))


def selection(rows, strength: int) -> set[int]:
    """Indices of few rows with every value of every column; with strength 2, with every pair of values."""
    bits: dict[Any, int] = {}  # of each value or pair of values: sets of them are integers, which is faster
    parts = []
    for row in rows:
        combinations = itertools.combinations(enumerate(map(str, row)), strength)
        parts.append(sum(1 << bits.setdefault(x, len(bits)) for x in combinations))
    missing, selected = (1 << len(bits)) - 1, set()
    while missing:
        best = max(range(len(rows)), key=lambda index: (parts[index] & missing).bit_count())
        selected.add(best)
        missing &= ~parts[best]
    return selected


def sweep(names: str, rows, strength: int = 1):
    """Parametrize a test with `rows`."""
    rows = list(rows)
    selected = selection(rows, strength)
    parameters = [
        pytest.param(*row, id="-".join(map(str, row)), marks=() if index in selected else pytest.mark.sweep)
        for index, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, parameters)


def pairwise(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Combinations of the axes' values in which every pair of values occurs, and no others.

    ``make test`` runs some of them, in which every value occurs; the others are marked ``sweep``.
    """
    rows = list(itertools.product(*axes.values()))
    rows = [rows[index] for index in sorted(selection(rows, 2))]
    selected = selection(rows, 1)
    params = [
        pytest.param(*row, marks=() if index in selected else pytest.mark.sweep, id="-".join(map(_id, row)))
        for index, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(", ".join(axes), params)


def sweep_product(names: str, *axes, strength: int = 1):
    """Parametrize a test with all combinations of the values of `axes`."""
    return sweep(names, itertools.product(*axes), strength)


def not_drawn(items: Iterable[pytest.Item], least: bool = False) -> set[pytest.Item]:
    """The cases of sweeps that are left out, by the hash of their names.

    Args:
        least: draw a thirty-second and not an eighth, and none if the test has other cases too.
    """
    tests: dict[str, list[pytest.Item]] = {}
    with_other_cases = set()
    for item in items:
        name, mark = item.nodeid.partition("[")[0], item.get_closest_marker("sweep")
        if mark is None:
            with_other_cases.add(name)
        else:
            tests.setdefault(name, []).append(item)
    left_out = set()
    for name, cases in tests.items():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        drawn = 0 if least and name in with_other_cases else -(-len(cases) // (32 if least else 8))
        left_out |= {*cases[drawn:]}
    return left_out
