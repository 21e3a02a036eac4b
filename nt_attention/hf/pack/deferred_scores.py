"""Runs attention modules that compute their scores themselves, on packed rows.

Such a module multiplies queries and keys, scales and masks the scores, takes the softmax, and multiplies by the values.
Here the product of queries and keys is not computed: it is a `DeferredScores`, which only remembers the operations.
The product with the values then runs `varlen_attention`. An operation that `varlen_attention` can't express raises an
error, so the check of the model fails.

Dimensions: T query and S key tokens of a packed row, H heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_private import base_of, pytree
from ..route.packed_mask import PackedMask, packed_mask_in


class CannotDeferError(RuntimeError):
    """An operation on scores that `varlen_attention` can't express."""


def run_attention_module(module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of an attention module of a patched model: with a packed row, scores are deferred."""
    mask = packed_mask_in(args, kwargs)
    if mask is None:
        return original(*args, **kwargs)
    with _Deferring(mask):
        out = original(*args, **kwargs)
    return pytree.tree_map_only(DeferredScores, lambda _: None, out)  # attention weights, which nobody asked for


@dataclass(frozen=True, eq=False)
class DeferredScores:
    """The product of queries and keys of a packed row, before or after the softmax. Behaves like a tensor (…, T, S).

    Attributes:
        mask: the mask of the row.
        query, key: (…, T, D) and (…, S, D).
        shape: the shape that the module sees.
        dtype: the dtype that the module sees.
        scale: the factor of the scores.
        is_softmax: whether these are the weights, after the softmax.
        dropout_p: the probability with which a weight is dropped.
    """

    mask: PackedMask
    query: Tensor
    key: Tensor
    shape: torch.Size
    dtype: torch.dtype
    scale: float = 1.0
    is_softmax: bool = False
    dropout_p: float = 0.0

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _apply(function.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_method, name, self)


def _method(name: str, scores: DeferredScores, *args: Any, **kwargs: Any) -> Any:
    return _apply(name, (scores, *args), kwargs)


def _operator(scores: DeferredScores, name: str, *args: Any) -> Any:
    return _apply(name, (scores, *args), {})


_OPERATORS = ("add", "radd", "iadd", "sub", "isub", "mul", "rmul", "imul", "truediv", "itruediv", "matmul", "getitem")
for _name in _OPERATORS:
    setattr(DeferredScores, f"__{_name}__", functools.partialmethod(_operator, _name))


def _apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on scores or weights."""
    name = name.strip("_")
    if name == "expand_as" and isinstance(args[0], PackedMask):
        return args[0].expand(args[1].shape)
    operation = _OPERATIONS.get(name)
    if operation is None or not any(isinstance(x, DeferredScores) for x in args[:2]):
        raise _not_supported(name)
    if not isinstance(args[0], DeferredScores):  # where(condition, scores, …), or number * scores
        if name not in ("add", "mul", "where", "max", "maximum") or kwargs:
            raise _not_supported(name)
        args = (args[1], args[0], *args[2:])
    return operation(name, *args, **kwargs)


def _shift(name: str, scores: DeferredScores, constant: Any, **_: Any) -> DeferredScores:
    """Add the same number to all scores, which changes no weight."""
    value = constant.value if isinstance(constant, PackedMask) else constant
    if scores.is_softmax or isinstance(value, Tensor | DeferredScores) or not abs(value) < 1e4:
        raise _not_supported(name)
    return scores


def _scale(name: str, scores: DeferredScores, factor: Any, **_: Any) -> DeferredScores:
    if scores.is_softmax or isinstance(factor, DeferredScores | PackedMask):
        raise _not_supported(name)
    if "div" in name:
        factor = 1 / factor
    if not isinstance(factor, Tensor):
        return replace(scores, scale=scores.scale * factor)
    if factor.dim():
        raise _not_supported(name)
    return replace(scores, query=scores.query * factor.to(scores.query.dtype))


def _mask(name: str, scores: DeferredScores, mask: Any, *_: Any, **__: Any) -> DeferredScores:
    """Mask nothing: `masked_fill` with False, or `where` with True, everywhere."""
    wanted = name == "where"
    if not isinstance(mask, PackedMask) or bool(mask.value) != wanted:
        raise _not_supported(name)
    return scores


def _maximum(name: str, scores: DeferredScores, least: Any, **_: Any) -> DeferredScores:
    """The maximum with the lowest number."""
    value = getattr(least, "number", least)
    if scores.is_softmax or not isinstance(value, int | float) or value > torch.finfo(scores.dtype).min / 2:
        raise _not_supported(name)
    return scores


def _view(name: str, scores: DeferredScores, *shape: Any, **_: Any) -> DeferredScores:
    seen = torch.empty(scores.shape, device="meta")
    new = getattr(seen, name)(*shape).shape
    if new[-2:] != scores.shape[-2:]:
        raise _not_supported(name)
    return replace(scores, shape=new)


def _cast(name: str, scores: DeferredScores, *args: Any, **kwargs: Any) -> DeferredScores:
    args = tuple(x.dtype if hasattr(x, "dtype") else x for x in args if not isinstance(x, torch.device))
    name = "to" if name == "type_as" else name
    dtype = getattr(torch.empty((), dtype=scores.dtype, device="meta"), name)(*args, **kwargs).dtype
    return replace(scores, dtype=dtype)


def _softmax(name: str, scores: DeferredScores, dim: int = -1, **options: Any) -> DeferredScores:
    if scores.is_softmax or dim not in (-1, scores.ndim - 1):
        raise _not_supported(name)
    return replace(scores, is_softmax=True, dtype=options.get("dtype") or scores.dtype)


def _dropout(
    name: str, weights: DeferredScores, p: float = 0.5, training: bool = True, inplace: bool = False
) -> DeferredScores:
    if not weights.is_softmax or (weights.dropout_p and p and training):
        raise _not_supported(name)
    return replace(weights, dropout_p=p) if training and p else weights


def _product(name: str, weights: DeferredScores, value: Any, **_: Any) -> Tensor:
    """The weights times the values (…, S, Dv), which runs `varlen_attention`: (…, T, Dv)."""
    mask = weights.mask
    is_value = isinstance(value, Tensor) and value.dim() == weights.ndim and value.shape[-2] == weights.shape[-1]
    if not weights.is_softmax or not is_value:
        raise _not_supported(name)
    query, key = weights.query.to(value.dtype), weights.key.to(value.dtype)  # some models cast them to float32
    out = mask.attend(query, key, value, scale=weights.scale, dropout_p=weights.dropout_p)
    return out.view(*weights.shape[:-1], -1)


# Operation → what it does with scores or weights.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd", "iadd", "sub", "isub"), _shift),
    **dict.fromkeys(("mul", "rmul", "imul", "div", "truediv", "itruediv"), _scale),
    **dict.fromkeys(("masked_fill", "where"), _mask),
    **dict.fromkeys(("max", "maximum"), _maximum),
    **dict.fromkeys(("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze"), _view),
    **dict.fromkeys(("to", "type", "type_as", "float", "half", "double", "bfloat16"), _cast),
    **dict.fromkeys(("contiguous", "clone"), lambda name, scores: scores),
    "softmax": _softmax,
    "dropout": _dropout,
    **dict.fromkeys(("matmul", "bmm"), _product),
}


