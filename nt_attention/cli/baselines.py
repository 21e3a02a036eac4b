"""Who is measured: a backend of ours, padded SDPA, and NestedTensor SDPA, each as it would be called."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional import explain, varlen_attention
from ..layout import SequenceLayout
from .inputs import Problem, Rival, Run
from .padded import padded, padded_reasons, unmasked_reasons

PADDED, UNMASKED, NESTED = "padded SDPA", "padded SDPA, no mask", "NestedTensor SDPA"
MOST_SCORES = 2**26  # of a call that the reference is measured on: it keeps some copies of them all


def backend(name: str) -> Rival:
    """``varlen_attention(backend=name)`` on packed rows."""

    def asked(p: Problem, backward: bool) -> tuple[str | None, list[str]]:
        q, k, v = p.qkv if backward else (x.detach() for x in p.qkv)
        explanation = explain(q, k, v, p.layout, p.key_layout, backend=name, **p.masks, **p.promises)
        if explanation.chosen is None:
            if name == "auto":
                told = (f"{other} {' '.join(reasons)}" for other, reasons in explanation.reasons.items())
                return None, [f"no backend can run this call: {' '.join(told)}"]
            return None, list(explanation.reasons[name])
        if explanation.chosen == "reference" and p.batch.scores > MOST_SCORES:
            return None, [
                f"the reference builds {p.batch.scores:.1e} scores here, and is measured up to {MOST_SCORES:.0e}."
            ]
        return explanation.chosen, []

    def prepare(p: Problem) -> Run:
        q, k, v = p.qkv

        def attention() -> Tensor:
            out = varlen_attention(q, k, v, p.layout, p.key_layout, backend=name, **p.masks, **p.promises)
            assert isinstance(out, Tensor)
            return out

        return Run(attention, p.qkv, p.grad, lambda x: x, lambda x: x)

    chosen = (lambda p, backward: asked(p, backward)[0]) if name == "auto" else (lambda p, backward: None)
    return Rival(name, lambda p, backward: asked(p, backward)[1], prepare, chosen)


def nested_reasons(p: Problem, backward: bool) -> list[str]:
    reasons = ["has no softcap."] if p.batch.softcap else []
    if p.has_window:
        reasons.append("has no window.")
    elif p.batch.is_causal and p.grad.device.type == "cpu":
        reasons.append("has no causal path on a CPU.")
    elif p.batch.is_causal and p.is_cross:
        reasons.append("its causal mask begins or ends where queries and keys do, by the kernel that it picks.")
    elif p.batch.is_causal and not p.layout.min_seqlen:
        reasons.append("has no causal path for sequences without tokens.")
    return reasons


def nested(p: Problem) -> Run:
    """SDPA on three NestedTensors (B, j, H, D); key heads are repeated beforehand, which only favours it."""
    group = p.batch.heads // p.batch.kv_heads
    query, key, value = (x.detach() for x in p.qkv)
    q = jagged(query, p.layout).requires_grad_()
    k, v = (jagged(x.repeat_interleave(group, 1), p.key_layout).requires_grad_() for x in (key, value))

    def attention() -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, is_causal=p.batch.is_causal).transpose(1, 2)

    return Run(
        attention, (q, k, v), jagged(p.grad, p.layout), lambda x: x.values(),
        lambda x: x.values().unflatten(1, (-1, group)).sum(2),
    )  # fmt: skip


def jagged(values: Tensor, layout: SequenceLayout) -> Tensor:
    """A leaf (B, j, …), made in stock's own way and told what spares it a sync."""
    made = torch.nested.nested_tensor_from_jagged(
        values, layout.offsets, min_seqlen=layout.min_seqlen, max_seqlen=layout.max_seqlen
    )
    return made.detach()


def rivals(backends: Iterable[str]) -> list[Rival]:
    """A rival for each of these backends, then those of torch."""
    return [
        *map(backend, backends),
        Rival(PADDED, padded_reasons, lambda p: padded(p, masked=True)),
        Rival(UNMASKED, unmasked_reasons, lambda p: padded(p, masked=False)),
        Rival(NESTED, nested_reasons, nested),
    ]
