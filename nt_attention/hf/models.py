"""What differs between Hugging Face models, in one table.

A model is known by its class name: a base model, or a listed head, which then runs packed from end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Head:
    """What a model's labels and logits belong to.

    Attributes:
        per: "token"; "next token", where each sequence's first label is predicted by nothing; or "sequence".
    """

    per: Literal["token", "next token", "sequence"]


@dataclass(frozen=True)
class Family:
    """A base model, and the heads that may stand on it.

    Attributes:
        heads: by class name.
        pooler: the attribute of the base model that reads the first token of each row, if there is one.
    """

    heads: Mapping[str, Head] = field(default_factory=dict)
    pooler: str | None = None


FAMILIES: dict[str, Family] = {
    "BertModel": Family(
        heads={
            "BertForMaskedLM": Head("token"),
            "BertForNextSentencePrediction": Head("sequence"),
            "BertForSequenceClassification": Head("sequence"),
            "BertForTokenClassification": Head("token"),
        },
        pooler="pooler",
    ),
    "LlamaModel": Family(
        heads={
            "LlamaForCausalLM": Head("next token"),
            "LlamaForTokenClassification": Head("token"),
        },
    ),
}

# Inputs with a place for every token, packed where they are given; labels only under a head per token.
TOKEN_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "shift_labels")
# Outputs with a place for every token, padded again; logits only under a head per token.
TOKEN_OUTPUTS = ("last_hidden_state", "hidden_states")


def known(module: nn.Module) -> tuple[Family, Head | None] | None:
    """The row for a module that is a listed base model (head None) or a listed head; None for all else."""
    name = type(module).__name__
    for base, family in FAMILIES.items():
        if name == base:
            return family, None
        if name in family.heads:
            return family, family.heads[name]
    return None


def base_model(module: nn.Module) -> nn.Module:
    """The base model of a known module: itself, or what its head stands on."""
    return module if type(module).__name__ in FAMILIES else module.base_model  # type: ignore[return-value]
