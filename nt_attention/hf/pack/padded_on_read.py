"""Outputs of a packed call that are padded when somebody reads them.

A training loop often reads only the loss. Padding the logits would then cost the memory that packing has saved. So
beside a loss, outputs are tensors of the padded shape whose values are computed when an operator needs them. Code that
walks through all outputs, such as the hooks of DDP and FSDP2 and the float32 conversion of accelerate, needs none.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..._warnings import warn
from ...patching.handle import NotPackedWarning
from ...torch_private import disabled_torch_function, make_wrapper, pytree, to_copy


class Padding(ABC):
    """How packed tensors are padded: a `Packing`, or the rows of a batch that was not packed."""

    @property
    @abstractmethod
    def token_shape(self) -> tuple[int, int]:
        """The first two dimensions of outputs with a value for each token, before they are padded."""

    @property
    @abstractmethod
    def padded_shape(self) -> tuple[int, int]:
        """(B, L), the same after it."""

    @abstractmethod
    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """The padded tensor (B, L, …), with `value` at padding."""

    @abstractmethod
    def unpad(self, gradient: Tensor) -> Tensor:
        """The gradient of the packed tensor, from that of the padded one."""

    @abstractmethod
    def tokens_of(self, packed: Tensor) -> tuple[Tensor, Any]:
        """The values of the tokens (T, …) and their layout, from a tensor before it is padded."""

    def pad_later(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """As `pad`, but a tensor that is computed when an operator reads it."""
        if packed.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Pad.apply(packed, self, value))
        return PaddedOnRead(_Source(packed, self, value, packed.dtype))  # `apply` takes 50 µs


@dataclass(eq=False)
class _Source:
    """What a `PaddedOnRead` is computed from.

    Attributes:
        packed: the tensor before, with its history in autograd.
        padding, value: how it is padded.
        dtype: to which it is converted.
        padded: the values, once they have been read.
    """

    packed: Tensor
    padding: Padding
    value: float
    dtype: torch.dtype
    padded: Tensor | None = None

    def read(self) -> Tensor:
        """The values (B, L, …), without a history in autograd."""
        if self.padded is None:
            with torch.no_grad():
                self.padded = self.padding.pad(self.packed.detach().to(self.dtype), self.value)
        return self.padded


class PaddedOnRead(Tensor):
    """A tensor (B, L, …) whose values are computed when an operator needs them."""

    source: _Source

    @staticmethod
    def __new__(cls, source: _Source) -> PaddedOnRead:
        shape = (*source.padding.padded_shape, *source.packed.shape[2:])
        made = make_wrapper(cls, shape, dtype=source.dtype, device=source.packed.device)
        made.source = source
        return cast(PaddedOnRead, made)

    def __init__(self, source: _Source) -> None:
        pass

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (made := _WITHOUT_VALUES.get(func)) is not None and args[0].source.padded is None:
            source = made(args[0].source, **kwargs)
            if source is not None:
                return PaddedOnRead(source)
        return func(*pytree.tree_map_only(cls, _values, args), **pytree.tree_map_only(cls, _values, kwargs))

    def retain_grad(self) -> None:
        warn(
            "this output is padded when it is read, and the loss is computed from the packed one: its .grad is that of "
            "what your code computes from it, without the loss.",
            NotPackedWarning,
        )
        super().retain_grad()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def _method_of(values: Callable[[PaddedOnRead], Tensor], name: str) -> Callable[..., Any]:
    def method(self: PaddedOnRead, *args: Any, **kwargs: Any) -> Any:
        return getattr(values(self), name)(*args, **kwargs)

    return method


for _name in ("numpy", "tolist", "__array__", "__dlpack__", "__repr__"):  # an error if a gradient is required
    setattr(PaddedOnRead, _name, _method_of(lambda x: plain(x), _name))
for _name in ("data_ptr", "untyped_storage", "storage", "share_memory_"):
    setattr(PaddedOnRead, _name, _method_of(lambda x: x.source.read(), _name))


def _values(x: PaddedOnRead) -> Tensor:
    return x.source.read()


def _converted(source: _Source, dtype: torch.dtype | None = None, **others: Any) -> _Source | None:
    """The source of the tensor in another dtype. None for other conversions."""
    return None if others or dtype is None else replace(source, dtype=dtype)


_aten = torch.ops.aten
# Operators that need no values: from the source of the argument to that of the result. Wrappers call them for all
# outputs. The result of `detach` shares its memory, and so its source.
_WITHOUT_VALUES: dict[Any, Callable[..., _Source | None]] = {
    to_copy.default: _converted,
    _aten.clone.default: lambda source, **_: replace(source),
    _aten.detach.default: lambda source: source,
}


class _Pad(torch.autograd.Function):
    """Connects a `PaddedOnRead` with the packed tensor."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, padding: Padding, value: float) -> Tensor:
        ctx.padding = padding
        return PaddedOnRead(_Source(packed, padding, value, packed.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.padding.unpad(gradient), None, None


class _Read(torch.autograd.Function):
    """The values of a `PaddedOnRead`, connected with it. Not a view: its base would be no plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: PaddedOnRead) -> Tensor:
        return x.source.read().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def plain(x: PaddedOnRead) -> Tensor:
    """The values as a tensor of PyTorch's own class, connected in autograd."""
    with torch.enable_grad():
        return cast(Tensor, _Read.apply(x)) if x.requires_grad else x.source.read()


def packed(x: Tensor) -> tuple[Tensor, Any]:
    """The packed form of an output of a patched model, without any padding: for losses and heads of your own.

    For calls with labels that ran packed. Any other use of the output pads it.

    Args:
        x: an output with a value for each token, such as `out.logits` or `out.hidden_states[-1]`.

    Returns:
        The values of the tokens, (T, …), and their layout: `layout.pack` packs other tensors (B, L, …) of the batch.
            With `mesh`, the tokens of this rank, and its `ShardedLayout`.

    Raises:
        ValueError: the output is a padded tensor, because the call has no labels or did not run packed.

    Example:
        >>> import torch, nt_attention as nta
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
        >>> handle = nta.patch(model)
        >>> ids, mask = torch.full((2, 3), 7), torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        >>> values, layout = nta.hf.packed(out.logits)
        >>> values.shape, layout.pack(ids).shape, out.logits.shape
        (torch.Size([4, 99]), torch.Size([4]), torch.Size([2, 3, 99]))
    """
    if not isinstance(x, PaddedOnRead):
        raise ValueError(
            f"this output is a padded tensor, {tuple(x.shape)}: pass labels, and see in print(handle) whether the call "
            "ran packed. Else use the output as it is."
        )
    return x.source.padding.tokens_of(x.source.packed.to(x.source.dtype))
