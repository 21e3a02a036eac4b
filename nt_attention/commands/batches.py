"""The batches that the GPU benchmarks run: lengths drawn with a fixed seed, 32768 packed tokens each.

They follow the shapes of real workloads: lognormal lengths with a cap (most are short, a few reach it), uniform ones,
and equal ones.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

TOKENS = 32768


@dataclass(frozen=True)
class Batch:
    """Lengths of the sequences, and the heads of the model that they go through."""

    name: str
    about: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)

    @property
    def flops(self) -> int:
        """Of a forward: two matrix products over the pairs that the mask leaves."""
        pairs = sum(self._pairs(n) for n in self.lengths)
        return 4 * pairs * self.heads * self.head_dim

    def _pairs(self, n: int) -> int:
        left, right = (n if side < 0 else min(side, n) for side in self.window_size)
        right = 0 if self.is_causal else right
        return sum(min(n, i + right + 1) - max(0, i - left) for i in range(n))


def lognormal(cap: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return _fill(lambda: min(cap, max(1, round(math.exp(draw.gauss(math.log(cap) - 1.9, 0.9))))))


def uniform(cap: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return _fill(lambda: draw.randint(1, cap))


def _fill(draw) -> tuple[int, ...]:
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(draw(), TOKENS - sum(lengths)))
    return tuple(lengths)


def equal(length: int) -> tuple[int, ...]:
    return (length,) * (TOKENS // length)


BATCHES = {
    batch.name: batch
    for batch in (
        Batch("A", "lognormal ≤ 2048", lognormal(2048), 16, 16, 64),
        Batch("B", "lognormal ≤ 8192, causal", lognormal(8192), 32, 8, 128, True),
        Batch("C", "8 × 4096, causal", equal(4096), 16, 16, 128, True),
        Batch("D", "uniform ≤ 128", uniform(128), 12, 12, 64),
        Batch("E", "lognormal ≤ 128", lognormal(128), 12, 12, 64),
        Batch("F", "lognormal ≤ 512", lognormal(512), 12, 12, 64),
        Batch("G", "uniform ≤ 256, causal", uniform(256), 16, 16, 128, True),
    )
}
