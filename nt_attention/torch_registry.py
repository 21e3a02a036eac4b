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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import attention

from .kernels import adapters
from .kernels.adapters import Inputs
from .kernels.backend import Backend, BackwardInputs
from .kernels.backends.flash import heads_first, tokens_first
from .kernels.call import AttentionSpec, Call, PreparedRuns
from .kernels.paged import forward as forward_in_pool
from .kernels.select import choose_for, selection_key
from .layouts.known import SequenceLayout
from .layouts.paged import PagedLayout
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


class _Options(NamedTuple):
    """The options of an operator that it passes on to the kernel."""

    scale: float | None
    is_causal: bool
    window_size: tuple[int, int] = (-1, -1)
    batch_invariant: bool = False


class _Call(NamedTuple):
    """Packed inputs, the call, and the backend that runs it."""

    inputs: Inputs
    call: Call
    backend: Backend


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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Packed query (T, H, D) with offsets, or dense (B, L, H, D) without.

        Returns:
            out like query, lse (H, T) or (B, H, L) with +inf for queries that see no key, and three tensors without
            content: two for the state of dropout, and the debug mask.

        Raises:
            ValueError: an argument is not supported, or the backend does not support the call.
        """
        _refuse(dropout_p, return_debug_mask)
        _refuse_arguments(alibi_slopes=alibi_slopes)
        options = _Options(
            scale, is_causal, _window(window_size_left, window_size_right), _is_batch_invariant(num_splits)
        )
        if seqused_k is not None or block_table is not None:
            paged = _in_pool(key, cum_seq_k, int(max_k), seqused_k, block_table)
            return self._forward_in_pool(Inputs(query, key, value), cum_seq_q, int(max_q), paged, options)
        found = self._call(Inputs(query, key, value), (cum_seq_q, cum_seq_k), (max_q, max_k), options, False)
        out, lse, _ = adapters.forward(found.backend, found.inputs, found.call)
        lse = heads_first(lse, found.call.spec)
        if cum_seq_q is None:
            out = out.view(*query.shape[:3], out.shape[2])
            lse = lse.unflatten(1, query.shape[:2]).transpose(0, 1).contiguous()
        return out, lse, *_without_dropout(query)

    def _forward_in_pool(
        self, inputs: Inputs, cum_seq_q: Tensor | None, max_q: int, paged: PagedLayout, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`forward` with keys in a pool."""
        query, key, value = inputs
        if cum_seq_q is None or query.dim() != 3:
            raise ValueError(f"seqused_k and block_table need packed queries with cum_seq_q, got {tuple(query.shape)}.")
        layout = SequenceLayout.from_offsets(cum_seq_q, max_seqlen=max_q, max_tokens=query.shape[0])
        if layout.batch_size != paged.batch_size:
            raise ValueError(f"cum_seq_q has {layout.batch_size} sequences, and the keys have {paged.batch_size}.")
        layout.check_rows(query, "query")
        paged.check_keys(key, value)
        bounded = not layout.knows_lengths
        spec = AttentionSpec.of_paged(query, key, value, options._asdict(), alibi=False, bounded=bounded)
        call = Call(layout, cast(SequenceLayout, paged), None, spec)
        backend, _ = choose_for(call, "split_kv" if self.backend == "token_tiled" else self.backend)
        out, lse = forward_in_pool(backend, query, key, value, call)
        return out, heads_first(lse, spec), *_without_dropout(query)

    def forward_into(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """`forward`, with a copy of the output into `out`. Returns lse."""
        found, lse, *_ = self.forward(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            dropout_p,
            is_causal,
            return_debug_mask,
            scale=scale,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
            seqused_k=seqused_k,
            alibi_slopes=alibi_slopes,
            block_table=block_table,
            num_splits=num_splits,
        )
        if out.shape != found.shape:
            raise ValueError(f"out must have the shape {tuple(found.shape)}, got {tuple(out.shape)}.")
        out.copy_(found)
        return lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor | None,
        unused: Tensor | None,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, with the arguments and results of `forward`.

        Raises:
            ValueError: an argument is not supported, or the backend does not support the gradients of the call.
        """
        _refuse(dropout_p)
        options = _Options(scale, is_causal, _window(window_size_left, window_size_right))
        given = Inputs(query, key, value)
        found = self._call(given, (cum_seq_q, cum_seq_k), (max_q, max_k), options, True)
        if cum_seq_q is None:
            grad_out, out = grad_out.flatten(0, 1), out.flatten(0, 1)
            logsumexp = logsumexp.transpose(0, 1).flatten(1)
        lse = tokens_first(logsumexp, found.call.spec)
        saved = BackwardInputs(grad_out, None, out, lse, None)
        grads = adapters.backward(found.backend, saved, found.inputs, found.call)
        return tuple(_with_strides_of(grad.view(x.shape), x) for grad, x in zip(grads, given, strict=True))  # type: ignore[return-value]

    def sdpa_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
        """Dense query (B, H, L, D), key (B, G, M, D) and value (B, G, M, Dv).

        Returns:
            out (B, H, L, Dv), lse (B, H, L), no offsets, L, M, and the other results of `forward`.
        """
        longest = query.shape[2], key.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, *more = self.forward(
            q, k, v, None, None, *longest, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        out = out.transpose(1, 2)
        out = _with_strides_of(out, query) if out.shape == query.shape else out
        return out, lse, None, None, *longest, *more  # type: ignore[return-value]

    def sdpa_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor | None,
        philox_offset: Tensor | None,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, with the arguments and results of `sdpa_forward`."""
        grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = self.backward(
            grad_out, q, k, v, out, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, None, None, scale=scale
        )
        return tuple(  # type: ignore[return-value]
            _with_strides_of(grad.transpose(1, 2), x) for grad, x in zip(grads, (query, key, value), strict=True)
        )

    def _call(
        self,
        inputs: Inputs,
        offsets: tuple[Tensor | None, Tensor | None],
        longest: tuple[int, int],
        options: _Options,
        needs_grad: bool,
    ) -> _Call:
        """Check and select, cached with the layouts. Dense inputs are packed."""
        if offsets[0] is None:
            layout, key_layout = (_equal_lengths(x) for x in inputs[:2])
            inputs = Inputs(*[x.flatten(0, 1) for x in inputs])
        else:
            layout, key_layout = _bounded_layouts(inputs, offsets, longest)
        query, key, value = inputs
        if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
            raise ValueError("query, key and value must have the same dtype and be on the same device.")
        of_call = options._asdict() | {"deterministic": torch.are_deterministic_algorithms_enabled()}

        def build() -> tuple[AttentionSpec, Backend, tuple[int, int] | None, PreparedRuns]:
            spec = AttentionSpec.of(
                query.device,
                query.dtype,
                (query.shape, key.shape, value.shape),
                of_call,
                needs_grad=needs_grad,
                equal_lengths=layout is key_layout or layout.same_lengths(key_layout),
                keyless=key_layout.min_seqlen == 0,
                bounded=not (layout.knows_lengths and key_layout.knows_lengths),
            )
            return spec, *choose_for(Call(layout, key_layout, None, spec, None, None), self.backend), {}

        shapes = query.shape[1:], key.shape[1:], value.shape[1:]
        cache_key = ("flash", *shapes, query.dtype, *of_call.values(), needs_grad, *selection_key(self.backend))
        other = None if key_layout is layout else key_layout
        spec, backend, dims, prepared = layout.cached(cache_key, build, other)
        layout.check_rows(query, "query")
        key_layout.check_keys(key, value)
        return _Call(inputs, Call(layout, key_layout, None, spec, dims, None, prepared), backend)


def _bounded_layouts(
    inputs: Inputs, offsets: tuple[Tensor | None, Tensor | None], longest: tuple[int, int]
) -> tuple[SequenceLayout, SequenceLayout]:
    """The layouts of packed queries and keys. On a GPU their lengths are not read: `longest` has bounds of them."""
    if offsets[1] is None:
        raise ValueError(
            "cum_seq_k must be the offsets of the keys, got None. Keys in a cache are not supported: call "
            "torch.nn.attention.restore_flash_attention_impl() first."
        )
    layout, key_layout = (
        SequenceLayout.from_offsets(given, max_seqlen=int(bound), max_tokens=x.shape[0])  # type: ignore[arg-type]
        for given, bound, x in zip(offsets, longest, inputs[:2], strict=True)
    )
    return layout, key_layout


def _in_pool(
    key: Tensor, cum_seq_k: Tensor | None, max_k: int, seqused_k: Tensor | None, block_table: Tensor | None
) -> PagedLayout:
    """Where keys are stored: in the pages of `block_table`, or from the offsets `cum_seq_k`."""
    if seqused_k is None:
        raise ValueError("block_table needs seqused_k, the number of keys of each sequence.")
    if block_table is not None:
        if key.dim() != 4:
            raise ValueError(f"with block_table, key must be (pages, page size, G, D), got {tuple(key.shape)}.")
        capacity = block_table.shape[1] * key.shape[1]
        return PagedLayout(block_table, seqused_k, key.shape[1], min(max_k, capacity))
    if cum_seq_k is None:
        raise ValueError("seqused_k without block_table needs cum_seq_k, where the keys of each sequence begin.")
    return PagedLayout.from_slots(cum_seq_k[:-1], seqused_k, max_k)


def _without_dropout(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of dropout and the debug mask, without content."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, state.new_zeros(()), query.new_empty(0)


def _equal_lengths(x: Tensor) -> SequenceLayout:
    """The layout of a dense batch (B, L, H, D)."""
    if x.dim() != 4:
        raise ValueError(f"tensors without offsets must be (batch, tokens, heads, head dim), got {tuple(x.shape)}.")
    batch, length = x.shape[:2]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing that a cache may drop can be in the graph
        offsets = torch.arange(batch + 1, device=x.device, dtype=torch.int32) * length
        return SequenceLayout.from_offsets(offsets, max_seqlen=length, max_tokens=batch * length)
    return _cached_equal_lengths(batch, length, x.device)


@functools.lru_cache(64)
def _cached_equal_lengths(batch: int, length: int, device: torch.device) -> SequenceLayout:
    return SequenceLayout.from_lengths([length] * batch, device=device)


def _refuse(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p:
        raise ValueError(
            f'flash attention implementation "nt_attention" does not support dropout_p={dropout_p}: pass 0, call '
            "nt_attention.varlen_attention, or torch.nn.attention.restore_flash_attention_impl() first."
        )
    _refuse_arguments(return_debug_mask=return_debug_mask or None)


def _refuse_arguments(**arguments: object) -> None:
    for name, x in arguments.items():
        if x is not None:
            raise ValueError(
                f'flash attention implementation "nt_attention" does not support {name}: leave it out, or call '
                "torch.nn.attention.restore_flash_attention_impl() first."
            )


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return tuple([-1 if side is None or side < 0 else int(side) for side in (left, right)])  # type: ignore[return-value]


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
