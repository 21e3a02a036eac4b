"""The batches that a twin runs to prove that its class can be packed, and the values to compare.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..families import CACHE
from ..pack.encoder_decoder import OF_SOURCE

LENGTHS = (7, 1, 23, 12)
WITH_PREFIX = (40, 47, 41, 52, 23)  # of rows that all begin with the first one, but for the last
TARGETS = (5, 9, 1, 14)  # lengths of the targets of an encoder-decoder
# Of long batches. Most rows are short, so that their packed row is longer than any length that a config or code names.
SHORT_ROW, LONG_ROW, LONG_PACKED_ROW = 31, 400, 4_200
LONGEST_ROW, LONGEST_PACKED_ROW = 1_100, 8_300  # if code names such lengths
_MULTIPLE = 512  # of the length of a long packed row
_FIRST_IDS = 300  # ids of which each is in a long batch


class Batch:
    """A batch of sequences, with padding on the right, on the left, or between the tokens.

    Args:
        side: "right", "left" or "holes".
        vocabulary: the number of ids.
        padding: the id at padding. No token has it.
        special: ids that must be among the tokens, also at the beginning of rows, as far as there are enough tokens.
        lengths: of the sequences.
        first: the lowest id of a token.
        seed: of the tokens.

    Attributes:
        target: the targets if the sequences are the sources of an encoder-decoder, or None.
    """

    target: Batch | None = None

    def __init__(
        self,
        side: str,
        vocabulary: int,
        padding: int,
        special: Sequence[int] = (),
        lengths: tuple[int, ...] = LENGTHS,
        first: int = 6,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.side, self.lengths = side, lengths
        self.mask = torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]
        if side == "left":
            self.mask = self.mask.flip(1)
        if side == "holes":
            self.mask[3] = self.mask[3].roll(5).logical_or(torch.arange(max(LENGTHS)) < 2)
            self.lengths = tuple(self.mask.sum(1).tolist())
        tokens = torch.randint(min(first, vocabulary - 1), vocabulary, (sum(self.lengths),), generator=generator)
        special = [number for number in special if 0 <= number < vocabulary and number != padding]
        if special:
            _put(tokens, torch.tensor(special), torch.tensor(self.lengths).cumsum(0)[:-1], generator)
        self.ids = torch.full(self.mask.shape, padding).masked_scatter(self.mask, tokens)

    @classmethod
    def long(
        cls, vocabulary: int, padding: int, special: Sequence[int], row: int, packed_row: int, short: int = SHORT_ROW
    ) -> Batch:
        """A batch whose packed row is longer than `packed_row`, with one long row, and with all low and special ids."""
        short = min(short, row)
        rows = -(-max(0, packed_row - row) // short) // 2 + 1
        rest = -(row + 2 * rows * short) % _MULTIPLE  # code may divide rows into chunks
        rests = [short] * (rest // short) + [rest % short] * (rest % short > 0)
        lengths = (*[short] * rows, row, *rests, *[short] * rows)
        special = [*special, *range(padding + 1, min(vocabulary, _FIRST_IDS))]
        return cls("right", vocabulary, padding, special, lengths, padding + 1)

    @property
    def inputs(self) -> dict[str, Tensor]:
        inputs = self.source_inputs
        if self.target is not None:
            inputs |= {f"decoder_{name}": x for name, x in self.target.source_inputs.items()}
        return inputs

    @property
    def source_inputs(self) -> dict[str, Tensor]:
        """The inputs, without those of a target."""
        return {"input_ids": self.ids, "attention_mask": self.mask.long()}

    def rows(self) -> list[dict[str, Tensor]]:
        """The inputs of each sequence alone, without padding."""
        return [self._alone(row, row + 1) for row in range(len(self.ids))]

    def groups(self) -> list[dict[str, Tensor]]:
        """As `rows`, but neighbors of the same length are one batch. A target must have the same lengths."""
        ends = [n for n in range(1, len(self.ids)) if self.lengths[n] != self.lengths[n - 1]]
        return [self._alone(begin, end) for begin, end in itertools.pairwise([0, *ends, len(self.ids)])]

    def _alone(self, begin: int, end: int) -> dict[str, Tensor]:
        ids = self._without_padding(begin, end)
        target = {} if self.target is None else {"decoder_input_ids": self.target._without_padding(begin, end)}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **target}

    def _without_padding(self, begin: int, end: int) -> Tensor:
        return self.ids[begin:end][self.mask[begin:end]].view(end - begin, -1)

    def _side_of(self, name: str) -> Batch:
        """The side that an output is about."""
        return self if self.target is None or name.startswith(OF_SOURCE) else self.target

    def values(self, out: Any) -> dict[str, Tensor]:
        """The outputs of a padded run: (T, …) for tokens, (B, …) for rows."""
        found = {}
        for name, value in _tensors(out):
            mask = self._side_of(name).mask
            if value.shape[:2] == mask.shape:
                found[name] = value[mask]
            elif value.dim() and value.numel() % len(self.ids) == 0:
                found[name] = value.reshape(len(self.ids), -1)
        return found

    def values_alone(self, outs: list[Any], inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same, from the runs of the batches `inputs`, which are `rows` or `groups`."""
        found: dict[str, Tensor] = {}
        by_name = [dict(_tensors(out)) for out in outs]
        for name, first in by_name[0].items():
            parts = [tensors[name] for tensors in by_name]
            ids = "input_ids" if self._side_of(name) is self else "decoder_input_ids"
            shapes = [x[ids].shape for x in inputs]
            per_token = first.dim() > 1 and all(x.shape[1] == n for x, (_, n) in zip(parts, shapes, strict=True))
            if per_token:
                found[name] = torch.cat([part.flatten(0, 1) for part in parts])
            elif first.dim():
                found[name] = torch.cat([x.reshape(rows, -1) for x, (rows, _) in zip(parts, shapes, strict=True)])
        return found


def special_ids(numbers: Iterable[int], vocabulary: int, most: int) -> list[int]:
    """At most `most` of some numbers that are ids, the largest first: low ones are drawn more often anyway."""
    return sorted({number for number in numbers if 0 <= number < vocabulary}, reverse=True)[:most]


def _put(tokens: Tensor, special: Tensor, starts: Tensor, generator: torch.Generator) -> None:
    """Write special ids to the tokens (T,), in place: some alone, some twice, some at the ends of rows."""
    width = 4 if len(tokens) > 4 * len(special) else 2
    blocks = torch.randperm(len(tokens) // width, generator=generator)[: max(1, len(tokens) // (2 * width))] * width
    chosen = special.repeat(len(blocks) // len(special) + 1)[: len(blocks)]
    for place in (0, 1, 3) if width == 4 else (0,):
        tokens[blocks + place] = chosen
    if width == 4:
        tokens[blocks + 2] = chosen.roll(1)
    # every other row begins with one, and the row before it ends with one
    begins = starts[::2]
    tokens[begins] = special.repeat(len(begins) // len(special) + 1)[: len(begins)]
    tokens[begins - 1] = special.flip(0).repeat(len(begins) // len(special) + 1)[: len(begins)]


def _tensors(out: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, by name. Of a tuple or a list they are numbered."""
    for name, value in out.items():
        if name in CACHE or name == "loss":
            continue
        parts = enumerate(value) if isinstance(value, tuple | list) else [("", value)]
        for number, part in parts:
            if isinstance(part, Tensor):
                yield f"{name}{number}", part.double() if not part.is_floating_point() else part
