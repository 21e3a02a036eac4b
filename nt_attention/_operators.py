"""The library of custom operators, `torch.ops.nt_attention`, and how they are defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("nt_attention", "FRAGMENT")
# The operators read lengths on the host, so a compiler must not capture them in a CUDA graph. Before a manual capture,
# run the call once with the same layout, and keep the layout.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any], *, random: bool = False) -> None:
    """Define an operator that runs `function` on every device.

    Args:
        schema: its name, arguments and results.
        function: the implementation. Its results must not share memory with its arguments.
        fake: the fake implementation.
        random: whether it draws random numbers.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(*_TAGS, torch.Tag.nondeterministic_seeded) if random else _TAGS)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nt_attention::{name}", fake, lib=LIBRARY)
