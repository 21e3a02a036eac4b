"""Conversion of NestedTensors to packed values and back. Only this file makes them.

Dimensions: B sequences, j their ragged length, T tokens in the batch, N ≥ T rows of a NestedTensor's values.

Each operation on a NestedTensor costs 50 to 120 µs of host time, so the rest of the library works on packed values.
Inputs are unwrapped once, and the output is wrapped once with the same offsets object, because two NestedTensors can
only be added if they share it. This file disables `__torch_function__` of NestedTensors, which costs 10 to 30 µs for
each access to an attribute and is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..compiler import enters_graph, is_compiling
from ..torch_private import (
    NestedTensor,
    extremes_in_graph,
    extremes_of,
    make_nested,
    nested_from_jagged,
    nested_values_of,
    ragged_dim_of,
    share_version_counter,
    without_torch_function,
)
from .reading import Facts, creating_cached_tensors, keep, read_offsets, to_device


class Parts(NamedTuple):
    """The parts of a NestedTensor.

    Attributes:
        values: (N, …), a view of the NestedTensor's values if its sequences are contiguous.
        offsets: the offsets of the NestedTensor.
        facts: what was read from them; None in a graph. There may be fewer tokens than N.
        rewrap: converts (N, …) to a NestedTensor of the same kind, with the same offsets and ragged dimension. If its
            second argument is True, the ragged dimension is 1.
    """

    values: Tensor
    offsets: Tensor
    facts: Facts | None
    rewrap: Callable[..., Tensor]


_no_torch_function = without_torch_function


def are_nested(*tensors: object) -> list[bool]:
    with _no_torch_function():
        return [isinstance(x, Tensor) and x.is_nested for x in tensors]


def take_apart(*, for_weights: bool = True, **named: Tensor) -> tuple[Parts, ...]:
    """The parts of NestedTensors (B, j, …) or (B, H, j, D), jagged or strided.

    If the sequences of a jagged NestedTensor are contiguous from row 0, its values are a view. If not (it has `lengths`
    with holes, or its offsets begin later), the tokens are copied, and `rewrap` restores the rows, with 0 in the holes.
    The sequences of a strided NestedTensor are concatenated. Syncs once for each new offsets tensor, and once for each
    new lengths tensor. An object that is passed twice is unwrapped once.

    Args:
        for_weights: whether the values will be multiplied by parameters. The backward pass then needs the values even
            if the NestedTensor requires no gradient, so they share its version counter.
        named: the NestedTensors, each as the keyword argument that error messages should name.

    Raises:
        ValueError: the ragged dimension is not 1 or 2, sequences overlap.
        TypeError: a NestedTensor is strided in torch.compile.
        RuntimeError: torch.jit.trace or make_fx is tracing.
    """
    if enters_graph():
        return _unwrap_in_graph(named)
    with _no_torch_function():
        jagged = {id(x): x for x in named.values() if isinstance(x, NestedTensor)}
        may_save = for_weights or any(x.requires_grad for x in jagged.values())
        values = dict(zip(jagged, _values(*jagged.values(), may_save=may_save), strict=True))
        read: dict[int, Facts] = {}
        done: dict[int, Parts] = {}
        for name, x in named.items():
            at = id(x)
            if at not in done:
                done[at] = _unwrap_jagged(x, values[at], name, read) if at in values else _unwrap_strided(x, name)
        return tuple([done[id(x)] for x in named.values()])


def unwrap(nested: Tensor) -> Parts:
    """`take_apart` of one NestedTensor.

    Raises:
        TypeError: `nested` is not a NestedTensor.
    """
    if not any(are_nested(nested)):
        what = f"a dense tensor {tuple(nested.shape)}" if isinstance(nested, Tensor) else type(nested).__name__
        raise TypeError(
            f"nested must be a NestedTensor, got {what}: make one with torch.nested.nested_tensor(sequences, "
            "layout=torch.jagged), or make a layout with SequenceLayout.from_lengths(lengths)."
        )
    return take_apart(nested=nested)[0]


def wrap(
    values: Tensor, offsets: Tensor, facts: Facts, *, ragged_dim: int = 1, max_seqlen: int | None = None
) -> Tensor:
    """A jagged NestedTensor with these offsets, as a view of `values` (N, …).

    It is (B, j, …); with the ragged dimension 2, it is (B, H, j, D).
    """
    longest = facts.max_seqlen if max_seqlen is None else max_seqlen
    # In inference mode, nested_from_jagged raises an error for other than inference tensors.
    if torch.is_inference_mode_enabled() and not is_compiling():
        return _jagged(values, offsets, None, ragged_dim, facts, longest)
    values = values if ragged_dim == 1 else values.movedim(0, ragged_dim - 1)
    return nested_from_jagged(values, offsets, None, ragged_dim, facts.min_seqlen, longest)


def _unwrap_jagged(nested: Any, values: Tensor, name: str, read: dict[int, Facts]) -> Parts:
    """Unwrap a jagged NestedTensor. `read` maps the id of offsets to their facts, and may be extended."""
    offsets, lengths, ragged_dim = nested.offsets(), nested.lengths(), ragged_dim_of(nested)
    if ragged_dim not in (1, 2) or (ragged_dim == 2 and values.dim() != 3):
        raise ValueError(
            f"{name} is ragged in dimension {ragged_dim} of {values.dim() + 1}: pass (B, j, …) or (B, H, j, D), "
            f"for example by transposing dimensions 1 and {ragged_dim}."
        )
    values = values if ragged_dim == 1 else values.movedim(ragged_dim - 1, 0)
    rows = values.shape[0]
    facts = read.get(id(offsets))
    if facts is None:
        facts = read[id(offsets)] = read_offsets(offsets).facts
    index = None
    if lengths is not None or facts.first:
        facts, index = _tokens_among_rows(offsets, facts, lengths, rows, name)
        values = values.index_select(0, index)
    elif rows < facts.total:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but its {len(facts.host) - 1} sequences have {facts.total} "
            f"tokens: pass at least {facts.total} rows."
        )

    def rewrap(result: Tensor, tokens_first: bool = False) -> Tensor:
        if index is not None:
            result = result.new_zeros(rows, *result.shape[1:]).index_copy(0, index, result)
        return _jagged(result, offsets, lengths, 1 if tokens_first else ragged_dim, facts, facts.max_seqlen)

    return Parts(values, offsets, facts, rewrap)


def _unwrap_in_graph(named: dict[str, Any]) -> tuple[Parts, ...]:
    """`take_apart` in a graph, with public operations. NestedTensors with the same ragged size share offsets."""
    done: list[tuple[Any, Parts]] = []
    for name, x in named.items():
        if x.layout != torch.jagged:
            raise TypeError(
                f"{name} is a strided NestedTensor, which torch.compile does not support: make it with "
                "layout=torch.jagged."
            )
        if x.lengths() is not None:
            raise ValueError(f"{name} has holes between its sequences: call contiguous() on it outside of the graph.")
        same = next((u for y, u in done if y is x), None)
        offsets = next((u.offsets for y, u in done if y.size(ragged_dim_of(y)) == x.size(ragged_dim_of(x))), None)
        done.append((x, same if same is not None else _unwrap_one_in_graph(x, offsets)))
    return tuple([u for _, u in done])


def _unwrap_one_in_graph(nested: Any, same: Tensor | None) -> Parts:
    values, offsets, ragged_dim = nested.values(), nested.offsets(), ragged_dim_of(nested)
    extremes = extremes_in_graph(nested)

    def rewrap(result: Tensor, tokens_first: bool = False) -> Tensor:
        dim = 1 if tokens_first else ragged_dim
        result = result if dim == 1 else result.movedim(0, dim - 1)
        return nested_from_jagged(result, offsets, None, dim, *extremes)

    values = values if ragged_dim == 1 else values.movedim(ragged_dim - 1, 0)
    return Parts(values, offsets if same is None else same, None, rewrap)


def _values(*nested: Tensor, may_save: bool = True) -> tuple[Tensor, ...]:
    """`x.values()` of each NestedTensor, three times as fast and as one autograd node."""
    if not may_save or not torch.is_grad_enabled():
        return tuple([nested_values_of(x).detach() for x in nested])
    differentiable = [x for x in nested if x.requires_grad]
    values = iter(_Values.apply(*differentiable) if differentiable else ())
    return tuple([next(values) if x.requires_grad else _detached_values(x) for x in nested])


def _detached_values(nested: Any) -> Tensor:
    """The detached values, with the version counter of `nested`."""
    return share_version_counter(nested, nested_values_of(nested).detach())


class _Form(NamedTuple):
    """Everything in a jagged NestedTensor except its values."""

    offsets: Tensor
    lengths: Tensor | None
    ragged_dim: int
    extremes: dict[str, Tensor]  # the cache in a NestedTensor, see `_extremes`

    def wrap(self, values: Tensor) -> Tensor:
        """A detached NestedTensor with these `values`."""
        return make_nested(values, *self)


class _Values(torch.autograd.Function):
    """NestedTensors → their values. Faster than `values()`, which goes through two dispatchers in each direction."""

    @staticmethod
    def forward(ctx: Any, *nested: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.forms = [_Form(x.offsets(), x.lengths(), ragged_dim_of(x), extremes_of(x)) for x in nested]
        return tuple([_detached_values(x) for x in nested])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        each = zip(grads, ctx.forms, ctx.needs_input_grad, strict=True)
        return tuple([None if grad is None or not wanted else _Values._wrap(grad, form) for grad, form, wanted in each])

    @staticmethod
    def _wrap(grad: Tensor, form: _Form) -> Tensor:
        if torch.is_grad_enabled():  # with create_graph=True, the gradient may be differentiated
            return nested_from_jagged(grad, form.offsets, form.lengths, form.ragged_dim)
        return form.wrap(grad)


class _Nested(torch.autograd.Function):
    """Values → a NestedTensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, form: _Form) -> Tensor:
        ctx.set_materialize_grads(False)
        return share_version_counter(values, form.wrap(values.detach()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None]:
        return None if grad is None else _values(grad)[0], None


def _jagged(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged_dim: int, facts: Facts, max_seqlen: int
) -> Tensor:
    """`nested_from_jagged` of `values` (N, …), three times as fast.

    The result has the minimum and maximum of its lengths cached, so that later operations need no sync to compute them.
    """
    with _no_torch_function():
        values = values if ragged_dim == 1 else values.movedim(0, ragged_dim - 1)
        extremes = facts.cache.find_or_build(("extremes", max_seqlen), lambda: _extremes(facts, max_seqlen))
        form = _Form(offsets, lengths, ragged_dim, extremes)
        if torch.is_grad_enabled() and values.requires_grad:
            return cast(Tensor, _Nested.apply(values, form))
        return form.wrap(values.detach())


def _extremes(facts: Facts, max_seqlen: int) -> dict[str, Tensor]:
    """The longest and shortest length, as NestedTensor stores them: as the sizes of empty tensors."""
    offsets = facts.device_offsets
    values = torch.empty(0, 0, device=offsets.device)
    return dict(extremes_of(nested_from_jagged(values, offsets, None, 1, facts.min_seqlen, max_seqlen)))


def _tokens_among_rows(
    offsets: Tensor, facts: Facts, lengths: Tensor | None, rows: int, name: str
) -> tuple[Facts, Tensor]:
    """The facts of the tokens, and their rows (T,), of a NestedTensor with holes, or whose offsets begin later."""
    begins = facts.host[:-1]

    def read() -> tuple[Facts, Tensor, Tensor]:
        counts = facts.host.diff() if lengths is None else lengths.detach().to("cpu", torch.int64)
        with creating_cached_tensors():
            tokens = Facts.of_lengths(counts.clamp(min=0).numpy(), offsets.device)
            index = np.arange(tokens.total) + (begins - tokens.host[:-1]).numpy().repeat(counts.clamp(min=0).numpy())
        return tokens, to_device(index, offsets.device), begins + counts

    key = "token rows"
    tokens, index, ends = facts.cache.find_or_build(key, read) if lengths is None else keep(lengths, (key, facts), read)
    wrong = (ends < begins) | (ends > torch.cat([begins[1:], torch.tensor([rows], device="cpu")]))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        limit = int(begins[at + 1]) if at + 1 < len(begins) else rows
        raise ValueError(
            f"sequence {at} of {name} has the rows {int(begins[at])} to {int(ends[at])}, but the next sequence begins, "
            f"or the values end, at row {limit}: sequences must not overlap."
        )
    return tokens, index


def _unwrap_strided(nested: Tensor, name: str) -> Parts:
    """Unwrap a strided NestedTensor: (B, j, …), or (B, H, j, D) if its shapes only differ in j."""
    parts = list(nested.unbind()) if nested.size(0) else []
    if not parts:
        raise ValueError(
            f"{name} is a strided NestedTensor without sequences, so its shape is unknown: pass at least one sequence."
        )
    token_dim = _strided_token_dim([tuple(part.shape) for part in parts], name)
    values = torch.cat([part.movedim(token_dim, 0) for part in parts])
    lengths = [part.shape[token_dim] for part in parts]
    facts = Facts.of_lengths(np.array(lengths), nested.device)

    def rewrap(result: Tensor, tokens_first: bool = False) -> Tensor:
        dim = 0 if tokens_first else token_dim
        pieces = [piece.movedim(0, dim) for piece in result.split(lengths)]
        return torch.nested.as_nested_tensor(pieces, layout=torch.strided)

    return Parts(values, facts.device_offsets, facts, rewrap)


def _strided_token_dim(shapes: list[tuple[int, ...]], name: str) -> int:
    if len(shapes[0]) < 3:
        return 0
    varying = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
    if varying in ([0], [1]):
        return varying[0]
    raise ValueError(
        f"{name} is a strided NestedTensor of shapes such as {shapes[0]}, which do not show whether dimension 1 or 2 "
        "is ragged: make it with layout=torch.jagged."
    )
