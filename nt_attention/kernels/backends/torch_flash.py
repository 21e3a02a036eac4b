"""PyTorch's flash attention for packed 16-bit tensors on CUDA, `aten::_flash_attention_forward`.

`torch.nn.attention.activate_flash_attention_impl` replaces the implementation of this operator. Other implementations
were not verified, so calls are not supported while one is active.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ...torch_private import flash_backward, flash_forward
from .. import bounds
from ..backend import COMMON, Backend, BackwardInputs, Gradients, HeadDims
from ..call import AttentionSpec, Call
from ..device import no_cuda, older_than_ampere
from .flash import HALVES, heads_first, longest, longest_keys, tokens_first


@functools.cache
def missing() -> str | None:
    if (reason := no_cuda()) is not None:
        return reason
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch does not include flash attention: install one that does."
    return None


def refuses(spec: AttentionSpec) -> list[str]:
    reasons, activated = older_than_ampere(spec), current_flash_attention_impl()
    if activated is not None:
        reasons.append(
            f"the flash attention implementation {activated!r} is active, which was not verified: call "
            "torch.nn.attention.restore_flash_attention_impl()."
        )
    if spec.bounded and spec.is_upper_left:
        reasons.append(
            "upper left alignment needs the lengths on the host: make the layout without max_tokens, or pass "
            'causal_alignment="lower_right".'
        )
    return reasons


def _options(spec: AttentionSpec) -> dict[str, float | int | None]:
    left, right = (None if side < 0 else side for side in spec.window.sizes)
    return {"scale": spec.scale, "window_size_left": left, "window_size_right": right}


def _sequences(call: Call) -> tuple[Tensor, Tensor, int, int, float, bool]:
    layout, key_layout, _, spec, *_ = call
    if spec.bounded:
        checked = bounds.check(layout, key_layout)
        offsets = (checked.cu_seqlens, checked.key_cu_seqlens)
    else:
        offsets = (layout.device_offsets, key_layout.device_offsets)
    return (*offsets, longest(layout), longest_keys(call), spec.dropout_p, spec.is_causal)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    spec = call.spec
    out, lse, rng_state, _, _ = flash_forward(query, key, value, *_sequences(call), False, **_options(spec))
    if spec.bounded:
        checked = bounds.check(call.layout, call.key_layout)
        out, lse = bounds.fill_past_end(out, checked.queries), bounds.lse_past_end(lse, checked.queries)
    lse = tokens_first(lse, spec)
    return (out, lse, rng_state.view(torch.int64)) if spec.dropout_p else (out, lse)


def backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    grad, _, out, lse, rng_state = saved
    spec = call.spec
    if rng_state is None or not spec.dropout_p:
        rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    state, unused = rng_state.view(torch.uint64), torch.empty(0, dtype=torch.uint64, device=query.device)
    grads = flash_backward(
        *(grad, query, key, value, out, heads_first(lse, spec)), *_sequences(call), state, unused, **_options(spec)
    )
    if spec.bounded:
        queries, keys = bounds.check(call.layout, call.key_layout)
        return tuple(bounds.fill_past_end(x, side) for x, side in zip(grads, (queries, keys, keys), strict=True))
    return grads


BACKEND = Backend(
    name="torch_flash",
    about="FlashAttention-2 of PyTorch (CUDA, 16-bit)",
    missing=missing,
    forward=forward,
    backward=backward,
    features=COMMON | {"window", "dropout", "bounds"},
    device_type="cuda",
    dtypes=HALVES,
    head_dims=HeadDims(256, multiple=8, equal=True, compiled=(32, 64, 96, 128, 192, 256)),
    refuses=refuses,
    traits={"lower_right_only", "aligned_rows", "takes_parts"},
)
