"""The attention mask of a packed row: 1 everywhere, without memory for it, and with the layout of the row.

A model passes its attention mask from layer to layer, also when gradient checkpointing computes a layer again. So the
mask carries the layout to every attention module. On the way, models reshape, cast and invert their mask. This mask has
the same value everywhere, so these operations only compute a shape and a value.

Dimensions: T query and S key tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...compiler import outside_of_graphs
from ...functional import varlen_attention
from ...layouts.cache import creating_cached_tensors
from ...layouts.protocol import Layout
from ...torch_private import make_wrapper, without_torch_function
from ..plan import Form
from .dropout import rate_of


class MixesSequencesError(RuntimeError):
    """Attention code that does not know packed rows got one."""


class CannotMaskError(NotImplementedError):
    """An operation on the mask of a packed row whose result depends on more than a shape and a value."""


class PackedMask(Tensor):
    """A mask with the same value everywhere. It has a shape, a dtype and a device, but no memory.

    An operation with another tensor returns that tensor if the mask changes nothing, like a product with a mask of 1.
    An operation with scores (…, T, S) raises an error, because it would let tokens see other sequences.

    Attributes:
        query_layout, key_layout: the sequences of the queries and of the keys.
        is_causal: whether a query sees only the keys up to its position, for attention code that can't know it.
        packing: the `Packing` of the padded batch that the row was made from, or None if the mask is not of such a row.
        value: the value at all positions.
    """

    query_layout: Layout
    key_layout: Layout
    is_causal: bool
    packing: Any
    value: bool | int | float

    @classmethod
    def of(
        cls,
        layout: Layout,
        key_layout: Layout | None = None,
        *,
        form: Form,
        is_causal: bool = False,
        packing: Any = None,
    ) -> PackedMask:
        """The mask of a packed row: int64 if it is a row, bool if it has all pairs."""
        key_layout = layout if key_layout is None else key_layout
        shape = (1, key_layout.total) if form == "row" else (1, 1, layout.total, key_layout.total)
        mask = cls._empty(shape, torch.int64 if form == "row" else torch.bool, layout.device)
        mask.query_layout, mask.key_layout, mask.is_causal, mask.value = layout, key_layout, is_causal, 1
        mask.packing = packing
        return mask

    @classmethod
    def _empty(cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> PackedMask:
        mask: PackedMask = make_wrapper(cls, tuple(shape), dtype=dtype, device=device)
        return mask

    @outside_of_graphs
    def _like(self, shape: Iterable[int], scalar: Tensor, device: torch.device) -> PackedMask:
        """This mask with another shape, and the value and dtype of a scalar on the CPU."""
        mask = self._empty(shape, scalar.dtype, device)
        mask.query_layout, mask.key_layout, mask.is_causal = self.query_layout, self.key_layout, self.is_causal
        mask.packing, mask.value = self.packing, scalar.item()
        return mask

    def filled(self, value: float, shape: Iterable[int], dtype: torch.dtype | None) -> PackedMask:
        """A tensor of another shape with the same value everywhere, and the layouts of this mask."""
        return self._like(
            shape, torch.tensor(value, dtype=dtype or torch.get_default_dtype(), device="cpu"), self.device
        )

    @property
    def scalar(self) -> Tensor:
        """The value as a tensor () on the CPU, with the dtype of the mask."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool | None = None, **options: Any
    ) -> Tensor:
        """Run `varlen_attention` with these layouts.

        Args:
            query, key, value: (…, T, D), (…, S, D) and (…, S, Dv), with heads in the dimension before.
            is_causal: None is that of the mask.
            options: other arguments of `varlen_attention`.

        Returns:
            (H, T, Dv).
        """
        q, k, v = (x.reshape(-1, *x.shape[-2:]).transpose(0, 1) for x in (query, key, value))
        is_causal = self.is_causal if is_causal is None else is_causal
        if options.get("dropout_p"):
            options["dropout_p"] = rate_of(options["dropout_p"])
        out = varlen_attention(q, k, v, self.query_layout, self.key_layout, is_causal=is_causal, **options)
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)

    def has_pairs_of(self, scores: Tensor) -> bool:
        """Whether a tensor has the shape of scores (…, T, S) that this mask would be applied to."""
        pairs = (self.query_layout.total, self.key_layout.total)
        return scores.shape[-2:] == pairs and self.dim() > 0 and self.shape[-1] == pairs[1] and min(pairs) > 1

    @classmethod
    @outside_of_graphs
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        masks = [x for x in tensors if isinstance(x, PackedMask)]
        if _name_of(function) == "set":  # checkpointing sets requires_grad to False
            return None
        with without_torch_function():
            if not masks or _name_of(function) in _QUESTIONS | {"get"}:
                return function(*args, **kwargs)
            if len(masks) == len(tensors):
                return _of_masks(function, masks, args, kwargs)
        return _with_tensor(function, masks[0], args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _not_supported(function)


def packed_mask_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedMask | None:
    """The packed mask among the arguments of a module, or None."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, PackedMask)), None)


def bypass_mask(layout: Layout) -> Tensor:
    """A mask that prevents transformers from building a (T, T) mask for a packed row.

    transformers' mask functions return a 4-D mask unchanged. This one has no elements, so that any other attention
    function raises an error. Without the error, activation checkpointing could recompute a packed row with an attention
    function that mixes the sequences, if the model's attention implementation was changed after the forward.
    """
    with creating_cached_tensors():  # tensors of function transforms have no storage
        mask = torch.ones((1, 1, 0, 0), dtype=torch.bool, device=layout.device)
    mask.untyped_storage().owner = layout  # type: ignore[attr-defined]  # for `owner_of`, also after a checkpoint
    return mask


def is_bypass_mask(mask: Any) -> bool:
    """Whether a mask was made by `bypass_mask`."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (1, 1, 0, 0)


# Names of operations, without underscores at both ends: those that ask for metadata, those that change the shape, and
# those that compute each element from numbers and other masks.
_QUESTIONS = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "len", "get_device"}
_SHAPES = {
    "view", "view_as", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute", "flatten",
    "unflatten", "repeat", "narrow", "getitem", "contiguous", "clone", "detach", "requires_grad",
}  # fmt: skip
_ELEMENTWISE = {
    "to", "type", "type_as", "bool", "int", "long", "half", "bfloat16", "float", "double", "add", "radd", "sub", "rsub",
    "mul", "rmul", "neg", "eq", "ne", "gt", "ge", "lt", "le", "and", "or", "invert", "logical_and", "logical_or",
    "logical_not", "bitwise_not", "zeros_like", "ones_like", "masked_fill",
}  # fmt: skip
# Operations whose result is the other tensor if the mask has this value.
_NEUTRAL = {**dict.fromkeys(("mul", "rmul", "imul"), 1), **dict.fromkeys(("add", "radd", "iadd", "masked_fill"), 0)}


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", str(function)).strip("_")


