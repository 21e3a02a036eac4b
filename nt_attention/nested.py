"""NestedTensor to packed values and back. Only this file uses ``torch.nested``.

Dimensions: B sequences, j their ragged length, T tokens in all, N ≥ T rows of a NestedTensor's values.

Each operation on a NestedTensor costs 50 to 120 µs of host time, so the rest of the library works on packed values.
Inputs are unwrapped once, and the output is rewrapped once with the same offsets object: two NestedTensors can only be
added if they share it. This file disables ``__torch_function__`` of NestedTensors, which costs 10 to 30 µs for each
access to an attribute and is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ._offsets import creating_cached_tensors, read_offsets, snapshot
from ._tracing import is_tracing, refuse_jit_trace
from .layout import SequenceLayout


class Unwrapped(NamedTuple):
    """The parts of a NestedTensor.

    Attributes:
        values: (N, …) rows, tokens first; a view of the NestedTensor's values if its sequences are contiguous.
        layout: the sequences; ``layout.total`` may be less than N.
        rewrap: (N, …) rows → a NestedTensor with the same kind, offsets and ragged dimension. If its second argument
            is True, the ragged dimension is 1.
    """

    values: Tensor
    layout: SequenceLayout
    rewrap: Callable[..., Tensor]


_past_torch_function = torch._C.DisableTorchFunctionSubclass


def are_nested(*tensors: object) -> list[bool]:
    with _past_torch_function():
        return [isinstance(x, Tensor) and x.is_nested for x in tensors]


def unwrap_each(*, for_weights: bool = True, **named: Tensor) -> tuple[Unwrapped, ...]:
    """Unwrap NestedTensors (B, j, …) or (B, H, j, D), jagged or strided, each passed by the name of its argument.

    If the sequences of a jagged one are contiguous from row 0, its values are a view. If not (``lengths`` with holes,
    or offsets that begin later), the tokens are copied, and ``rewrap`` restores the rows with 0 in the holes. The parts
    of a strided one are concatenated. Syncs once for each new offsets tensor, and once for each new lengths tensor. An
    object that is passed twice is unwrapped once.

    Args:
        for_weights: whether the values are multiplied by parameters, whose backward saves them even if the
            NestedTensor requires no gradient. The values then share its version counter.

    Raises:
        ValueError: the ragged dimension is not 1 or 2, sequences overlap, or make_fx is recording.
        TypeError: a strided NestedTensor under torch.compile.
        RuntimeError: torch.jit.trace is recording.
    """
    refuse_jit_trace()
    if torch.compiler.is_compiling():
        return _unwrap_in_graph(named)
    if is_tracing():
        raise ValueError("make_fx can't record NestedTensors: pass packed tensors and offsets to the traced function.")
    with _past_torch_function():
        jagged = {id(x): x for x in named.values() if isinstance(x, NestedTensor)}
        may_save = for_weights or any(x.requires_grad for x in jagged.values())
        values = dict(zip(jagged, _values(*jagged.values(), may_save=may_save), strict=True))
        layouts: dict[int, SequenceLayout] = {}
        done: dict[int, Unwrapped] = {}
        for name, x in named.items():
            at = id(x)
            if at not in done:
                done[at] = _unwrap_jagged(x, values[at], name, layouts) if at in values else _unwrap_strided(x, name)
        return tuple([done[id(x)] for x in named.values()])


def layout_of(nested: Tensor) -> SequenceLayout:
    """The layout of a NestedTensor's tokens.

    Raises:
        TypeError: not a NestedTensor.
    """
    if not any(are_nested(nested)):
        kind = f"a dense tensor {tuple(nested.shape)}" if isinstance(nested, Tensor) else type(nested).__name__
        raise TypeError(
            f"nested must be a NestedTensor, got {kind}: make one with torch.nested.nested_tensor(sequences, "
            "layout=torch.jagged), or describe packed rows by SequenceLayout.from_lengths."
        )
    return unwrap_each(nested=nested)[0].layout


def wrap(values: Tensor, layout: SequenceLayout) -> Tensor:
    """The jagged NestedTensor (B, j, …) of ``values`` (N, …) with the layout's own offsets; a view of ``values``."""
    if torch.is_inference_mode_enabled() and not torch.compiler.is_compiling():  # stock fails on non-inference tensors
        return _jagged(values, layout.offsets, None, 1, layout)
    return nested_tensor_from_jagged(values, layout.offsets, None, 1, layout.min_seqlen, layout.max_seqlen)


