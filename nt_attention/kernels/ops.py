"""Backends as registered operators, all with one schema, and fakes for them.

An operator takes offsets and numbers, no layout, so that a graph holds nothing else; the layout is found again with the
offsets, without a sync. ``auto`` is one of them: in a graph it chooses when it runs. Differentiation stands above, in
``kernels/run.py``.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout
from . import flops, passes
from .spec import AttentionSpec, Backend, Problem

LIBRARY = torch.library.Library("nt_attention", "FRAGMENT")
_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor key_cu_seqlens, Tensor? alibi_slopes, "
    "float scale, bool is_causal, bool lower_right, int window_left, int window_right, float softcap, float dropout_p, "
    "bool deterministic, bool batch_invariant, bool needs_grad"
)
# Lengths are read on the host, so compilers must not record these into CUDA graphs of their own accord. Whoever
# captures one by hand warms up on the layout first, and keeps it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def register(backend: Backend) -> None:
    """Define ``nt_attention::<name>_forward`` and ``_backward``: complete, whatever the kernel itself lacks."""
    assert backend.backward is not None
    _define(backend.name, _CALL, lambda problem: backend, "dropout" in backend.features, backend.rng_on_host)


def register_auto(choose: Callable[[Problem, str], Backend]) -> None:
    """Define ``nt_attention::auto_forward`` and ``_backward``, which choose when they run."""
    _define("auto", f"{_CALL}, str backend", choose, random=True, rng_on_host=False)


def _define(name: str, call: str, backend_for: Callable[..., Backend], random: bool, rng_on_host: bool) -> None:

    def run_forward(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs = passes.Inputs(query, key, value)
        problem, asked = _problem(*inputs, *call)
        backend = backend_for(problem, *asked)
        out, lse, state = passes.forward(backend, inputs, problem)
        if state is None:
            state = torch.empty(0, dtype=torch.int64, device=query.device)
        return out, lse, state if rng_on_host == backend.rng_on_host else state.to(query.device)

    def run_backward(
        grad: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *call: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        problem, asked = _problem(query, key, value, *call)
        backend = backend_for(problem, *asked)
        if backend.rng_on_host:
            state = state.cpu()
        return passes.backward(backend, grad, grad_lse, out, lse, state, passes.Inputs(query, key, value), problem)

    for suffix, schema, function, fake in (
        (
            "forward",
            f"({call}) -> (Tensor out, Tensor lse, Tensor rng_state)",
            run_forward,
            functools.partial(_fake_forward, rng_on_host),
        ),
        (
            "backward",
            f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor rng_state, {call}) "
            "-> (Tensor, Tensor, Tensor)",
            run_backward,
            _fake_backward,
        ),
    ):
        tags = (*_TAGS, torch.Tag.nondeterministic_seeded) if random and suffix == "forward" else _TAGS
        LIBRARY.define(f"{name}_{suffix}{schema}", tags=tags)
        LIBRARY.impl(f"{name}_{suffix}", function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nt_attention::{name}_{suffix}", fake, lib=LIBRARY)


@dataclass(frozen=True)
class Operator:
    """A backend, or None for the one that is chosen when a graph runs, for what was ``asked``.

    It is called as an operator where somebody looks at operators, and directly where nobody does, which is 40 µs of
    host time less.
    """

    backend: Backend | None
    asked: str = "auto"

    def forward(self, inputs: passes.Inputs, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """out (T, H, Dv), lse (T, H), and the state of the random numbers, None or empty where none were drawn."""
        if self.backend is not None and not _is_watched(inputs.query):
            return passes.forward(self.backend, inputs, problem)
        return self._operator("forward")(*inputs, *_call(problem), *self._last())

    def backward(
        self,
        grad: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        state: Tensor | None,
        inputs: passes.Inputs,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""
        if self.backend is not None and not _is_watched(grad):
            return passes.backward(self.backend, grad, grad_lse, out, lse, state, inputs, problem)
        if state is None:
            state = grad.new_empty(0, dtype=torch.int64)
        operator = self._operator("backward")
        return operator(grad, grad_lse, out, lse, state, *inputs, *_call(problem), *self._last())

    def _last(self) -> tuple[str, ...]:
        return (self.asked,) if self.backend is None else ()

    def _operator(self, direction: str) -> Callable[..., Any]:
        name = "auto" if self.backend is None else self.backend.name
        if not torch.compiler.is_compiling():
            flops.register(name)
        return getattr(torch.ops.nt_attention, f"{name}_{direction}").default


def _is_watched(x: Tensor) -> bool:
    """Whether a compiler, a dispatch mode, a function transform or a tensor subclass wants to see operators."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def _call(problem: Problem) -> tuple[object, ...]:
    """What ``_CALL`` has after query, key and value."""
    layout, key_layout, slopes, spec, _ = problem
    return (
        *(layout.cu_seqlens, key_layout.cu_seqlens, slopes, spec.scale, spec.is_causal, spec.lower_right),
        *(*spec.window_size, spec.softcap, spec.dropout_p, spec.deterministic, spec.batch_invariant, spec.needs_grad),
    )


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    slopes: Tensor | None,
    *call: Any,
) -> tuple[Problem, tuple[str, ...]]:
    """What ``_call`` was made from, and whatever follows it."""
    options, asked = call[:10], call[10:]
    layout = SequenceLayout.from_offsets(cu_seqlens)
    key_layout = layout if key_cu_seqlens is cu_seqlens else SequenceLayout.from_offsets(key_cu_seqlens)
    shape = (*query.shape[1:], *value.shape[1:])
    keys = (layout is key_layout or layout.same_lengths(key_layout), key_layout.min_seqlen)
    spec = _spec(query.device, query.dtype, shape, slopes is not None, keys, *options)
    return Problem(layout, key_layout, slopes, spec), asked


@functools.lru_cache(maxsize=1024)
def _spec(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    alibi: bool,
    keys: tuple[bool, int],
    scale: float,
    is_causal: bool,
    lower_right: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    batch_invariant: bool,
    needs_grad: bool,
) -> AttentionSpec:
    num_heads, head_dim, num_kv_heads, value_dim = shape
    equal_lengths, min_keys = keys
    return AttentionSpec(
        device=device,
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=scale,
        is_causal=is_causal,
        causal_alignment="lower_right" if lower_right else "upper_left",
        window_size=(window_left, window_right),
        softcap=softcap,
        alibi=alibi,
        dropout_p=dropout_p,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        needs_grad=needs_grad,
        equal_lengths=equal_lengths,
        min_keys=min_keys,
    )


def _fake_forward(
    rng_on_host: bool, query: Tensor, key: Tensor, value: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dropout_p = call[8]
    out = query.new_empty(*query.shape[:2], value.shape[2])
    state_device = "cpu" if rng_on_host and dropout_p else query.device
    state = torch.empty(2 if dropout_p else 0, dtype=torch.int64, device=state_device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=dtype).T  # as flash kernels write it
    return out, lse, state


def _fake_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, state: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = passes.readable(*call[:3])
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
