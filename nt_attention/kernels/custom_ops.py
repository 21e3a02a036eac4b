"""Attention as custom operators, and their fake implementations.

A graph holds tensors and numbers, so an operator takes offsets instead of a layout, and the name of a backend. What was
read from the offsets is cached, so the operator finds the layout without a sync. There are two pairs of operators:
`attention_forward` and `attention_backward` may read lengths on the host. `bounded_forward` and `bounded_backward` are
for layouts that know only bounds. They read nothing, so a compiler can capture them in a CUDA graph.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compiler import is_traced
from ..layouts.bounded import BoundedLayout
from ..layouts.cache import owner_of, tensor_of
from ..layouts.paged import PagedLayout
from ..layouts.protocol import Layout
from ..layouts.sequence import SequenceLayout
from ..operators import LIBRARY, define
from . import adapters, paged, registry
from .adapters import Tensors
from .backend import BackwardInputs
from .call import OPTIONS, SCHEMA, AttentionSpec, Call, check_slopes, from_schema, layout_fields, schema_values
from .relative import TERMS, RelativeBias, check_relative, check_type
from .select import Choice, choose_for, select_again, selection_key

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor key_cu_seqlens, Tensor? alibi_slopes"
_RELATIVE = "Tensor? buckets, Tensor? bias, Tensor? query_bias, Tensor? key_bias"
# Of a `PagedLayout`: its tensors, and its page size, max_seqlen and whether it has slots; empty for packed keys.
_PAGED = "Tensor? table, Tensor? table_offsets, Tensor? key_lengths, SymInt[] pages"
# The bounds of both sides: max_seqlen and total of queries, then those of keys; empty if lengths are read.
_MORE = "SymInt[] bounds, str backend"
_CALL = f"{_TENSORS}, {_RELATIVE}, {_PAGED}, {SCHEMA}, {_MORE}"
_SAVED = "Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor rng_state, Tensor selected"
_RESULTS = "Tensor out, Tensor lse, Tensor rng_state, Tensor selected"
_Gradients = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # of query, key and value, and of the biases that are passed
_NAMES = [argument.split()[-1] for argument in _CALL.split(", ")]
_VALUES = slice(_NAMES.index("pages") + 1, _NAMES.index("bounds"))  # the fields in `SCHEMA`
_BIASES = slice(_NAMES.index("bias"), _NAMES.index("key_bias") + 1)
# The arguments of a forward operator. Those of a backward have the arguments in `_SAVED` before them.
_named_tuple: Any = namedtuple  # mypy would look for the names
Arguments = _named_tuple("Arguments", _NAMES)


def arguments_of(call: Call, backend: str) -> tuple[Any, ...]:
    """An operator's arguments after query, key and value."""
    layout, key_layout, slopes, spec, _, relative, *_ = call
    biases = [None] * 4 if relative is None else [relative.buckets, *(getattr(relative, name) for name in TERMS)]
    offsets = layout.operator_offsets
    of_pages: tuple[Any, ...] = (None, None, None, [])
    if spec.paged:
        pages, key_offsets, bounds = call.paged, offsets, list(layout.bounds or ())
        numbers = [pages.page_size, pages.max_seqlen, int(pages.has_slots)]
        of_pages = (pages.table, pages.table_offsets, pages.given_lengths, numbers)
    else:
        key_offsets, bounds = key_layout.operator_offsets, _bounds_of(call) if spec.bounded else []
    return (offsets, key_offsets, slopes, *biases, *of_pages, *schema_values(spec), bounds, backend)


def _bounds_of(call: Call) -> list[int]:
    """The bounds of both sides.

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


def call_of(arguments: Any) -> Call:
    """The call of an operator's `Arguments`.

    It checks the tensors, because kernels could read past their end.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    if arguments.table is not None:
        return _paged_call(arguments)
    return _cached_call(arguments, ("call",), lambda call: Choice(None, call.spec))[0]


