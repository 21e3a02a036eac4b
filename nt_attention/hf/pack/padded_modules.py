"""Modules that mix the tokens of a row, such as those with states, run on padded rows.

Everything else of the model stays packed. A module that only looks back along the row gives the same for each sequence
in a row that is padded at its end.

Dimensions: T tokens of the packed row, E the width of hidden states, B sequences, L positions of a padded row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...compiler import is_compiling, outside_of_graphs
from ...layouts.cache import on_host, to_device
from ...layouts.protocol import Layout
from ...layouts.tree import TreeLayout
from ...patching.forwards import Handle, override_forward
from ...torch_private import backward_id, is_transformed, pytree
from ..plan import Plan
from ..route.packed_mask import PackedMask
from ..route.packed_row import PackedRow, current_row, running, runs_padded
from .convolutions import convolving, keep_apart

if TYPE_CHECKING:
    from ...layouts.cache import Ints

    # lengths (B,), whether a GPU runs them → for each group the indices of its sequences
    Grouping = Callable[[Ints, bool], list[Ints]]


class GroupCost(NamedTuple):
    """What a group costs beside its positions, in positions.

    Attributes:
        step: for each position of its longest sequence. States are computed one step after the other.
        start: once.
    """

    step: float
    start: float


# On a GPU the host launches the steps of each group, which takes it longer than the GPU. A Qwen3.5 that is 1,024 wide,
# with PyTorch's code for states, on an H200, took in 1, 2, 3, 4 groups for training 658, 315, 290, 440 ms and for
# inference 131, 77, 92, 112 (8,192 tokens ≤ 1024), and with 16,384 ≤ 2048: 955, 528, 557, 515 and 167, 114, 134, 148.
ON_GPU, ON_CPU = GroupCost(5, 3000), GroupCost(1, 100)
_LEVEL = 1.04
_CHECKPOINT = "_gradient_checkpointing_func"  # of a layer: what transformers calls to make a checkpoint of it
# Arguments that describe the packed row. A padded row is read from its beginning, so it needs none.
_OF_ROW = ("attention_mask", "mask", "padding_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


class Groups(NamedTuple):
    """The sequences of a packed row, as padded rows. Those of similar lengths are a group, and run together.

    Attributes:
        padded: for each group (n, L) int64, the token at each position; T for padding.
        packed: (T,) int64, where each token is among the positions of all groups.
    """

    padded: list[Tensor]
    packed: Tensor

    @classmethod
    def of(cls, layout: Layout, grouping: Grouping) -> Groups:
        """The groups of a layout, cached with it."""
        return layout.cached(("padded modules", grouping), lambda: _groups_of(layout, grouping))


def _groups_of(layout: Layout, grouping: Grouping) -> Groups:
    offsets = on_host(layout.host)
    lengths, total = np.diff(offsets), int(offsets[-1])
    padded, packed, begin = [], np.empty(total, np.int64), 0
    for members in grouping(lengths, layout.device.type == "cuda"):
        positions = np.arange(lengths[members].max())
        tokens = offsets[:-1][members, None] + positions
        is_token = positions < lengths[members, None]
        packed[tokens[is_token]] = begin + np.flatnonzero(is_token)
        begin += tokens.size
        padded.append(to_device(np.where(is_token, tokens, total), layout.device))
    return Groups(padded, to_device(packed, layout.device))


def group_by_length(lengths: Ints, on_gpu: bool) -> list[Ints]:
    """The groups of similar lengths that take the least time (`GroupCost`), the longest first, without empty ones."""
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    if not len(order):
        return []
    step, start = ON_GPU if on_gpu else ON_CPU
    lengths = lengths[order]
    # Groups begin at one of these places only: where the length has fallen by a share.
    level = np.floor(np.log(lengths) / np.log(_LEVEL))
    begins = np.flatnonzero(np.diff(level, prepend=level[0] + 1))
    places = np.append(begins, len(order))
    # For the sequences before each place: what they cost, and the place at which the last of their groups begins.
    costs, last = [0.0], [0]
    for end in places[1:]:
        first = begins[: len(costs)]
        totals = np.array(costs) + (end - first + step) * lengths[first] + start
        costs.append(float(totals.min()))
        last.append(int(totals.argmin()))
    groups, at = [], len(begins)
    while at:
        groups.append(order[places[last[at]] : places[at]])
        at = last[at]
    return groups[::-1]


def equal_lengths(lengths: Ints, on_gpu: bool = False) -> list[Ints]:
    """The sequences in groups of equal lengths, without empty ones."""
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths[lengths > 0])]


def one_group(lengths: Ints, on_gpu: bool = False) -> list[Ints]:
    """All sequences but empty ones as one group, with as much padding as there can be: for the check."""
    return [np.flatnonzero(lengths)] if lengths.any() else []


def add_padded_modules(base: nn.Module, plan: Plan, handle: Handle, grouping: Grouping) -> bool:
    """Let the modules run padded, and convolutions with zeros between sequences, that the plan names.

    `grouping` says which sequences run together, unless the plan says `equal_lengths`.

    Returns:
        Whether there are any.
    """
    grouping = equal_lengths if plan.equal_lengths else grouping
    paths = paths_of(base, plan.mixing)
    for path in paths:
        module = base.get_submodule(path)
        if type(module).__name__ in plan.padded:
            override_forward(module, functools.partial(run_padded, grouping), handle)
        else:
            keep_apart(module)
            override_forward(module, run_convolution, handle)
    for path in {_layer_of(base, path) for path in paths} - {"", *paths}:
        override_forward(base.get_submodule(path), run_layer, handle)
    return bool(paths)


def paths_of(base: nn.Module, classes: tuple[str, ...]) -> list[str]:
    """The paths of the modules of these classes."""
    return [path for path, module in base.named_modules() if type(module).__name__ in classes]


def share_of_weights(base: nn.Module, classes: tuple[str, ...]) -> float:
    """Which share of the weights, but for embeddings, the modules have that run padded."""
    embeddings = {id(x) for part in base.modules() if isinstance(part, nn.Embedding) for x in part.parameters()}
    padded = {id(x) for path in paths_of(base, classes) for x in base.get_submodule(path).parameters()}
    sizes = {id(x): x.numel() for x in base.parameters() if id(x) not in embeddings}
    return sum(sizes[x] for x in padded & sizes.keys()) / max(1, sum(sizes.values()))


def _layer_of(base: nn.Module, path: str) -> str:
    """The path of the layer that a module is in: the first item of a list; "" if it is in none."""
    parts = path.split(".")
    for at in range(1, len(parts)):
        if isinstance(base.get_submodule(".".join(parts[:at])), nn.ModuleList):
            return ".".join(parts[: at + 1])
    return ""


# Gradient checkpointing computes a layer again in the backward, when no row is set. A checkpoint in the layer, as those
# of transformers, carries the row. For a checkpoint around the layer, the storage of hidden states keeps the row, or
# None for padded rows.


class _WithRow:
    """A layer's function that makes a checkpoint, `checkpoint(function, *args)`, for a function that needs its row."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        row, padded = current_row(), runs_padded()
        if is_compiling() or (row is None and not padded):
            return self.checkpoint(function, *args)

        def run(*args: Any) -> Any:
            with running(row=row, padded=padded):
                return function(*args)

        return self.checkpoint(run, *args)


