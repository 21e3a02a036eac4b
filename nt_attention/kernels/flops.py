"""FLOP formulas of the custom operators for `torch.utils.flop_counter.FlopCounterMode`. They count visible pairs only.

Dimensions: T query tokens, S key tokens, H query heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..compiler import is_traced
from ..torch_private import dispatch_modes
from .call_size import CallSize
from .custom_ops import call_of


@functools.cache
def register(name: str) -> None:
    """Register the formulas of a backend, at its first call: importing the counter also imports Triton."""
    from torch.utils import flop_counter

    formulas = {
        getattr(torch.ops.nt_attention, f"{name}_forward"): forward,
        getattr(torch.ops.nt_attention, f"{name}_backward"): backward,
    }
    for operator, formula in formulas.items():
        flop_counter.register_flop_formula(operator, get_raw=True)(formula)
    for mode in dispatch_modes():  # active counters have a copy of the registry
        if isinstance(counter := getattr(mode, "counter", None), flop_counter.FlopCounterMode):
            counter.flop_registry.update({operator: flop_counter.flop_registry[operator] for operator in formulas})


def forward(*arguments: Any, out_val: Any) -> int:
    """FLOPs of two matrix products: scores and output. Takes the arguments and the result of the operator."""
    query, _, value = arguments[:3]
    return 2 * _pairs(*arguments) * (query.shape[2] + value.shape[2])


def backward(*arguments: Any, out_val: Any) -> int:
    """FLOPs of five matrix products: the scores again, and the gradients of weights, query, key and value."""
    arguments = arguments[5:]  # the first five are those that the forward does not have
    query, _, value = arguments[:3]
    return 2 * _pairs(*arguments) * (3 * query.shape[2] + 2 * value.shape[2])


def _pairs(*arguments: Any) -> int:
    """The number of (query, head, key) triples. Fake offsets count as equal lengths with all keys visible."""
    query, key, _, cu_seqlens, key_cu_seqlens = arguments[:5]
    if is_traced(cu_seqlens) or is_traced(key_cu_seqlens):
        return query.shape[0] * key.shape[0] // max(1, cu_seqlens.shape[0] - 1) * query.shape[1]
    return int(CallSize.of(call_of(*arguments)).pairs) * query.shape[1]