def _cached_call(
    arguments: Any, key: tuple[Any, ...], select: Callable[[Call], Choice], layouts: tuple[Layout, Layout] | None = None
) -> tuple[Call, Any]:
    """The call and its backend. What `select` chooses depends on `key` too, and is cached with the layouts."""
    query, k, value, slopes = arguments.query, arguments.key, arguments.value, arguments.alibi_slopes
    layout, key_layout = _layouts(arguments) if layouts is None else layouts
    relative = None if arguments.buckets is None else RelativeBias(arguments.buckets, *arguments[_BIASES])
    if relative is not None:
        check_type(relative)
    terms = () if relative is None else relative.terms
    values = tuple([tuple(x) if isinstance(x, list) else x for x in arguments[_VALUES]])

    def build() -> Choice:
        layout.check_rows(query, "query")
        key_layout.check_keys(k, value)
        fields = from_schema(values)
        options = {name: fields.pop(name) for name in OPTIONS.keys() & fields.keys()}
        fields |= {"alibi": slopes is not None, "relative": terms, **layout_fields(query, layout, key_layout)}
        spec = AttentionSpec.of_tensors((query, k, value), options, **fields)
        return select(Call(layout, key_layout, slopes, spec, None, relative))

    of_tensors = [item for x in (query, k, value) for item in (x.shape, x.dtype, x.device)]
    full_key = ("operator", *of_tensors, slopes is None, terms, values, key)
    choice = layout.cached(full_key, build, key_layout)
    prepared = choice.prepared if slopes is None and relative is None else None
    if slopes is not None:
        check_slopes(slopes, query.shape[1], layout.batch_size, query.device)
    if relative is not None:
        check_relative(relative, query, k)
    call = Call(layout, key_layout, slopes, choice.spec, choice.head_dims, relative, prepared, choice.is_direct)
    return call, choice.backend


def _layouts(arguments: Any) -> tuple[Layout, Layout]:
    """The layouts of queries and keys.

    Layouts with bounds are new in each call, and nothing that they cache outlives it: CUDA graphs of torch.compile
    allow no other tensors in their memory than their outputs.
    """
    offsets, key_offsets, bounds = arguments.cu_seqlens, arguments.key_cu_seqlens, list(arguments.bounds)
    if not bounds:
        layout = SequenceLayout.in_operator(offsets)
        return layout, layout if key_offsets is offsets else SequenceLayout.in_operator(key_offsets)
    bounded = BoundedLayout(offsets, *bounds[:2])
    is_same = key_offsets is offsets and bounds[:2] == bounds[2:]
    return bounded, bounded if is_same else BoundedLayout(key_offsets, *bounds[2:])


