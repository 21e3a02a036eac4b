"""The named workloads of the benchmarks. `python benchmarks/backends.py` times the backends on them."""

from __future__ import annotations

from nt_attention.cli.calls import CAUSAL, Workload, draw_lengths

__all__ = ["CAUSAL", "WORKLOADS", "Workload", "draw_lengths"]

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
