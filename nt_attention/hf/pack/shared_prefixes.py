"""Runs the base model of a causal model on a tree: each prefix that rows of the batch share, once.

Everything in a checked base model but its attention computes each token by itself, and its attention takes a
`TreeLayout`. So the packed row of the base model becomes the rows of the tree, and its outputs are expanded again.
Modules that keep a state along the row run all tokens (`padded_modules.py`).
Heads and losses get what they get without sharing.

Dimensions: T tokens of the packed row, R rows of the tree, E the width of hidden states.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...compiler import can_be_read, outside_of_graphs
from ...layouts.cache import on_host, owner_of, tensor_of, to_device
from ...layouts.sequence import SequenceLayout
from ...layouts.tree import TreeLayout
from ...patching.handle import PrefixCounts
from ...torch_private import has_compiled_call, inside_compiled, is_transformed
from .. import families
from ..plan import Plan
from ..route.packed_mask import bypass_mask
from ..route.packed_row import PackedRow, counts_positions, running, why_no_row
from ..route.rope import scales_by_length
from .outputs import UnknownOutputError
from .side_effects import RandomNumbers, StoredValues

MIN_SHARED = 32  # tokens
IS_COMPILED = "it or its layers are compiled"
_IS_RANDOM = "it draws random numbers, which would be the same in all rows that share a prefix"
_KEEPS = "its modules keep values of tokens, such as a loss, which would count tokens that rows share once"
LEAST_SAVED = 0.05  # of all tokens; with less, finding prefixes and repeating rows takes longer
_SHARE_LITTLE = "its rows share too little"
_NO_IDS = "it has no input_ids, or positions with axes"
_KNOWN = {"input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_OUTPUTS = {"last_hidden_state", "hidden_states"}


def why_not_shared(model: PreTrainedModel, plan: Plan, attentions: Collection[nn.Module]) -> str | None:
    """Why no batch of a model can share prefixes, or None. `attentions`: its attention modules."""
    if not attentions or not all(getattr(module, "is_causal", False) is True for module in attentions):
        return "its attention modules are not causal, or have no is_causal that says so"
    if plan.mask is not None or not families.routes_attention(model):
        return "its attention does not run through transformers' interface"
    needs_row = any(counts_positions(x) or scales_by_length(x) for x in model.modules())
    if families.family_of(model).embed is not None or needs_row:
        return "its embeddings, positions or states depend on the other tokens of a sequence"
    return None


@outside_of_graphs
def may_share(counts: PrefixCounts, arguments: dict[str, Any], rows: int) -> bool:
    """Whether rows without padding may share prefixes. If not, the call is counted. Syncs with the device once."""
    ids = arguments.get("input_ids")
    if rows > 1 and ids is not None and (not can_be_read(ids) or _begin_alike(ids[:, :MIN_SHARED])):
        return True
    counts.add(_SHARE_LITTLE if ids is not None else _NO_IDS)
    return False


def _begin_alike(first: Tensor) -> bool:
    """Whether two rows of `first` (B, N) are equal, and as long as a shared prefix must be. Syncs once."""
    rows = on_host(first)
    return rows.shape[1] >= MIN_SHARED and len({row.tobytes() for row in rows}) < len(rows)


# Base models → how they ran (`_kind_of_call`) → why they do not share any more, which a shared call has shown.
_refused: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, str]] = weakref.WeakKeyDictionary()
# Base models → how they ran (`_kind_of_call`) in shared calls that made no random number.
_without_random: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


def _kind_of_call(modules: list[nn.Module]) -> Hashable:
    return any(module.training for module in modules), torch.is_grad_enabled()


@outside_of_graphs
def run_shared(counts: PrefixCounts, base: nn.Module, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run the original forward of a base model on a packed row (1, T), with shared prefixes if that is possible.

    If it draws random numbers, such as the noise of a router, or keeps values of tokens, such as a loss of a router, it
    runs again without sharing.
    """
    tree = None if is_transformed() else _tree_of(base, arguments)
    if isinstance(tree, TreeLayout):
        modules = list(base.modules())
        stored = StoredValues(modules if torch.is_grad_enabled() else ())
        random = RandomNumbers(arguments["input_ids"].device)
        without_random, kind = _without_random.setdefault(base, set()), _kind_of_call(modules)
        # Watching slows down every function of torch. Later calls only compare the states of generators.
        with nullcontext() if kind in without_random else random:
            out = _run_on_tree(tree, original, arguments)
        reason = _IS_RANDOM if random.are_for_tokens else _KEEPS if stored.are_new else None
        if reason is None:
            if not random.made:
                without_random.add(kind)
            counts.add(None, int(arguments["input_ids"].shape[1]), tree.total)
            return out
        random.restore()
        stored.restore()
        tree = _refused.setdefault(base, {})[kind] = reason
    counts.add(tree or "a function transform runs it")
    return original(**arguments)


