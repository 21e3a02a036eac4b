"""Calls and arguments of the custom operators of the CPU backends and of "auto"."""

import itertools
from functools import partial

import pytest
import torch
from oracle import Problem, problem

from nt_attention import SequenceLayout, varlen_attention

BACKENDS = ["cpu", "reference", "auto"]
NAMES = pytest.mark.parametrize("backend", BACKENDS)

LENGTHS, KEY_LENGTHS = [5, 0, 1, 17, 3], [2, 3, 0, 19, 7]

NAMED = {
    "self": {"lengths": LENGTHS},
    "cross": {"lengths": LENGTHS, "key_lengths": KEY_LENGTHS, "past": (3, 2)},
}


def case_of(lengths, geometry, extra, /, **more) -> Problem:
    return problem("self", geometry, extra, **NAMED[lengths], **more)


def call(case: Problem, backend: str):
    layout = SequenceLayout.from_lengths(case.lengths)
    key_layout = None if case.key_lengths is None else SequenceLayout.from_lengths(case.key_lengths)
    return partial(
        varlen_attention, layout=layout, key_layout=key_layout, return_lse=True, backend=backend, **case.options
    )


def only(inputs):
    """Query, key and value, without the options, which `call` has already."""
    return {name: inputs[name] for name in ("query", "key", "value")}


FORWARD = torch.ops.nt_attention.attention_forward.default
BACKWARD = torch.ops.nt_attention.attention_backward.default
PACKED = (None, None, None, [])  # the arguments of pools


def operands(
    name="cpu",
    lengths="cross",
    *,
    lower_right=True,
    causal=True,
    past=(0, 0),
    heads_first=False,
    alibi=False,
    relative=False,
):
    """An operator's arguments by position: float32, grouped heads, odd head dims."""

    def random(rows, heads, width):
        return torch.randn(heads, rows, width).transpose(0, 1) if heads_first else torch.randn(rows, heads, width)

    key_lengths = KEY_LENGTHS if lengths == "cross" else LENGTHS
    offsets, key_offsets = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (LENGTHS, key_lengths)
    )
    if lengths == "self":
        key_offsets = offsets
    rows, keys = sum(LENGTHS) + past[0], sum(key_lengths) + past[1]
    tensors = (random(rows, 6, 11), random(keys, 3, 11), random(keys, 3, 7))
    slopes = torch.rand(len(LENGTHS), 6) if alibi else None
    biases = [None] * 4
    if relative:
        biases = [torch.randint(13, (9,)), torch.randn(6, 13), random(rows, 6, 13), random(keys, 6, 13)]
    alignment = "lower_right" if lower_right else "upper_left"
    options = (0.3, causal, alignment, (-1, -1), 0.0, 0.0, False, False, True, relative)
    return (*tensors, offsets, key_offsets, slopes, *biases, *PACKED, *options, [], name)


def given_back(grad, grad_lse, results, arguments):
    """The arguments of the backward operator."""
    return (grad, grad_lse, *results, *arguments)


def described(results):
    flat = [x for result in results for x in (result if isinstance(result, list) else [result])]
    return [(x.shape, x.stride(), x.dtype) for x in flat]
