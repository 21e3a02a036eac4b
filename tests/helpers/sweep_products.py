"""Products of parameters: a selection runs in `make test`, the other combinations are marked `sweep`."""

import itertools

import pytest


def selection(rows, strength: int) -> set[int]:
    """Indices of few rows with every value of every column; with strength 2, with every pair of values."""
    parts = [set(itertools.combinations(enumerate(map(str, row)), strength)) for row in rows]
    missing, selected = set().union(*parts), set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(parts[index] & missing))
        selected.add(best)
        missing -= parts[best]
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


def sweep_product(names: str, *axes, strength: int = 1):
    """Parametrize a test with all combinations of the values of `axes`."""
    return sweep(names, itertools.product(*axes), strength)
