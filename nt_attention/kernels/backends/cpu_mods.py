"""What the backward of the CPU backend keeps of score_mod and mask_mod.

The backward must see the mask and the scores of the forward. Whatever a mod reads may have changed until then. So masks
are saved, a bit for each score. Scores would take 32 times as much, so score_mod is called again, and its result for
one score is compared with that of the forward, bit by bit.

Dimensions: n tiles of the same shape, H heads, L queries of a tile, S keys of a tile.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..call import AttentionSpec
from ..mods import apply_mask_mod, apply_score_mod
from .cpu_tiles import TileGroup

MODS_CHANGED = (
    "score_mod gave other values in the backward than in the forward: something that it reads was modified in between. "
    "Run the backward first, or pass backend='reference'."
)
_PROBE = 0.7310585  # any score: what a mod adds or multiplies changes it
_SEED_BYTES, _DIGEST_BYTES = 16, 8


class SavedMods:
    """The mods of a call. The forward writes what the backward reads, tile after tile, as bytes.

    Args:
        spec: the options of the call.
        saved: what the forward has written. None in the forward.
    """

    def __init__(self, spec: AttentionSpec, saved: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None) -> None:
        self._spec, self._saved, self._at = spec, saved, 0
        self._written: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    @classmethod
    def of_state(cls, spec: AttentionSpec, state: Tensor) -> tuple[Tensor, SavedMods]:
        """The seed (2,) and the mods, from the result of `with_seed`."""
        return state[:_SEED_BYTES].view(torch.int64), cls(spec, state[_SEED_BYTES:].numpy())

    def with_seed(self, seed: Tensor | None) -> Tensor:
        """What the forward has written, after a seed (2,) int64, as uint8."""
        first = torch.zeros(2, dtype=torch.int64) if seed is None else seed
        return torch.from_numpy(np.concatenate([first.view(torch.uint8).numpy(), *self._written]))

    def mask_of(self, tiles: TileGroup) -> Tensor:
        """The result of mask_mod for tiles, bool, (n or 1, H or 1, L, S)."""
        mod, heads, positions = self._spec.mask_mod, self._spec.num_heads, tiles.positions()
        assert mod is not None
        if self._saved is None:
            mask = apply_mask_mod(mod, heads, positions)
            if self._spec.needs_grad:
                self._written += [np.array(mask.shape[:2], np.int32).view(np.uint8), np.packbits(mask.numpy())]
            return mask
        shape = (*self._read(8).view(np.int32).tolist(), positions.queries.shape[1], positions.keys.shape[1])
        count = int(np.prod(shape))
        bits = np.unpackbits(self._read(-(-count // 8)), count=count)
        return torch.from_numpy(bits.view(np.bool_).reshape(shape))

    def score_mod_of(self, tiles: TileGroup, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """`mod(scores)` for tiles, the scores (n, H, L, S) changed by score_mod.

        Raises:
            RuntimeError: in the backward, it is another function than in the forward.
        """
        spec, positions = self._spec, tiles.positions()
        assert spec.score_mod is not None
        mod = functools.partial(apply_score_mod, spec.score_mod, positions=positions)
        if spec.needs_grad:
            shape = len(tiles.sequences), spec.num_heads, positions.queries.shape[1], positions.keys.shape[1]
            with torch.no_grad():
                results = mod(torch.full((), _PROBE, dtype=dtype, device="cpu").expand(shape).clone())
            digest = hashlib.blake2b(results.contiguous().numpy().tobytes(), digest_size=_DIGEST_BYTES).digest()
            if self._saved is None:
                self._written.append(np.frombuffer(digest, np.uint8))
            elif self._read(_DIGEST_BYTES).tobytes() != digest:
                raise RuntimeError(MODS_CHANGED)
        return mod

    def _read(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        assert self._saved is not None
        self._at += count
        return self._saved[self._at - count : self._at]
