"""Run a call whose sequences share prefixes, on any backend. `call.layout` is a `TreeLayout`.

There are three ways:

- "masked": one call of a kernel that has the mask of the tree (`Hooks.tree_forward`).
- "joined": no key is copied. One call computes the segments alone. For each depth of the tree, a further call without a
  mask computes what follows a segment on its keys. Outputs are joined by their log-sum-exp. The backward of each call
  computes its weights from the output and the log-sum-exp of all keys, so gradients are sums (FlashAttention-2, Dao
  2023, section 2.3.2, for parts of the keys). With several depths, outputs and gradients of queries are added in
  float32 and rounded once, so errors in 16 bits do not grow with the depth.
- "copied": one call, for which the keys of each path are copied. For windows and biases by distance, which a call on
  several sequences at once can't have.

The backward needs the output and the log-sum-exp only, so it may run in another way than the forward.

Dimensions: T rows of the tree, H query heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..compiler import EAGER, call_mode
from ..layouts.tree import BLOCK, TreeLayout
from . import adapters, cost_model, device
from .adapters import Tensors
from .backend import Backend, BackwardInputs, Gradients
from .call import AttentionSpec, Call
from .call_size import CallSize
from .launch import Launch, launch
from .support import head_dims
from .triton_support import block_size, interpreted

_BLOCK = 32  # rows of a program of the kernel that joins
_COLUMNS = 1024  # of a program of the kernel that adds copies
MASKED, JOINED, COPIED = "masked", "joined", "copied"
_TEXTS = {
    MASKED: "one call with the mask of the tree",
    JOINED: "a call for the segments and one for each depth, joined by their log-sum-exp; no keys are copied",
    COPIED: "one call, the keys of each prefix are copied for what continues it",
}


def expected_us(backend: Backend, spec: AttentionSpec, tree: TreeLayout) -> dict[str, float]:
    """The ways in which `backend` can run a call → the expected device time in µs. 0 if nothing is measured."""
    return tree.cached(("ways", backend, spec), lambda: _expected_us(backend, spec, tree))


def way_of(backend: Backend, call: Call) -> str:
    """The way that is expected to be the fastest."""
    times = expected_us(backend, call.spec, tree_of(call))
    return min(times, key=times.__getitem__)


def explain_way(backend: Backend, call: Call) -> str:
    """The way, for people."""
    return f"shared prefixes: {_TEXTS[way_of(backend, call)]}"


def _expected_us(backend: Backend, spec: AttentionSpec, tree: TreeLayout) -> dict[str, float]:
    by_distance = not spec.window.is_causal or spec.has_bias
    if by_distance or spec.batch_invariant or "takes_parts" not in backend.traits or not tree.total:
        ways = [COPIED]
    elif spec.device.type == "cpu":  # copied was never faster: joined reads a prefix once for all that continues it
        ways = [JOINED]
    else:
        ways = [JOINED, COPIED]
        if backend.hooks.takes_tree(spec):
            ways.append(MASKED)
    return {way: _us_of(backend, spec, tree, way) for way in ways}


def _us_of(backend: Backend, spec: AttentionSpec, tree: TreeLayout, way: str) -> float:
    costs = cost_model.tree_costs(backend.name, spec, way)
    if costs is not None:
        return sum(cost * size for cost, size in zip(costs, sizes(spec, tree, way), strict=True))
    calls = _calls(tree, spec, way)
    return sum(cost_model.expected_us(call.spec, CallSize.of(call)).get(backend.name, 0.0) for call in calls)


def sizes(spec: AttentionSpec, tree: TreeLayout, way: str) -> list[float]:
    """The numbers in which the time of a way is linear.

    These are 1, thousands of rows that are read and written, thousands of copied keys, and thousands of computed pairs:
    those in segments and those with prefixes, or those in blocks that need the mask and those in full blocks. All are
    multiplied by the elements of a row.
    """
    heads, key_heads = (n * max(spec.head_dim, spec.value_dim) / 1000 for n in (spec.num_heads, spec.num_kv_heads))
    if way == MASKED:
        masked, full = (BLOCK * BLOCK * int(is_in.sum()) for is_in in tree.blocks())
        return [1.0, heads * tree.total, 0.0, heads * masked, heads * full]
    lengths, keys = tree.segments.host.diff(), tree.paths.host.diff()
    in_segments = int((lengths * (lengths + 1)).sum()) / 2
    with_prefixes = int((lengths * (keys - lengths)).sum())
    calls = 1 if way == COPIED else 1 + len(tree.levels())
    copies = key_heads * tree.paths.total if way == COPIED else 0.0
    return [1.0, heads * tree.total * calls, copies, heads * in_segments, heads * with_prefixes]


def tree_of(call: Call) -> TreeLayout:
    """`call.layout` of a call with a tree."""
    assert isinstance(call.layout, TreeLayout)
    return call.layout


def _calls(tree: TreeLayout, spec: AttentionSpec, way: str) -> list[Call]:
    """The calls of a way: one with copied keys, or that of the segments and one for each depth."""
    spec = replace(spec, tree=False, causal_alignment="lower_right")
    if way == COPIED:
        spec = replace(spec, equal_lengths=False, keyless=tree.paths.min_seqlen == 0)
        return [Call(tree.segments, tree.paths, None, spec)]
    whole = replace(spec, is_causal=False, window_size=(-1, -1), equal_lengths=False, keyless=True)
    segments = Call(tree.segments, tree.segments, None, spec)
    return [segments, *[Call(layout, key_layout, None, whole) for layout, key_layout in tree.levels()]]


def _ready_calls(backend: Backend, call: Call, way: str) -> list[Call]:
    """The same for a backend, kept for all layers of a model."""

    def make() -> list[Call]:
        calls = [
            each._replace(head_dims=head_dims(backend, each.spec), prepared={})
            for each in _calls(tree_of(call), call.spec, way)
        ]
        return [each._replace(is_direct=adapters.is_direct(backend, each, each.head_dims)) for each in calls]

    return tree_of(call).cached((way, backend, call.spec), make)


def with_copied_keys(tensors: Tensors, call: Call, backend: Backend | None = None) -> tuple[Tensors, Call]:
    """The call with a copy of the keys of each path, for a backend if there is one, and its tensors. Differentiable."""
    tree = tree_of(call)
    if backend is None:
        (copied,) = _calls(tree, call.spec, COPIED)
    else:
        (copied,) = _ready_calls(backend, call, COPIED)
    if call.alibi_slopes is not None or call.relative is not None:
        relative = None if call.relative is None else call.relative.map_rows(lambda x: x, tree.keys.expand)
        copied = copied._replace(alibi_slopes=call.alibi_slopes, relative=relative, prepared=None)
    return Tensors(tensors.query, *tree.expand_keys(tensors.key, tensors.value)), copied


def forward(backend: Backend, inputs: Tensors, call: Call) -> tuple[Tensor, Tensor, None]:
    """out (T, H, Dv), lse (T, H). Rows past the tree's total are 0 and −inf."""
    way = way_of(backend, call)
    if way == MASKED:
        assert backend.hooks.tree_forward is not None
        out, lse = backend.hooks.tree_forward(*adapters.readable(backend, *inputs), call)
        rows = len(inputs.query)
        return _with_rows(out, rows), torch.nn.functional.pad(lse.T, (0, rows - len(lse)), value=-torch.inf).T, None
    if way == COPIED:
        out, lse, _ = adapters.forward(backend, *with_copied_keys(inputs, call, backend))
        return out, lse, None
    segments, *levels = _ready_calls(backend, call, way)
    out, lse, _ = adapters.forward(backend, inputs, segments)
    dtype = out.dtype
    out = _exact(out, levels)
    for level in levels:
        out, lse = join(out, lse, *adapters.forward(backend, inputs, level)[:2])
    return out.to(dtype), lse, None