def _paged_call(arguments: Any) -> Call:
    query, key, value, slopes = arguments.query, arguments.key, arguments.value, arguments.alibi_slopes
    (page_size, max_seqlen, has_slots), bounds = arguments.pages, arguments.bounds
    table, table_offsets, lengths = arguments.table, arguments.table_offsets, arguments.key_lengths
    offsets = arguments.cu_seqlens
    layout = BoundedLayout(offsets, *bounds) if bounds else SequenceLayout.in_operator(offsets)
    pages: Any
    if has_slots:
        pages = PagedLayout.from_slots(table.squeeze(1), lengths, max_seqlen)
    elif table_offsets is not None:
        pages = PagedLayout.from_indices(table, table_offsets, lengths, page_size, max_seqlen)
    else:
        pages = PagedLayout(table, lengths, page_size, max_seqlen)
    layout.check_rows(query, "query")
    pages.check_keys(key, value)
    if slopes is not None:
        check_slopes(slopes, query.shape[1], layout.batch_size, query.device)
    options = {name: x for name, x in from_schema(arguments[_VALUES]).items() if name in OPTIONS}
    fields = layout_fields(query, layout, pages)
    spec = AttentionSpec.of_tensors((query, key, value), options, alibi=slopes is not None, **fields)
    return Call(layout, pages, slopes, spec)


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results in `_RESULTS`.

    `selected` () int64, on the CPU, is the number of the backend, so that the backward runs on the same one. Its
    storage has the layouts, which the caller may free before the backward. With bounds it is empty, because a CUDA
    graph has no tensors on the CPU. The backward then selects by the same arguments.
    """
    arguments = Arguments(*given)
    query, key, value = inputs = Tensors(*arguments[:3])
    empty = query.new_empty(0, dtype=torch.int64)
    if arguments.table is not None:
        call = _paged_call(arguments)
        backend: Any = choose_for(call, arguments.backend, in_graph=True).backend
        out, lse = paged.forward(backend, query, key, value, call)
        return out, lse, empty, empty.clone()
    call, backend = _cached_call(arguments, ("forward", *selection_key(arguments.backend)), _select(arguments))
    out, lse, state = adapters.forward(backend, inputs, call)
    selected = empty.clone()
    if not arguments.bounds:
        selected = tensor_of((call.layout, call.key_layout), torch.device("cpu"), registry.number_of(backend))
    return out, lse, empty if state is None else state.to(out.device), selected


def _select(arguments: Any) -> Callable[[Call], Choice]:
    return lambda call: choose_for(call, arguments.backend, in_graph=True)


def _backward(*given: Any) -> _Gradients:
    saved, selected, arguments = BackwardInputs(*given[:5]), given[5], Arguments(*given[6:])
    inputs = Tensors(*arguments[:3])
    _check_saved(saved, inputs)
    if arguments.bounds:
        call, backend = _cached_call(arguments, ("backward",), _select(arguments))
    else:
        number = int(selected)
        layouts = owner_of(selected)  # None if the tensor was copied
        call, backend = _cached_call(arguments, ("backward", number), lambda call: select_again(call, number), layouts)
    query, key, value, *of_biases = adapters.backward(backend, saved, inputs, call)
    return query, key, value, of_biases


def _check_saved(saved: BackwardInputs, inputs: Tensors) -> None:
    """Check shapes, because kernels could read past the end of a tensor."""
    query, _, value = inputs
    if not query.dim() == value.dim() == 3:
        raise ValueError(f"query and value must have three dimensions, got {query.dim()} and {value.dim()}.")
    of_out, of_lse = (*query.shape[:2], value.shape[2]), tuple(query.shape[:2])
    for name, shape in (("grad", of_out), ("out", of_out), ("lse", of_lse), ("grad_lse", of_lse)):
        if (x := getattr(saved, name)) is not None and x.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}.")


def _fake_forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = Arguments(*given)
    query, value = arguments.query, arguments.value
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=dtype).T  # strides of adapters.forward
    is_packed = arguments.table is None
    state = query.new_empty(2 if arguments.dropout_p and is_packed else 0, dtype=torch.int64)
    if is_packed and not arguments.bounds:
        return out, lse, state, torch.empty((), dtype=torch.int64, device="cpu")
    return out, lse, state, query.new_empty(0, dtype=torch.int64)


def _fake_backward(*given: Any) -> _Gradients:
    arguments = Arguments(*given[6:])
    query, key, value = map(torch.empty_like, adapters.contiguous_in_head_dim(*arguments[:3]))
    biases = arguments[_BIASES] if arguments.relative_grad else ()
    return query, key, value, [x.new_empty(x.shape) for x in biases if x is not None]


def _define(name: str, *, reads_on_host: bool) -> None:
    """Define `<name>_forward` and `_backward`, and the gradient of the former, for graphs that contain the operator.

    Eager calls use the autograd function in `kernels/autograd.py` instead.
    """
    define(
        f"{name}_forward({_CALL}) -> ({_RESULTS})", _forward, _fake_forward, random=True, reads_on_host=reads_on_host
    )
    gradients = "(Tensor, Tensor, Tensor, Tensor[])"
    define(f"{name}_backward({_SAVED}, {_CALL}) -> {gradients}", _backward, _fake_backward, reads_on_host=reads_on_host)
    operator = getattr(torch.ops.nt_attention, f"{name}_backward").default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in inputs], *output)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint computes the tensors for each reading
        tensors, (out, lse, state, selected) = saved[: len(_NAMES)], saved[len(_NAMES) :]
        arguments = Arguments(*[number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)])
        if arguments.table is not None:
            raise RuntimeError(
                "keys in pools are for inference: run this graph in torch.no_grad(), or record packed keys."
            )
        arguments = arguments._replace(needs_grad=True, relative_grad=any(ctx.needs_input_grad[_BIASES]))
        grad = torch.zeros_like(out) if grad is None else grad
        *grads, of_biases = operator(grad, grad_lse, out, lse, state, selected, *arguments)
        grads += [None] * (len(_NAMES) - 3)
        passed = [at for at, x in enumerate(arguments[_BIASES], _BIASES.start) if x is not None]
        for at, of_bias in zip(passed, of_biases, strict=False):  # there are none if no bias needs a gradient
            grads[at] = of_bias
        return tuple(grads)

    torch.library.register_autograd(f"nt_attention::{name}_forward", backward, setup_context=setup_context, lib=LIBRARY)


_define("attention", reads_on_host=True)
_define("bounded", reads_on_host=False)
