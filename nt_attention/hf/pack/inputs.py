"""The arguments of a call of a Hugging Face model: which rows they have, and how they are packed.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...compiler import inline_only
from ...layouts.protocol import Layout
from ...layouts.sequence import SequenceLayout
from .. import families
from ..plan import Head, Plan
from ..route.hand_packed import layout_of_lengths
from .packing import Packing


@inline_only
def arguments_of(defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call that are not their defaults, by name; None if the call has an argument twice."""
    arguments = kwargs
    if args:
        positional = dict(zip(defaults, args, strict=False))
        if len(args) > len(defaults) or positional.keys() & kwargs.keys():
            return None
        arguments = {**positional, **kwargs}
    ignored = families.IGNORED.intersection(arguments).difference(defaults)
    inputs = families.INPUTS
    return {
        name: x
        for name, x in arguments.items()
        if x is not defaults.get(name) and (x is not None or name not in inputs) and name not in ignored
    }


def read_packing(arguments: dict[str, Any], always: bool, head: Head | None = None) -> Packing | None:
    """The packing of a call. Unless `always`, it is None for a call that has neither a mask, positions nor offsets."""
    tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
    mask, position_ids = arguments.get("attention_mask"), arguments.get("position_ids")
    if position_ids is not None and has_axes(position_ids, mask):
        position_ids = position_ids[0] if len(position_ids) == 4 else None  # transformers has those of text first
    is_by_hand = "cu_seq_lens_q" in arguments
    if tokens is None or (mask is None and position_ids is None and not (always or is_by_hand)):
        return None
    rows, length = tokens.shape[:2]
    if mask is None and position_ids is None and not is_by_hand:
        return Packing(SequenceLayout.from_lengths([length] * rows, device=tokens.device), None, rows, length)
    for name, x in (("attention_mask", mask), ("position_ids", position_ids)):
        if x is not None and x.shape != (rows, length) and (name == "attention_mask" or x.shape != (1, length)):
            hint = " To continue from a cache, pass use_cache=True in the first call: packed calls return no cache."
            raise ValueError(
                f"{name} is {tuple(x.shape)}, but the input is {(rows, length)} (batch, length)."
                f"{hint if length < x.shape[1] else ''}"
            )
    for name in families.TOKEN_INPUTS & arguments.keys():
        if arguments[name].shape[:2] not in ((rows, length), (1, length)):
            return None  # the model raises an error
    mask = None if mask is None else mask != 0  # any value but 0 is a token, as in transformers
    if is_by_hand:
        return Packing.of_packed_rows(layout_of_lengths(arguments, tokens), mask, rows, length)
    return Packing.of(mask, position_ids, rows, length, uncounted_labels(arguments, mask, head))


def uncounted_labels(arguments: dict[str, Any], mask: Tensor | None, head: Head | None) -> Tensor | None:
    """(B, L) bool, the labels that the loss of the padded run counts and that of the packed one does not.

    These are labels at padding and, for the next token, at a first token that has padding before it. None without
    labels for tokens.
    """
    labels = arguments.get("shift_labels", arguments.get("labels"))
    if mask is None or labels is None or head not in ("token", "next token") or labels.shape != mask.shape:
        return None
    counted = mask != 0
    has_label = labels != arguments.get("ignore_index", -100)
    if head == "next token" and "shift_labels" not in arguments:
        has_label[:, :1] = False  # nothing predicts it
        counted[:, 1:] &= counted[:, :-1].clone()
    return has_label & ~counted


def ignore_past_end(arguments: dict[str, Any], layout: Layout) -> None:
    """Let rows past the last token, which layouts with bounds have, have no labels. Changes `arguments`."""
    if not layout.knows_lengths:
        for key in {"labels", "shift_labels"} & arguments.keys():
            arguments[key] = layout.fill_past_end(arguments[key].squeeze(0), -100).unsqueeze(0)


def has_axes(position_ids: Tensor, mask: Tensor | None) -> bool:
    """Whether positions are (axes, batch, length), as in M-RoPE. They don't show where sequences begin."""
    is_3d = position_ids.dim() == 3 and len(position_ids) > 1
    return is_3d and mask is not None and position_ids.shape[1:] == mask.shape


def default_position_ids(plan: Plan, base: Any, packing: Packing, input_ids: Tensor | None) -> Tensor:
    """(1, T), the positions that the model would use in the padded row, or for each sequence of a row alone."""
    if plan.positions == "tokens":
        return packing.layout.position_ids.unsqueeze(0)
    padded = packing.own_positions.unsqueeze(0)
    if plan.positions == "padded":
        return padded
    padding = padding_id(base)
    assert padding is not None
    if input_ids is None:
        return padded + padding + 1
    is_token = (input_ids != padding).long()
    if packing.shares_rows:
        is_token = packing.pack(is_token)
        total = is_token.cumsum(1) - is_token
        first = packing.layout.safe_offsets[:-1].clamp(max=packing.layout.total - 1)
        return (total - total[:, first[packing.layout.sequence_ids]] + 1) * is_token + padding
    return packing.pack(is_token.cumsum(1) * is_token + padding)


def padding_id(base: Any) -> int | None:
    """The id that a model does not count in positions: that of its embeddings or, if they have none, of its config."""
    for module in base.modules():
        if not isinstance(module, nn.Embedding) and isinstance(padding := vars(module).get("padding_idx"), int):
            return padding
    of_config: int | None = base.config.pad_token_id
    return of_config


def tokens_to_keep(packing: Packing, keep: int | Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at the last `keep` positions, or at the positions `keep`. See `Packing.tokens_at`."""
    positions = torch.arange(packing.length, device=packing.layout.device)
    return packing.tokens_at(positions[-keep:] if isinstance(keep, int) else positions[keep])


def points_at_padding(arguments: dict[str, Any], packing: Packing) -> bool:
    """Whether an answer begins or ends at padding, which has no logits. Syncs with the device once."""
    spans = [arguments[x].flatten() for x in ("start_positions", "end_positions") if x in arguments]  # (B,) or (B, 1)
    if not spans:
        return False
    positions = torch.stack(spans, 1)  # (B, 2)
    _, is_token = packing.tokens_at(positions.clamp(0, packing.length - 1))
    return bool(((positions < packing.length) & ~is_token).any())  # the loss ignores larger positions
