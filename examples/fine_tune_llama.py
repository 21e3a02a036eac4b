"""Fine-tune a small Llama on padded batches of text, padding-free: the loss is that of the padded model.

A random model and Python's own documentation as bytes, so that nothing is downloaded; the loop is any fine-tuning loop.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import nt_attention as nta

PAD = 256


def make_batch(texts: list[bytes]) -> dict[str, Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], True, PAD)
    mask = rows != PAD
    return {"input_ids": rows, "attention_mask": mask.long(), "labels": rows.masked_fill(~mask, -100)}


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=PAD + 1, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, pad_token_id=PAD,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    lines = [line.strip().encode()[:160] for text in topics.values() for line in text.splitlines() if line.strip()]
    batches = [make_batch(lines[i : i + 16]) for i in range(0, 16 * options.steps, 16)]
    padded = model(**batches[0]).loss.item()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    with nta.patch(model) as handle:
        print(handle)
        for batch in batches:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(f"first loss {losses[0]:.6f} patched, {padded:.6f} padded; after {len(losses)} steps {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