def run_layer(module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a layer with modules that run padded."""
    hidden, row = _first_tensor((*args, *kwargs.values())), current_row()
    checkpoint = vars(module).get(_CHECKPOINT)
    if checkpoint is not None and not isinstance(checkpoint, _WithRow):
        setattr(module, _CHECKPOINT, _WithRow(checkpoint))
    if hidden is None or is_compiling() or is_transformed():  # in torch.func, tensors have no storage
        return original(*args, **kwargs)
    kept = _kept_row(hidden)
    if row is None and backward_id() != -1 and not runs_padded():
        if kept is _UNKNOWN:
            return original(*args, **kwargs)
        with running(row=kept, padded=kept is None):
            out = original(*args, **kwargs)
        if (first := _first_tensor(out if isinstance(out, tuple) else (out,))) is not None:
            _storage(first).row = kept
        return out
    if kept is not _UNKNOWN and kept is not row:  # an earlier call may compute it again: it keeps its storage
        copied = hidden.clone()
        args = tuple(copied if x is hidden else x for x in args)
        kwargs = {name: copied if x is hidden else x for name, x in kwargs.items()}
        hidden = copied
    _storage(hidden).row = row
    return original(*args, **kwargs)


def _first_tensor(values: tuple[Any, ...]) -> Tensor | None:
    return next((x for x in values if isinstance(x, Tensor)), None)


def _storage(x: Tensor) -> Any:
    return x.untyped_storage()


_UNKNOWN: Any = object()


def _kept_row(hidden: Tensor) -> PackedRow | None:
    """The row that the storage of hidden states keeps; `_UNKNOWN` if it keeps none."""
    return _UNKNOWN if is_transformed() else getattr(_storage(hidden), "row", _UNKNOWN)


def _keep_row(hidden: Tensor, row: PackedRow | None) -> None:
    """Let the storage of hidden states keep the row, for a checkpoint around such a module alone.

    If calls with different rows have the same hidden states, it keeps none.
    """
    if not is_transformed():
        _storage(hidden).row = row if getattr(_storage(hidden), "row", row) is row else _UNKNOWN


def _row_of(module: nn.Module, hidden: Tensor | None) -> PackedRow | None:
    """The row that such a module runs in. None if the batch is padded.

    Raises:
        RuntimeError: it is computed again in the backward, and nothing says which sequences the row has.
    """
    row = current_row()
    if hidden is not None and backward_id() == -1:
        _keep_row(hidden, _UNKNOWN if row is None and not runs_padded() else row)
    if row is not None or hidden is None or backward_id() == -1 or runs_padded():
        return row
    row = _kept_row(hidden)
    if row is _UNKNOWN and hidden.shape[0] > 1:  # a packed row is one
        return None
    if row is _UNKNOWN:
        raise RuntimeError(
            f"{type(module).__name__} is computed again in the backward, where the lengths of its sequences are not "
            "known: use the model's gradient_checkpointing_enable, without torch.compile."
        )
    return row


@outside_of_graphs
def run_padded(
    grouping: Grouping, module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """The `forward` of a module that runs padded, in a packed row."""
    row = _row_of(module, _first_tensor((*args, *kwargs.values())))
    arguments = _by_name(module, args, kwargs)
    layout = None if row is None else row.layout
    if layout is None or not any(_is_row(x, layout.total) for x in pytree.tree_leaves(arguments)):
        return original(*args, **kwargs)
    tree = layout if isinstance(layout, TreeLayout) else None  # a module with a state runs whole sequences
    groups = Groups.of(layout if tree is None else tree.sequences, grouping)
    names, window = set(inspect.signature(type(module).forward).parameters), arguments.get("sliding_window")
    arguments = {
        name: None if name in _OF_ROW and not isinstance(x, PackedMask) else x
        for name, x in arguments.items()
        if name not in _OF_ROW or name in names
    }
    values, structure = pytree.tree_flatten(arguments)
    values = [_rows_of(x, tree) if _is_row(x, layout.total) else x for x in values]
    with running(row=None, padded=True):
        results = [
            original(**pytree.tree_unflatten([_of_group(x, padded, window) for x in values], structure))
            for padded in groups.padded
        ]
    return _packed(results, groups, tree)


@outside_of_graphs
def run_convolution(module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module with a causal convolution that runs in a packed row (`convolutions.py`)."""
    row = _row_of(module, _first_tensor((*args, *kwargs.values())))
    if row is None:
        return original(*args, **kwargs)
    with convolving(module, row.layout):
        return original(*args, **kwargs)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return dict(zip(names, args, strict=False)) | kwargs


def _is_row(x: object, total: int) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, PackedMask) and x.dim() >= 2 and x.shape[:2] == (1, total)


