"""Padded inputs of PyTorch's Transformer modules: which positions are tokens, and the tokens packed.

Dimensions: B sequences, L positions of a padded row, T tokens, E embed dim.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..compiler import can_be_read, is_captured, outside_of_graphs
from ..layouts.protocol import Layout
from ..layouts.sequence import layout_of_padding
from ..modules.inputs import layout_without_padding


class PaddedInput(NamedTuple):
    """An input of a call and its masks, as the caller passed them.

    Attributes:
        values: (B, L, E); (L, B, E) if the module is not `batch_first`; or (L, E).
        padding: (B, L) or (L,), True or −inf at padding. None if every position is a token.
        padding_name: the name of `padding` in the call, for messages.
        mask: the mask of self-attention, usually (L, L). None if there is none.
        mask_name: the name of `mask` in the call, for messages.
        is_causal: if True, attention is causal, and `mask` is not read.
    """

    values: Tensor
    padding: Tensor | None
    padding_name: str
    mask: Tensor | None = None
    mask_name: str = "mask"
    is_causal: bool | None = None

    def rows(self, batch_first: bool) -> Tensor:
        """The values as (B, L, E), or (L, E) if that is what the caller passed."""
        return self.values if batch_first or self.values.dim() == 2 else self.values.transpose(0, 1)

    def has_valid_shapes(self, batch_first: bool) -> bool:
        """Whether PyTorch accepts the shapes of values and padding, and the dtype of padding."""
        if self.values.dim() not in (2, 3):
            return False
        if self.padding is None:
            return True
        return _is_mask(self.padding) and self.padding.shape == self.rows(batch_first).shape[:-1]


class PackedInput(NamedTuple):
    """The tokens of a padded input.

    Attributes:
        values: (T, E).
        layout: the sequences.
        is_causal: whether self-attention is causal.
        full_shape: (B, L) if the input has no padding mask, so that every position is a token. Else None.
        batch_first: whether the caller passed (B, L, E), not (L, B, E).
        is_batched: False if the caller passed (L, E).
    """

    values: Tensor
    layout: Layout
    is_causal: bool
    full_shape: tuple[int, int] | None
    batch_first: bool
    is_batched: bool

    @outside_of_graphs  # the number of rows would be a constant of the graph
    def restore(self, out: Tensor) -> Tensor:
        """Convert (T, E) to the form of the input, with 0 at padding."""
        padded = self.layout.pad(out) if self.full_shape is None else out.unflatten(0, self.full_shape)
        if not self.is_batched:
            return padded[0]
        return padded if self.batch_first else padded.transpose(0, 1)


def pack_inputs(
    *inputs: PaddedInput, batch_first: bool, reason: str | None = None, always: bool = False
) -> tuple[PackedInput, ...] | str | None:
    """Pack the inputs of one call, outside of graphs.

    Syncs once for each padding mask, and once for each mask whose values are read.

    Args:
        inputs: inputs with the same batch size.
        batch_first: whether the module takes (B, L, E), not (L, B, E).
        reason: why the call can't run packed, if the caller knows that already.
        always: also pack inputs of which none has a padding mask.

    Returns:
        The packed inputs; or the reason why the call can't run packed; or None if there is nothing to say: no input has
            a padding mask, or the original forward raises an error for these shapes.
    """
    if not always and all(x.padding is None for x in inputs):
        return None
    if not all(x.has_valid_shapes(batch_first) for x in inputs):
        return None
    rows = [x.rows(batch_first) for x in inputs]
    if not all(x.dim() == rows[0].dim() and (x.dim() == 2 or x.shape[0] == rows[0].shape[0]) for x in rows):
        return None
    read = [*rows, *(x.padding for x in inputs if x.padding is not None)]
    if not all(map(_can_be_read, read)):
        return "its values can't be read here"
    if reason is not None:
        return reason
    masks = [mask for x in inputs for mask in ((x.padding_name, x.padding), (x.mask_name, x.mask))]
    if learned := [name for name, mask in masks if mask is not None and mask.requires_grad]:
        return f"{learned[0]} needs a gradient"
    causal = [causality(x.mask, x.is_causal, row.shape[-2]) for x, row in zip(inputs, rows, strict=True)]
    packed = []
    for x, row, its_causal in zip(inputs, rows, causal, strict=True):
        if its_causal is None:
            return f"{x.mask_name} is neither None nor causal"
        if (one := _pack(row, x.padding, its_causal, batch_first)) is None:
            return f"{x.padding_name} has values other than 0 and −inf"
        packed.append(one)
    return tuple(packed)


def _pack(rows: Tensor, padding: Tensor | None, causal: bool, batch_first: bool) -> PackedInput | None:
    """Pack rows (B, L, E) or (L, E). Syncs once if there is a padding mask (B, L) or (L,).

    None if the mask has numbers other than 0 and −inf.
    """
    is_batched = rows.dim() == 3
    if not is_batched:
        rows, padding = rows[None], None if padding is None else padding[None]
    if padding is None:
        layout = layout_without_padding(rows)
        return PackedInput(rows.flatten(0, 1), layout, causal, (rows.shape[0], rows.shape[1]), batch_first, is_batched)
    of_tokens = layout_of_padding(padding)
    if of_tokens is None:
        return None
    return PackedInput(of_tokens.pack(rows), of_tokens, causal, None, batch_first, is_batched)


def causality(mask: Tensor | None, is_causal: bool | None, length: int) -> bool | None:
    """Whether attention is causal, or None for any other mask. Syncs once if it has to read the mask.

    Args:
        mask: the mask of self-attention, True or −inf where a key is hidden. A mask that hides nothing is like no mask.
        is_causal: if True, the mask is not read, as in `nn.TransformerEncoder`.
        length: L.
    """
    if is_causal or mask is None:
        return bool(is_causal)
    return _read_causality(mask) if mask.shape == (length, length) else None


def _read_causality(mask: Tensor) -> bool | None:
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    causal = later if mask.dtype == torch.bool else _additive(later, mask)
    is_causal, is_empty = torch.stack([(mask == causal).all(), (mask == 0).all()]).tolist()
    return is_causal if is_causal or is_empty else None


def _as_padding(mask: Tensor) -> Tensor | None:
    """True at padding, with the shape of `mask`. None if a floating-point mask has values other than 0 and −inf.

    Syncs once for a floating-point mask.
    """
    if mask.dtype == torch.bool:
        return mask
    padding = mask == -torch.inf
    return padding if torch.equal(mask, _additive(padding, mask)) else None


def _additive(blocked: Tensor, like: Tensor) -> Tensor:
    """An additive mask with the dtype of `like`: −inf where `blocked`, else 0."""
    return torch.zeros_like(like).masked_fill(blocked, -torch.inf)


def padding_of_memory(source: Tensor, memory: Tensor | None) -> Literal["same", "hidden", "visible"]:
    """Compare the padding of the memory with that of the source it is made from.

    Syncs once, unless both are the same object. Floating-point masks cost one more sync each.

    Args:
        source: (B, L) or (L,), the padding mask of the source.
        memory: the padding mask of the memory, or None.

    Returns:
        "same" if the masks are equal, "hidden" if the memory hides all padding of the source, "visible" if not. It
            is "hidden" too if the encoder will not pack: the masks can't be read, or have other values or shapes.
    """
    if memory is source:
        return "same"
    masks = [source] if memory is None else [source, memory]
    can_be_compared = all(_can_be_read(x) and _is_mask(x) and x.shape == source.shape for x in masks)
    return _compare_padding(source, memory) if can_be_compared else "hidden"


def _compare_padding(source: Tensor, memory: Tensor | None) -> Literal["same", "hidden", "visible"]:
    padding = _as_padding(source)
    if padding is None:
        return "hidden"
    if memory is None:
        return "visible" if padding.any() else "hidden"
    hidden = _as_padding(memory)
    blocked = memory == -torch.inf if hidden is None else hidden
    is_visible, differs = torch.stack([(padding & ~blocked).any(), (padding != blocked).any()]).tolist()
    if is_visible:
        return "visible"
    return "hidden" if differs or hidden is None else "same"


def _can_be_read(tensor: Tensor) -> bool:
    return can_be_read(tensor) and not is_captured(tensor)


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool or tensor.is_floating_point()