def _unwrap_jagged(nested: Any, values: Tensor, name: str, layouts: dict[int, SequenceLayout]) -> Unwrapped:
    """``layouts``: id of the offsets → layout, so that NestedTensors with the same offsets share one."""
    offsets, lengths, ragged_dim = nested._offsets, nested._lengths, nested._ragged_idx
    if ragged_dim not in (1, 2) or (ragged_dim == 2 and values.dim() != 3):
        raise ValueError(
            f"{name} is ragged in dimension {ragged_dim} of {values.dim() + 1}: pass (B, j, …), or (B, H, j, D) "
            f"(a transpose of dimensions 1 and {ragged_dim} makes it)."
        )
    values = values if ragged_dim == 1 else values.movedim(ragged_dim - 1, 0)
    rows = values.shape[0]
    index = None
    if lengths is not None:
        layout, index, *_ = _tokens_among_rows(offsets, lengths, rows, name)
    elif id(offsets) in layouts:
        layout = layouts[id(offsets)]
    else:
        source, facts = read_offsets(offsets)
        if facts.first:
            layout, index, *_ = _tokens_among_rows(offsets, None, rows, name)
        else:
            layout = layouts[id(offsets)] = SequenceLayout.from_facts(source, facts)
    if index is None:
        layout.check_rows(values, name)
    else:
        values = values.index_select(0, index)

    def rewrap(result: Tensor, tokens_first: bool = False) -> Tensor:
        if index is not None:
            result = result.new_zeros(rows, *result.shape[1:]).index_copy(0, index, result)
        return _jagged(result, offsets, lengths, 1 if tokens_first else ragged_dim, layout)

    return Unwrapped(values, layout, rewrap)


def _unwrap_in_graph(named: dict[str, Any]) -> tuple[Unwrapped, ...]:
    """``unwrap_each`` in a graph, by public operations. NestedTensors with the same ragged size share a layout."""
    done: list[tuple[Any, Unwrapped]] = []
    for name, x in named.items():
        if x.layout != torch.jagged:
            raise TypeError(f"{name} must be a jagged NestedTensor under torch.compile.")
        if x._lengths is not None:
            raise ValueError(f"{name} has holes between its sequences: make it contiguous() outside of the graph.")
        twin = next((u for y, u in done if y is x), None)
        layout = next((u.layout for y, u in done if y.size(y._ragged_idx) == x.size(x._ragged_idx)), None)
        done.append((x, twin if twin is not None else _unwrap_one_in_graph(x, layout)))
    return tuple([u for _, u in done])


def _unwrap_one_in_graph(nested: Any, layout: SequenceLayout | None) -> Unwrapped:
    values, offsets, ragged_dim = nested.values(), nested.offsets(), nested._ragged_idx
    extremes = nested._maybe_min_seqlen, nested._maybe_max_seqlen

    def rewrap(result: Tensor, tokens_first: bool = False) -> Tensor:
        dim = 1 if tokens_first else ragged_dim
        result = result if dim == 1 else result.movedim(0, dim - 1)
        return nested_tensor_from_jagged(result, offsets, None, dim, *extremes)

    values = values if ragged_dim == 1 else values.movedim(ragged_dim - 1, 0)
    return Unwrapped(values, SequenceLayout.from_offsets(offsets) if layout is None else layout, rewrap)


