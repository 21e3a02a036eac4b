"""Calls of `varlen_attention` on the problems of `oracle.py`, strides of their tensors, and a dispatch mode."""

from functools import partial

import torch
from oracle import Problem
from torch.utils._python_dispatch import TorchDispatchMode

from nt_attention import SequenceLayout, varlen_attention


def call(case: Problem, backend: str = "auto", **options):
    """`varlen_attention` with the layouts of the problem. It returns out and lse, as `Problem.solve` expects."""
    device = case.inputs["query"].device
    layout = SequenceLayout.from_lengths(case.lengths, device=device)
    key_layout = None if case.key_lengths is None else SequenceLayout.from_lengths(case.key_lengths, device=device)
    return partial(varlen_attention, layout=layout, key_layout=key_layout, return_lse=True, backend=backend, **options)


OFFSETS = torch.tensor([0, 5, 14])


def attend(x, offsets):
    """Causal self-attention with a layout that is made from `offsets` in the call."""
    return varlen_attention(x, x, x, SequenceLayout.from_offsets(offsets), is_causal=True)


# A tensor (T, H, D) with the same numbers and other strides.
STRIDES = {
    "every-other-column": lambda x: x.repeat_interleave(2, dim=2)[..., ::2],
    "columns-before-heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens-last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "heads-first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every-other-token": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "one-of-three": lambda x: torch.stack([x - 1, x, x + 1], 1)[:, 1],
}


class PassThrough(TorchDispatchMode):
    """A dispatch mode that changes nothing, as profilers and loggers do. `operators` lists our custom operators."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "nt_attention":
            self.operators.append(function)
        return function(*args, **(kwargs or {}))
