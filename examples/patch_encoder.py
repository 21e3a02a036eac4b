"""Patch an nn.TransformerEncoder, compare it with the padded run, and restore the original."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

import nt_attention as nta

LENGTHS = [12, 180, 7, 33, 64, 9, 21, 40]


def milliseconds(encoder: nn.TransformerEncoder, x: Tensor, padding: Tensor) -> float:
    """The time of a forward and backward pass in ms, median of five."""
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        encoder(x, src_key_padding_mask=padding).sum().backward()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[1:])


def main(argv: list[str] | None = None) -> float:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 8, 512, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    x = torch.randn(*padding.shape, 128)

    stock, before = encoder(x, src_key_padding_mask=padding), milliseconds(encoder, x, padding)
    with nta.patch(encoder) as handle:
        print(handle)
        patched, after = encoder(x, src_key_padding_mask=padding), milliseconds(encoder, x, padding)
    difference = (stock - patched)[~padding].abs().max().item()
    print(f"{padding.numel()} positions, {sum(LENGTHS)} tokens: largest difference {difference:.1e}")
    print(f"forward + backward: {before:.1f} ms padded, {after:.1f} ms patched, {before / after:.1f} ×")
    return difference


if __name__ == "__main__":
    main()
