"""The batches that are measured by name: 32768 packed tokens each, and two small ones for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from .lengths import equal, lognormal, uniform


@dataclass(frozen=True)
class Batch:
    """Lengths of the sequences, the heads of the model that they go through, and what a query sees.

    Attributes:
        lengths: of the queries; of keys and values as well, if ``key_lengths`` is None.
        value_dim: the head dim of values, if it is not ``head_dim``.
    """

    name: str
    about: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    key_lengths: tuple[int, ...] | None = None
    value_dim: int | None = None

    @property
    def keys(self) -> tuple[int, ...]:
        """The length of keys and values of each sequence."""
        return self.lengths if self.key_lengths is None else self.key_lengths

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def scores(self) -> int:
        """How many scores a backend computes that knows no mask and no padding."""
        return self.heads * sum(n * m for n, m in zip(self.lengths, self.keys, strict=True))


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
MORE = (
    Batch("one long", "one of 8192 beside lognormal ≤ 128", (8192, *lognormal(128)[:800]), 12, 12, 64),
    Batch("all 17", "1927 × 17", equal(17), 12, 12, 64),
    Batch("all 1", "32768 × 1", equal(1), 12, 12, 64),
    Batch("window", "A, 128 on either side", BATCHES["A"].lengths, 16, 16, 64, window_size=(128, 128)),
    Batch("GQA 32/1", "B's lengths, causal", BATCHES["B"].lengths, 32, 1, 128, True),
    *(
        Batch(f"{name} d{d}", f"{name}, head dim {d}", BATCHES[name].lengths, width // d, width // d, d)
        for name, width in (("A", 1024), ("F", 768), ("E", 768))
        for d in (32, 72, 80, 96, 128, 160, 192, 256)
    ),
)
SMALL = (
    Batch("small", "lognormal ≤ 256", lognormal(256, 2048), 8, 8, 64),
    Batch("small causal", "uniform ≤ 128, causal", uniform(128, 2048), 8, 2, 64, True),
)
ALL = BATCHES | {batch.name: batch for batch in (*MORE, *SMALL)}
