"""Backends as custom operators, which all have the same schema, and their fake implementations.

A graph holds tensors and numbers, so an operator takes offsets instead of a layout. What was read from the offsets is
cached, so the operator finds the layout without a sync. The operator `auto` selects a backend when it runs.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..compiler import is_traced
from ..layouts.bounded import BoundedLayout
from ..layouts.known import SequenceLayout
from ..layouts.paged import PagedLayout
from ..layouts.protocol import Layout
from ..operators import LIBRARY, define
from . import adapters
from .adapters import Inputs
from .backend import Backend, BackwardInputs
from .call import OPTIONS, SCHEMA, AttentionSpec, Call, PreparedRuns, check_slopes, from_schema, schema_values
from .relative import RelativeBias, check_relative, check_type

_T = TypeVar("_T")
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor key_cu_seqlens, Tensor? alibi_slopes"
_RELATIVE = "Tensor? buckets, Tensor? bias, Tensor? query_bias, Tensor? key_bias"
_CALL = f"{_TENSORS}, {_RELATIVE}, {SCHEMA}"
_PAGED = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor table, Tensor? table_offsets, Tensor? lengths, "
    "Tensor? alibi_slopes, SymInt[] bounds, SymInt page_size, SymInt max_seqlen, bool has_slots"
)
_NAMES = [argument.split()[-1] for argument in _CALL.split(", ")]
_ARGUMENTS = len(_NAMES)
_Gradients = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # of query, key and value, and of the biases that are given
_VALUES = _NAMES.index("key_bias") + 1  # the arguments from here on are not tensors
_BIASES = slice(_NAMES.index("bias"), _VALUES)
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor[])"  # the schema of `_Gradients`
_SAVED = "Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor rng_state"


def register(backend: Backend) -> None:
    """Define `nt_attention::<name>_forward` and `_backward`, which run the kernel and its adapters."""
    register_by_name(backend.name, lambda: (0, backend), random="dropout" in backend.features)


def register_by_name(name: str, find: Callable[[], tuple[int, Backend]], *, random: bool = True) -> None:
    """The same for a name. The operators find the backend when they run, because it can be removed and replaced.

    Args:
        name: The name of the backend.
        find: Returns the backend, and a number that no other backend of this name has. Raises a ValueError if there is
            none.
        random: Whether the backend may draw random numbers.
    """

    def call_and_backend(arguments: Sequence[Any], is_backward: bool) -> tuple[Call, Backend]:
        number, backend = find()
        return _cached_call(arguments, (name, number), lambda call: None, is_backward)[0], backend

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, backend = call_and_backend(arguments, False)
        return _forward(backend, Inputs(*arguments[:3]), call)

    def backward(*arguments: Any) -> _Gradients:
        saved, arguments = _backward_inputs(*arguments[:8]), arguments[5:]
        call, backend = call_and_backend(arguments, True)
        if backend.backward is None:
            raise RuntimeError(f"{name} has no gradients: run this graph in torch.no_grad(), or name another backend.")
        return _backward(backend, saved, Inputs(*arguments[:3]), call)

    def fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _fake_forward(find()[1].rng_on_host, *arguments)

    results = "Tensor out, Tensor lse, Tensor rng_state"
    define(f"{name}_forward({_CALL}) -> ({results})", forward, fake, random=random)
    define(f"{name}_backward({_SAVED}, {_CALL}) -> {_GRADIENTS}", backward, _fake_backward)
    _differentiate(name)


def register_bounded(
    choose: Callable[[Call, str], tuple[Backend, tuple[int, int] | None]], key: Callable[[str], Any]
) -> None:
    """Define `nt_attention::bounded_forward` and `bounded_backward`, for layouts that know only bounds.

    They read nothing on the host, so a compiler can capture them in a CUDA graph. Their further arguments are the
    bounds of both sides, see `bounds_of`, and the name of a backend or "auto". Both directions select it, from the same
    arguments. With dropout, the caller must name it: backends draw other random numbers.

    Args:
        choose: Selects a backend, and the head dims to call it with, for a call and a requested name.
        key: Everything besides the call on which `choose` depends, for a requested name.
    """

    def call_and_backend(arguments: Sequence[Any]) -> tuple[Call, Backend]:
        name = arguments[-1]
        call, (backend, dims) = _cached_call(arguments, ("bounded", key(name)), lambda call: choose(call, name))
        return call._replace(head_dims=dims), backend

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, backend = call_and_backend(arguments)
        return _forward(backend, Inputs(*arguments[:3]), call)

    def backward(*arguments: Any) -> _Gradients:
        saved, arguments = _backward_inputs(*arguments[:8]), arguments[5:]
        call, backend = call_and_backend(arguments)
        return _backward(backend, saved, Inputs(*arguments[:3]), call)

    fake = functools.partial(_fake_forward, False)
    results, more = "Tensor out, Tensor lse, Tensor rng_state", "SymInt[4] bounds, str backend"
    define(f"bounded_forward({_CALL}, {more}) -> ({results})", forward, fake, random=True, reads_on_host=False)
    define(
        f"bounded_backward({_SAVED}, {_CALL}, {more}) -> {_GRADIENTS}", backward, _fake_backward, reads_on_host=False
    )
    _differentiate("bounded")


def register_paged(
    choose: Callable[[Call, str], tuple[Backend, tuple[int, int] | None]],
    run: Callable[[Backend, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]],
) -> None:
    """Define `nt_attention::paged_forward` and `paged_forward_with_bounds`, for keys in pools.

    The second one is for queries whose layout knows only bounds. It reads nothing on the host, so a compiler can
    capture it in a CUDA graph. Both have no gradients.

    Args:
        choose: Selects a backend, and the head dims to call it with, for a call and a requested name.
        run: Runs it.
    """

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        query, key, value, *rest, name = arguments
        call = _paged_call(query, key, value, rest)
        return run(choose(call, name)[0], query, key, value, call)

    def fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        query, _, value = arguments[:3]
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        return out, query.new_empty(query.shape[1], query.shape[0], dtype=dtype).T

    for name, reads_on_host in (("paged_forward", True), ("paged_forward_with_bounds", False)):
        schema = f"{name}({_PAGED}, {SCHEMA}, str backend) -> (Tensor out, Tensor lse)"
        define(schema, forward, fake, random=True, reads_on_host=reads_on_host)
        torch.library.register_autograd(f"nt_attention::{name}", _refuse_gradients, lib=LIBRARY)


def _refuse_gradients(*_: Any) -> None:
    raise RuntimeError("keys in pools are for inference: run this graph in torch.no_grad(), or record packed keys.")


def paged_arguments_of(call: Call) -> tuple[Any, ...]:
    """The arguments of `paged_forward` after query, key and value, without the last one."""
    paged = call.paged
    where = (paged.table, paged.table_offsets, paged.given_lengths)
    numbers = (list(call.layout.bounds or ()), paged.page_size, paged.max_seqlen, paged.has_slots)
    return (call.layout.operator_offsets, *where, call.alibi_slopes, *numbers, *schema_values(call.spec))


def _paged_call(query: Tensor, key: Tensor, value: Tensor, arguments: Sequence[Any]) -> Call:
    """The inverse of `paged_arguments_of`."""
    cu_seqlens, table, table_offsets, lengths, slopes, bounds, page_size, max_seqlen, has_slots, *values = arguments
    layout = BoundedLayout(cu_seqlens, *bounds) if bounds else SequenceLayout.in_operator(cu_seqlens)
    if has_slots:
        paged = PagedLayout.from_slots(table.squeeze(1), lengths, max_seqlen)
    elif table_offsets is not None:
        paged = PagedLayout.from_indices(table, table_offsets, lengths, page_size, max_seqlen)
    else:
        paged = PagedLayout(table, lengths, page_size, max_seqlen)
    layout.check_rows(query, "query")
    paged.check_keys(key, value)
    if slopes is not None:
        check_slopes(slopes, query.shape[1], layout.batch_size, query.device)
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in from_schema(values).items()}
    more = {"alibi": slopes is not None, "bounded": not layout.knows_lengths}
    spec = AttentionSpec.of_paged(query, key, value, options, **more)
    return Call(layout, cast(SequenceLayout, paged), slopes, spec)


class Selection(NamedTuple):
    """A backend that was selected for a call: its number, by which the backward finds it, and `Call.head_dims`."""

    number: int
    backend: Backend
    head_dims: tuple[int, int] | None


def register_auto(
    select: Callable[[Call, str], Selection],
    select_again: Callable[[Call, int], Selection],
    key: Callable[[str], Any],
    version: Callable[[], int],
) -> None:
    """Define `nt_attention::auto_forward`, which selects a backend when it runs, and `auto_backward`.

    The forward's result `selected` (1,) int64, on the CPU, holds the number of the backend.

    Args:
        select: Selects a backend for a call and a requested name.
        select_again: Selects the backend of a number, or raises a ValueError if it cannot run the call.
        key: Everything besides the call on which `select` depends, for a requested name.
        version: A number that changes if a backend is registered or removed.
    """

    def select_first(call: Call, name: str) -> tuple[Selection, Tensor]:
        found = select(call, name)
        return found, torch.tensor([found.number], device="cpu")

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *arguments, name = arguments  # type: ignore[assignment]
        call, ((_, backend, dims), selected) = _cached_call(
            arguments, ("forward", key(name)), lambda call: select_first(call, name)
        )
        out, lse, state = _forward(backend, Inputs(*arguments[:3]), call._replace(head_dims=dims))
        return out, lse, state.to(out.device) if backend.rng_on_host else state, selected.clone()

    def backward(*arguments: Any) -> _Gradients:
        saved, (*arguments, selected) = _backward_inputs(*arguments[:8]), arguments[5:]  # type: ignore[assignment]
        number = int(selected)
        call, (_, backend, dims) = _cached_call(
            arguments, ("backward", number, version()), lambda call: select_again(call, number), is_backward=True
        )
        if backend.rng_on_host:
            saved = saved._replace(rng_state=saved.rng_state.cpu())  # type: ignore[union-attr]
        return _backward(backend, saved, Inputs(*arguments[:3]), call._replace(head_dims=dims))

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        return (*_fake_forward(False, *arguments[:-1]), torch.empty(1, dtype=torch.int64, device="cpu"))

    results = "Tensor out, Tensor lse, Tensor rng_state, Tensor selected"
    define(f"auto_forward({_CALL}, str backend) -> ({results})", forward, fake, random=True)
    define(f"auto_backward({_SAVED}, {_CALL}, Tensor selected) -> {_GRADIENTS}", backward, _fake_backward)
    _differentiate("auto")


def _differentiate(name: str) -> None:
    """Register the gradient of `<name>_forward` for graphs that contain the operator, such as exported ones.

    Eager calls use the autograd function in `kernels/autograd.py` instead.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        # auto_backward takes `selected` in place of the last argument of auto_forward, the name of the backend
        ctx.given, ctx.more, inputs = len(inputs), inputs[_ARGUMENTS:], inputs[:_ARGUMENTS]
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in inputs], *output)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint computes the tensors for each reading
        tensors, (out, lse, state, *selected) = saved[:_ARGUMENTS], saved[_ARGUMENTS:]
        arguments = [number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)]
        arguments[argument_index("needs_grad")] = True
        arguments[argument_index("relative_grad")] = any(ctx.needs_input_grad[_BIASES])
        grad = torch.zeros_like(out) if grad is None else grad
        backward_operator = getattr(torch.ops.nt_attention, f"{name}_backward").default
        more = selected if name == "auto" else ctx.more
        *grads, of_biases = backward_operator(grad, grad_lse, out, lse, state, *arguments, *more)
        grads += [None] * (ctx.given - 3)
        given = [at for at, x in enumerate(arguments[_BIASES], _BIASES.start) if x is not None]
        for at, of_bias in zip(given, of_biases, strict=False):  # there are none if no bias needs a gradient
            grads[at] = of_bias
        return tuple(grads)

    torch.library.register_autograd(f"nt_attention::{name}_forward", backward, setup_context=setup_context, lib=LIBRARY)


