"""FlashAttention-4 (Zadouri et al. 2026), `flash_attn.cute` of the `flash-attn-4` package.

Kernels are compiled on first use, which takes a few seconds for each kind of call.
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 caches them on disk. Version 4.0.0b36 computes wrong gradients of the queries
at head dims 16 and 80 on Hopper without an error, and fails at head dim 64 with values of 128. So it is only called
with head dims that were verified.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...layouts.cache import to_device
from ...layouts.tree import BLOCK, TreeLayout
from .. import device
from ..backend import COMMON, Backend, BackwardInputs, Gradients, HeadDims, Hooks
from ..call import AttentionSpec, Call
from ..device import no_cuda
from .flash import HALVES
from .flash_attn_4_launch import LaunchAgain


@functools.cache
def missing() -> str | None:
    if (reason := no_cuda()) is not None:
        return reason
    package = importlib.util.find_spec("flash_attn")
    folders = package.submodule_search_locations if package is not None else None
    if not any(os.path.isdir(os.path.join(folder, "cute")) for folder in folders or ()):
        return "flash-attn-4 is not installed: pip install flash-attn-4."
    if importlib.util.find_spec("cutlass") is None:
        return "flash-attn-4 needs nvidia-cutlass-dsl, which is not installed: pip install nvidia-cutlass-dsl."
    return None


def refuses(spec: AttentionSpec) -> list[str]:
    """Gradients of grouped heads at (192, 128), to which these head dims are padded, are not verified."""
    reasons, is_grouped = device.too_old(spec, 9, 0), spec.num_heads != spec.num_kv_heads
    if spec.needs_grad and is_grouped and 128 < spec.head_dim <= 192 and spec.value_dim <= 128:
        dims = f"head dim {spec.head_dim} with values of {spec.value_dim}"
        reasons.append(f"gradients of grouped heads at {dims} are not supported: pass another backend.")
    return reasons


def _options(call: Call) -> dict[str, Any]:
    layout, key_layout, _, spec, *_ = call
    left, right = (None if side < 0 else side for side in spec.window.sizes)
    return {
        "cu_seqlens_q": layout.device_offsets,
        "cu_seqlens_k": key_layout.device_offsets,
        "max_seqlen_q": layout.max_seqlen,
        "max_seqlen_k": key_layout.max_seqlen,
        "softmax_scale": spec.scale,
        "causal": spec.is_causal,
        "softcap": spec.softcap,
        "window_size_left": left,
        "window_size_right": right,
    }


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, ...]:
    with device.current(query.device):
        return _tokens_first(*_forward(_options(call), out, query, key, value))


def prepare_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Callable[..., tuple[Tensor, ...]]:
    launch = LaunchAgain(functools.partial(_forward, _options(call), None))

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        with device.current(query.device):
            return _tokens_first(*launch(query, key, value))

    return run


def _forward(options: dict[str, Any], out: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_fwd

    results: tuple[Tensor, ...] = _flash_attn_fwd(*inputs, **options, return_lse=True, out=out)
    return results[:2]


def _tokens_first(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.transpose(0, 1)


def backward(
    saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call, dq: Tensor | None = None
) -> Gradients:
    grad, grad_lse, out, lse, _ = saved
    grad_lse = None if grad_lse is None else grad_lse.transpose(0, 1).contiguous()
    options = _options(call) | {"deterministic": call.spec.deterministic, "dlse": grad_lse, "dq": dq}
    with device.current(query.device):
        return _backward(options, query, key, value, out, grad, lse.transpose(0, 1).contiguous())


def prepare_backward(
    saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> Callable[..., Gradients]:
    options = _options(call) | {"deterministic": call.spec.deterministic}
    launch = LaunchAgain(functools.partial(_backward, options))

    def run(saved: BackwardInputs, *inputs: Tensor) -> Gradients:
        with device.current(inputs[0].device):
            return launch(*inputs, saved.out, saved.grad, saved.lse.transpose(0, 1).contiguous())

    return run


def _backward(options: dict[str, Any], *tensors: Tensor) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    grads: Gradients = _flash_attn_bwd(*tensors, **options)
    return grads[:3]


def takes_tree(spec: AttentionSpec) -> bool:
    """Whether the kernel can have the mask of a tree. Verified on Hopper for these head dims."""
    is_verified = spec.head_dim == spec.value_dim and spec.head_dim in (64, 128) and not spec.softcap
    in_order = spec.deterministic and spec.needs_grad
    return is_verified and not in_order and torch.cuda.get_device_capability(spec.device)[0] == 9


def _tree_options(tree: TreeLayout, spec: AttentionSpec, backward: bool) -> dict[str, Any]:
    from .flash_attn_4_mask import tree_mask

    return {
        "softmax_scale": spec.scale,
        "mask_mod": tree_mask,
        "aux_tensors": [tree.cached("end in int32", lambda: tree.end.to(torch.int32))],
        "block_sparse_tensors": tree.cached(("blocks", backward), lambda: _blocks(tree, backward)),
    }


def _blocks(tree: TreeLayout, by_key: bool) -> Any:
    """The blocks of queries and keys that need the mask, and those that are visible as a whole.

    Their numbers and indices are listed for each block of queries, or of keys.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    lists: list[Tensor] = []
    for is_in in tree.blocks():
        each = to_device(np.ascontiguousarray(is_in.T if by_key else is_in), tree.device)
        order = each.logical_not().to(torch.int8).argsort(dim=1, stable=True)
        lists += [each.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]]
    return BlockSparseTensorsTorch(*lists, block_size=(BLOCK, BLOCK))


def tree_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_fwd

    tree: Any = call.layout
    inputs = [x[: tree.total].unsqueeze(0) for x in (query, key, value)]
    with device.current(query.device):
        out, lse, *_ = _flash_attn_fwd(*inputs, **_tree_options(tree, call.spec, False), return_lse=True)
    return out[0], lse[0].transpose(0, 1)


def tree_backward(saved: BackwardInputs, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    tree: Any = call.layout
    inputs = [x[: tree.total].unsqueeze(0) for x in (query, key, value, saved.out, saved.grad)]
    lse = saved.lse[: tree.total].transpose(0, 1).contiguous().unsqueeze(0)
    with device.current(query.device):
        grads = _flash_attn_bwd(*inputs, lse, **_tree_options(tree, call.spec, True))
    return grads[0][0], grads[1][0], grads[2][0]


BACKEND = Backend(
    name="flash_attn_4",
    about="FlashAttention-4 of the flash-attn-4 package (Hopper and later, 16-bit)",
    missing=missing,
    forward=forward,
    backward=backward,
    features=COMMON | {"window", "softcap", "deterministic"},
    device_type="cuda",
    dtypes=HALVES,
    refuses=refuses,
    head_dims=HeadDims(256, only=((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))),
    traits={"lower_right_only", "reads_past_end", "aligned_rows", "takes_outputs", "lse_gradient", "takes_parts"},
    hooks=Hooks(
        prepare_forward, prepare_backward, takes_tree=takes_tree, tree_forward=tree_forward, tree_backward=tree_backward
    ),
)
