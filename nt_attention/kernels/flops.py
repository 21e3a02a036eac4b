"""FLOP formulas of the custom operators for `torch.utils.flop_counter.FlopCounterMode`. They count visible pairs only.

Dimensions: T query tokens, S key tokens, H query heads, D and Dv head dims.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ..compiler import is_traced
from ..torch_private import dispatch_modes
from .call_size import CallSize
from .custom_ops import Arguments, call_of


@functools.cache
def register() -> None:
    """Register the formulas, at the first call of an operator: importing the counter also imports Triton."""
    from torch.utils import flop_counter

    formulas = {
        getattr(torch.ops.nt_attention, f"{name}_{direction}"): formula
        for name in ("attention", "bounded")
        for direction, formula in (("forward", forward), ("backward", backward))
    }
    for operator, formula in formulas.items():
        flop_counter.register_flop_formula(operator, get_raw=True)(formula)
    for mode in dispatch_modes():  # active counters have a copy of the registry
        if isinstance(counter := getattr(mode, "counter", None), flop_counter.FlopCounterMode):
            counter.flop_registry.update({operator: flop_counter.flop_registry[operator] for operator in formulas})


def forward(*given: Any, out_val: Any) -> int:
    """FLOPs of two matrix products: scores and output. Takes the arguments and the result of the operator."""
    arguments = Arguments(*given)
    return 2 * _pairs(arguments) * (arguments.query.shape[2] + arguments.value.shape[-1])


def backward(*given: Any, out_val: Any) -> int:
    """FLOPs of five matrix products: the scores again, and the gradients of weights, query, key and value."""
    arguments = Arguments(*given[-len(Arguments._fields) :])  # those before them are not of the forward
    return 2 * _pairs(arguments) * (3 * arguments.query.shape[2] + 2 * arguments.value.shape[2])


def _pairs(arguments: Any) -> int:
    """The number of (query, head, key) triples. Fake offsets count as equal lengths with all keys visible."""
    query, key, offsets = arguments.query, arguments.key, arguments.cu_seqlens
    if is_traced(offsets) or is_traced(arguments.key_cu_seqlens):
        keys = key.shape[:-2].numel()
        return query.shape[0] * keys // max(1, offsets.shape[0] - 1) * query.shape[1]
    call = call_of(arguments)
    if call.spec.paged and not call.spec.bounded:  # else it is an upper bound
        call = call._replace(key_layout=call.paged.read_lengths(), spec=replace(call.spec, paged=False))
    return int(CallSize.of(call).pairs) * query.shape[1]
