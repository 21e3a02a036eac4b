"""score_mod and mask_mod, the functions of flex_attention that change scores and hide keys.

Dimensions: n tiles of the same shape, H heads, L queries of a tile, S keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..compiler import outside_of_graphs


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


@outside_of_graphs
def frozen(mod: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A mod whose variables keep their values, for a backward that calls it later.

    Without it, a function that is made in a loop would read what its variables have become after the loop. Only the
    variables of plain functions are kept.
    """
    if not isinstance(mod, FunctionType):
        return mod
    names = _names(mod.__code__) | {"__builtins__", "__name__"}  # these are read by imports and warnings
    variables = {name: mod.__globals__[name] for name in names if name in mod.__globals__}
    cells = tuple([_copy_cell(cell) for cell in mod.__closure__ or ()])
    copied = FunctionType(mod.__code__, variables, mod.__name__, mod.__defaults__, cells)
    copied.__kwdefaults__ = mod.__kwdefaults__
    return copied


def _names(code: CodeType) -> set[str]:
    """The names of the global variables that a function, and those in it, may read."""
    return set(code.co_names).union(*[_names(x) for x in code.co_consts if isinstance(x, CodeType)])


def _copy_cell(cell: CellType) -> CellType:
    try:
        return CellType(cell.cell_contents)
    except ValueError:  # it is empty
        return cell


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
