"""score_mod and mask_mod, the functions of flex_attention that change scores and hide keys.

Dimensions: n tiles of the same shape, H heads, L queries of a tile, S keys of a tile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

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


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast. Some devices, such as meta, have none."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


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

    Without it, a function that is made in a loop would read what its variables have become after the loop. It keeps the
    variables of Python functions that are defined in one module, also of those that they call, and the attributes of an
    object with `__call__`.
    """
    if isinstance(mod, FunctionType):
        return _frozen(mod, mod.__module__, {})
    is_plain = mod is not None and not isinstance(mod, nn.Module) and hasattr(mod, "__dict__")
    return copy.copy(mod) if is_plain and not isinstance(mod, type) else mod


def _frozen(function: FunctionType, module: str, known: dict[FunctionType, FunctionType]) -> FunctionType:
    """A copy of a function of a module, with copies of the functions of that module in its variables."""

    def kept(value: Any) -> Any:
        is_own = isinstance(value, FunctionType) and value.__module__ == module
        return _frozen(value, module, known) if is_own else value

    if function in known:
        return known[function]
    names = _names(function.__code__) | {"__builtins__", "__name__"}  # these are read by imports and warnings
    variables: dict[str, Any] = {}
    cells = tuple([CellType() for _ in function.__closure__ or ()])
    copied = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    known[function] = copied  # it may call itself
    variables |= {name: kept(function.__globals__[name]) for name in names if name in function.__globals__}
    for cell, of_copy in zip(function.__closure__ or (), cells, strict=True):
        with suppress(ValueError):  # it is empty
            of_copy.cell_contents = kept(cell.cell_contents)
    return copied


def _names(code: CodeType) -> set[str]:
    """The names of the global variables that a function, and those in it, may read."""
    return set(code.co_names).union(*[_names(x) for x in code.co_consts if isinstance(x, CodeType)])


def needs_gradient(mod: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Whether the result of a score_mod requires a gradient for a score that requires none."""
    if not torch.is_grad_enabled():
        return False
    score = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device="cpu")
    try:
        with without_autocast(score.device):
            return checked_score_mod(mod)(
                score, *torch.zeros(4, dtype=torch.int64, device="cpu").unbind()
            ).requires_grad
    except IndexError:  # an empty tensor has no gradient
        return False


def _for_each_score(mod: Callable[..., Tensor], scores: Tensor, positions: Positions) -> Tensor:
    """`mod` for each score. Autocast is off in it, so the forward and the backward compute the same."""
    heads = torch.arange(scores.shape[1], device=scores.device)
    over_keys = torch.vmap(mod, in_dims=(0, None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(0, None, None, 0, None))
    over_heads = torch.vmap(over_queries, in_dims=(0, None, 0, None, None))
    over_tiles = torch.vmap(over_heads, in_dims=(0, 0, None, 0, 0))
    b, q, k = positions
    with without_autocast(scores.device):
        return over_tiles(scores, b, heads, q, k)