class _Deferring(TorchFunctionMode):
    """In this mode, the product of the queries and keys of a packed row is a `DeferredScores`."""

    def __init__(self, mask: PackedMask) -> None:
        super().__init__()
        self.mask = mask
        self.pairs = (mask.query_layout.total, mask.key_layout.total)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.__name__.strip("_")
        if any(isinstance(x, DeferredScores) for x in args):
            return _apply(name, args, kwargs)
        if name in ("matmul", "bmm") and self._are_queries_and_keys(*args[:2]):
            return self._scores(*args)
        if name == "baddbmm" and isinstance(args[0], PackedMask) and self._are_queries_and_keys(*args[1:3]):
            return _shift(name, self._scores(*args[1:3]), args[0]) * kwargs.get("alpha", 1)
        if name in ("zeros", "empty") and (shape := torch.Size(pytree.tree_leaves(args)))[-2:] == self.pairs:
            return self.mask.filled(0, shape, kwargs.get("dtype"))
        if name == "scaled_dot_product_attention":
            return self._sdpa(*args, **kwargs)
        result = function(*args, **kwargs)
        if name == "full" and isinstance(result, Tensor) and not result.dim():
            result.number = args[1]  # type: ignore[attr-defined]
        return result

    def _are_queries_and_keys(self, query: Any, key: Any) -> bool:
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == key.dim() > 2):
            return False
        base = base_of(key)
        if isinstance(key if base is None else base, nn.Parameter):  # learned keys, not those of tokens
            return False
        return (query.shape[-2], key.shape[-1]) == self.pairs and query.shape[:-2] == key.shape[:-2]

    def _scores(self, query: Tensor, transposed_key: Tensor) -> DeferredScores:
        shape = torch.Size((*query.shape[:-1], transposed_key.shape[-1]))
        return DeferredScores(self.mask, query, transposed_key.transpose(-1, -2), shape, query.dtype)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and not isinstance(attn_mask, PackedMask):
            raise _not_supported("scaled_dot_product_attention with a mask of its own")
        is_causal = is_causal or self.mask.is_causal
        out = self.mask.attend(query, key, value, is_causal, scale=scale, dropout_p=dropout_p)
        return out.view(*query.shape[:-1], -1)


def _not_supported(name: str) -> CannotDeferError:
    return CannotDeferError(f"computes its attention with {name.strip('_')}, which varlen_attention can't express")
