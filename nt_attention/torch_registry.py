"""Our kernels as a flash attention implementation of PyTorch, under the name "nt_attention".

`torch.nn.attention.activate_flash_attention_impl("nt_attention")` lets `token_tiled` run
`torch.nn.attention.varlen.varlen_attn`, and `scaled_dot_product_attention` where it selects flash attention. This
module has functions with the signatures of the `aten` operators, and replaces the operators on CUDA devices by them.

Dimensions: B sequences, T query tokens, S key tokens, L query tokens of each sequence in a dense batch, M key tokens, H
query heads, G key heads, D head dim.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from .functional import Arguments, PlannedCall, plan_arguments
from .kernels import adapters
from .kernels.adapters import Tensors
from .kernels.backend import Backend, BackwardInputs
from .kernels.backends.flash import heads_first, tokens_first
from .kernels.paged import forward as forward_in_pool
from .layouts.known import SequenceLayout
from .layouts.paged import PagedLayout
from .layouts.protocol import Layout
from .torch_private import FLASH_OPERATORS, schema_of

NAME = "nt_attention"


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
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        if self._library is not None:
            self._library = None


def activate() -> ActiveOperators:
    """Replace the operators on CUDA devices. PyTorch calls this function when the implementation is activated.

    Raises:
        RuntimeError: the operators of this version of PyTorch have other arguments.
    """
    return replace_operators(FlashOperators(), "CUDA")


def replace_operators(operators: FlashOperators, device: str) -> ActiveOperators:
    """Let `operators` run PyTorch's flash attention operators on tensors of a device type, "CUDA" or in tests "CPU"."""
    functions = operators.by_name()
    if not hasattr(torch.ops.aten, FLASH_OPERATORS["forward_into"]):
        del functions[FLASH_OPERATORS["forward_into"]]  # newer than torch 2.11
    for name, function in functions.items():
        check_signature(name, function)
    library = torch.library.Library("aten", "IMPL", device)
    for name, function in functions.items():
        library.impl(name, function, device)
    return ActiveOperators(library)


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Check that `function` takes the arguments of the operator `aten::<name>`.

    Raises:
        RuntimeError: it does not, or there is no such operator.
    """
    operator = getattr(torch.ops.aten, name, None)
    parameters = inspect.signature(function).parameters.values()
    arguments = [] if operator is None else schema_of(operator.default).arguments
    positional = [x.name for x in arguments if not x.kwarg_only]
    taken = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    by_name = {x.name for x in arguments if x.kwarg_only}
    if positional != taken or not by_name <= {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}:
        found = "does not exist" if operator is None else f"is {schema_of(operator.default)}"
        raise RuntimeError(
            f"aten::{name} {found} in torch {torch.__version__}, which nt_attention {NAME!r} does not support: call "
            "nt_attention.varlen_attention instead, or install a version of torch that is tested with nt_attention."
        )


def _takes(positional: str, by_name: str = "scale") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method take these arguments. It gets them as attributes of one object, None if they are not passed."""
    names, more = positional.split(), by_name.split()

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def function(self: FlashOperators, *given: Any, **named: Any) -> Any:
            passed = dict.fromkeys([*names, *more]) | dict(zip(names, given, strict=False)) | named
            return method(self, SimpleNamespace(**passed))

        parameter = inspect.Parameter
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
            + [parameter(name, parameter.KEYWORD_ONLY, default=None) for name in more]
        )
        return function

    return decorate


_INPUTS = "query key value"
_LENGTHS = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_FORWARD = f"{_INPUTS} {_LENGTHS} return_debug_mask"
_IN_POOL = "scale window_size_left window_size_right seqused_k alibi_slopes block_table num_splits"


