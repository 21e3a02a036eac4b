"""The examples' training data: paragraphs of Python's documentation as bytes. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD, END, VOCABULARY = 256, 257, 258  # 0 to 255 are the bytes


def paragraphs(length: int, limit: int | None = None) -> list[str]:
    """The first ``limit`` paragraphs of the documentation, each cut to ``length`` characters."""
    pieces = (" ".join(piece.split())[:length] for topic in topics.values() for piece in topic.split("\n\n"))
    return [piece for piece in pieces if len(piece) > 2 and piece.isascii()][:limit]


def padded_batch(texts: Iterable[str | Sequence[int]]) -> dict[str, Tensor]:
    """A batch (B, L) for a causal language model: ``input_ids``, ``attention_mask`` and ``labels``."""
    rows = [torch.tensor(list(text.encode() if isinstance(text, str) else text)) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = ids != PAD
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, one for padding and one for the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens(["<pad>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<end>")


def llama_config(hidden_size: int = 64, layers: int = 2, heads: int = 4) -> LlamaConfig:
    """A small Llama with as many tokens as ``tokenizer`` has."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, pad_token_id=PAD, bos_token_id=None,
        eos_token_id=END,
    )  # fmt: skip
