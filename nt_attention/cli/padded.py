"""SDPA on the padded workload, with the mask that makes it exact, and without one.

Dimensions: B sequences, L the longest, H heads and G of keys, D and Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.masks import distances
from .inputs import PreparedCall, WorkloadTensors

MAX_PADDING = 16  # padded tokens to real ones: past that, the time says nothing that the number does not
MAX_SEQUENCES = 16384  # with 32768 of one token, torch 2.11's backward on a GPU reads outside of its memory
MAX_MASKED = {"cpu": 2**28, "cuda": 2**32}  # entries of a mask (B, L, L), which SDPA turns into numbers


def too_much_padding(tensors: WorkloadTensors) -> list[str]:
    if tensors.device.type == "cuda" and tensors.layout.batch_size > MAX_SEQUENCES:
        return [f"torch's kernels fail with {tensors.layout.batch_size} sequences, and take the process with them."]
    for layout, what in ((tensors.layout, "tokens"), (tensors.key_layout, "keys")):
        padded = layout.batch_size * layout.max_seqlen
        if padded > MAX_PADDING * layout.total:
            return [f"it would compute {padded} padded {what} for {layout.total} real ones, past {MAX_PADDING} times."]
    return ["has no softcap."] if tensors.workload.softcap else []


def padded_reasons(tensors: WorkloadTensors, backward: bool) -> list[str]:
    reasons = too_much_padding(tensors)
    entries = tensors.layout.batch_size * tensors.layout.max_seqlen * tensors.key_layout.max_seqlen
    if not reasons and not tensors.window.is_open and entries > MAX_MASKED[tensors.device.type]:
        reasons.append(f"its mask would have {entries:.1e} entries.")
    return reasons


def unmasked_reasons(tensors: WorkloadTensors, backward: bool) -> list[str]:
    if tensors.has_window:
        return ["has no window without a mask."]
    if tensors.is_cross and tensors.workload.is_causal:
        return ["has no causal mask that ends where each sequence's queries and keys end."]
    return too_much_padding(tensors)


def padded(tensors: WorkloadTensors, masked: bool) -> PreparedCall:
    """SDPA on (B, H, L, D), with the mask that makes it exact or with none.

    Grouped heads go as transformers sends them: repeated beside a mask, by ``enable_gqa`` without one.
    """
    layouts = (tensors.layout, tensors.key_layout, tensors.key_layout)
    q, k, v = leaves = tuple(
        layout.pad(x.detach()).transpose(1, 2).requires_grad_() for layout, x in zip(layouts, tensors.qkv, strict=True)
    )
    grad = tensors.layout.pad(tensors.grad).transpose(1, 2)
    mask = padding_mask(tensors) if masked else None
    causal = tensors.workload.is_causal and not masked
    group = tensors.workload.heads // tensors.workload.kv_heads

    def attention() -> Tensor:
        key, value = (x.repeat_interleave(group, 1) if masked and group > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, is_causal=causal, enable_gqa=group > 1 and not masked
        )

    return PreparedCall(
        attention, leaves, grad, lambda x: tensors.layout.pack(x.transpose(1, 2)),
        lambda x: tensors.key_layout.pack(x.transpose(1, 2)), exact=masked or causal or not tensors.is_ragged,
    )  # fmt: skip


def padding_mask(tensors: WorkloadTensors) -> Tensor:
    """True where a query sees a key: the key padding mask (B, 1, 1, L), or (B, 1, L, L) where queries differ."""
    lengths, key_lengths = (layout.lengths[:, None, None] for layout in (tensors.layout, tensors.key_layout))
    queries, keys, device = tensors.layout.max_seqlen, tensors.key_layout.max_seqlen, tensors.device
    real = torch.arange(keys, device=device) < key_lengths
    # aligned lower right: the last query of a sequence is at the position of its last key
    visible = tensors.window.visible(distances(queries, keys, 0, device) - (key_lengths - lengths))
    if visible is None:
        return real.unsqueeze(1)
    padding = torch.arange(queries, device=device)[:, None] >= lengths
    return (real & (visible | padding)).unsqueeze(1)  # padded queries see the real keys: no row is fully masked