def argument_index(name: str) -> int:
    """The index of an argument of the forward operators."""
    return _NAMES.index(name)


def arguments_of(call: Call) -> tuple[Any, ...]:
    """An operator's arguments after query, key and value."""
    layout, key_layout, slopes, spec, _, relative, _ = call
    of_relative = relative and (relative.buckets, relative.bias, relative.query_bias, relative.key_bias)
    offsets = layout.operator_offsets, key_layout.operator_offsets
    return (*offsets, slopes, *(of_relative or [None] * 4), *schema_values(spec))


def bounds_of(call: Call) -> list[int]:
    """The bounds for the operators of `register_bounded`: max_seqlen and total of queries, then those of keys.

    Raises:
        ValueError: One side knows its lengths when a graph runs, and not before.
    """
    layouts = (call.layout, call.key_layout)
    if any(x.bounds is None and is_traced(x.operator_offsets) for x in layouts):
        raise ValueError(
            "in a graph, the lengths of both sides must be unknown, or of none: make both layouts with max_seqlen and "
            "max_tokens."
        )
    return [bound for x in layouts for bound in (x.bounds or (x.max_seqlen, x.total))]


def call_of(*arguments: Any) -> Call:
    """The inverse of `arguments_of`, for the arguments of a forward operator.

    It checks the tensors, because kernels could read past their end.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    return _cached_call(arguments, (), lambda call: None)[0]


def _cached_call(
    arguments: Sequence[Any], key: tuple[Any, ...], more: Callable[[Call], _T], is_backward: bool = False
) -> tuple[Call, _T]:
    """`call_of`, and `more(call)`, which depends on the spec, the layouts and `key`. It is cached with the layouts."""
    query, k, value, cu_seqlens, key_cu_seqlens, slopes, *of_relative = arguments[:_VALUES]
    is_bounded = len(arguments) == _ARGUMENTS + 2
    bounds = arguments[_ARGUMENTS] if is_bounded else ()
    layout, key_layout = _layouts(cu_seqlens, key_cu_seqlens, bounds, is_backward)
    relative = None if of_relative[0] is None else RelativeBias(*of_relative)
    if relative is not None:
        check_type(relative)
    terms = () if relative is None else relative.terms
    values = tuple([tuple(x) if isinstance(x, list) else x for x in arguments[_VALUES:_ARGUMENTS]])

    def build() -> tuple[AttentionSpec, _T, PreparedRuns]:
        layout.check_rows(query, "query")
        key_layout.check_keys(k, value)
        spec = _spec(query, k, value, layout, key_layout, slopes is not None, terms, values)
        return spec, more(Call(layout, key_layout, slopes, spec, None, relative)), {}

    of_tensors = [item for x in (query, k, value) for item in (x.shape, x.dtype, x.device)]
    full_key = ("operator", *of_tensors, slopes is None, terms, values, key)
    prepared: PreparedRuns | None
    spec, found, prepared = layout.cached(full_key, build, key_layout)
    if slopes is not None:
        prepared = None
        check_slopes(slopes, query.shape[1], layout.batch_size, query.device)
    if relative is not None:
        prepared = None
        check_relative(relative, query, k)
    return Call(layout, key_layout, slopes, spec, None, relative, prepared), found


def _layouts(
    cu_seqlens: Tensor, key_cu_seqlens: Tensor, bounds: Sequence[int], is_backward: bool
) -> tuple[Layout, Layout]:
    """The layouts of queries and keys. `bounds` are those of `bounds_of`; empty if the lengths are read.

    Layouts with bounds are new in each call, and nothing that they cache outlives it: CUDA graphs of torch.compile
    allow no other tensors in their memory than their outputs.
    """
    if not bounds:
        layout = SequenceLayout.in_operator(cu_seqlens, is_backward)
        same = key_cu_seqlens is cu_seqlens
        return layout, layout if same else SequenceLayout.in_operator(key_cu_seqlens, is_backward)
    bounded = BoundedLayout(cu_seqlens, bounds[0], bounds[1])
    if key_cu_seqlens is cu_seqlens and list(bounds[:2]) == list(bounds[2:]):
        return bounded, bounded
    return bounded, BoundedLayout(key_cu_seqlens, bounds[2], bounds[3])


def _spec(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    key_layout: Layout,
    alibi: bool,
    relative: tuple[str, ...],
    values: Sequence[Any],
) -> AttentionSpec:
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(f"cu_seqlens are of {layout.batch_size} sequences, key_cu_seqlens of {key_layout.batch_size}.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must share a dtype, got {query.dtype}, {key.dtype} and {value.dtype}.")
    options = from_schema(values)
    return AttentionSpec.of(
        query.device,
        query.dtype,
        (query.shape, key.shape, value.shape),
        {name: x for name, x in options.items() if name in OPTIONS},
        alibi=alibi,
        relative=relative,
        equal_lengths=layout is key_layout or layout.same_lengths(key_layout),
        keyless=key_layout.min_seqlen == 0,
        bounded=not (layout.knows_lengths and key_layout.knows_lengths),
        **{name: x for name, x in options.items() if name not in OPTIONS},
    )


def _backward_inputs(
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    query: Tensor,
    _: Tensor,
    value: Tensor,
) -> BackwardInputs:
    """The backward's inputs. Shapes are checked, because kernels could read past the end of a tensor."""
    if not query.dim() == value.dim() == 3:
        raise ValueError(f"query and value must have three dimensions, got {query.dim()} and {value.dim()}.")
    of_out, of_lse = (*query.shape[:2], value.shape[2]), tuple(query.shape[:2])
    for name, x, shape in (
        *(("grad", grad, of_out), ("out", out, of_out)),
        *(("lse", lse, of_lse), ("grad_lse", grad_lse, of_lse)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}.")
    return BackwardInputs(grad, grad_lse, out, lse, state)


def _forward(backend: Backend, inputs: Inputs, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, state = adapters.forward(backend, inputs, call)
    return out, lse, out.new_empty(0, dtype=torch.int64) if state is None else state


def _fake_forward(rng_on_host: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value = arguments[:3]
    dropout_p = arguments[argument_index("dropout_p")]
    out = query.new_empty(*query.shape[:2], value.shape[2])
    state_device = "cpu" if rng_on_host and dropout_p else query.device
    state = torch.empty(2 if dropout_p else 0, dtype=torch.int64, device=state_device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=dtype).T  # strides of adapters.forward
    return out, lse, state


def _backward(backend: Backend, saved: BackwardInputs, inputs: Inputs, call: Call) -> _Gradients:
    query, key, value, *of_biases = adapters.backward(backend, saved, inputs, call)
    return query, key, value, of_biases


def _fake_backward(*arguments: Any) -> _Gradients:
    arguments = arguments[5:]  # the first five are those that the forward does not have
    query, key, value = map(torch.empty_like, adapters.contiguous_in_head_dim(*arguments[:3]))
    biases = arguments[_BIASES] if arguments[argument_index("relative_grad")] else ()
    return query, key, value, [x.new_empty(x.shape) for x in biases if x is not None]
