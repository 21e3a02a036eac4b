"""The workloads that are measured by name: 32768 packed tokens each, and two small ones for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from .lengths import TOKENS, Lengths


@dataclass(frozen=True)
class Workload:
    """Lengths of the sequences, the heads of the model that they go through, and the mask.

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


def lengths(kind: str, number: int, tokens: int = TOKENS) -> tuple[int, ...]:
    return Lengths(kind=kind, number=number).up_to(tokens)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("A", "lognormal ≤ 2048", lengths("lognormal", 2048), 16, 16, 64),
        Workload("B", "lognormal ≤ 8192, causal", lengths("lognormal", 8192), 32, 8, 128, True),
        Workload("C", "8 × 4096, causal", lengths("equal", 4096), 16, 16, 128, True),
        Workload("D", "uniform ≤ 128", lengths("uniform", 128), 12, 12, 64),
        Workload("E", "lognormal ≤ 128", lengths("lognormal", 128), 12, 12, 64),
        Workload("F", "lognormal ≤ 512", lengths("lognormal", 512), 12, 12, 64),
        Workload("G", "uniform ≤ 256, causal", lengths("uniform", 256), 16, 16, 128, True),
    )
}
MORE = (
    Workload("one long", "one of 8192 beside lognormal ≤ 128", (8192, *lengths("lognormal", 128)[:800]), 12, 12, 64),
    Workload("all 17", "1927 × 17", lengths("equal", 17), 12, 12, 64),
    Workload("all 1", "32768 × 1", lengths("equal", 1), 12, 12, 64),
    Workload("window", "A, 128 on either side", WORKLOADS["A"].lengths, 16, 16, 64, window_size=(128, 128)),
    Workload("GQA 32/1", "B's lengths, causal", WORKLOADS["B"].lengths, 32, 1, 128, True),
    *(
        Workload(f"{name} d{d}", f"{name}, head dim {d}", WORKLOADS[name].lengths, width // d, width // d, d)
        for name, width in (("A", 1024), ("F", 768), ("E", 768))
        for d in (32, 72, 80, 96, 128, 160, 192, 256)
    ),
)
SMALL = (
    Workload("small", "lognormal ≤ 256", lengths("lognormal", 256, 2048), 8, 8, 64),
    Workload("small causal", "uniform ≤ 128, causal", lengths("uniform", 128, 2048), 8, 2, 64, True),
)
ALL = WORKLOADS | {workload.name: workload for workload in (*MORE, *SMALL)}
