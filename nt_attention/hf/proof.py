"""What was proven about a class of Hugging Face models and a config."""

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

# Arguments that some models need in a packed row:
# "seq_idx": the sequence of each token, (1, T) int32, for kernels that keep a state along the row.
# "sliding_window": that of the config, for attention modules that leave the window to the mask.
Extra = Literal["seq_idx", "sliding_window"]


@dataclass(frozen=True)
class Proof:
    """What was proven about a class and a config: how its models are packed, or why they can't be.

    Attributes:
        reason: why the model can't be packed, or None if it can.
        positions: how positions are counted, as in `families.Family`.
        pool: whether the base model's `pooler` gets the first token of each row.
        head: how the head runs, or None for a base model.
        mask: the form of the `PackedMask` that the model gets, or None if it gets a mask without elements, because it
            passes `cu_seq_lens` to its attention.
        is_causal: whether the attention of a model that gets a `PackedMask` is causal.
        extra: an argument that the model gets besides its inputs and `cu_seq_lens`, or None.
        holes: whether rows with padding between tokens can be packed.
        embeds: whether `inputs_embeds` can be packed.
        token_types: whether `token_type_ids` can be packed.
        islands: classes of modules that run on padded rows (`pack/islands.py`).
        equal_lengths: whether an island runs only sequences of equal lengths together, so that it needs no padding.
        convolutions: classes of modules whose causal convolutions run with zeros between sequences
            (`pack/convolutions.py`).
        reads_padding: whether unpatched values of some padded batches depend on the padding. Packed, they are those of
            each sequence alone.
        layers: classes of layers that pack by themselves (`pack/encoder_layers.py`). The other fields but `holes` and
            `islands` are then not used.
        trains: whether such layers pack in training, and in calls with labels.
        tried: False if no small model could be built and run, which may be different next time.
    """

    reason: str | None = None
    positions: Positions = "padded"
    pool: bool = False
    head: Head | None = None
    mask: Form | None = None
    is_causal: bool = False
    extra: Extra | None = None
    holes: bool = True
    embeds: bool = True
    token_types: bool = True
    islands: tuple[str, ...] = ()
    equal_lengths: bool = False
    convolutions: tuple[str, ...] = ()
    reads_padding: bool = False
    layers: tuple[str, ...] = ()
    trains: bool = True
    tried: bool = True

    @property
    def mixers(self) -> tuple[str, ...]:
        """The classes of modules that mix the tokens of a row, and keep sequences apart in one of the two ways."""
        return (*self.islands, *self.convolutions)
