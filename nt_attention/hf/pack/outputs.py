"""The outputs of a packed call, padded again.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...compiler import outside_of_graphs
from ...torch_private import pytree
from .. import families
from .packing import Packing
from .small_batches import PaddedRows
from .tensor_parallel import is_distributed


class UnknownOutputError(Exception):
    """An output can't be padded: it is a DTensor, or it is not known and may have a value for each token."""


_UNKNOWN = "its output {!r} is not known, and may have a value for each token"


@outside_of_graphs
def pad_outputs(
    out: ModelOutput, packing: Packing | PaddedRows, kept: tuple[Tensor, Tensor] | None, done: set[str]
) -> None:
    """Pad every output with a value for each token: (1, T, …) → (B, L, …). With `PaddedRows`, write its padding.

    Args:
        out: the outputs, which are replaced.
        packing: how the batch was packed, or the rows of a batch that was not.
        kept: the tokens whose logits there are, see `Packing.tokens_at`; None if there are those of all tokens.
        done: the names of outputs that stay as they are.

    Raises:
        UnknownOutputError: an output of a packed row is a DTensor, or in no table and may have values in another form.
    """

    def pad_tokens(x: Tensor) -> Tensor:
        return packing.pad(x) if x.shape[:2] == packing.token_shape else x

    for name in [name for name in out if name not in done and name not in families.OTHER_OUTPUTS]:
        value = out[name]
        if isinstance(packing, PaddedRows):
            # without a change: DTensors, and hidden states (altup, B, L, D) of Gemma3n
            if is_distributed(value) or (name == "hidden_states" and any(x.dim() != 3 for x in _tensors_of(value))):
                continue
        elif is_distributed(value):
            raise UnknownOutputError(f"its output {name!r} is a DTensor")
        if name == "logits" and kept is not None:
            tokens, is_token = kept
            out[name] = value.view(*tokens.shape, -1).masked_fill(~is_token.unsqueeze(2), 0)
        elif name == "logits" and value.dim() == 2:  # only of tokens with labels (sparse_prediction in ModernBERT)
            continue
        elif name in families.LOWEST_AT_PADDING:
            out[name] = packing.pad(value, torch.finfo(value.dtype).min)
        else:
            if isinstance(packing, Packing):
                _check_form(name, value, packing.token_shape)
            whole = isinstance(value, Tensor)  # pytrees take time
            out[name] = pad_tokens(value) if whole else pytree.tree_map_only(Tensor, pad_tokens, value)


def _tensors_of(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def _check_form(name: str, value: Any, token_shape: tuple[int, int]) -> None:
    """Raise an error if an output has more or fewer tokens than the row, or values for tokens in an unknown form."""
    total = token_shape[1]
    for part in _tensors_of(value):
        has_tokens = isinstance(part, Tensor) and part.dim() == 3 and name in families.TOKEN_OUTPUTS
        if has_tokens and part.shape[:2] != token_shape:
            raise UnknownOutputError(f"its output {name!r} has {part.shape[1]} tokens, but the row has {total}")
        unknown = isinstance(part, dict | list | tuple)  # a subclass that pytrees do not open
        if isinstance(part, Tensor) and part.shape[:2] != (1, total):
            unknown = total in part.shape or part.numel() % max(total, 1) == 0 < part.dim()
        if unknown:
            raise UnknownOutputError(_UNKNOWN.format(name))