def backward(backend: Backend, saved: BackwardInputs, inputs: Tensors, call: Call) -> Gradients:
    """The gradients, see `adapters.backward`."""
    way = way_of(backend, call)
    if way == MASKED and saved.grad_lse is not None:
        way = JOINED
    if way == COPIED:
        return backward_with_copies(
            lambda x, copied: adapters.backward(backend, saved, x, copied), inputs, call, backend
        )
    if way == MASKED:
        assert backend.hooks.tree_backward is not None
        grad, out, *tensors = adapters.readable(backend, saved.grad, saved.out, *inputs)
        grads = backend.hooks.tree_backward(saved._replace(grad=grad, out=out), *tensors, call)
        return tuple([_with_rows(grad, len(x)) for grad, x in zip(grads, inputs, strict=True)])
    segments, *levels = _ready_calls(backend, call, way)
    of_query, key, value = adapters.backward(backend, saved, inputs, segments)
    query = _exact(of_query, levels)
    for level in levels:  # a key is in one of them, so its gradient is rounded once
        for grad, x in zip((query, key, value), adapters.backward(backend, saved, inputs, level), strict=True):
            grad.add_(x)
    return query.to(of_query.dtype), key, value


def _exact(x: Tensor, levels: Sequence[Call]) -> Tensor:
    """`x`, to which the results of the levels are added: in float32 if it would be rounded after each of several."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if len(levels) > 1 else x


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zeros up to row `rows`."""
    return x if len(x) == rows else torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - len(x)))


