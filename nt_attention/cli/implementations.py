"""The implementations that are measured: backends of this library, padded SDPA and NestedTensor SDPA."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional import explain, varlen_attention
from ..kernels.select import Explanation
from ..layout import SequenceLayout
from .inputs import Implementation, PreparedCall, WorkloadTensors
from .padded import padded, padded_reasons, unmasked_reasons

PADDED, UNMASKED, NESTED = "padded SDPA", "padded SDPA, no mask", "NestedTensor SDPA"
MAX_SCORES = 2**26  # of a call that the reference is measured on: it keeps some copies of them all


def backend(name: str) -> Implementation:
    """``varlen_attention(backend=name)`` on packed rows."""

    def explanation(tensors: WorkloadTensors, backward: bool) -> Explanation:
        q, k, v = tensors.qkv if backward else (x.detach() for x in tensors.qkv)
        options = tensors.options | tensors.guarantees
        return explain(q, k, v, tensors.layout, tensors.key_layout, backend=name, **options)

    def reasons(tensors: WorkloadTensors, backward: bool) -> list[str]:
        explained, scores = explanation(tensors, backward), tensors.workload.scores
        if explained.chosen is None and name == "auto":
            details = (f"{other} {' '.join(reasons)}" for other, reasons in explained.reasons.items())
            return [f"no backend can run this call: {' '.join(details)}"]
        if explained.chosen is None:
            return list(explained.reasons[name])
        if explained.chosen == "reference" and scores > MAX_SCORES:
            return [f"the reference builds {scores:.1e} scores here, and is measured up to {MAX_SCORES:.0e}."]
        return []

    def chosen(tensors: WorkloadTensors, backward: bool) -> str | None:
        return explanation(tensors, backward).chosen if name == "auto" else None

    def prepare(tensors: WorkloadTensors) -> PreparedCall:
        arguments, options = (*tensors.qkv, tensors.layout, tensors.key_layout), tensors.options | tensors.guarantees

        def attention() -> Tensor:
            out = varlen_attention(*arguments, backend=name, **options)
            assert isinstance(out, Tensor)
            return out

        return PreparedCall(attention, tensors.qkv, tensors.grad, lambda x: x, lambda x: x)

    return Implementation(name, reasons, prepare, chosen)


def nested_reasons(tensors: WorkloadTensors, backward: bool) -> list[str]:
    reasons = ["has no softcap."] if tensors.workload.softcap else []
    if tensors.has_window:
        reasons.append("has no window.")
    elif tensors.workload.is_causal and tensors.device.type == "cpu":
        reasons.append("has no causal path on a CPU.")
    elif tensors.workload.is_causal and tensors.is_cross:
        reasons.append("its causal mask begins or ends where queries and keys do, by the kernel that it picks.")
    elif tensors.workload.is_causal and not tensors.layout.min_seqlen:
        reasons.append("has no causal path for sequences without tokens.")
    return reasons


def nested(tensors: WorkloadTensors) -> PreparedCall:
    """SDPA on three NestedTensors (B, j, H, D); key heads are repeated beforehand, which only favours it."""
    group = tensors.workload.heads // tensors.workload.kv_heads
    query, key, value = (x.detach() for x in tensors.qkv)
    q = jagged(query, tensors.layout).requires_grad_()
    k, v = (jagged(x.repeat_interleave(group, 1), tensors.key_layout).requires_grad_() for x in (key, value))

    def attention() -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, is_causal=tensors.workload.is_causal).transpose(1, 2)

    return PreparedCall(
        attention, (q, k, v), jagged(tensors.grad, tensors.layout), lambda x: x.values(),
        lambda x: x.values().unflatten(1, (-1, group)).sum(2),
    )  # fmt: skip


def jagged(values: Tensor, layout: SequenceLayout) -> Tensor:
    """A leaf (B, j, …), made in stock's own way and given the lengths' bounds, which spares it a sync."""
    made = torch.nested.nested_tensor_from_jagged(
        values, layout.offsets, min_seqlen=layout.min_seqlen, max_seqlen=layout.max_seqlen
    )
    return made.detach()


def all_implementations(backends: Iterable[str]) -> list[Implementation]:
    """An implementation for each of these backends, then those of torch."""
    return [
        *map(backend, backends),
        Implementation(PADDED, padded_reasons, lambda tensors: padded(tensors, masked=True)),
        Implementation(UNMASKED, unmasked_reasons, lambda tensors: padded(tensors, masked=False)),
        Implementation(NESTED, nested_reasons, nested),
    ]
