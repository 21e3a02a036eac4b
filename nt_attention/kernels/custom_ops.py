"""Backends as registered operators, all with one schema, and fakes for them.

An operator takes offsets and numbers, no layout, so that a graph holds nothing else; the layout is found again with the
offsets, without a sync. ``auto`` is one of them: in a graph it chooses when it runs. Differentiation stands above, in
``kernels/autograd.py``.

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
from . import adapters, flops
from .call import AttentionSpec, Backend, Gradients, Known, Problem, check_shapes, check_slopes

LIBRARY = torch.library.Library("nt_attention", "FRAGMENT")
_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor key_cu_seqlens, Tensor? alibi_slopes, "
    "float scale, bool is_causal, bool lower_right, int window_left, int window_right, float softcap, float dropout_p, "
    "bool deterministic, bool batch_invariant, bool needs_grad"
)
_OPTIONS = [argument.split()[1] for argument in _CALL.split(", ")][3:]  # what follows query, key and value
_GRADS = "Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor rng_state"
# Lengths are read on the host, so compilers must not record these into CUDA graphs of their own accord. Whoever
# captures one by hand warms up on the layout first, and keeps it.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def register(backend: Backend) -> None:
    """Define ``nt_attention::<name>_forward`` and ``_backward``: complete, whatever the kernel itself lacks."""
    assert backend.backward is not None

    def forward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(backend, adapters.Inputs(*call[:3]), _problem(*call))

    def backward(*arguments: Any) -> Gradients:
        known, call = _known(*arguments[:8]), arguments[5:]
        return adapters.backward(backend, known, adapters.Inputs(*call[:3]), _problem(*call))

    fake = functools.partial(_fake_forward, backend.rng_on_host)
    random = "dropout" in backend.features
    _define(f"{backend.name}_forward({_CALL}) -> (Tensor out, Tensor lse, Tensor rng_state)", forward, fake, random)
    _define(f"{backend.name}_backward({_GRADS}, {_CALL}) -> (Tensor, Tensor, Tensor)", backward, _fake_backward)
    _differentiate(backend.name)


def register_auto(choose: Callable[[Problem, str], int], at: Callable[[int, Problem], Backend]) -> None:
    """Define ``nt_attention::auto_forward``, which chooses when it runs, and ``_backward``, which is told the choice.

    ``choose`` gives a backend's place on a list, ``at`` the backend in that place, if it can run the call. ``chosen``
    (3,) int64, on the host, holds the place and the digests of both layouts, by which the backward knows whether their
    offsets were changed.
    """

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *call, asked = arguments
        inputs, problem = adapters.Inputs(*call[:3]), _problem(*call)
        place = choose(problem, asked)
        out, lse, state = _forward(at(place, problem), inputs, problem)
        chosen = torch.tensor([place, problem.layout.digest, problem.key_layout.digest], device="cpu")
        return out, lse, state.to(inputs.query.device), chosen

    def backward(*arguments: Any) -> Gradients:
        known, call = _known(*arguments[:8]), arguments[5:-1]
        place, *digests = arguments[-1].tolist()
        problem = _problem(*call)
        backend = at(place, problem)
        if digests != [problem.layout.digest, problem.key_layout.digest]:  # not all compilers check what they save
            raise RuntimeError(
                "the offsets of a layout, which are needed for gradient computation, have been modified by an inplace "
                "operation since the forward: pass a copy of them, offsets.clone(), to each forward."
            )
        if backend.rng_on_host:
            known = known._replace(rng_state=arguments[4].cpu())
        return adapters.backward(backend, known, adapters.Inputs(*call[:3]), problem)

    def fake(*call: Any) -> tuple[Tensor, ...]:
        return (*_fake_forward(False, *call), torch.empty(3, dtype=torch.int64, device="cpu"))

    results = "Tensor out, Tensor lse, Tensor rng_state, Tensor chosen"
    _define(f"auto_forward({_CALL}, str backend) -> ({results})", forward, fake, random=True)
    _define(f"auto_backward({_GRADS}, {_CALL}, Tensor chosen) -> (Tensor, Tensor, Tensor)", backward, _fake_backward)
    _differentiate("auto")


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any], random: bool = False) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(*_TAGS, torch.Tag.nondeterministic_seeded) if random else _TAGS)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nt_attention::{name}", fake, lib=LIBRARY)


def _differentiate(name: str) -> None:
    """Give ``<name>_forward`` its gradient, for graphs that hold the operator itself, as export and make_fx record it.

    Calls of ours have theirs from ``kernels/autograd.py``, above the operator.
    """
    arguments = len(_OPTIONS) + 3  # of the call; auto has one more, which its backward does not take

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.given = len(inputs)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs[:arguments]]
        tensors = [x if isinstance(x, Tensor) else None for x in inputs[:arguments]]
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        tensors, (out, lse, state, *told) = ctx.saved_tensors[:arguments], ctx.saved_tensors[arguments:]
        call = [number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)]
        call[3 + _OPTIONS.index("needs_grad")] = True
        grad = torch.zeros_like(out) if grad is None else grad
        operator = getattr(torch.ops.nt_attention, f"{name}_backward").default
        grads = operator(grad, grad_lse, out, lse, state, *call, *told)
        return (*grads, *[None] * (ctx.given - 3))

    torch.library.register_autograd(f"nt_attention::{name}_forward", backward, setup_context=setup_context, lib=LIBRARY)


def _forward(backend: Backend, inputs: adapters.Inputs, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, state = adapters.forward(backend, inputs, problem)
    return out, lse, out.new_empty(0, dtype=torch.int64) if state is None else state


@dataclass(frozen=True)
class Operator:
    """A backend, or None for the one that is chosen when a graph runs, for what was ``asked``.

    It is called as an operator where somebody looks at operators, and directly where nobody does, which is 40 µs of
    host time less.
    """

    backend: Backend | None
    asked: str = "auto"

    def forward(self, inputs: adapters.Inputs, problem: Problem) -> tuple[Any, ...]:
        """out (T, H, Dv), lse (T, H), the random numbers' state or None, and what else the backward is to be told."""
        if self.backend is None:
            return self._operator("forward")(*inputs, *_call(problem), self.asked)
        if not _is_watched(*inputs):
            return adapters.forward(self.backend, inputs, problem)
        return self._operator("forward")(*inputs, *_call(problem))

    def backward(self, known: Known, told: tuple[Any, ...], inputs: adapters.Inputs, problem: Problem) -> Gradients:
        """The gradients. ``told``: what else the forward gave."""
        if self.backend is not None and not _is_watched(known.grad, *inputs):
            return adapters.backward(self.backend, known, inputs, problem)
        if known.rng_state is None:
            known = known._replace(rng_state=known.out.new_empty(0, dtype=torch.int64))
        return self._operator("backward")(*known, *inputs, *_call(problem), *told)

    def _operator(self, direction: str) -> Callable[..., Any]:
        name = "auto" if self.backend is None else self.backend.name
        if not torch.compiler.is_compiling():
            flops.register(name)
        return getattr(torch.ops.nt_attention, f"{name}_{direction}").default


