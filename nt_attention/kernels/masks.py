"""Mask geometry: the visible keys of a query under causality and a window, their number, and the ALiBi bias.

A distance is the position of a key minus the position of the query, both counted along the keys. It is negative for
keys before the query and positive for keys after it.

Dimensions: B sequences, H heads, L queries of a sequence, S keys of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

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

    def mask(self, queries: int, keys: int, diagonal: int, device: torch.device) -> Tensor | None:
        """(L, S) bool, the visible keys, with query i at key position i + diagonal; None if all are visible."""
        if diagonal + self.right >= keys - 1 and queries - 1 + diagonal - self.left <= 0:
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


def checked_score_mod(mod: Callable[..., Any]) -> Callable[..., Tensor]:
    """`mod(score, b, h, q_idx, kv_idx)`, which raises a ValueError if it does not return one score."""

    def score_mod(score: Tensor, *indices: Tensor) -> Tensor:
        result = mod(score, *indices)
        precise = torch.promote_types(score.dtype, torch.float32)  # that of flex_attention's scores in 16 bits
        is_number = isinstance(result, Tensor) and not result.dim() and result.is_floating_point()
        if not is_number or torch.promote_types(result.dtype, precise) != precise:
            raise ValueError(
                f"score_mod must return a tensor of shape () in the dtype of the score, {score.dtype}, got "
                f"{_describe(result)}: index tensors down to one number, and cast it with .to(score.dtype)."
            )
        return cast(Tensor, result)

    return score_mod


def checked_mask_mod(mod: Callable[..., Any]) -> Callable[..., Tensor]:
    """`mod(b, h, q_idx, kv_idx)`, which raises a ValueError if it does not return one truth value."""

    def mask_mod(*indices: Tensor) -> Tensor:
        result = mod(*indices)
        if not isinstance(result, Tensor) or result.dim() or result.dtype != torch.bool:
            raise ValueError(
                "mask_mod must return a boolean tensor of shape (), True if the query sees the key, got "
                f"{_describe(result)}: compare numbers, as in q_idx >= kv_idx."
            )
        return result

    return mask_mod


def _describe(result: object) -> str:
    return f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else f"a {type(result).__name__}"


class Positions(NamedTuple):
    """The pairs of n tiles, for mods: the indices of their sequences (n,), queries (n, L) and keys (n, S)."""

    sequences: Tensor
    queries: Tensor
    keys: Tensor

    @classmethod
    def of_sequence(cls, b: int, scores: Tensor) -> Positions:
        """All pairs of sequence b, with these scores (…, L, S)."""
        rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        return cls(torch.tensor([b], device=scores.device), rows[None], keys[None])


def apply_score_mod(mod: Callable[..., Any], scores: Tensor, positions: Positions) -> Tensor:
    """Call `mod(score, b, h, q_idx, kv_idx)` on scalars, as flex_attention does, for every score (n, H, L, S)."""
    return _for_each_score(checked_score_mod(mod), scores, positions).to(scores.dtype)


def apply_mask_mod(mod: Callable[..., Any], heads: int, positions: Positions) -> Tensor:
    """The result of `mod(b, h, q_idx, kv_idx)` for every score, bool, (n or 1, H or 1, L, S)."""
    mask_mod = checked_mask_mod(mod)
    b, q, k = positions
    scores = q.new_zeros(()).expand(len(b), heads, q.shape[1], k.shape[1])
    visible = _for_each_score(lambda _, *indices: mask_mod(*indices), scores, positions)
    for dim in (0, 1):  # of what does not depend on the sequence or the head, there is one copy in memory
        visible = visible.narrow(dim, 0, 1) if visible.stride(dim) == 0 else visible
    return visible


def needs_gradient(mod: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Whether the result of a score_mod requires a gradient for a score that requires none."""
    if not torch.is_grad_enabled():
        return False
    score = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device="cpu")
    try:
        return checked_score_mod(mod)(score, *torch.zeros(4, dtype=torch.int64, device="cpu").unbind()).requires_grad
    except IndexError:  # an empty tensor has no gradient
        return False


def _for_each_score(mod: Callable[..., Tensor], scores: Tensor, positions: Positions) -> Tensor:
    heads = torch.arange(scores.shape[1], device=scores.device)
    over_keys = torch.vmap(mod, in_dims=(0, None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(0, None, None, 0, None))
    over_heads = torch.vmap(over_queries, in_dims=(0, None, 0, None, None))
    over_tiles = torch.vmap(over_heads, in_dims=(0, 0, None, 0, 0))
    b, q, k = positions
    return over_tiles(scores, b, heads, q, k)


def _sum_of_clamped_line(start: Tensor, count: Tensor, top: Tensor) -> Tensor:
    """The sum of min(max(start + i, 0), top) over i < count."""
    return _sum_below(start + count, top) - _sum_below(start, top)


def _sum_below(end: Tensor, top: Tensor) -> Tensor:
    """The sum of min(j, top) over 0 ≤ j < end."""
    end = end.clamp(min=0)
    rising = torch.minimum(end, top)
    return rising * (rising - 1) // 2 + (end - rising) * top
