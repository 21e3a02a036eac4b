"""All entries of nt_attention in one program, which mypy and pyright check in strict mode (`make types`)."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import nt_attention as nta


class Block(nn.Module):
    """Attention within each document, with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nta.VarlenMultiheadAttention(width, heads, window_size=(64, 0), rotary=nta.Rotary())

    def forward(self, x: Tensor, layout: nta.SequenceLayout) -> Tensor:
        out, _ = self.attention(x, x, x, is_causal=True, layout=layout)
        return x + out


def attend(layout: nta.SequenceLayout, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Packed queries, keys and values, without a module."""
    query, key, value = torch.randn(3, layout.total, heads, head_dim).unbind()
    out = nta.varlen_attention(query, key, value, layout, is_causal=True)
    same, lse = nta.varlen_attention(query, key, value, layout, is_causal=True, return_lse=True)
    torch.testing.assert_close(out, same)
    explanation = nta.explain(query, key, value, layout, is_causal=True)
    print(f"{explanation.chosen} runs it; flex would not: {explanation.reasons['flex'][0]}")
    return layout.pad(out), lse


def patch_encoder(encoder: nn.TransformerEncoder, x: Tensor, padding: Tensor) -> nta.PatchHandle:
    """The handle of an encoder that has run one padded batch."""
    found = nta.estimate(encoder, [{"src": x, "src_key_padding_mask": padding}], training=False, seconds=0.1)
    print(f"pad ratio {found.pad_ratio:.2f}, speedup {found.speedup or 0:.1f}")
    handle: nta.PatchHandle = nta.patch(encoder, on_fallback="raise")
    with torch.no_grad():
        encoder(x, src_key_padding_mask=padding)
    print(f"{handle.calls[None]} packed call, {handle.counts.tokens} of {handle.counts.positions} positions are tokens")
    return handle


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    warnings.filterwarnings("error", category=nta.SlowBackendWarning)
    warnings.filterwarnings("ignore", category=nta.NotPackedWarning)
    documents = [torch.randn(length, 32) for length in (5, 90, 31, 12, 64, 8)]
    block = Block(32, heads=4)
    for indices in nta.data.TokenBudgetSampler([len(document) for document in documents], max_tokens=128):
        batch = [documents[index] for index in indices]
        layout = nta.SequenceLayout.from_lengths([len(document) for document in batch])
        print(layout, tuple(block(torch.cat(batch), layout).shape))
    padded, lse = attend(nta.SequenceLayout.from_lengths([5, 0, 9]), heads=8, head_dim=16)
    print(tuple(padded.shape), tuple(lse.shape))
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    with patch_encoder(encoder, torch.randn(2, 9, 32), padding) as handle:
        assert handle.active
    name: str = nta.hf.register(over="sdpa")
    with nta.patch_all(packing="always") as models:
        print(f"attn_implementation={name!r}; {sum(models.models.values())} models of transformers were built")


if __name__ == "__main__":
    main()
