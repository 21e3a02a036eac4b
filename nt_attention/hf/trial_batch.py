"""The batches that a twin runs to prove that its class can be packed, and the values to compare.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LENGTHS = (7, 1, 23, 12)
LONG = (3, 120, 70, 1)  # for what happens at a distance, such as a window that the config does not name


class Batch:
    """A batch of four sequences, with padding on the right, on the left, or between the tokens.

    A long batch also has special ids, such as those of beginnings and ends.
    """

    def __init__(self, side: str, vocabulary: int, padding: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = LONG if side == "long" else LENGTHS
        self.mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        if side == "left":
            self.mask = self.mask.flip(1)
        if side == "holes":
            self.mask[3] = self.mask[3].roll(5).logical_or(torch.arange(max(LENGTHS)) < 2)
            self.lengths = tuple(self.mask.sum(1).tolist())
        first = padding + 1 if side == "long" else 6
        tokens = torch.randint(first, vocabulary, (sum(self.lengths),), generator=generator)
        self.ids = torch.full(self.mask.shape, padding).masked_scatter(self.mask, tokens)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask.long()}

    def rows(self) -> list[dict[str, Tensor]]:
        """The inputs of each sequence alone, without padding."""
        alone = [ids[mask][None] for ids, mask in zip(self.ids, self.mask, strict=True)]
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in alone]

    def values(self, out: Any) -> dict[str, Tensor]:
        """The outputs of a padded run: (T, …) for tokens, (B, …) for rows."""
        found = {}
        for name, value in _tensors(out):
            if value.shape[:2] == self.mask.shape:
                found[name] = value[self.mask]
            elif value.dim() and value.numel() % len(self.ids) == 0:
                found[name] = value.reshape(len(self.ids), -1)
        return found

    def values_alone(self, outs: list[Any]) -> dict[str, Tensor]:
        """The same, from the runs of each sequence alone."""
        found: dict[str, Tensor] = {}
        by_name = [dict(_tensors(out)) for out in outs]
        for name, first in by_name[0].items():
            parts = [tensors[name] for tensors in by_name]
            per_token = first.dim() > 1 and all(x.shape[1] == n for x, n in zip(parts, self.lengths, strict=True))
            if per_token:
                found[name] = torch.cat([part[0] for part in parts])
            elif first.dim():
                found[name] = torch.cat([part.reshape(1, -1) for part in parts])
        return found


def _tensors(out: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, by name. Of a tuple or a list they are numbered."""
    for name, value in out.items():
        if name in ("past_key_values", "loss"):
            continue
        parts = enumerate(value) if isinstance(value, tuple | list) else [("", value)]
        for number, part in parts:
            if isinstance(part, Tensor):
                yield f"{name}{number}", part.double() if not part.is_floating_point() else part
