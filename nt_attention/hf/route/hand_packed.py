"""Rows that the caller packed: `cu_seq_lens_q` says where sequences begin, or `position_ids` that restart.

Dimensions: B rows, L positions in a row, S sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...compiler import can_be_read, outside_of_graphs
from ...layouts.protocol import Layout
from ...layouts.sequence import SequenceLayout
from .positions import starts


def layout_of_lengths(arguments: dict[str, Any], tokens: Tensor) -> Layout:
    """The sequences of all B · L positions, from `cu_seq_lens_q`.

    Syncs with the device once for each tensor of offsets, and once if there are `position_ids`.

    Args:
        arguments: the arguments of the call.
        tokens: (B, L, …), its input.

    Raises:
        ValueError: the offsets are not those of whole rows, or `cu_seq_lens_k` or `position_ids` say something else.
    """
    offsets, other, (rows, length) = arguments["cu_seq_lens_q"], arguments.get("cu_seq_lens_k"), tokens.shape[:2]
    if not isinstance(offsets, Tensor):
        raise ValueError(f"cu_seq_lens_q must be a tensor of offsets, got {type(offsets).__name__}.")
    layout = SequenceLayout.from_offsets(offsets.to(tokens.device))
    if layout.total != rows * length:
        raise ValueError(
            f"cu_seq_lens_q ends at {layout.total}, but the input is {(rows, length)} (batch, length): pass the "
            f"offsets of all {rows * length} tokens."
        )
    if rows > 1 and not np.isin(range(0, rows * length, length), layout.host).all():
        raise ValueError(
            f"cu_seq_lens_q has a sequence that begins in one row of {length} tokens and ends in another: pass one row."
        )
    keys = layout if other is None or other is offsets else SequenceLayout.from_offsets(other.to(tokens.device))
    if not layout.same_lengths(keys):
        raise ValueError("cu_seq_lens_k differs from cu_seq_lens_q: in self-attention, pass the same offsets.")
    position_ids = arguments.get("position_ids")
    if position_ids is not None and position_ids.shape in ((rows, length), (1, length)):
        _check_positions(position_ids.expand(rows, -1).flatten(), layout)
    return layout


def _check_positions(position_ids: Tensor, layout: Layout) -> None:
    """Check that positions (B · L,) increase in each sequence, and do not go on from one sequence to the next."""
    if not can_be_read(position_ids):
        return
    step, inside = position_ids.diff(), layout.position_ids[1:] > 0
    wrong = ((step < 1) & inside) | ((step == 1) & ~inside)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0]) + 1
        before, there = position_ids[at - 1 : at + 1].tolist()
        what = "has no sequence that begins" if inside[at - 1] else "has a sequence that begins"
        raise ValueError(
            f"position_ids and cu_seq_lens_q say different things: token {at} has position {there} after {before}, but "
            f"cu_seq_lens_q {what} there. Pass positions that begin again with each sequence, or only one of the two."
        )


def is_packed(arguments: dict[str, Any]) -> bool:
    """Whether a row of this call has several sequences. Syncs with the device once if there are `position_ids`.

    Positions that the host can't read are those of one sequence.
    """
    offsets, position_ids, mask = (arguments.get(x) for x in ("cu_seq_lens_q", "position_ids", "attention_mask"))
    if offsets is not None:
        return bool(offsets.numel() != 2)
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or not can_be_read(position_ids):
        return False
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):  # masks that are made already
        return False
    length = position_ids.shape[1]
    token_mask = None
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        token_mask = mask[:, mask.shape[1] - length :] != 0
    return length > 1 and bool(starts(position_ids, token_mask).any())


@outside_of_graphs
def refuse_packed_rows(model: Any, arguments: dict[str, Any], reason: str) -> None:
    """Refuse a call with rows of several sequences, which the model would mix for this `reason`.

    Raises:
        ValueError: a row has several sequences.
    """
    if is_packed(arguments):
        raise mixed_rows_error(model, reason)


def mixed_rows_error(model: Any, reason: str) -> ValueError:
    """The error for rows with several sequences that a model would mix. `reason`: why it would."""
    return ValueError(
        f"{type(model).__name__} got rows with several sequences (cu_seq_lens_q, or position_ids that restart), and "
        f"would mix them, because {reason}."
    )
