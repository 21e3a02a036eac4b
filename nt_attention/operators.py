"""The library of custom operators, `torch.ops.nt_attention`, and how they are defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("nt_attention", "FRAGMENT")


def define(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    random: bool = False,
    reads_on_host: bool = True,
) -> None:
    """Define an operator that runs `function` on every device.

    Args:
        schema: its name, arguments and results.
        function: the implementation. Its results must not share memory with its arguments.
        fake: the fake implementation.
        random: whether it draws random numbers.
        reads_on_host: whether it reads lengths on the host. A compiler then does not capture it in a CUDA graph. Before
            a manual capture, run the call once with the same layout, and keep the layout.
    """
    name = schema.partition("(")[0]
    tags = [torch.Tag.pt2_compliant_tag]
    tags += [torch.Tag.nondeterministic_seeded] if random else []
    tags += [torch.Tag.cudagraph_unsafe] if reads_on_host else []
    LIBRARY.define(schema, tags=tuple(tags))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nt_attention::{name}", fake, lib=LIBRARY)
