"""Errors that PyTorch's own attention does not raise in the same program, each with the page that documents it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .run import Combination


@dataclass(frozen=True)
class Documented:
    """A refusal that PyTorch's own attention does not share; ``page`` tells users of it."""

    combinations: str  # a regular expression over their names
    stage: str  # where it is raised; "" for anywhere
    message: str  # a regular expression
    reason: str
    page: str


EXCEPTIONS = [
    Documented(
        r"(lengths|layout\.(offsets|cu_seqlens)) .* before forward",
        "call",
        r"^ValueError: .*(changed|in place)",
        "a layout whose offsets were changed after it was made; stock has no layouts, and reads offsets anew",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"(lengths|layout\.(offsets|cu_seqlens)) .* before backward",
        "backward",
        r"^RuntimeError: .*modified by an inplace operation",
        "offsets are saved for the backward pass, as torch's varlen_attn saves cu_seqlens; a mask made of them is not",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"^patch/(bert|llama).*\| differentiated twice",
        "backward",
        r"^RuntimeError: .*differentiate",
        "kernels are differentiated once, as stock's kernels are; a model under eager attention has no kernel",
        "docs/reference/hugging_face.md",
    ),
    Documented(
        r"\| export",
        "trace",
        r"^(ValueError|RuntimeError|TypeError): .*(from_offsets|has no values to read|while torch.export is tracing)",
        "lengths are read on the host by every constructor but from_offsets",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"^SequenceLayout\.to_nested/from_offsets.*\| out add_ \|",
        "change",
        r"^RuntimeError: cannot call binary pointwise function",
        "a layout copies its offsets, and PyTorch adds NestedTensors only if they share one tensor of offsets",
        "docs/reference/multihead_attention.md",
    ),
    Documented(
        r"/nested.*\| out mul_ of a view \|",
        "backward",
        r"^NotImplementedError: aten\.new_empty_strided",
        "autograd can't pass a change of the values() of a NestedTensor that is no view; the output itself may change",
        "docs/reference/multihead_attention.md",
    ),
]


def documented(combination: Combination, stage: str, message: str) -> bool:
    return any(
        re.search(known.combinations, combination.label)
        and known.stage in ("", stage)
        and re.search(known.message, message)
        for known in EXCEPTIONS
    )
