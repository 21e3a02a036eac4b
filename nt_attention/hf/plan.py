"""How a Hugging Face model is packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a model computes positions if the caller passes none: see `families.Family`.
Positions = Literal["padded", "tokens", "ids"]

# The form of a `PackedMask`: "row" is (1, S), as callers pass it; "pairs" is (1, 1, T, S), as transformers' mask
# functions return it. T are query tokens, S key tokens.
Form = Literal["row", "pairs"]

# How a head runs:
# "token": it predicts a value for each token. Head and loss run packed.
# "next token": the same, but the first token of a sequence is not predicted.
# "span": it predicts the first and last token of an answer. The head runs packed, its loss on padded logits.
# "sequence": anything else. The base model runs packed, the head gets padded hidden states.
Head = Literal["next token", "token", "span", "sequence"]


@dataclass(frozen=True)
class Plan:
    """How a model is packed, as the check of the model has found it.

    Attributes:
        positions: how positions are counted, as in `families.Family`.
        pool: whether the base model's `pooler` gets the first token of each row.
        head: how the head runs, or None for a base model.
        head_mixes: whether the head gives values for tokens, and computes them with other tokens of the row.
        mask: the form of the `PackedMask` that the model gets, or None if it gets a mask without elements, because it
            passes `cu_seq_lens` to its attention.
        is_causal: whether the attention of a model that gets a `PackedMask` is causal.
        padded: classes of modules that mix tokens, and run on padded rows (`pack/padded_modules.py`).
        equal_lengths: whether such a module runs only sequences of equal lengths together, so that it needs no padding.
        convolutions: classes of modules whose causal convolutions run with zeros between sequences
            (`pack/convolutions.py`).
        reads_padding: whether unpatched values of some padded batches depend on the padding. Packed, they are those of
            each sequence alone.
    """

    positions: Positions = "padded"
    pool: bool = False
    head: Head | None = None
    head_mixes: bool = False
    mask: Form | None = None
    is_causal: bool = False
    padded: tuple[str, ...] = ()
    equal_lengths: bool = False
    convolutions: tuple[str, ...] = ()
    reads_padding: bool = False

    @property
    def mixing(self) -> tuple[str, ...]:
        """The classes of modules that mix the tokens of a row, and keep sequences apart in one of the two ways."""
        return (*self.padded, *self.convolutions)