def _values(*nested: Tensor, may_save: bool = True) -> tuple[Tensor, ...]:
    """``x.values()`` of each, in a third of the host time and as one autograd node."""
    if not may_save or not torch.is_grad_enabled():
        return tuple([x._values.detach() for x in nested])  # type: ignore[attr-defined]
    wanting = [x for x in nested if x.requires_grad]
    given = iter(_Values.apply(*wanting) if wanting else ())
    return tuple([next(given) if x.requires_grad else _values_of(x) for x in nested])


def _values_of(nested: Any) -> Tensor:
    """The detached values. They share the version counter of ``nested``."""
    return _share_version_counter(nested, nested._values.detach())


def _share_version_counter(base: Tensor, alias: Tensor) -> Tensor:
    """Give ``alias``, which has the memory of ``base``, the version counter of ``base``, and return it.

    A NestedTensor and its values have separate counters. An operation that saves one of them for its backward would not
    notice an in-place change of the other, and the gradients would be wrong. ``detach`` gives its result the counter of
    its input, so it is called here with an implementation that returns ``alias``. Inference tensors have no counter.
    """
    if alias.is_inference():
        return alias
    torch._C._push_on_torch_dispatch_stack(_ReturnInstead(alias))
    try:
        return base.detach()
    finally:
        torch._C._pop_torch_dispatch_stack(None)


class _ReturnInstead(TorchDispatchMode):
    """A dispatch mode under which every operator returns one tensor."""

    def __init__(self, result: Tensor) -> None:
        self.result = result  # the parent's __init__ is only needed for ``with``

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not needed outside of compiled code, and the wrapper that it adds is slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return self.result


class _Form(NamedTuple):
    """Everything in a jagged NestedTensor except its values."""

    offsets: Tensor
    lengths: Tensor | None
    ragged_dim: int
    extremes: dict[str, Tensor]  # NestedTensor's own cache: see ``_extremes``

    def made_of(self, values: Tensor) -> Tensor:
        """The NestedTensor of ``values`` in this form, detached."""
        with _past_torch_function():
            nested = NestedTensor(values, self.offsets, lengths=self.lengths, _ragged_idx=self.ragged_dim)
            nested._metadata_cache = dict(self.extremes)
        return nested