class _Rows(NamedTuple):
    """The values (T + 1, …) of the tokens of all sequences. The last one is padding."""

    values: Tensor


def _rows_of(x: Tensor, tree: TreeLayout | None) -> _Rows:
    rows = x[0] if tree is None else tree.expand(x[0])
    return _Rows(torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]))


def _of_group(x: Any, padded: Tensor, window: int | None) -> Any:
    """The argument of a module for a group of sequences."""
    if isinstance(x, _Rows):
        return x.values[padded]
    return _mask_of_group(x, padded, window) if isinstance(x, PackedMask) else x


def _mask_of_group(mask: PackedMask, padded: Tensor, window: int | None) -> Tensor:
    """The mask of padded rows in the form of that of the packed row: (n, L), (n, …, 1, L) or, if causal, (n, …, L, L).

    Its value is that of `mask` where a token is visible. Elsewhere it is 0 or, if that is the value, the lowest one.
    """
    visible = (padded < mask.key_layout.total).view(len(padded), *[1] * (mask.dim() - 2), padded.shape[1])
    if mask.dim() > 2 and mask.is_causal:
        pairs = visible.expand(*visible.shape[:-2], padded.shape[1], -1)
        visible = pairs.tril() if window is None else pairs.tril().triu(1 - window)
    hidden = 0 if mask.value else torch.finfo(mask.dtype).min
    return torch.where(visible, mask.value, hidden).to(mask.dtype)


def _packed(results: list[Any], groups: Groups, tree: TreeLayout | None) -> Any:
    """The packed row of the results of all groups: tensors (n, L, …), or tuples of them."""
    first = results[0]
    if isinstance(first, Tensor):
        if any(x.shape[:2] != padded.shape for x, padded in zip(results, groups.padded, strict=True)):
            return first
        row = torch.cat([x.flatten(0, 1) for x in results]).index_select(0, groups.packed)
        return (row if tree is None else tree.collapse(row)).unsqueeze(0)
    if isinstance(first, tuple):
        return tuple(_packed(list(each), groups, tree) for each in zip(*results, strict=True))
    return first