@dataclass(frozen=True)
class FlashOperators:
    """Functions with the signatures of PyTorch's flash attention operators.

    Args:
        backend: The backend that runs. It must not be `torch_flash`, which calls these operators.
    """

    backend: str = "token_tiled"

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """The functions by the names of their operators."""
        return {operator: getattr(self, name) for name, operator in FLASH_OPERATORS.items()}

    @_takes(_FORWARD, _IN_POOL)
    def forward(self, given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Packed query (T, H, D) with offsets, or dense (B, L, H, D) without.

        Returns:
            out like query, lse (H, T) or (B, H, L) with +inf for queries that see no key, and three tensors without
            content: two for the state of dropout, and the debug mask.

        Raises:
            ValueError: an argument is not supported, or the backend does not support the call.
        """
        _refuse(given.dropout_p, return_debug_mask=given.return_debug_mask or None, alibi_slopes=given.alibi_slopes)
        query = given.query
        planned = self._plan(given, needs_grad=False, batch_invariant=_is_batch_invariant(given.num_splits))
        assert isinstance(planned.backend, Backend)
        if planned.call.spec.paged:
            out, lse = forward_in_pool(planned.backend, *planned.tensors, planned.call)
        else:
            out, lse, _ = adapters.forward(planned.backend, planned.tensors, planned.call)
        lse = heads_first(lse, planned.call.spec)
        if given.cum_seq_q is None:
            out = out.view(*query.shape[:3], out.shape[2])
            lse = lse.unflatten(1, query.shape[:2]).transpose(0, 1).contiguous()
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return out, lse, state, state.new_zeros(()), query.new_empty(0)

    @_takes(f"out {_FORWARD}", _IN_POOL)
    def forward_into(self, given: Any) -> Tensor:
        """`forward`, with a copy of the output into `out`. Returns lse."""
        out = vars(given).pop("out")
        result, lse, *_ = self.forward(**vars(given))
        if out.shape != result.shape:
            raise ValueError(f"out must have the shape {tuple(result.shape)}, got {tuple(out.shape)}.")
        out.copy_(result)
        return lse

    @_takes(f"grad_out {_INPUTS} out logsumexp {_LENGTHS} rng_state unused", "scale window_size_left window_size_right")
    def backward(self, given: Any) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, with the arguments and results of `forward`.

        Raises:
            ValueError: an argument is not supported, or the backend does not support the gradients of the call.
        """
        _refuse(given.dropout_p)
        planned = self._plan(given, needs_grad=True)
        grad_out, out, lse = given.grad_out, given.out, given.logsumexp
        if given.cum_seq_q is None:
            grad_out, out, lse = grad_out.flatten(0, 1), out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        saved = BackwardInputs(grad_out, None, out, tokens_first(lse, planned.call.spec), None)
        assert isinstance(planned.backend, Backend)
        grads = adapters.backward(planned.backend, saved, planned.tensors, planned.call)
        inputs = given.query, given.key, given.value
        return tuple(_with_strides_of(grad.view(x.shape), x) for grad, x in zip(grads, inputs, strict=True))

    @_takes(f"{_INPUTS} dropout_p is_causal return_debug_mask")
    def sdpa_forward(self, given: Any) -> tuple[Any, ...]:
        """Dense query (B, H, L, D), key (B, G, M, D) and value (B, G, M, Dv).

        Returns:
            out (B, H, L, Dv), lse (B, H, L), no offsets, L, M, and the other results of `forward`.
        """
        query, longest = given.query, (given.query.shape[2], given.key.shape[2])
        out, lse, *more = self.forward(**vars(given) | _tokens_first(given, "query", "key", "value"))
        out = out.transpose(1, 2)
        out = _with_strides_of(out, query) if out.shape == query.shape else out
        return out, lse, None, None, *longest, *more

    @_takes(f"grad_out {_INPUTS} out logsumexp {_LENGTHS} philox_seed philox_offset")
    def sdpa_backward(self, given: Any) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, with the arguments and results of `sdpa_forward`."""
        named = vars(given) | _tokens_first(given, "grad_out", "query", "key", "value", "out")
        named |= {"cum_seq_q": None, "cum_seq_k": None}
        inputs = given.query, given.key, given.value
        return tuple(
            _with_strides_of(grad.transpose(1, 2), x) for grad, x in zip(self.backward(**named), inputs, strict=True)
        )

    def _plan(self, given: Any, needs_grad: bool, batch_invariant: bool = False) -> PlannedCall:
        """Check and select, cached with the layouts. Dense inputs are packed."""
        tensors, backend = Tensors(given.query, given.key, given.value), self.backend
        sides = [getattr(given, f"window_size_{side}", None) for side in ("left", "right")]
        options: dict[str, Any] = {
            "scale": given.scale,
            "is_causal": bool(given.is_causal),
            "window_size": tuple([-1 if side is None or side < 0 else int(side) for side in sides]),
            "batch_invariant": batch_invariant,
            "deterministic": needs_grad and torch.are_deterministic_algorithms_enabled(),
        }
        key_layout: Layout | PagedLayout
        if getattr(given, "seqused_k", None) is not None or getattr(given, "block_table", None) is not None:
            layout, key_layout = _layouts_in_pool(given)
            backend = "split_kv" if backend == "token_tiled" else backend
        elif given.cum_seq_q is None:
            layout, key_layout = (_equal_lengths(x) for x in tensors[:2])
            tensors = Tensors(*[x.flatten(0, 1) for x in tensors])
        else:
            layout, key_layout = _bounded_layouts(given)
        arguments = Arguments(tensors, layout, key_layout, needs_grad=needs_grad)
        return plan_arguments(arguments, None, backend, options)


def _tokens_first(given: Any, *names: str) -> dict[str, Tensor]:
    """These tensors (B, H, L, D) as (B, L, H, D)."""
    return {name: getattr(given, name).transpose(1, 2) for name in names}


def _bounded_layouts(given: Any) -> tuple[Layout, Layout]:
    """The layouts of packed queries and keys. On a GPU their lengths are not read: `max_q` and `max_k` are bounds."""
    if given.cum_seq_k is None:
        raise ValueError(
            "cum_seq_k must be the offsets of the keys, got None. Keys in a cache are not supported: call "
            "torch.nn.attention.restore_flash_attention_impl() first."
        )
    layout, key_layout = (
        SequenceLayout.from_offsets(offsets, max_seqlen=int(longest), max_tokens=x.shape[0])
        for offsets, longest, x in (
            (given.cum_seq_q, given.max_q, given.query),
            (given.cum_seq_k, given.max_k, given.key),
        )
    )
    return layout, key_layout


def _layouts_in_pool(given: Any) -> tuple[Layout, PagedLayout]:
    """The layout of packed queries, and where keys are: in pages of `block_table`, or from the offsets `cum_seq_k`."""
    query, key, table, lengths = given.query, given.key, given.block_table, given.seqused_k
    if lengths is None:
        raise ValueError("block_table needs seqused_k, the number of keys of each sequence.")
    if table is not None:
        if key.dim() != 4:
            raise ValueError(f"with block_table, key must be (pages, page size, G, D), got {tuple(key.shape)}.")
        paged = PagedLayout(table, lengths, key.shape[1], int(given.max_k))
    elif given.cum_seq_k is None:
        raise ValueError("seqused_k without block_table needs cum_seq_k, where the keys of each sequence begin.")
    else:
        paged = PagedLayout.from_slots(given.cum_seq_k[:-1], lengths, int(given.max_k))
    if given.cum_seq_q is None or query.dim() != 3:
        raise ValueError(f"seqused_k and block_table need packed queries with cum_seq_q, got {tuple(query.shape)}.")
    layout = SequenceLayout.from_offsets(given.cum_seq_q, max_seqlen=int(given.max_q), max_tokens=query.shape[0])
    return layout, paged


def _equal_lengths(x: Tensor) -> Layout:
    """The layout of a dense batch (B, L, H, D)."""
    if x.dim() != 4:
        raise ValueError(f"tensors without offsets must be (batch, tokens, heads, head dim), got {tuple(x.shape)}.")
    batch, length = x.shape[:2]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing that a cache may drop can be in the graph
        offsets = torch.arange(batch + 1, device=x.device, dtype=torch.int32) * length
        return SequenceLayout.from_offsets(offsets, max_seqlen=length, max_tokens=batch * length)
    return _cached_equal_lengths(batch, length, x.device)


@functools.lru_cache(64)
def _cached_equal_lengths(batch: int, length: int, device: torch.device) -> Layout:
    return SequenceLayout.from_lengths([length] * batch, device=device)


def _refuse(dropout_p: float, **arguments: object) -> None:
    if dropout_p:
        raise ValueError(
            f'flash attention implementation "nt_attention" does not support dropout_p={dropout_p}: pass 0, call '
            "nt_attention.varlen_attention, or torch.nn.attention.restore_flash_attention_impl() first."
        )
    for name, x in arguments.items():
        if x is not None:
            raise ValueError(
                f'flash attention implementation "nt_attention" does not support {name}: leave it out, or call '
                "torch.nn.attention.restore_flash_attention_impl() first."
            )


def _is_batch_invariant(num_splits: int | None) -> bool:
    if num_splits not in (None, 0, 1):
        raise ValueError(
            f'flash attention implementation "nt_attention" does not split keys, got num_splits={num_splits}: pass '
            "None, or 1 for results that do not depend on the batch."
        )
    return num_splits == 1


def _with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `empty_like(like)`, which compilers expect."""
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like).copy_(x)
