"""What a compiled graph breaks for: lengths, read on the host. Imported where a compiler is at work already."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import SequenceLayout


@torch.compiler.disable  # type: ignore[untyped-decorator]
def read_offsets(offsets: Tensor) -> SequenceLayout:
    return SequenceLayout.from_offsets(offsets)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def read_mask(mask: Tensor) -> SequenceLayout:
    return SequenceLayout.from_attention_mask(mask)
