"""Our kernels as a flash attention implementation of PyTorch, under the name "nt_attention".

`torch.nn.attention.activate_flash_attention_impl("nt_attention")` lets `token_tiled` run
`torch.nn.attention.varlen.varlen_attn`, and `scaled_dot_product_attention` where it selects flash attention. This
module has functions with the signatures of the `aten` operators, and replaces the operators on CUDA devices by them.

Dimensions: B sequences, T query tokens, S key tokens, L query tokens of each sequence in a dense batch, M key tokens, H
query heads, G key heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from .compat._layouts import equal_lengths
from .functional import Arguments, plan_arguments
from .kernels import adapters
from .kernels.adapters import Tensors
from .kernels.backend import BackwardInputs
from .kernels.backends.flash import heads_first, tokens_first
from .kernels.call import Call
from .kernels.paged import forward as forward_in_pool
from .layouts.paged import PagedLayout
from .layouts.protocol import Layout
from .layouts.sequence import SequenceLayout
from .torch_private import FLASH_OPERATORS, schema_of

NAME = "nt_attention"
# The arguments of the operators. Where an operator has others, `activate` raises an error.
# fmt: off
_ARGUMENTS = {
    "grad_out", "out", "query", "key", "value", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
    "is_causal", "return_debug_mask", "rng_state", "unused", "philox_seed", "philox_offset", "scale",
    "window_size_left", "window_size_right", "seqused_k", "alibi_slopes", "block_table", "num_splits",
}
# fmt: on
_REFUSED = {
    "dropout_p": "pass 0",
    "return_debug_mask": "pass False",
    "alibi_slopes": "leave it out",
    "num_splits": "pass None, or 1 for results that do not depend on the batch",
}


def is_supported() -> bool:
    """Whether this version of PyTorch takes flash attention implementations.

    Torch 2.11 has a registry too, but no `varlen_attn_out`, and our implementation was not tested with it.
    """
    return hasattr(attention, "register_flash_attention_impl") and torch.__version__ >= "2.12"


def register() -> None:
    """Offer the implementation to PyTorch under the name "nt_attention". Importing `nt_attention` does this.

    Nothing changes until `torch.nn.attention.activate_flash_attention_impl("nt_attention")` is called.

    Raises:
        RuntimeError: this version of PyTorch takes no implementations.

    Example:
        >>> import torch, nt_attention
        >>> "nt_attention" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    if not is_supported():
        raise RuntimeError(
            f"torch {torch.__version__} takes no other flash attention implementations: install torch 2.12 or later, "
            "or call nt_attention.varlen_attention in place of varlen_attn."
        )
    attention.register_flash_attention_impl(NAME, register_fn=activate)


class ActiveOperators:
    """The replaced operators; `remove()` restores those of PyTorch."""

    def __init__(self, library: torch.library.Library) -> None:
        self._libraries = [library]

    def remove(self) -> None:
        self._libraries.clear()


def activate(backend: str = "token_tiled", device: str = "CUDA") -> ActiveOperators:
    """Replace the operators on a type of device. PyTorch calls this function when the implementation is activated.

    Raises:
        RuntimeError: the operators of this version of PyTorch have other arguments.
    """
    operators = FlashOperators(backend)
    for name in FLASH_OPERATORS.values():
        check_arguments(name)
    library = torch.library.Library("aten", "IMPL", device)
    for method, name in FLASH_OPERATORS.items():
        library.impl(name, getattr(operators, method), device)
    return ActiveOperators(library)


def check_arguments(name: str) -> None:
    """Check that the operator `aten::<name>` has no arguments that are not known here."""
    if not hasattr(torch.ops.aten, name) or not _ARGUMENTS.issuperset(_arguments_of(name)):
        operator = getattr(torch.ops.aten, name, None)
        found = "does not exist" if operator is None else f"is {schema_of(operator.default)}"
        raise RuntimeError(
            f"aten::{name} {found} in torch {torch.__version__}, which nt_attention {NAME!r} does not support: call "
            "nt_attention.varlen_attention instead, or install a version of torch that is tested with nt_attention."
        )


