"""How far an implementation is from attention in float64, on a sample of a workload's sequences.

The sample is the first few sequences and the longest that fits. Each goes through the reference backend alone, as many
heads at a time as fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import varlen_attention
from ..layout import SequenceLayout
from .inputs import WorkloadTensors

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
FIRST_TOKENS = 2000  # of the sequences that are taken from the beginning
SCORES = {"cpu": 2**24, "cuda": 2**28}  # at once, in float64; autograd keeps some copies
BYTES = 128  # of a score, with all its copies


@dataclass(frozen=True)
class ExpectedResults:
    """The results that a sample's rows should have.

    Attributes:
        rows: for "out", "dq", "dk" and "dv" the indices of the sample's rows among the packed rows.
        values: the same names, float64.
        floor: the least magnitude that an error is put in relation to. The gradients of q and k are of magnitude
            n^−0.5 where a query sees n keys, but 0 where it sees one: what rounding leaves there is no error. So this
            is one over the mean number of keys that a query sees.
    """

    rows: dict[str, Tensor]
    values: dict[str, Tensor]
    floor: float

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        """The relative L2 error of each result, over the sample."""
        found = {}
        for name, got in results.items():
            want = self.values[name]
            size = max(float(want.norm()), self.floor * want.numel() ** 0.5)
            found[name] = float((got[self.rows[name]].double() - want).norm()) / size if want.numel() else 0.0
        return found


def expected_results(tensors: WorkloadTensors, backward: bool) -> ExpectedResults | None:
    """Run a sample in float64, with gradients if asked for. None if no sequence fits."""
    sample, limit = sampled(tensors), score_limit(tensors)
    if not sample:
        return None
    starts, key_starts = (layout.host_offsets.tolist() for layout in (tensors.layout, tensors.key_layout))
    rows = [slice(starts[b], starts[b + 1]) for b in sample]
    key_rows = [slice(key_starts[b], key_starts[b + 1]) for b in sample]
    parts = [_exact(tensors, *pair, backward, limit) for pair in zip(rows, key_rows, strict=True)]
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    index, key_index = (
        torch.cat([torch.arange(part.start, part.stop, device=tensors.device) for part in of])
        for of in (rows, key_rows)
    )
    queries, keys = (torch.tensor([of[b] for b in sample]) for of in (tensors.workload.lengths, tensors.workload.keys))
    pairs = int(tensors.window.pairs(queries, keys, lower_right=True).sum())
    where = {"out": index, "dq": index, "dk": key_index, "dv": key_index}
    return ExpectedResults(where, values, len(index) / max(1, pairs))


def score_limit(tensors: WorkloadTensors) -> int:
    device = tensors.device
    if device.type == "cpu":
        return SCORES["cpu"]
    return min(SCORES["cuda"], torch.cuda.mem_get_info(device)[0] // BYTES)


def sampled(tensors: WorkloadTensors) -> list[int]:
    """Which sequences: the first few, and the longest whose scores fit in memory."""
    group = tensors.workload.heads // tensors.workload.kv_heads
    scores = [group * n * m for n, m in zip(tensors.workload.lengths, tensors.workload.keys, strict=True)]
    fitting = [b for b, number in enumerate(scores) if number <= score_limit(tensors)]
    chosen, tokens = set(), 0
    for b in fitting:
        tokens += tensors.workload.lengths[b] + tensors.workload.keys[b]
        if tokens > 2 * FIRST_TOKENS:
            break
        chosen.add(b)
    return sorted(chosen | {max(fitting, key=scores.__getitem__)} if fitting else chosen)


def _exact(tensors: WorkloadTensors, queries: slice, keys: slice, backward: bool, limit: int) -> dict[str, Tensor]:
    """One sequence in float64: out (T, H, Dv), and dq (T, H, D), dk (S, G, D) and dv (S, G, Dv)."""
    query, key, value = (x.detach()[rows] for x, rows in zip(tensors.qkv, (queries, keys, keys), strict=True))
    layout, key_layout = (SequenceLayout.from_lengths([len(x)], device=x.device) for x in (query, key))
    group = tensors.workload.heads // tensors.workload.kv_heads
    at_once = max(1, limit // max(1, group * len(query) * len(key)))  # key heads
    parts = []
    for first in range(0, tensors.workload.kv_heads, at_once):
        kv = slice(first, first + at_once)
        heads = slice(kv.start * group, kv.stop * group)
        q, k, v = (x.double().requires_grad_(backward) for x in (query[:, heads], key[:, kv], value[:, kv]))
        out = varlen_attention(q, k, v, layout, key_layout, backend="reference", **tensors.options)
        assert isinstance(out, Tensor)
        part = {"out": out.detach()}
        if backward:
            grads = torch.autograd.grad(out, (q, k, v), tensors.grad[queries, heads].double())
            part |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        parts.append(part)
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
