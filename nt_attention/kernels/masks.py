"""Mask geometry: the visible keys of a query under causality and a window, their number, and the ALiBi bias.

A distance is the position of a key minus the position of the query, both counted along the keys. It is negative for
keys before the query and positive for keys after it.

Dimensions: B sequences, H heads, L queries of a sequence, S keys of a sequence.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """How many keys a query sees before and after its own position, both inclusive; inf is no limit.

    Example:
        >>> import torch
        >>> from nt_attention.kernels.masks import Window
        >>> window = Window.of((1, -1), is_causal=True)
        >>> window.mask(3, 3, 0, torch.device("cpu")).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    left: float = math.inf
    right: float = math.inf

    @classmethod
    def of(cls, window_size: tuple[int, int], is_causal: bool = False) -> Window:
        """The window of these arguments of `varlen_attention`, in which −1 is no limit."""
        left, right = window_size
        return cls(math.inf if left < 0 else left, 0 if is_causal else math.inf if right < 0 else right)

    @property
    def is_open(self) -> bool:
        """Whether every key is visible."""
        return self.left == self.right == math.inf

    @property
    def is_causal(self) -> bool:
        """Whether a query sees exactly the keys up to its own position."""
        return self.left == math.inf and self.right == 0  # torch.compile of torch 2.11 can't compare tuples

    @property
    def sizes(self) -> tuple[int, int]:
        """(left, right) as integers for flash kernels; −1 is no limit."""
        left, right = (-1 if side == math.inf else int(side) for side in self)
        return left, right

    def visible(self, distance: Tensor) -> Tensor | None:
        """Whether keys at these distances are visible, bool; None if all keys are visible."""
        if self.left == math.inf:
            return None if self.right == math.inf else distance <= int(self.right)
        after_left = distance >= -int(self.left)
        return after_left if self.right == math.inf else after_left & (distance <= int(self.right))

    def hides_nothing(self, queries: int, keys: int, diagonal: int) -> bool:
        """Whether all keys are visible, with query i at key position i + diagonal."""
        return diagonal + self.right >= keys - 1 and queries - 1 + diagonal - self.left <= 0

    def mask(self, queries: int, keys: int, diagonal: int, device: torch.device) -> Tensor | None:
        """(L, S) bool, the visible keys, with query i at key position i + diagonal; None if all are visible."""
        if self.hides_nothing(queries, keys, diagonal):
            return None
        return self.visible(distances(queries, keys, diagonal, device))

    def pairs(self, queries: Tensor, keys: Tensor, lower_right: bool) -> Tensor:
        """(B,) the number of visible (query, key) pairs of sequences with these numbers (B,) of queries and keys.

        Query i sees the keys from i + shift − left to i + shift + right, clamped to the sequence. Both ends are clamped
        linear functions of i, whose sums have a closed form.
        """
        shift = keys - queries if lower_right else torch.zeros_like(keys)
        before = 0 * keys if self.left == math.inf else _sum_of_clamped_line(shift - int(self.left), queries, keys)
        upto = queries * keys
        if self.right != math.inf:
            upto = _sum_of_clamped_line(shift + int(self.right) + 1, queries, keys)
        return upto - before


def distances(queries: int, keys: int, diagonal: int, device: torch.device) -> Tensor:
    """(L, S) int64 distances, with query i at key position i + diagonal."""
    return torch.arange(keys, device=device) - (torch.arange(queries, device=device) + diagonal)[:, None]


def alibi_bias(distance: Tensor, slopes: Tensor) -> Tensor:
    """(…, H, L, S) −slope · |distance| for slopes (…, H): ALiBi (Press et al. 2022), made symmetric."""
    return -slopes[..., None, None] * distance.abs()


def _sum_of_clamped_line(start: Tensor, count: Tensor, top: Tensor) -> Tensor:
    """The sum of min(max(start + i, 0), top) over i < count."""
    return _sum_below(start + count, top) - _sum_below(start, top)


def _sum_below(end: Tensor, top: Tensor) -> Tensor:
    """The sum of min(j, top) over 0 ≤ j < end."""
    end = end.clamp(min=0)
    rising = torch.minimum(end, top)
    return rising * (rising - 1) // 2 + (end - rising) * top
