"""The outputs of a packed call, padded again.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...compiler import outside_of_graphs
from ...layouts.sequence import SequenceLayout
from ...torch_private import is_transformed, pytree
from .. import families
from ..route.packed_row import why_no_row
from .packing import Packing
from .padded_on_read import Padding
from .tensor_parallel import is_distributed


@dataclass(frozen=True)
class PaddedPacking(Padding):
    """The rows of a padded batch, of which the host does not know the lengths.

    Attributes:
        is_padding: (B, L) bool.
    """

    is_padding: Tensor

    @property
    def token_shape(self) -> tuple[int, int]:
        """(B, L), the first two dimensions of outputs with a value for each token."""
        rows, length = self.is_padding.shape
        return rows, length

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.token_shape

    def unpad(self, gradient: Tensor) -> Tensor:
        return self.pad(gradient)

    def tokens_of(self, packed: Tensor) -> tuple[Tensor, Any]:
        layout = SequenceLayout.from_attention_mask(~self.is_padding)
        return layout.pack(packed), layout

    def pad(self, padded: Tensor, value: float = 0.0) -> Tensor:
        """Write `value` to the padding of (B, L, …)."""
        return padded.masked_fill(self.is_padding.view(*self.token_shape, *[1] * (padded.dim() - 2)), value)


class UnknownOutputError(Exception):
    """An output can't be padded: it is not known, and may have a value for each token."""


_UNKNOWN = "its output {!r} is not known, and may have a value for each token"


@outside_of_graphs
def pad_outputs(
    out: ModelOutput,
    packing: Packing | PaddedPacking,
    kept: tuple[Tensor, Tensor] | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Pad every output with a value for each token: (1, T, …) → (B, L, …). With `PaddedPacking`, write its padding.

    Beside a loss, outputs are padded when they are read: `padded_on_read.py`.

    Args:
        out: the outputs, which are replaced.
        packing: how the batch was packed, or the rows of a batch that was not.
        kept: the tokens whose logits there are, see `Packing.tokens_at`; None if there are those of all tokens.
        names: the outputs that are padded. None: all.

    Raises:
        UnknownOutputError: an output of a packed row is in no table and may have values in another form.
    """
    later = out.get("loss") is not None and not is_transformed()
    for name in [name for name in (out if names is None else names) if name not in families.OTHER_OUTPUTS]:
        value = out[name]
        if name == "logits" and kept is not None:
            tokens, is_token = kept
            out[name] = value.view(*tokens.shape, -1).masked_fill(~is_token.unsqueeze(2), 0)
            continue
        if name == "logits" and value.dim() == 2:  # only of tokens with labels (sparse_prediction in ModernBERT)
            continue
        if isinstance(packing, PaddedPacking):
            # without a change: DTensors, and hidden states (altup, B, L, D) of Gemma3n
            if is_distributed(value) or (name == "hidden_states" and any(x.dim() != 3 for x in _tensors_of(value))):
                continue
        else:
            _check_form(name, value, packing.token_shape)
        _pad_tokens(out, name, packing, later)


@outside_of_graphs
def pad_later(out: ModelOutput, padding_of: Callable[[str], Padding]) -> None:
    """Let outputs (1, T, …) that a CUDA graph has computed beside a loss be padded when they are read.

    `padding_of`: the name of an output → the rows of its side.
    """
    for name in [name for name in out if name not in families.OTHER_OUTPUTS]:
        _pad_tokens(out, name, padding_of(name), later=True)


def _pad_tokens(out: ModelOutput, name: str, padding: Padding, later: bool) -> None:
    """Pad the tensors of an output that have a value for each token."""

    def pad(x: Any) -> Tensor:
        if x.shape[:2] != padding.token_shape:
            return x
        value = torch.finfo(x.dtype).min if name in families.LOWEST_AT_PADDING else 0.0
        if not is_distributed(x):
            return padding.pad_later(x, value) if later else padding.pad(x, value)
        # a DTensor, of which each rank has all tokens: see `tensor_parallel.divides_tokens`
        return x.from_local(padding.pad(x.to_local(), value), x.device_mesh, x.placements, run_check=False)

    value = out[name]  # pytrees take time
    out[name] = pad(value) if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, pad, value)


def _tensors_of(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def _check_form(name: str, value: Any, token_shape: tuple[int, int]) -> None:
    """Raise an error if an output has more or fewer tokens than the row, or values for tokens in an unknown form."""
    total = token_shape[1]
    for part in _tensors_of(value):
        has_tokens = isinstance(part, Tensor) and part.dim() == 3 and name in families.TOKEN_OUTPUTS
        if has_tokens and part.shape[:2] != token_shape:
            raise UnknownOutputError(why_no_row(f"its output {name!r}", part.shape[0], part.shape[1], total))
        unknown = isinstance(part, dict | list | tuple)  # a subclass that pytrees do not open
        if isinstance(part, Tensor) and part.shape[:2] != (1, total):
            unknown = total in part.shape or part.numel() % max(total, 1) == 0 < part.dim()
        if unknown:
            raise UnknownOutputError(_UNKNOWN.format(name))
