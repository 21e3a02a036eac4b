"""Where packed sequences begin, as ``position_ids`` tell it.

Dimensions: B rows, L places in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def begins(position_ids: Tensor, here: Tensor | None = None) -> Tensor:
    """(B, L) bool, the tokens with which a sequence begins inside its row, after the row's first; without a sync.

    Without a mask that is wherever a position is not the one before it plus one, as in transformers. With one, a token
    is held against the token before it: it goes on where its position is one more, or more by as many places as they
    are apart (some count padding, others do not), and where all of a row's positions are the same.

    Args:
        position_ids: (B, L) or (1, L).
        here: (B, L) bool, where tokens are; None for everywhere.
    """
    if here is None:
        found = torch.zeros_like(position_ids, dtype=torch.bool)
        found[:, 1:] = position_ids.diff(dim=1) != 1
        return found
    if not here.numel():
        return torch.zeros_like(here)
    positions = position_ids.expand_as(here)
    before = previous(here)
    ahead = positions - positions.gather(1, before.clamp(min=0))
    places = torch.arange(here.shape[1], device=here.device)
    tells = (position_ids != position_ids[:, :1]).any(1, keepdim=True)
    return here & (before >= 0) & tells & (ahead != 1) & (ahead != places - before)


def previous(here: Tensor) -> Tensor:
    """(B, L) int64, the place of the token before each place, −1 where there is none."""
    places = torch.arange(here.shape[1], device=here.device).expand_as(here).masked_fill(~here, -1)
    return torch.cat([places.new_full((len(here), 1), -1), places.cummax(1).values[:, :-1]], 1)
