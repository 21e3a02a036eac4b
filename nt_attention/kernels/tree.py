"""Run a call whose sequences share prefixes, on any backend. `call.layout` is a `TreeLayout`.

There are two ways:

- "joined": no key is copied. One call computes the segments alone. For each depth of the tree, a further call without a
  mask computes what follows a segment on its keys. Outputs are joined by their log-sum-exp. The backward of each call
  computes its weights from the output and the log-sum-exp of all keys, so gradients are sums (FlashAttention-2, Dao
  2023, section 2.3.2, for parts of the keys).
- "copied": one call, for which the keys of each path are copied. For windows and biases by distance, which a call on
  several sequences at once can't have.

Dimensions: T rows of the tree, H query heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layouts.protocol import Layout
from ..layouts.tree import TreeLayout
from . import adapters, cost_model, device
from .adapters import Tensors
from .backend import Backend, BackwardInputs, Gradients
from .call import AttentionSpec, Call
from .call_size import CallSize
from .launch import Launch, launch
from .support import head_dims
from .triton_support import block_size, interpreted

_BLOCK = 32  # rows of a program of the kernel
# Expected device time in µs of a GB that is joined, or copied: that of an H100 with a memory of 3.35 TB/s.
_US_PER_GB = 1e6 / 2800
JOINED, COPIED = "joined", "copied"


def way_of(backend: Backend, call: Call) -> str:
    """How `backend` runs the call: the way that can run it, and is expected to be faster."""
    return tree_of(call).cached(("way", backend.name, call.spec), lambda: _way_of(backend, call))


def explain_way(backend: Backend, call: Call) -> str:
    """The way, for people."""
    if way_of(backend, call) == COPIED:
        return "shared prefixes: one call, the keys of each prefix are copied for what continues it"
    return f"shared prefixes: {1 + len(tree_of(call).levels())} calls, joined by their log-sum-exp; no keys are copied"


def _way_of(backend: Backend, call: Call) -> str:
    spec = call.spec
    by_distance = not spec.window.is_causal or spec.has_bias
    if by_distance or spec.batch_invariant or not backend.takes_parts:
        return COPIED
    if spec.device.type == "cpu":  # was never slower: prefixes are read once for all that continues them
        return JOINED
    times = {way: _expected_us(backend, call, way) for way in (JOINED, COPIED)}
    return min(times, key=times.__getitem__)


def _expected_us(backend: Backend, call: Call, way: str) -> float:
    """The expected device time of a way; without measured times, the bytes that it moves."""
    tree, spec = tree_of(call), call.spec
    parts = [_copied_call(call)] if way == COPIED else _parts(backend, call)
    us = sum(cost_model.expected_us(part.spec, CallSize.of(part)).get(backend.name, 0.0) for part in parts)
    of_keys = spec.num_kv_heads * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
    of_rows = spec.num_heads * spec.value_dim * spec.dtype.itemsize
    if way == COPIED:  # read and write; with gradients, sorted and added as well
        moved = tree.paths.total * of_keys * (8 if spec.needs_grad else 2)
    else:  # read both, write one; with gradients, the gradients of queries and keys as well
        moved = (len(parts) - 1) * tree.total * (3 * of_rows + (3 * (of_rows + of_keys) if spec.needs_grad else 0))
    return us + moved / 1e9 * _US_PER_GB


def tree_of(call: Call) -> TreeLayout:
    """`call.layout` of a call with a tree."""
    assert isinstance(call.layout, TreeLayout)
    return call.layout


def with_copied_keys(tensors: Tensors, call: Call) -> tuple[Tensors, Call]:
    """The call with a copy of the keys of each path, and its tensors. Differentiable."""
    tree = tree_of(call)
    keys = tree.expand_keys(tensors.key, tensors.value)
    return Tensors(tensors.query, *keys), _copied_call(call)


def _copied_call(call: Call) -> Call:
    tree, spec = tree_of(call), call.spec
    keyless = tree.paths.min_seqlen == 0
    spec = replace(spec, tree=False, equal_lengths=False, keyless=keyless, causal_alignment="lower_right")
    relative = None if call.relative is None else call.relative.map_rows(lambda x: x, tree.keys.expand)
    return Call(tree.segments, tree.paths, call.alibi_slopes, spec, None, relative)


def _parts(backend: Backend, call: Call) -> list[Call]:
    """The calls of the joined way: that of the segments, and one for each depth."""
    return tree_of(call).cached(("parts", backend.name, call.spec), lambda: _make_parts(backend, call))


def _make_parts(backend: Backend, call: Call) -> list[Call]:
    tree = tree_of(call)

    def part(layout: Layout, key_layout: Layout, **changed: Any) -> Call:
        spec: AttentionSpec = replace(call.spec, tree=False, causal_alignment="lower_right", **changed)
        made = Call(layout, key_layout, None, spec, head_dims(backend, spec), None, {})
        return made._replace(is_direct=adapters.is_direct(backend, made, made.head_dims))

    whole: Any = {"is_causal": False, "window_size": (-1, -1), "equal_lengths": False, "keyless": True}
    return [part(tree.segments, tree.segments), *[part(*level, **whole) for level in tree.levels()]]


def forward(backend: Backend, inputs: Tensors, call: Call) -> tuple[Tensor, Tensor, None]:
    """out (T, H, Dv), lse (T, H). Rows past the tree's total are 0 and −inf."""
    if way_of(backend, call) == COPIED:
        out, lse, _ = adapters.forward(backend, *with_copied_keys(inputs, call))
        return out, lse, None
    (out, lse, _), *others = [adapters.forward(backend, inputs, part) for part in _parts(backend, call)]
    for more, more_lse, _ in others:
        out, lse = join(out, lse, more, more_lse)
    return out, lse, None


def backward(backend: Backend, saved: BackwardInputs, inputs: Tensors, call: Call) -> Gradients:
    """The gradients, see `adapters.backward`."""
    if way_of(backend, call) == COPIED:
        return backward_with_copies(lambda *given: adapters.backward(backend, saved, *given), inputs, call)
    grads, *others = [adapters.backward(backend, saved, inputs, part) for part in _parts(backend, call)]
    for more in others:
        for grad, x in zip(grads, more, strict=True):
            grad.add_(x)
    return grads


def backward_with_copies(run: Callable[[Tensors, Call], Gradients], inputs: Tensors, call: Call) -> Gradients:
    """The gradients of the copied way, in which `run` returns those of the call with copied keys."""
    tree = tree_of(call)
    query, key, value, *of_biases = run(*with_copied_keys(inputs, call))
    grads = (query, tree.keys.add(key, len(inputs.key)), tree.keys.add(value, len(inputs.value)))
    if call.relative is not None and of_biases:
        added = call.relative.with_tensors(of_biases).map_rows(
            lambda grad: grad, lambda grad: tree.keys.add(grad, len(inputs.key))
        )
        of_biases = list(added.tensors)
    return (*grads, *of_biases)


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
        constants, grid = (dim, block_size(dim), _BLOCK), (-(-rows // _BLOCK), heads)
        with device.current(out.device):
            launch(Launch(kernels.join_kernel, grid, tensors, integers, (), constants, 4, 1))
    return out, lse