def _of_masks(
    function: Callable[..., Any], masks: list[PackedMask], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PackedMask:
    """The result of an operation on masks and numbers."""
    first = masks[0]
    if _name_of(function) in _SHAPES:
        shape = function(*[_on_meta(x) for x in args], **{name: _on_meta(x) for name, x in kwargs.items()}).shape
        return first._like(shape, first.scalar, first.device)
    if _name_of(function) not in _ELEMENTWISE:
        raise _not_supported(function)
    device = next((x for x in (*args, kwargs.get("device")) if isinstance(x, torch.device)), first.device)
    scalars = [x.scalar if isinstance(x, PackedMask) else x for x in args if not isinstance(x, torch.device)]
    options = {name: x for name, x in kwargs.items() if name in ("dtype", "other", "mask", "value")}
    scalar = function(*scalars, **options) if len(scalars) > 1 or options or function is not Tensor.to else scalars[0]
    shapes = [mask.shape for mask in masks]
    shape = masks[0].shape if function is Tensor.type_as else torch.broadcast_shapes(*shapes)
    return first._like(shape, scalar, device)


def _with_tensor(function: Callable[..., Any], mask: PackedMask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on a mask and another tensor."""
    other = next(x for x in args if isinstance(x, Tensor) and not isinstance(x, PackedMask))
    if args[0] is mask and _name_of(function) in ("to", "type_as"):
        return mask.to(other.dtype)
    if args[0] is mask and _name_of(function) == "expand_as":
        return mask.expand(other.shape)
    if function is F.scaled_dot_product_attention or mask.has_pairs_of(other):
        raise MixesSequencesError(
            "a packed row came to attention code that would mix its sequences: the patch of the model was removed, or "
            "its attention was replaced, between the forward and the backward."
        )
    is_neutral = mask.value == _NEUTRAL.get(_name_of(function))
    if is_neutral and torch.broadcast_shapes(mask.shape, other.shape) == other.shape:
        return other
    raise _not_supported(function)


def _on_meta(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, PackedMask) else x


def _not_supported(function: Any) -> Exception:
    return CannotMaskError(f"uses its attention mask with {_name_of(function)}, which a packed row does not support")
