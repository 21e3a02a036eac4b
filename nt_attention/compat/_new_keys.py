"""New keys of `flash_attn_with_kvcache`: their checks, their rotary embedding, and appending them.

Dimensions: B sequences, L queries and N new keys of each sequence, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler import can_be_read
from ..modules.rotary import rotate_pairs
from ._kv_cache import KVCache, Pools
from ._layouts import token_positions


class RotaryTables(NamedTuple):
    """The rotary embedding of a call, with tables instead of frequencies.

    Attributes:
        cos, sin: (seqlen_ro, R/2).
        interleaved: as `rotary_interleaved`.
        is_ordered: whether each query is at a position of its own.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    is_ordered: bool

    @classmethod
    def of(
        cls, cos: Tensor | None, sin: Tensor | None, q: Tensor, capacity: int, interleaved: bool, is_ordered: bool
    ) -> RotaryTables | None:
        """Check `rotary_cos` and `rotary_sin`. None if both are None."""
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            raise ValueError("rotary_cos and rotary_sin must be passed together, got one of them.")
        if cos.shape != sin.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
            raise ValueError(
                f"rotary_cos and rotary_sin must be (seqlen_ro, R/2) with R up to {q.shape[-1]}, got "
                f"{tuple(cos.shape)} and {tuple(sin.shape)}."
            )
        if len(cos) < capacity:
            raise ValueError(
                f"rotary_cos and rotary_sin have {len(cos)} positions, but the cache has {capacity} for each sequence: "
                "pass a row for each."
            )
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            if x.device != q.device or not x.is_floating_point():
                raise ValueError(f"{name} must have floating-point numbers on {q.device}, got {x.dtype} on {x.device}.")
        return cls(cos, sin, interleaved, is_ordered)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` (N, H, D) by positions (N,). Computes in float32 or float64, and returns the dtype of `x`."""
        if positions.is_cpu and can_be_read(positions) and positions.numel() and positions.amax() >= len(self.cos):
            raise ValueError(
                f"a query is at position {int(positions.amax())}, but rotary_cos and rotary_sin have {len(self.cos)} "
                "positions: pass a row for each."
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (table[positions].unsqueeze(1).to(dtype) for table in (self.cos, self.sin))
        return rotate_pairs(x, cos, sin, interleaved=self.interleaved)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, cache_seqlens: int | Tensor | None, rotary: RotaryTables | None
) -> tuple[Tensor, Pools, Callable[[], None]]:
    """The queries (B·L, H, D), rotated; the keys with the new ones; and a function that writes the new ones."""
    new = k.shape[1]
    starts = cache.lengths(cache_seqlens, new)
    pools = cache.pools(starts + new)
    sequences, positions = _positions(starts, new, is_ordered=True)
    query, key = q.flatten(0, 1), k.flatten(0, 1)
    if rotary is not None:
        of_queries = _positions(starts, q.shape[1], rotary.is_ordered)[1]
        query, key = rotary.rotate(query, of_queries), rotary.rotate(key, positions)
    return query, pools, lambda: cache.append(key, v.flatten(0, 1), sequences, positions)


def _positions(starts: Tensor, length: int, is_ordered: bool) -> tuple[Tensor, Tensor]:
    """(B·length,) each: the sequence and the position of tokens that follow `starts` (B,), or that are all there."""
    batch = starts.shape[0]
    sequences, steps = token_positions(batch, length, starts)
    positions = starts[sequences].long()
    return sequences, positions + steps if is_ordered else positions


def check_shape(name: str, x: object, shape: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != shape.count(",") + 1:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor {shape}, got {got}.")


def check_nothing_new(k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    """Check the arguments of a call without new keys."""
    if k is not None or v is not None:
        raise ValueError("k and v must be passed together, got one of them.")
    if cos is not None or sin is not None:
        raise ValueError("rotary_cos and rotary_sin need new keys: pass k and v, or rotate q before the call.")


def check_new(k: Tensor, v: Tensor, cache: KVCache, cache_seqlens: int | Tensor | None) -> None:
    """Check new keys and values."""
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is needed with k and v: pass the number of positions that are in use.")
    batch = cache.table.shape[0]
    for name, x, pool in (("k", k, cache.key), ("v", v, cache.value)):
        check_shape(name, x, "(B, N, G, D)")
        wanted = (batch, k.shape[1], *pool.shape[2:])
        if x.shape != wanted or x.dtype != pool.dtype or x.device != pool.device:
            raise ValueError(
                f"{name} must be {wanted} of {pool.dtype} on {pool.device}, as {name}_cache is, got {tuple(x.shape)} "
                f"of {x.dtype} on {x.device}."
            )
