"""Finds models whose parallel styles divide the tokens of a row over ranks (sequence parallelism).

Styles that divide heads or features compute each token of a packed row, as they do in a padded batch. Styles that
divide tokens take the number of tokens of all ranks to be that of this rank times the number of ranks. A packed row may
have any number of tokens, so this may be wrong for it, and the ranks would exchange tensors of wrong sizes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...patching.forwards import STYLES_OF_TRANSFORMERS, variables_around
from ...torch_private import forward_hooks_of, pytree

DIVIDES_TOKENS = "its parallel styles divide the tokens of a row over ranks, and a packed row may not divide evenly"

# Model → the number of hooks that were registered in the process, and whether styles divide tokens.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[int, bool]] = weakref.WeakKeyDictionary()


def divides_tokens(model: nn.Module) -> bool:
    """Whether parallel styles of PyTorch or transformers divide tokens: another dimension of (B, L, E) than the last.

    Takes some µs for each module, but only if a hook was registered anywhere since the last call.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    hooks, divides = _known.get(model, (None, False))
    if hooks != RemovableHandle.next_id:  # `parallelize_module` may have registered hooks
        divides = any(map(_is_of_tokens, _placements(model)))
        _known[model] = RemovableHandle.next_id, divides
    return divides


def is_distributed(x: Any) -> bool:
    """Whether a value is a DTensor."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def _placements(model: nn.Module) -> Iterator[Any]:
    """The placements of inputs and outputs that the styles of a model use."""
    from torch.distributed.tensor.parallel import ParallelStyle

    for module in model.modules():
        hooks = [hook for hooks in forward_hooks_of(module) for hook in hooks.values()]
        if "forward" in vars(module):
            hooks.append(vars(module)["forward"])
        for value in (value for hook in hooks for value in variables_around(hook).values()):
            if isinstance(value, functools.partial):
                yield from pytree.tree_leaves((value.args, value.keywords))
            elif isinstance(value, ParallelStyle) or type(value).__module__ == STYLES_OF_TRANSFORMERS:
                yield from pytree.tree_leaves(vars(value))


def _is_of_tokens(placement: Any) -> bool:
    from torch.distributed.tensor import Shard

    return isinstance(placement, Shard) and placement.dim not in (-1, 2)
