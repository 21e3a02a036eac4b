"""Right against the oracle, or an error: every public entry, with everything that is done to tensors around a call.

A combination is an entry, where its inputs come from, what is changed in place, how it is run, and the backend. Each
is run three times: by the oracle in float64 on functions without side effects, by this package, and, where this package
raises, by the same program of stock operations. It may raise where stock raises, or by the table below.

`python tests/test_never_wrong.py` prints how many there are and what they gave; `--only TEXT` runs those whose name
holds the text.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from never_wrong.combine import groups
from never_wrong.entries import ENTRIES
from never_wrong.modes import MODES
from never_wrong.run import Combination, judge


@dataclass(frozen=True)
class Documented:
    """A refusal that PyTorch's own attention does not share; ``page`` tells users of it."""

    combinations: str  # a regular expression over their names
    stage: str  # where it is raised; "" for anywhere
    message: str  # a regular expression
    reason: str
    page: str


EXCEPTIONS = [
    Documented(
        r"lengths .* before forward",
        "call",
        r"^ValueError: .*(changed|in place)",
        "a layout whose offsets were changed after it was made; stock has no layouts, and reads offsets anew",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"lengths .* before backward",
        "backward",
        r"^RuntimeError: .*modified by an inplace operation",
        "offsets are saved for the backward pass, as torch's varlen_attn saves cu_seqlens; a mask made of them is not",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"^patch/(bert|llama).*\| differentiated twice",
        "backward",
        r"^RuntimeError: .*differentiate",
        "kernels are differentiated once, as stock's kernels are; a model under eager attention has no kernel",
        "docs/reference/hugging_face.md",
    ),
    Documented(
        r"\| jit\.trace,",
        "trace",
        r"jit\.trace",
        "lengths would be constants of the trace",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"\| (make_fx|export)",
        "trace",
        r"^(ValueError|RuntimeError|TypeError): .*(from_offsets|has no values to read|while make_fx is tracing)",
        "lengths are read on the host by every constructor but from_offsets",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"\| vmap of func\.grad \|",
        "call",
        r"vmap",
        "the kernels' autograd function has no vmap rule",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"/nested.*\| out mul_ of a view \|",
        "backward",
        r"^NotImplementedError: aten\.new_empty_strided",
        "autograd can't pass a change of the values() of a NestedTensor that is no view; the output itself may change",
        "docs/reference/multihead_attention.md",
    ),
]

GROUPS = groups()


def documented(combination: Combination, stage: str, message: str) -> int:
    for at, known in enumerate(EXCEPTIONS):
        if (
            re.search(known.combinations, combination.label)
            and known.stage in ("", stage)
            and re.search(known.message, message)
        ):
            return at
    return -1


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
        assert (pathlib.Path(__file__).parent.parent / known.page).is_file(), known.page


def test_every_entry_is_run_in_every_kind_of_mode() -> None:
    """A table that is filtered by mistake would pass everything."""
    names = {combination.entry for group in GROUPS.values() for combination in group}
    modes = {combination.mode for group in GROUPS.values() for combination in group}
    assert names == set(ENTRIES)
    assert modes == set(MODES)
    assert sum(map(len, GROUPS.values())) > 15_000


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="run combinations whose name matches this regular expression")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, kinds, used = time.perf_counter(), collections.Counter(), collections.Counter()
    spent = collections.Counter()
    for group, combinations in GROUPS.items():
        start = time.perf_counter()
        for combination in combinations:
            if not re.search(options.only, combination.label):
                continue
            verdict = judge(combination, documented)
            kinds[verdict.kind] += 1
            used[verdict.exception] += verdict.exception >= 0
            if verdict.kind == "wrong":
                print(f"WRONG {combination.label}: {verdict.what}")
        spent[group] = time.perf_counter() - start
    for group, seconds in spent.most_common(12):
        print(f"{seconds:6.1f} s  {group}", file=sys.stderr)
    total = sum(kinds.values())
    print(f"{total} combinations in {time.perf_counter() - begin:.0f} s: {dict(kinds)}")
    for at, known in enumerate(EXCEPTIONS):
        print(f"{used[at]:6} refused, {known.reason} ({known.page})")
    return 1 if kinds["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
