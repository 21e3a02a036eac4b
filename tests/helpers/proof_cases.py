"""A batch with padding, and sizes of small models, for tests of proofs."""

import torch

LENGTHS = [5, 1, 12, 8]
MASK = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
BATCH = {"input_ids": torch.randint(5, 97, MASK.shape).masked_fill(~MASK, 0), "attention_mask": MASK.long()}
SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 6,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
