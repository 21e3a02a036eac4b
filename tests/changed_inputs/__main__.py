"""Run the combinations and print what they gave: `cd tests && PYTHONPATH=helpers python -m changed_inputs --help`."""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time

import torch

from .combine import groups
from .documented import EXCEPTIONS, documented
from .run import judge


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="run combinations whose name matches this regular expression")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, kinds, used = time.perf_counter(), collections.Counter(), collections.Counter()
    spent = collections.Counter()
    for group, combinations in groups().items():
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
