"""The workloads of the benchmarks, and the distributions that their lengths are drawn from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TOKENS = 32768

# name → a random length from 1 to N; the median of "lognormal" is 0.15 N
DISTRIBUTIONS: dict[str, Callable[[random.Random, int], int]] = {
    "lognormal": lambda source, n: min(n, max(1, round(math.exp(source.gauss(math.log(n) - 1.9, 0.9))))),
    "uniform": lambda source, n: source.randint(1, n),
    "equal": lambda source, n: n,
}


def draw_lengths(text: str, tokens: int = TOKENS, seed: int = 0) -> tuple[int, ...]:
    """The lengths that a text describes, the same each time.

    Args:
        text: lengths such as "5,0,900,17", or a distribution and its largest length N such as "lognormal:2048".
        tokens: the sum of lengths that are drawn; equal lengths are as many as fit.

    Raises:
        ValueError: another text.
    """
    kind, colon, number = text.partition(":")
    if not colon and all(part.strip().isdecimal() for part in text.split(",")):
        return tuple(map(int, text.split(",")))
    if kind not in DISTRIBUTIONS or not number.isdecimal() or not int(number):
        names = ", ".join(f"{name}:N" for name in DISTRIBUTIONS)
        raise ValueError(f"lengths must be a list such as 5,0,900,17 or one of {names} with N ≥ 1, got {text!r}.")
    n, source = int(number), random.Random(seed)
    lengths: list[int] = []
    left = tokens - tokens % n if kind == "equal" else tokens
    while left:
        lengths.append(min(DISTRIBUTIONS[kind](source, n), left))
        left -= lengths[-1]
    return tuple(lengths)


@dataclass(frozen=True)
class Workload:
    """The lengths of the sequences, the heads of a model, and options of ``varlen_attention``."""

    name: str
    about: str  # a description of the lengths and the mask
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int  # divides ``heads``
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    key_lengths: tuple[int, ...] | None = None  # None for self-attention
    value_dim: int | None = None  # None for ``head_dim``

    def __str__(self) -> str:
        heads = "/".join(map(str, dict.fromkeys((self.heads, self.kv_heads))))
        return f"{self.name}: {len(self.lengths)} sequences, {self.about}, {heads} × {self.head_dim}"


CAUSAL = {"is_causal": True}
SHORT = draw_lengths("lognormal:128")
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("A", "lognormal ≤ 2048", draw_lengths("lognormal:2048"), 16, 16, 64),
        Workload("B", "lognormal ≤ 8192, causal", draw_lengths("lognormal:8192"), 32, 8, 128, CAUSAL),
        Workload("C", "8 × 4096, causal", draw_lengths("equal:4096"), 16, 16, 128, CAUSAL),
        Workload("D", "uniform ≤ 128", draw_lengths("uniform:128"), 12, 12, 64),
        Workload("E", "lognormal ≤ 128", SHORT, 12, 12, 64),
        Workload("F", "lognormal ≤ 512", draw_lengths("lognormal:512"), 12, 12, 64),
        Workload("G", "uniform ≤ 256, causal", draw_lengths("uniform:256"), 16, 16, 128, CAUSAL),
        Workload("one long", "8192 and 800 lognormal ≤ 128", (8192, *SHORT[:800]), 12, 12, 64),
        Workload("small", "lognormal ≤ 256", draw_lengths("lognormal:256", 2048), 8, 8, 64),
        Workload("small causal", "uniform ≤ 128, causal", draw_lengths("uniform:128", 2048), 8, 2, 64, CAUSAL),
    )
}
