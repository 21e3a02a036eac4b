"""Train a small attention classifier on text of different lengths, with NestedTensors from the input to the output.

The task is to tell two groups of topics in Python's documentation apart by their bytes: statements, and expressions and
types.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import nt_attention as nta

EMBED, HEADS = 48, 4


class Classifier(nn.Module):
    """Texts of bytes (B, j) to logits (B,): two residual attention layers, then the mean over each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, EMBED)
        self.layers = nn.ModuleList(
            nta.VarlenMultiheadAttention(EMBED, HEADS, batch_first=True, window_size=(8, 8), alibi=True)
            for _ in range(2)
        )
        self.out = nn.Linear(EMBED, 1)

    def forward(self, texts: list[Tensor]) -> Tensor:
        x = torch.nested.nested_tensor(texts, layout=torch.jagged)
        x = self.embedding(x)
        for attention in self.layers:
            x = x + attention(x, x, x)[0]  # the offsets are the same, so the residual connection works
        return self.out(torch.stack([tokens.mean(0) for tokens in x.unbind()])).squeeze(-1)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    openings = ["\n\n".join(text.split("\n\n")[:2]).encode()[:600] for text in topics.values()]
    texts = [torch.tensor(list(opening)) for opening in openings]
    labels = torch.tensor([float("statement" in text.splitlines()[0]) for text in topics.values()])
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(options.steps):
        batch = torch.randperm(len(texts))[:16].tolist()
        loss = nn.functional.binary_cross_entropy_with_logits(model([texts[i] for i in batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            lengths = sorted(len(texts[i]) for i in batch)
            print(f"step {step}: lengths {lengths[0]} to {lengths[-1]}, loss {losses[-1]:.3f}")
    print(f"first loss {losses[0]:.3f}, mean of the last five {sum(losses[-5:]) / len(losses[-5:]):.3f}")
    return losses[-1]


if __name__ == "__main__":
    main()