class _Values(torch.autograd.Function):
    """NestedTensors → their values. Faster than ``values()``, which passes two dispatchers in each direction."""

    @staticmethod
    def forward(ctx: Any, *nested: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.forms = [_Form(x._offsets, x._lengths, x._ragged_idx, x._metadata_cache) for x in nested]
        return tuple([_values_of(x) for x in nested])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        each = zip(grads, ctx.forms, ctx.needs_input_grad, strict=True)
        return tuple([None if grad is None or not wanted else _Values._wrap(grad, form) for grad, form, wanted in each])

    @staticmethod
    def _wrap(grad: Tensor, form: _Form) -> Tensor:
        if torch.is_grad_enabled():  # create_graph=True: the gradient may be differentiated again
            return nested_tensor_from_jagged(grad, form.offsets, form.lengths, form.ragged_dim)
        return form.made_of(grad)


class _Nested(torch.autograd.Function):
    """Values → a NestedTensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, form: _Form) -> Tensor:
        ctx.set_materialize_grads(False)
        return _share_version_counter(values, form.made_of(values.detach()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None]:
        return None if grad is None else _values(grad)[0], None


def _jagged(values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged_dim: int, layout: SequenceLayout) -> Tensor:
    """``nested_tensor_from_jagged`` of rows (N, …), in a third of the host time.

    The lengths' minimum and maximum are passed on, so that no later operation needs a sync to compute them.
    """
    with _past_torch_function():
        values = values if ragged_dim == 1 else values.movedim(0, ragged_dim - 1)
        form = _Form(offsets, lengths, ragged_dim, layout.cached("extremes", lambda: _extremes(layout)))
        if torch.is_grad_enabled() and values.requires_grad:
            return cast(Tensor, _Nested.apply(values, form))
        return form.made_of(values.detach())


def _extremes(layout: SequenceLayout) -> dict[str, Tensor]:
    """The longest and shortest length in the form of NestedTensor's cache: as the sizes of empty tensors.

    They are marked as dynamic for torch.compile, once. NestedTensor's constructor would do it each time.
    """
    sizes = {"max_seqlen": layout.max_seqlen, "min_seqlen": layout.min_seqlen}
    extremes = {name: torch.empty(size, 0, device="cpu") for name, size in sizes.items()}
    for x in extremes.values():
        torch._dynamo.mark_dynamic(x, 0)
    return extremes


class _TokenRows(NamedTuple):
    """The rows with tokens, in a NestedTensor with holes or whose offsets do not begin at 0."""

    layout: SequenceLayout  # of the tokens alone
    row_of_token: Tensor  # (T,) int64
    end: int  # one past the last of these rows
    as_read: object  # the snapshot of the lengths that this was made from


def _tokens_among_rows(offsets: Tensor, lengths: Tensor | None, rows: int, name: str) -> _TokenRows:
    _, facts = read_offsets(offsets)
    given = facts.host if lengths is None else lengths  # the cache key
    by_lengths = facts.cache.find_or_build("token rows", WeakIdKeyDictionary)
    found: _TokenRows | None = by_lengths.get(given)
    if found is not None and found.end <= rows and found.as_read == snapshot(given):
        return found
    begins = facts.host[:-1]
    counts = facts.host.diff() if lengths is None else lengths.detach().to("cpu", torch.int64)
    ends = begins + counts
    limits = torch.cat([begins[1:], torch.tensor([rows], device="cpu")])
    wrong = (counts < 0) | (ends > limits)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"sequence {at} of {name} covers rows {int(begins[at])} to {int(ends[at])}, but the next one begins, or "
            f"the values end, at row {int(limits[at])}: sequences may not overlap."
        )
    with creating_cached_tensors():
        layout = SequenceLayout.from_lengths(counts, device=offsets.device)
        index = layout.position_ids + offsets[:-1].to(torch.int64)[layout.sequence_ids]
    found = _TokenRows(layout, index, int(ends.max()) if len(ends) else 0, snapshot(given))
    if not given.is_inference():
        by_lengths[given] = found
    return found


def _unwrap_strided(nested: Tensor, name: str) -> Unwrapped:
    """A strided NestedTensor: (B, j, …), or (B, H, j, D) if the shapes show which dimension is ragged."""
    parts = list(nested.unbind()) if nested.size(0) else []
    if not parts:
        raise ValueError(
            f"{name} is a strided NestedTensor of no sequences, which has no shape to keep: pass at least one."
        )
    token_dim = _strided_token_dim([tuple(part.shape) for part in parts], name)
    values = torch.cat([part.movedim(token_dim, 0) for part in parts])
    lengths = [part.shape[token_dim] for part in parts]
    layout = SequenceLayout.from_lengths(lengths, device=nested.device)

    def rewrap(result: Tensor, tokens_first: bool = False) -> Tensor:
        dim = 0 if tokens_first else token_dim
        pieces = [piece.movedim(0, dim) for piece in result.split(lengths)]
        return torch.nested.as_nested_tensor(pieces, layout=torch.strided)

    return Unwrapped(values, layout, rewrap)


def _strided_token_dim(shapes: list[tuple[int, ...]], name: str) -> int:
    if len(shapes[0]) < 3:
        return 0
    varying = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
    if varying in ([0], [1]):
        return varying[0]
    raise ValueError(
        f"{name} is a strided NestedTensor of shapes such as {shapes[0]}, in which the ragged dimension is not "
        "one of 1 and 2 alone: make it with layout=torch.jagged."
    )


SequenceLayout._wrap = staticmethod(wrap)
SequenceLayout._layout_of_nested = staticmethod(layout_of)
