"""Runs the packed call of a patched model as a CUDA graph.

The graph has the whole call: it packs the padded batch, runs the model and pads the outputs. The host only reads the
mask, to know the number of tokens.

Dimensions: B rows of a padded batch and L positions in a row, as in the bucket; N tokens of the bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...graphs.cache import CapturedCalls, process_settings, why_not_a_graph
from ...graphs.capture import Bucket, Computed, Sizes, Work, tensors_of
from ...graphs.device import NotCapturedError
from ...kernels.select import selection_key
from ...layouts.bounded import BoundedLayout
from ...layouts.reading import to_device
from ...modules.graphs import without_lengths
from ...patching.forwards import PatchedForward
from .. import families
from ..plan import Head
from ..route.packed_row import extend_tables
from ..transformers_private import attention_of
from .attention_code import make_cached_tensors
from .inputs import uncounted_labels
from .packing import Packing, begin_padded, read_bits
from .padded_on_read import Padding

# The arguments that a graph can take.
_TENSORS = {"input_ids", "inputs_embeds", "token_type_ids", "attention_mask", "labels", "shift_labels"}
_OTHERS = {"output_hidden_states", "return_dict", "use_cache"}
_NUMBER = "num_items_in_batch"  # another number in each batch, so it is an input of the graph


@dataclass(frozen=True, kw_only=True)
class BoundedPacking(Packing):
    """The tokens of a batch that only the device knows. Packed rows have N rows, `layout.total`.

    Attributes:
        mask: (B, L) bool, True at tokens.
        token: (B·L,) int64, the number of tokens up to each position, minus 1.
        padded: the tensors (B, L, …) that were made.
        packed: outputs (1, N, …) that are padded later, see `pad_later`.
    """

    mask: Tensor
    token: Tensor
    padded: list[Tensor] = field(default_factory=list)
    packed: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_mask(cls, mask: Tensor, tokens: int) -> BoundedPacking:
        """The packing of a mask (B, L) with up to `tokens` tokens, which the host does not read."""
        mask = mask != 0
        rows, length = mask.shape
        offsets = torch.nn.functional.pad(mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        token = mask.flatten().cumsum(0) - 1
        index = offsets.new_zeros(tokens + 1, dtype=torch.int64)
        positions = torch.arange(rows * length, device=mask.device)
        index.scatter_(0, torch.where(mask.flatten(), token, tokens).clamp_(max=tokens), positions)
        layout = BoundedLayout(offsets, length, tokens)
        # further rows are copies of the first token, because ids at padding may be invalid
        index = torch.where(torch.arange(tokens, device=mask.device) < offsets[-1], index[:-1], index[0])
        token = token.clamp_(0, max(0, tokens - 1))
        return cls(layout, index, rows, length, mask=mask, token=token)

    @property
    def saves_nothing(self) -> bool:
        return False

    def first_tokens(self, packed: Tensor) -> Tensor:
        return self._nearest(packed, torch.zeros(1, dtype=torch.int64, device=packed.device)).squeeze(1)

    def pad_with_nearest(self, packed: Tensor) -> Tensor:
        return self._keep(self._nearest(packed, torch.arange(self.length, device=packed.device)))

    def tokens_at(self, positions: Tensor, *, nearest: bool = False) -> tuple[Tensor, Tensor]:
        row = torch.arange(self.rows, device=positions.device)[:, None]
        flat = row * self.length + positions
        token = self.token[flat]
        if nearest:
            first = self.layout.offsets[:-1, None].clamp(max=self.layout.total - 1)
            is_token = self.mask.any(1, keepdim=True).expand_as(flat)
            token = torch.maximum(token, first)
        else:
            is_token = self.mask.flatten()[flat]
        return token.where(is_token, 0), is_token

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        assert self.index is not None
        index = torch.where(self.mask.flatten(), self.token, packed.shape[1])  # one further row, for padding
        padded = cast(Tensor, _Pad.apply(packed.squeeze(0), index, self.index, self.layout, value))
        return self._keep(padded.unflatten(0, (self.rows, self.length)))

    def pad_later(self, packed: Tensor, value: float = 0.0) -> Tensor:
        """The tensor itself: the graph ends with it, and its result is padded when it is read."""
        self.packed.append(packed)
        return packed

    def _keep(self, padded: Tensor) -> Tensor:
        self.padded.append(padded)
        return padded


@dataclass(frozen=True, eq=False)
class OfMask(Padding):
    """The padding of a batch whose mask was read, for outputs of a graph: made only if one of them is read.

    Attributes:
        is_token: (B, L), True at tokens.
        device: that of the outputs.
        ignores_labels, shares_rows: as in `Packing`.
    """

    is_token: NDArray[np.bool_]
    device: torch.device
    ignores_labels: bool = False
    shares_rows: ClassVar[bool] = False

    @functools.cached_property
    def _packing(self) -> Packing:
        return Packing.of(to_device(self.is_token, self.device), None, *self.padded_shape)

    @property
    def begins_padded(self) -> bool:
        return begin_padded(self.is_token)

    @functools.cached_property
    def token_shape(self) -> tuple[int, int]:
        return 1, int(np.count_nonzero(self.is_token))

    @property
    def padded_shape(self) -> tuple[int, int]:
        rows, length = self.is_token.shape
        return rows, length

    def pad(self, packed: Tensor, value: float = 0.0) -> Tensor:
        return self._packing.pad(packed, value)

    def unpad(self, gradient: Tensor) -> Tensor:
        return self._packing.unpad(gradient)

    def tokens_of(self, packed: Tensor) -> tuple[Tensor, Any]:
        return self._packing.tokens_of(packed)


class _Pad(torch.autograd.Function):
    """Packed rows (N, …) → padded rows (B·L, …). Both directions gather: the gradient of a token is at its position.

    It has no packing, which has the padded tensors: autograd would keep what it saves until Python collects cycles.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, of_padded: Tensor, of_packed: Tensor, layout: BoundedLayout, value: float
    ) -> Tensor:
        ctx.of_packed, ctx.layout = of_packed, layout
        return torch.cat([packed, packed.new_full((1, *packed.shape[1:]), value)]).index_select(0, of_padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.layout.fill_past_end(grad.index_select(0, ctx.of_packed), 0.0)
        return packed, None, None, None, None


def run_as_graph(
    graphs: CapturedCalls,
    model: PreTrainedModel,
    arguments: dict[str, Any],
    is_compiled: bool,
    head: Head | None,
    returns_cache: Callable[[], bool],
    run: Callable[[BoundedPacking, dict[str, Any]], ModelOutput | tuple[Any, ...]],
) -> tuple[Any, Sizes, OfMask]:
    """Run a packed call as a CUDA graph, and return its result, its sizes, and how outputs are padded that are not yet.

    Syncs with the device once, for the mask.

    Args:
        graphs: the graphs of the model.
        model: the model whose call it is.
        arguments: those that are not their defaults.
        is_compiled: whether `run` runs a compiled model.
        head: how its head runs.
        returns_cache: whether the model returns a cache for a batch without padding.
        run: runs the call for a packing and these arguments.

    Raises:
        NotCapturedError: the call can't run as a graph. Nothing was computed.
    """
    if (reason := _why_not(model, arguments, graphs.training)) is not None:
        raise NotCapturedError(reason)
    tokens: Tensor = arguments.get("input_ids", arguments.get("inputs_embeds"))  # type: ignore[assignment]
    rows, length = tokens.shape[:2]
    mask = arguments.get("attention_mask")
    padding = OfMask(np.ones((rows, length), np.bool_), tokens.device)
    if mask is not None:
        padding = _read_mask(mask, uncounted_labels(arguments, mask, head))
    sizes = Sizes(rows, length, padding.token_shape[1])
    if not sizes.tokens:
        raise NotCapturedError("the batch has no tokens")
    if sizes.tokens == rows * length and returns_cache():
        raise NotCapturedError("it has no padding, so the model returns a cache: pass use_cache=False")
    inputs, options = _divide(arguments, tokens)

    def shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
        first = bucket[0].sequences, bucket[0].longest
        return {name: x.shape if name == _NUMBER else (*first, *x.shape[2:]) for name, x in inputs.items()}

    def function(static: dict[str, Tensor], bucket: Bucket) -> Computed:
        make_cached_tensors(model, tokens.device)
        packing = BoundedPacking.of_mask(static["attention_mask"], bucket[0].tokens)
        with without_lengths():
            out = run(packing, {**options, **static})
        return Computed(out, [_form_of(x, packing) for x in tensors_of(out)], packing.layout)

    of_inputs = tuple([(name, x.dtype, x.dim(), x.shape[2:], x.device) for name, x in inputs.items()])
    work = Work(
        module=model,
        key=(is_compiled, _settings(model, tokens.device), repr(sorted(options.items())), of_inputs),
        inputs=inputs,
        shapes=shapes,
        zeroed=frozenset({"attention_mask"}),
        function=function,
        part=lambda x, form: _part(x, form, sizes),
        prepare=lambda bucket: extend_tables(model, bucket[0].longest),
    )
    return graphs.run(work, (sizes,)), sizes, padding


def _divide(arguments: dict[str, Any], tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inputs of a graph, which has a mask in each call, and the arguments that are a part of its key."""
    inputs = {name: x for name, x in sorted(arguments.items()) if isinstance(x, Tensor)}
    options = {name: x for name, x in arguments.items() if name not in inputs and name != _NUMBER}
    if "attention_mask" not in inputs:
        ones = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        inputs = {"attention_mask": ones, **inputs}
    if (number := arguments.get(_NUMBER)) is not None:
        inputs.pop(_NUMBER, None)
        inputs[_NUMBER] = torch.as_tensor(number, device=tokens.device).detach()
    return inputs, options


def _form_of(x: Tensor, packing: BoundedPacking) -> str:
    """What the first dimensions of an output are: "padded", "packed", "rows" or "other"."""
    if any(x is one for one in packing.padded):
        return "padded"
    if any(x is one for one in packing.packed):
        return "packed"
    return "rows" if x.dim() and x.shape[0] == packing.rows else "other"


def _part(x: Tensor, form: str, sizes: Sizes) -> Tensor:
    """The part of an output of a graph that belongs to the batch."""
    if form == "padded":  # (B, L, …)
        return x[: sizes.sequences, : sizes.longest]
    if form == "packed":  # (1, T, …)
        packed = x[:, : sizes.tokens]
        has_padding = sizes.tokens < sizes.sequences * sizes.longest  # else nothing is packed, as without graphs
        return packed if has_padding else packed.view(sizes.sequences, sizes.longest, *x.shape[2:])
    return x[: sizes.sequences] if form == "rows" else x


def _read_mask(mask: Tensor, uncounted: Tensor | None) -> OfMask:
    """The padding of a mask (B, L). Syncs with the device once."""
    is_token, *others = read_bits([mask != 0] if uncounted is None else [mask != 0, uncounted])
    begins = is_token[:, 1:] & ~is_token[:, :-1]
    if (np.count_nonzero(begins, axis=1) + is_token[:, :1].any(1)).max(initial=0) > 1:
        raise NotCapturedError("its rows have padding between tokens")
    return OfMask(is_token, mask.device, bool(others and others[0].any()))


def _why_not(model: PreTrainedModel, arguments: dict[str, Any], training: bool) -> str | None:
    """Why a call can't run as a graph, for a reason that depends on no values, or None."""
    tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if not isinstance(tokens, Tensor):
        return "it has no input_ids and no inputs_embeds"
    if (reason := why_not_a_graph(model, tokens, training)) is not None:
        return reason
    if unknown := arguments.keys() - _TENSORS - _OTHERS - {_NUMBER}:
        return f"a graph can't take {', '.join(sorted(unknown))}"
    if tokens.dim() != (2 if "input_ids" in arguments else 3):
        return "its inputs have another number of dimensions"
    number = arguments.get(_NUMBER, 0)
    if not isinstance(number, int | float) and not (isinstance(number, Tensor) and number.numel() == 1):
        return f"{_NUMBER} is no number"
    tensors = [arguments[name] for name in _TENSORS & arguments.keys()]
    if any(x.shape[:2] != tokens.shape[:2] or x.device != tokens.device for x in tensors):
        return "its inputs differ in their device or in their first two dimensions"
    forward = vars(base := families.base_model(model)).get("forward")
    return None if isinstance(forward, PatchedForward) and forward.module is base else "its forward was replaced"


def _settings(model: PreTrainedModel, device: torch.device) -> tuple[object, ...]:
    """Settings of the process and the config on which the captured work depends."""
    config: Any = model.config
    of_config = (config.return_dict, repr(config.output_hidden_states), attention_of(config))
    return (*process_settings(device), *selection_key("auto"), *of_config)
