"""Torch's in-tree flash attention for packed 16-bit tensors on CUDA: ``aten::_flash_attention_forward``.

Whatever implementation has been activated with ``torch.nn.attention.activate_flash_attention_impl`` answers that
operator in its place, and raises on what it lacks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ..call import COMMON, AttentionSpec, Backend, Gradients, Known, Problem
from ..device import no_cuda
from .flash import HALVES, heads_first, longest, tokens_first, window


@functools.cache
def missing() -> str | None:
    if (reason := no_cuda()) is not None:
        return reason
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention: install one that has."
    return None


def refuses(spec: AttentionSpec) -> list[str]:
    activated = current_flash_attention_impl()
    if activated is None:
        return []
    return [
        f"{activated} is activated in its place, and what that gets right was not run here: call "
        "torch.nn.attention.restore_flash_attention_impl()."
    ]


def _options(spec: AttentionSpec) -> dict[str, float | int | None]:
    left, right = (None if side < 0 else side for side in window(spec))
    return {"scale": spec.scale, "window_size_left": left, "window_size_right": right}


def _sequences(problem: Problem) -> tuple[Tensor, Tensor, int, int, float, bool]:
    layout, key_layout, _, spec, _ = problem
    offsets = (layout.cu_seqlens, key_layout.cu_seqlens)
    return (*offsets, longest(layout), longest(key_layout), spec.dropout_p, spec.is_causal)


def forward(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    spec = problem.spec
    out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *_sequences(problem), False, **_options(spec)
    )
    lse = tokens_first(lse, spec)
    return (out, lse, rng_state.view(torch.int64)) if spec.dropout_p else (out, lse)


def backward(known: Known, query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> Gradients:
    grad, _, out, lse, rng_state = known
    spec = problem.spec
    if rng_state is None or not spec.dropout_p:
        rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    state, unused = rng_state.view(torch.uint64), torch.empty(0, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, out, heads_first(lse, spec)), *_sequences(problem), state, unused, **_options(spec)
    )


BACKEND = Backend(
    name="torch_flash",
    about="torch's in-tree FlashAttention-2 (CUDA, 16-bit)",
    missing=missing,
    forward=forward,
    backward=backward,
    features=COMMON | {"window", "dropout"},
    device_type="cuda",
    min_capability=(8, 0),
    dtypes=HALVES,
    max_head_dim=256,
    head_dim_multiple=8,
    compiled_for=(32, 64, 96, 128, 192, 256),
    one_head_dim=True,
    refuses=refuses,
    lower_right_only=True,
)
