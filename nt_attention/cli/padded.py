"""SDPA on the padded batch, with the mask that makes it exact, and without one.

Dimensions: B sequences, L the longest, H heads and G of keys, D and Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .inputs import Problem, Run

MOST_PADDING = 16  # padded tokens to real ones: past that, the time says nothing that the number does not
MOST_SEQUENCES = 16384  # with 32768 of one token, torch 2.11's backward on a GPU reads outside of its memory
MOST_MASKED = {"cpu": 2**28, "cuda": 2**32}  # entries of a mask (B, L, L), which SDPA turns into numbers


def too_much_padding(p: Problem) -> list[str]:
    if p.grad.device.type == "cuda" and p.layout.batch_size > MOST_SEQUENCES:
        return [f"torch's kernels fail with {p.layout.batch_size} sequences, and take the process with them."]
    for layout, what in ((p.layout, "tokens"), (p.key_layout, "keys")):
        padded = layout.batch_size * layout.max_seqlen
        if padded > MOST_PADDING * layout.total:
            return [f"it would compute {padded} padded {what} for {layout.total} real ones, past {MOST_PADDING} times."]
    return ["has no softcap."] if p.batch.softcap else []


def padded_reasons(p: Problem, backward: bool) -> list[str]:
    reasons = too_much_padding(p)
    entries = p.layout.batch_size * p.layout.max_seqlen * p.key_layout.max_seqlen
    if not reasons and (p.has_window or p.batch.is_causal) and entries > MOST_MASKED[p.grad.device.type]:
        reasons.append(f"its mask would have {entries:.1e} entries.")
    return reasons


def unmasked_reasons(p: Problem, backward: bool) -> list[str]:
    if p.has_window:
        return ["has no window without a mask."]
    if p.is_cross and p.batch.is_causal:
        return ["has no causal mask that ends where each sequence's queries and keys end."]
    return too_much_padding(p)


def padded(p: Problem, masked: bool) -> Run:
    """SDPA on (B, H, L, D), with the mask that makes it exact or with none.

    Grouped heads go as transformers sends them: repeated beside a mask, by ``enable_gqa`` without one.
    """
    q, k, v, grad = (
        layout.pad(x.detach()).transpose(1, 2)
        for layout, x in zip((p.layout, p.key_layout, p.key_layout, p.layout), (*p.qkv, p.grad), strict=True)
    )
    q, k, v = leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    mask = padding_mask(p) if masked else None
    causal = p.batch.is_causal and not masked
    group = p.batch.heads // p.batch.kv_heads

    def attention() -> Tensor:
        key, value = (x.repeat_interleave(group, 1) if masked and group > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, is_causal=causal, enable_gqa=group > 1 and not masked
        )

    return Run(
        attention, leaves, grad, lambda x: p.layout.pack(x.transpose(1, 2)),
        lambda x: p.key_layout.pack(x.transpose(1, 2)), exact=masked or causal or not p.is_ragged,
    )  # fmt: skip


def padding_mask(p: Problem) -> Tensor:
    """True where a query sees a key: the key padding mask (B, 1, 1, L), or (B, 1, L, L) where queries differ."""
    lengths, key_lengths = (layout.lengths[:, None, None] for layout in (p.layout, p.key_layout))
    keys = torch.arange(p.key_layout.max_seqlen, device=lengths.device)
    real = keys < key_lengths
    if not p.has_window and not p.batch.is_causal:
        return real.unsqueeze(1)
    queries = torch.arange(p.layout.max_seqlen, device=lengths.device)[:, None]
    place = queries + key_lengths - lengths  # the sequence's last query stands across from its last key
    left, right = p.batch.window_size
    right = 0 if p.batch.is_causal else right
    seen = real.expand(-1, len(queries), -1)
    if left >= 0:
        seen = seen & (keys >= place - left)
    if right >= 0:
        seen = seen & (keys <= place + right)
    return (seen | (real & (queries >= lengths))).unsqueeze(1)  # padding sees what is there, so no row is blind for it
