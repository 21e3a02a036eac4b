"""Mask geometry: which keys a query sees under causality and a window, how many they are, and ALiBi's bias.

Shared by all backends, padded attention, Hugging Face's masks and the command line.

Dimensions: B sequences, H heads, L queries and S keys of a sequence. A distance is a key's position minus the query's
position, both counted along the keys. It is below 0 for keys before the query, and above 0 for keys after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """How many keys a query sees before and after its own position, both inclusive; inf is no limit.

    >>> Window.of((2, -1), is_causal=True).mask(3, 3, 0, torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    left: float = math.inf
    right: float = math.inf

    @classmethod
    def of(cls, window_size: tuple[int, int], is_causal: bool = False) -> Window:
        """From ``varlen_attention``'s arguments, in which −1 is no limit."""
        left, right = window_size
        return cls(math.inf if left < 0 else left, 0 if is_causal else math.inf if right < 0 else right)

    @property
    def is_open(self) -> bool:
        """Whether every key is visible."""
        return self.left == self.right == math.inf

    @property
    def is_causal(self) -> bool:
        """Whether exactly the keys up to the query's own position are visible."""
        return self.left == math.inf and self.right == 0  # torch.compile of torch 2.11 can't compare tuples

    @property
    def sizes(self) -> tuple[int, int]:
        """(left, right) as flash kernels take them: −1 is no limit."""
        left, right = (-1 if side == math.inf else int(side) for side in self)
        return left, right

    def visible(self, distance: Tensor) -> Tensor | None:
        """Whether a key at each distance is visible, bool; None if all are."""
        if self.left == math.inf:
            return None if self.right == math.inf else distance <= int(self.right)
        after_left = distance >= -int(self.left)
        return after_left if self.right == math.inf else after_left & (distance <= int(self.right))

    def mask(self, queries: int, keys: int, diagonal: int, device: torch.device) -> Tensor | None:
        """(L, S) bool, the visible keys, with query i at key position i + diagonal; None if all are visible."""
        if diagonal + self.right >= keys - 1 and queries - 1 + diagonal - self.left <= 0:
            return None
        return self.visible(distances(queries, keys, diagonal, device))

    def pairs(self, queries: Tensor, keys: Tensor, lower_right: bool) -> Tensor:
        """(B,) the number of visible (query, key) pairs of each sequence, from its numbers of queries and keys (B,).

        Query i sees the keys from i + shift − left to i + shift + right, clamped to the sequence. Both ends are clamped
        linear functions of i, whose sums have a closed form.
        """
        shift = keys - queries if lower_right else torch.zeros_like(keys)
        before = 0 * keys if self.left == math.inf else _sum_of_cut_line(shift - int(self.left), queries, keys)
        upto = queries * keys
        if self.right != math.inf:
            upto = _sum_of_cut_line(shift + int(self.right) + 1, queries, keys)
        return upto - before


def distances(queries: int, keys: int, diagonal: int, device: torch.device) -> Tensor:
    """(L, S) int64, with query i at key position i + diagonal."""
    return torch.arange(keys, device=device) - (torch.arange(queries, device=device) + diagonal)[:, None]


def alibi_bias(distance: Tensor, slopes: Tensor) -> Tensor:
    """(…, H, L, S), −slope · |distance| for slopes (…, H) (Press et al. 2022, made symmetric)."""
    return -slopes[..., None, None] * distance.abs()


def for_each_score(mod: Callable[..., Tensor], scores: Tensor, b: int) -> Tensor:
    """Call ``mod(score, b, h, q_idx, kv_idx)`` on scalars, as flex_attention does, for every score (H, L, S)."""
    heads, queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape)
    over_keys = torch.vmap(mod, in_dims=(0, None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(0, None, None, 0, None))
    over_heads = torch.vmap(over_queries, in_dims=(0, None, 0, None, None))
    return over_heads(scores, torch.tensor(b, device=scores.device), heads, queries, keys)


def _sum_of_cut_line(start: Tensor, count: Tensor, top: Tensor) -> Tensor:
    """The sum of min(max(start + i, 0), top) over i < count."""
    return _sum_below(start + count, top) - _sum_below(start, top)


def _sum_below(end: Tensor, top: Tensor) -> Tensor:
    """The sum of min(j, top) over 0 ≤ j < end."""
    end = end.clamp(min=0)
    rising = torch.minimum(end, top)
    return rising * (rising - 1) // 2 + (end - rising) * top
