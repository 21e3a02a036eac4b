"""Runs the packed call of a patched model as a CUDA graph.

The graph has the whole call: it packs the padded batch, runs the model and pads the outputs. The host only reads the
mask, to know the number of tokens. The batch of an encoder-decoder has two sides, the source and the target.

Dimensions: B rows of a padded batch and L positions in a row, as in the bucket; N tokens of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils import ModelOutput

from ...graphs.cache import reasons_of_call
from ...graphs.capture import Bucket, Computed, Form, Sizes, Work, tensors_of
from ...graphs.device import NotCapturedError, Reasons, check
from ...kernels.select import selection_key
from ...layouts.cache import to_device
from ...layouts.rows import scatter_rows
from ...layouts.sequence import layout_of_mask
from ...modules.graphs import bounded_layout, without_lengths
from ...patching.forwards import PatchedForward
from .. import families
from ..route.packed_row import extend_tables
from ..transformers_private import attention_of
from .attention_code import make_cached_tensors
from .inputs import uncounted_labels
from .packing import Packing, begin_padded, read_bits

# The arguments that a graph can take: of each side its tokens, in one of two forms, and its mask; and others.
_TOKENS = ("input_ids", "inputs_embeds"), ("decoder_input_ids", "decoder_inputs_embeds")
_MASKS = "attention_mask", "decoder_attention_mask"
_TENSORS = {*_TOKENS[0], *_TOKENS[1], *_MASKS, "token_type_ids", "labels", "shift_labels"}
_OTHERS = {"output_hidden_states", "output_attentions", "return_dict", "use_cache"}
_NUMBER = "num_items_in_batch"  # another number in each batch, so it is an input of the graph


@dataclass(frozen=True, kw_only=True)
class BoundedPacking(Packing):
    """The tokens of a batch that only the device knows. Packed rows have N rows, `layout.total`.

    In `index`, further rows have the position B · L, which no padded row has.

    Attributes:
        side: which side of the batch this is.
        made: the outputs that this packing made, and their form.
    """

    side: int = 0
    made: list[tuple[Tensor, Form]] = field(default_factory=list)

    @classmethod
    def of_mask(cls, mask: Tensor, tokens: int, side: int = 0) -> BoundedPacking:
        """The packing of a mask (B, L) with up to `tokens` tokens, which the host does not read."""
        rows, length = mask.shape
        is_token = mask.flatten() != 0
        lengths = is_token.view(rows, length).sum(1, dtype=torch.int32)
        index = lengths.new_full((tokens + 1,), rows * length, dtype=torch.int64)  # and one place for padding
        token = torch.where(is_token, is_token.cumsum(0) - 1, tokens).clamp_(max=tokens)
        index.scatter_(0, token, torch.arange(rows * length, device=mask.device))
        return cls(bounded_layout(lengths, Sizes(rows, length, tokens)), index[:-1], rows, length, side=side)

    def pack(self, padded: Tensor) -> Tensor:
        """As in `Packing`. Further rows are copies of the first token, because ids at padding may be invalid."""
        assert self.index is not None
        index = self.index.where(self.index < self.rows * self.length, self.index[0])
        return padded.expand(self.rows, *padded.shape[1:]).flatten(0, 1).index_select(0, index).unsqueeze(0)

    def first_tokens(self, packed: Tensor) -> Tensor:
        return self._nearest(packed, torch.zeros(1, dtype=torch.int64, device=packed.device)).squeeze(1)

    def pad_with_nearest(self, packed: Tensor) -> Tensor:
        return self._keep(super().pad_with_nearest(packed), "padded")

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        assert self.index is not None
        shape = self.rows * self.length + 1, 1, *packed.shape[2:]  # and one row for further rows
        padded = scatter_rows(packed.squeeze(0), self.index, shape, value)[:-1]
        return self._keep(padded.view(self.rows, self.length, *packed.shape[2:]), "padded")

    def pad_later(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """The tensor itself: the graph ends with it, and its result is padded when it is read."""
        return self._keep(packed, "packed")

    def _keep(self, x: Tensor, kind: Any) -> Tensor:
        self.made.append((x, Form(kind, self.side)))
        return x


def _form_of(output: Tensor, packings: list[BoundedPacking]) -> Form:
    """The form of an output of a model that ran with these packings."""
    of_rows = output.dim() > 0 and output.shape[0] == packings[0].rows
    made = (form for packing in packings for x, form in packing.made if x is output)
    return next(made, Form("rows" if of_rows else "other"))


@dataclass(frozen=True)
class HostMask:
    """The mask of a batch, on the host. It says what `Packing` says of it."""

    is_token: NDArray[np.bool_]  # (B, L)
    ignores_labels: bool = False
    shares_rows: ClassVar[bool] = False

    @property
    def begins_padded(self) -> bool:
        return begin_padded(self.is_token)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.is_token.size, self.of_graph.tokens

    @cached_property
    def of_graph(self) -> Sizes:
        """The sizes by which a graph is chosen."""
        rows, length = self.is_token.shape
        return Sizes(rows, length, int(np.count_nonzero(self.is_token)))

    def packing(self, device: torch.device) -> Packing:
        """The packing, for outputs that are padded when they are read."""
        index = to_device(np.flatnonzero(self.is_token), device)
        return Packing(layout_of_mask(self.is_token, device), index, *self.is_token.shape)


def run_as_graph(
    call: Any,
    returns_cache: Callable[[], bool],
    run: Callable[[list[BoundedPacking], dict[str, Any]], ModelOutput | tuple[Any, ...]],
) -> tuple[Any, list[HostMask]]:
    """Run a `ModelCall` as a CUDA graph, and return its result and the mask of each side. Syncs once for each mask.

    Args:
        call: the call.
        returns_cache: whether the model returns a cache for a batch without padding.
        run: runs the call for the packings of its sides and these arguments.

    Raises:
        NotCapturedError: the call can't run as a graph. Nothing was computed.
    """
    graphs, model = call.entry.handle.graphs, call.model
    arguments = {**call.arguments, "return_dict": True}
    check(_reasons(call, arguments))
    inputs = {name: x for name, x in sorted(arguments.items()) if isinstance(x, Tensor) and name != _NUMBER}
    options = {name: x for name, x in arguments.items() if name not in inputs and name != _NUMBER}
    tokens = [_tokens_of(arguments, side) for side in range(len(call.side_masks))]
    device = tokens[0].device
    # a graph has a mask in each call
    inputs |= {
        name: torch.ones(x.shape[:2], dtype=torch.bool, device=device) if mask is None else mask
        for name, mask, x in zip(_MASKS, call.side_masks, tokens, strict=False)
    }
    masks = [_read_mask(call, side, x) for side, x in enumerate(tokens)]
    if not all(mask.of_graph.tokens for mask in masks):
        raise NotCapturedError("the batch has no tokens")
    if all(mask.is_token.all() for mask in masks) and returns_cache():
        raise NotCapturedError("it has no padding, so the model returns a cache: pass use_cache=False")
    forms = {name: Form("padded", call.side_of(name)) for name in inputs}
    if (number := arguments.get(_NUMBER)) is not None:
        inputs[_NUMBER] = torch.as_tensor(number, device=device).detach()
        forms[_NUMBER] = Form("other")

    def function(static: dict[str, Tensor], bucket: Bucket) -> Computed:
        extend_tables(model, max(its.longest for its in bucket))
        make_cached_tensors(model, device)
        packings = [
            BoundedPacking.of_mask(static[name], its.tokens, side)
            for side, (name, its) in enumerate(zip(_MASKS, bucket, strict=False))
        ]
        with without_lengths():
            out = run(packings, {**options, **static})
        return Computed(out, [_form_of(x, packings) for x in tensors_of(out)], [x.layout for x in packings])

    config: Any = model.config
    of_config = config.return_dict, repr(config.output_hidden_states), attention_of(config)
    key = call.compiler is not None, *of_config, *selection_key("auto"), repr(sorted(options.items()))
    sizes = tuple([mask.of_graph for mask in masks])
    work = Work(module=model, options=key, sizes=sizes, inputs=inputs, forms=forms, function=function)
    return graphs.run(work), masks


def _tokens_of(arguments: dict[str, Any], side: int) -> Any:
    """The ids (B, L) or embeddings (B, L, E) of a side, or None."""
    ids, embeds = _TOKENS[side]
    return arguments.get(ids, arguments.get(embeds))


def _read_mask(call: Any, side: int, tokens: Tensor) -> HostMask:
    """The mask (B, L) of a side, which has these tokens, on the host. Syncs with the device once if there is one."""
    if (mask := call.side_masks[side]) is None:
        return HostMask(np.ones(tokens.shape[:2], np.bool_))
    has_labels = call.side_of("labels") == side
    uncounted = uncounted_labels(call.arguments, mask, call.entry.head) if has_labels else None
    is_token, *others = read_bits([mask != 0] if uncounted is None else [mask != 0, uncounted])
    begins = is_token[:, 1:] & ~is_token[:, :-1]
    if (np.count_nonzero(begins, axis=1) + is_token[:, :1].any(1)).max(initial=0) > 1:
        raise NotCapturedError("its rows have padding between tokens")
    return HostMask(is_token, bool(others and others[0].any()))


def _reasons(call: Any, arguments: dict[str, Any]) -> Reasons:
    """Why a call can't run as a graph, for reasons that depend on no values."""
    yield call.entry.plan.padded, "modules that run padded need the lengths on the host"
    yield call.entry.plan.convolutions, "its convolutions along the row are not supported there"
    unknown = arguments.keys() - _TENSORS - _OTHERS - {_NUMBER}
    yield unknown, f"a graph can't take {', '.join(sorted(unknown))}"
    tokens = [_tokens_of(arguments, side) for side in range(len(call.side_masks))]
    yield not all(isinstance(x, Tensor) for x in tokens), "it has no input_ids and no inputs_embeds"
    yield from reasons_of_call(call.model, tokens[0], call.entry.handle.graphs.training)
    dims = [2 if ids in arguments else 3 for ids, _ in _TOKENS[: len(tokens)]]
    yield [x.dim() for x in tokens] != dims, "its inputs have another number of dimensions"
    number = arguments.get(_NUMBER, 0)
    is_number = isinstance(number, int | float) or (isinstance(number, Tensor) and number.numel() == 1)
    yield not is_number, f"{_NUMBER} is no number"
    tensors = [(arguments[name], tokens[call.side_of(name)]) for name in _TENSORS & arguments.keys()]
    differ = any(x.shape[:2] != its.shape[:2] or x.device != tokens[0].device for x, its in tensors)
    differ |= len({len(x) for x in tokens}) > 1
    yield differ, "its inputs differ in their device or in their first two dimensions"
    entries = [(x, vars(x).get("forward")) for x in {families.base_model(call.model), *call.inner}]
    are_ours = all(isinstance(forward, PatchedForward) and forward.module is x for x, forward in entries)
    yield not are_ours, "its forward was replaced"