@functools.cache
def _arguments_of(name: str) -> list[str]:
    return [x.name for x in schema_of(getattr(torch.ops.aten, name).default).arguments]


def _operator(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take the arguments of its operator. It gets them as attributes, None if they are not passed."""

    @functools.wraps(method)
    def function(self: FlashOperators, *args: Any, **named: Any) -> Any:
        names = _arguments_of(FLASH_OPERATORS[method.__name__])
        return method(self, SimpleNamespace(**dict.fromkeys(_ARGUMENTS) | dict(zip(names, args, strict=False)) | named))

    return function


@dataclass(frozen=True)
class FlashOperators:
    """PyTorch's flash attention operators: `FLASH_OPERATORS` has the name of the operator of each method.

    Args:
        backend: The backend that runs. It must not be `torch_flash`, which calls these operators.
    """

    backend: str = "token_tiled"

    @_operator
    def forward(self, given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Packed query (T, H, D) with offsets, or dense (B, L, H, D) without.

        Returns:
            out like query, lse (H, T) or (B, H, L) with +inf for queries that see no key, and three tensors without
            content: two for the state of dropout, and the debug mask.

        Raises:
            ValueError: an argument is not supported, or the backend does not support the call.
        """
        query, (tensors, call) = given.query, self._plan(given, needs_grad=False)
        if call.spec.paged:
            out, lse = forward_in_pool(call.backend, *tensors, call)
        else:
            out, lse, _ = adapters.forward(call.backend, tensors, call)
        lse = heads_first(lse, call.spec)
        if given.cum_seq_q is None:
            out = out.view(*query.shape[:3], out.shape[2])
            lse = lse.unflatten(1, query.shape[:2]).transpose(0, 1).contiguous()
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return out, lse, state, state.new_zeros(()), query.new_empty(0)

    @_operator
    def forward_into(self, given: Any) -> Tensor:
        """`forward`, with a copy of the output into `out`. Returns lse."""
        out, lse, *_ = self.forward(**vars(given))
        if given.out.shape != out.shape:
            raise ValueError(f"out must have the shape {tuple(out.shape)}, got {tuple(given.out.shape)}.")
        given.out.copy_(out)
        return lse

    @_operator
    def backward(self, given: Any) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, with the arguments and results of `forward`."""
        tensors, call = self._plan(given, needs_grad=True)
        grad_out, out, lse = given.grad_out, given.out, given.logsumexp
        if given.cum_seq_q is None:
            grad_out, out, lse = grad_out.flatten(0, 1), out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        saved = BackwardInputs(grad_out, None, out, tokens_first(lse, call.spec), None)
        grads = adapters.backward(call.backend, saved, tensors, call)
        inputs = given.query, given.key, given.value
        return tuple(_with_strides_of(grad.view(x.shape), x) for grad, x in zip(grads, inputs, strict=True))

    @_operator
    def sdpa_forward(self, given: Any) -> tuple[Any, ...]:
        """Dense query (B, H, L, D), key (B, G, M, D) and value (B, G, M, Dv).

        Returns:
            out (B, H, L, Dv), lse (B, H, L), no offsets, L, M, and the other results of `forward`.
        """
        query, longest = given.query, (given.query.shape[2], given.key.shape[2])
        out, lse, *more = self.forward(**_tokens_first(given))
        out = out.transpose(1, 2)
        out = _with_strides_of(out, query) if out.shape == query.shape else out
        return out, lse, None, None, *longest, *more

    @_operator
    def sdpa_backward(self, given: Any) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, with the arguments and results of `sdpa_forward`."""
        grads = self.backward(**_tokens_first(given) | {"cum_seq_q": None, "cum_seq_k": None})
        inputs = given.query, given.key, given.value
        return tuple(_with_strides_of(grad.transpose(1, 2), x) for grad, x in zip(grads, inputs, strict=True))

    def _plan(self, given: Any, needs_grad: bool) -> tuple[Tensors, Call]:
        """Check and select, cached with the layouts. Dense inputs are packed."""
        _check_supported(given)
        tensors, backend = Tensors(given.query, given.key, given.value), self.backend
        sides = given.window_size_left, given.window_size_right
        options: dict[str, Any] = {
            "scale": given.scale,
            "is_causal": bool(given.is_causal),
            "window_size": tuple([-1 if side is None or side < 0 else int(side) for side in sides]),
            "batch_invariant": given.num_splits == 1,
            "deterministic": needs_grad and torch.are_deterministic_algorithms_enabled(),
        }
        if given.cum_seq_q is None:
            tensors = Tensors(*[x.flatten(0, 1) for x in tensors])
        if given.seqused_k is not None and backend == "token_tiled":
            backend = "split_kv"
        layouts = _layout_of(given.query, given.cum_seq_q, given.max_q), _key_layout(given)
        return tensors, plan_arguments(Arguments(tensors, *layouts, needs_grad=needs_grad), None, backend, options)


def _layout_of(x: Tensor, offsets: Tensor | None, longest: int) -> Layout:
    """The layout of packed rows, or of a dense batch (B, L, H, D). On a GPU, offsets are not read."""
    if offsets is not None:
        return SequenceLayout.from_offsets(offsets, max_seqlen=int(longest), max_tokens=x.shape[0])
    if x.dim() != 4:
        raise ValueError(f"tensors without offsets must be (batch, tokens, heads, head dim), got {tuple(x.shape)}.")
    return equal_lengths(x.shape[0], x.shape[1], x)


def _key_layout(given: Any) -> Layout | PagedLayout:
    """The layout of the keys, or where they are: in pages of `block_table`, or from the offsets `cum_seq_k`."""
    key, table, lengths, offsets = given.key, given.block_table, given.seqused_k, given.cum_seq_k
    if lengths is None:
        if table is not None:
            raise ValueError("block_table needs seqused_k, the number of keys of each sequence.")
        if offsets is None and given.cum_seq_q is not None:
            raise ValueError(
                "cum_seq_k must be the offsets of the keys, got None. Keys in a cache are not supported: call "
                "torch.nn.attention.restore_flash_attention_impl() first."
            )
        return _layout_of(key, offsets, given.max_k)
    if given.cum_seq_q is None or given.query.dim() != 3:
        raise ValueError(f"seqused_k needs packed queries with cum_seq_q, got {tuple(given.query.shape)}.")
    if table is not None:
        if key.dim() != 4:
            raise ValueError(f"with block_table, key must be (pages, page size, G, D), got {tuple(key.shape)}.")
        return PagedLayout(table, lengths, key.shape[1], int(given.max_k))
    if offsets is None:
        raise ValueError("seqused_k without block_table needs cum_seq_k, where the keys of each sequence begin.")
    return PagedLayout.from_slots(offsets[:-1], lengths, int(given.max_k))


def _tokens_first(given: Any) -> dict[str, Any]:
    """The arguments with tensors (B, H, L, D) as (B, L, H, D)."""
    heads_first = ("grad_out", "query", "key", "value", "out")
    return {k: x.transpose(1, 2) if k in heads_first and x is not None else x for k, x in vars(given).items()}


def _check_supported(given: Any) -> None:
    for name, instead in _REFUSED.items():
        value = getattr(given, name)
        if isinstance(value, Tensor) or value not in (None, 0, 1 if name == "num_splits" else 0):
            shown = name if isinstance(value, Tensor) else f"{name}={value}"
            raise ValueError(
                f'flash attention implementation "nt_attention" does not support {shown}: {instead}, call '
                "nt_attention.varlen_attention, or torch.nn.attention.restore_flash_attention_impl() first."
            )


def _with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `empty_like(like)`, which compilers expect."""
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like).copy_(x)