def _is_watched(*tensors: Tensor) -> bool:
    """Whether a compiler, a dispatch mode, a function transform or a tensor subclass wants to see operators."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any(type(x) not in _PLAIN or x.is_meta for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _call(problem: Problem) -> tuple[object, ...]:
    """What ``_CALL`` has after query, key and value."""
    layout, key_layout, slopes, spec, _ = problem
    return (
        *(layout.cu_seqlens, key_layout.cu_seqlens, slopes, spec.scale, spec.is_causal, spec.lower_right),
        *(*spec.window_size, spec.softcap, spec.dropout_p, spec.deterministic, spec.batch_invariant, spec.needs_grad),
    )


def _known(
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    query: Tensor,
    _: Tensor,
    value: Tensor,
) -> Known:
    """What a backward is told, with its shapes checked: kernels would read past the end of others."""
    if not query.dim() == value.dim() == 3:
        raise ValueError(f"query and value must have three dimensions, got {query.dim()} and {value.dim()}.")
    of_out, of_lse = (*query.shape[:2], value.shape[2]), tuple(query.shape[:2])
    for name, x, shape in (
        *(("grad", grad, of_out), ("out", out, of_out)),
        *(("lse", lse, of_lse), ("grad_lse", grad_lse, of_lse)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}.")
    return Known(grad, grad_lse, out, lse, state)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    slopes: Tensor | None,
    *call: Any,
) -> Problem:
    """What ``_call`` was made from."""
    layout = SequenceLayout.from_offsets(cu_seqlens)
    key_layout = layout if key_cu_seqlens is cu_seqlens else SequenceLayout.from_offsets(key_cu_seqlens)
    layout.check_rows(query, "query")
    key_layout.check_keys(key, value)
    if layout.batch_size != key_layout.batch_size:
        raise ValueError(f"cu_seqlens are of {layout.batch_size} sequences, key_cu_seqlens of {key_layout.batch_size}.")
    if slopes is not None:
        check_slopes(slopes, query.shape[1], layout.batch_size, query.device)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must share a dtype, got {query.dtype}, {key.dtype} and {value.dtype}.")
    shapes = tuple(torch.Size((0, *x.shape[1:])) for x in (query, key, value))  # of any number of tokens
    keys = (layout is key_layout or layout.same_lengths(key_layout), key_layout.min_seqlen == 0)
    spec = _spec(query.device, query.dtype, shapes, slopes is not None, keys, *call)
    return Problem(layout, key_layout, slopes, spec)


@functools.lru_cache(maxsize=1024)
def _spec(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    alibi: bool,
    keys: tuple[bool, bool],
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
    check_shapes(*shapes)
    (_, num_heads, head_dim), (_, num_kv_heads, value_dim) = shapes[0], shapes[2]
    equal_lengths, keyless = keys
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
        keyless=keyless,
    )


def _fake_forward(
    rng_on_host: bool, query: Tensor, key: Tensor, value: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dropout_p = call[_OPTIONS.index("dropout_p")]
    out = query.new_empty(*query.shape[:2], value.shape[2])
    state_device = "cpu" if rng_on_host and dropout_p else query.device
    state = torch.empty(2 if dropout_p else 0, dtype=torch.int64, device=state_device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=dtype).T  # as flash kernels write it
    return out, lse, state


def _fake_backward(*arguments: Any) -> Gradients:
    query, key, value = adapters.readable(*arguments[5:8])
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
