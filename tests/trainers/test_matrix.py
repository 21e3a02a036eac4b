"""The page of trainers says what the tests found."""

import json

import trainers_page as matrix


def test_trainers_page_matches_outcomes():
    assert matrix.PAGE.read_text() == matrix.render(json.loads(matrix.FOUND.read_text()))


def test_trainers_page_numbers_reasons():
    rows = [
        {"library": "b 1", "task": "one", "patched": "before", "outcome": "packed"},
        {"library": "b 1", "task": "one", "patched": "after", "outcome": "packed, and in part padded: why; other"},
        {"library": "A 2", "task": "two", "patched": "after", "outcome": "falls back: other"},
        {"library": "A 2", "task": "three", "patched": "after", "outcome": "refused: never"},
    ]
    page = matrix.render(rows)
    assert page.index("## A 2") < page.index("## b 1")
    assert "| one | packed | packed, in part (3, 1) |" in page
    assert "| two | – | falls back (1) |" in page
    assert "| three | – | refused (2) |" in page
    assert page.endswith("1. other\n2. never\n3. why\n")


def test_outcomes_of_libraries_that_did_not_run_are_kept():
    def row(library, outcome="packed"):
        return {"library": library, "task": "one", "patched": "before", "outcome": outcome}

    before = [row("A 1.2.3", "falls back"), row("B 2"), row("A 1.1 on an H200")]
    assert matrix.merge(before, [row("A 1.3")]) == [row("A 1.3"), row("B 2"), row("A 1.1 on an H200")]