def backward_with_copies(
    run: Callable[[Tensors, Call], Gradients], inputs: Tensors, call: Call, backend: Backend | None = None
) -> Gradients:
    """The gradients of the copied way, in which `run` returns those of the call with copied keys."""
    rows = len(inputs.key)
    query, key, value, *of_biases = run(*with_copied_keys(inputs, call, backend))
    grads = (query, _add_copies(call, key, rows), _add_copies(call, value, rows))
    if call.relative is not None and of_biases:
        added = call.relative.with_tensors(of_biases).map_rows(
            lambda grad: grad, lambda grad: _add_copies(call, grad, rows)
        )
        of_biases = list(added.tensors)
    return (*grads, *of_biases)


def _add_copies(call: Call, grad: Tensor, rows: int) -> Tensor:
    """The sum of the copies of each key, (…, G, D) → (rows, G, D). In a fixed order, in float32 or float64."""
    tree = tree_of(call)
    in_kernel = grad.device.type != "cpu" or interpreted()
    if not in_kernel or grad.dtype == torch.float64 or call_mode(grad) != EAGER or not grad.numel():
        return tree.keys.add(grad, rows)
    from . import tree_kernels as kernels

    columns, grad = grad[0].numel(), grad.contiguous()
    sums = grad.new_empty(rows, *grad.shape[1:])
    ends = tree.cached("ends of copies", lambda: tree.keys.counts.cumsum(0))
    grid, constants = (rows, -(-columns // _COLUMNS)), (min(_COLUMNS, block_size(columns)),)
    with device.current(grad.device):
        tensors, integers = (grad, tree.keys.order, ends, sums), (columns, tree.total)
        launch(Launch(kernels.add_kernel, grid, tensors, integers, (), constants, 4, 1))
    return sums


def join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both results: out (T, H, Dv), lse (T, H). May change `out` and `lse`."""
    if out.device.type != "cpu" or interpreted():
        return _join_in_kernel(out, lse, more, more_lse)
    joined = torch.logaddexp(lse, more_lse)
    finite = joined.masked_fill(joined == -torch.inf, 0.0)
    weight, more_weight = ((x - finite).exp().unsqueeze(-1) for x in (lse, more_lse))
    return torch.addcmul(out * weight, more, more_weight).to(out.dtype), joined


def _join_in_kernel(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    from . import tree_kernels as kernels

    rows, heads, dim = out.shape
    if out.numel():
        tensors, integers = (out, lse.T, more, more_lse.T), (rows, out.stride(0), more.stride(0))
        constants, grid = (dim, block_size(dim), _BLOCK), (heads, -(-rows // _BLOCK))
        with device.current(out.device):
            launch(Launch(kernels.join_kernel, grid, tensors, integers, (), constants, 4, 1))
    return out, lse
