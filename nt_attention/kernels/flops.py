"""What the operators count for ``torch.utils.flop_counter.FlopCounterMode``: the pairs that the mask leaves."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout
from .masks import Window


@functools.cache
def register(name: str) -> None:
    """Tell torch's counter of a backend, at its first call. Not at import: the counter pulls in Triton."""
    from torch.utils import flop_counter
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    formulas = {
        getattr(torch.ops.nt_attention, f"{name}_forward"): forward,
        getattr(torch.ops.nt_attention, f"{name}_backward"): backward,
    }
    for operator, formula in formulas.items():
        flop_counter.register_flop_formula(operator, get_raw=True)(formula)  # type: ignore[arg-type]
    for mode in _get_current_dispatch_mode_stack():  # one that counts already has copied what was known until now
        if isinstance(counter := getattr(mode, "counter", None), flop_counter.FlopCounterMode):
            counter.flop_registry.update({operator: flop_counter.flop_registry[operator] for operator in formulas})


def forward(*call: Any, out_val: Any) -> int:
    """Two matrix products: scores and output. Takes the operator's arguments, and what it gave."""
    query, _, value = call[:3]
    return 2 * _pairs(*call) * (query.shape[2] + value.shape[2])


def backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, state: Tensor, *call: Any, out_val: Any
) -> int:
    """Five: scores again, the gradients of the weights, and of query, key and value."""
    query, _, value = call[:3]
    return 2 * _pairs(*call) * (3 * query.shape[2] + 2 * value.shape[2])


def _pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
    is_causal: bool,
    lower_right: bool,
    window_left: int,
    window_right: int,
    *_: Any,
) -> int:
    """(query, head, key) triples that are computed; for fake offsets, as if all lengths were equal and seen whole."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(cu_seqlens, FakeTensor) or isinstance(key_cu_seqlens, FakeTensor):
        return query.shape[0] * key.shape[0] // max(1, cu_seqlens.shape[0] - 1) * query.shape[1]
    queries, keys = (
        SequenceLayout.from_offsets(offsets).host_offsets.diff() for offsets in (cu_seqlens, key_cu_seqlens)
    )
    pairs = Window.of((window_left, window_right), is_causal).pairs(queries, keys, lower_right)
    return int(pairs.sum()) * query.shape[1]