def _run_on_tree(tree: TreeLayout, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    handle = tensor_of(tree, tree.device)
    tokens = {name: tree.collapse(arguments[name][0]).unsqueeze(0) for name in ("input_ids", "position_ids")}
    with running(row=PackedRow(tree, tokens["position_ids"], tree.max_seqlen)):
        out = original(**{
            **arguments,
            **tokens,
            "attention_mask": bypass_mask(tree),
            "cu_seq_lens_q": handle,
            "cu_seq_lens_k": handle,
            "max_length_q": tree.max_seqlen,
            "max_length_k": tree.max_seqlen,
        })  # fmt: skip
    for name, value in out.items():
        if name in _OUTPUTS:
            out[name] = _expand(tree, name, value)
        elif value is not None:
            raise UnknownOutputError(f"its output {name} can't be expanded from shared prefixes")
    return out


def _expand(tree: TreeLayout, name: str, value: Any) -> Any:
    """The values (1, R, …) of all rows: (1, T, …) → (1, R, …), of a tensor or each in a tuple."""
    if not isinstance(value, Tensor):
        return tuple(_expand(tree, name, x) for x in value)
    if value.shape[:2] != (1, tree.total):
        raise UnknownOutputError(why_no_row(f"its output {name!r}", value.shape[0], value.shape[1], tree.total))
    return tree.expand(value[0]).unsqueeze(0)


def _tree_of(base: nn.Module, arguments: dict[str, Any]) -> TreeLayout | str:
    """The tree of a packed row, or why this call does not share prefixes."""
    layout = owner_of(arguments["attention_mask"])
    if not isinstance(layout, SequenceLayout):
        return "the lengths are not known on the host, as in CUDA graphs, or the batch is divided over a mesh"
    if "input_ids" in arguments and not _begin_alike(_first_tokens(arguments["input_ids"][0], layout)):
        return _SHARE_LITTLE  # before anything that takes longer
    modules = list(base.modules())
    if any(has_compiled_call(x) or inside_compiled(x) is not x for x in modules):
        return IS_COMPILED
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.dim() and name not in _KNOWN:
            return f"it has {name}"
    if "input_ids" not in arguments or arguments["position_ids"].dim() != 2:
        return _NO_IDS
    if any(getattr(x, "is_causal", True) is False for x in modules):
        return "its attention is not causal any more"
    if any(isinstance(x, nn.Embedding) and x.scale_grad_by_freq for x in modules):
        return "its embedding divides gradients by the number of tokens (scale_grad_by_freq=True)"
    if any(map(_drops, modules)):
        return "it has dropout, which would be the same in all rows that share a prefix"
    if reason := _refused.get(base, {}).get(_kind_of_call(modules)):
        return reason
    row, positions = arguments["input_ids"][0], arguments["position_ids"][0]
    tree = TreeLayout.from_prefixes(row.long() + (positions.long() << 32), layout, MIN_SHARED, sort=True)
    return _SHARE_LITTLE if tree.total > (1 - LEAST_SAVED) * layout.total else tree


def _first_tokens(row: Tensor, layout: SequenceLayout) -> Tensor:
    """(B, N), the first N = `MIN_SHARED` tokens of the sequences of a packed row (T,) that have as many."""
    offsets = on_host(layout.host)
    starts = offsets[:-1][np.diff(offsets) >= MIN_SHARED]
    index = to_device((starts[:, None] + np.arange(MIN_SHARED)).ravel(), row.device)
    return row.index_select(0, index).view(-1, MIN_SHARED)


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values, or passes a rate to the attention function."""
    if not module.training:
        return False
    if isinstance(module, _DROPOUT):
        return module.p > 0
    return any(rate > 0 for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float))
