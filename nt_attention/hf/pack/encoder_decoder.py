"""Runs the call of a patched Hugging Face encoder-decoder with packed rows on both sides.

The encoder runs on the packed source. The decoder runs on the packed target: self-attention with the lengths of the
target, cross-attention with queries of the target and keys of the source. Both layouts travel in the masks
(`packed_mask.py`).

Dimensions: B rows, Ls and Lt positions of a padded source and target, S and T tokens of the packed ones.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...compiler import active_compiler, inline_only, outside_of_graphs
from ...layouts.protocol import Layout
from ...patching.forwards import Handle, is_recorded
from .. import families
from ..plan import Head, Plan
from ..route.hand_packed import is_packed, mixed_rows_error
from ..route.packed_mask import PackedMask
from ..route.packed_row import PackedRow, running
from .differences import LABELS
from .inputs import arguments_of, default_position_ids, ignore_past_end, read_packing
from .outputs import pad_outputs
from .packed_forward import ModelForward
from .packing import Packing
from .routes import FallsBack, ModelCall, Packed, Unpatched, longest_of
from .rules import (
    NO_PADDING,
    Rule,
    differs_from_padded,
    is_divided_by_context_parallel,
    needs_samples,
    was_given_other_attention,
    why_arguments_not_packed,
)

# Arguments of an encoder-decoder, beside those in `families.INPUTS`. A call with any other one can't run packed.
_INPUTS = {
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "encoder_outputs",
}  # fmt: skip
# Outputs with a value for each token of the source. Others have one for each token of the target.
OF_SOURCE = ("encoder_last_hidden_state", "encoder_hidden_states")
_IGNORED = -100  # labels with this value have no loss
# Inputs with a value for each position of the source, and of the target.
_SOURCE = {"input_ids", "inputs_embeds"}
_TARGET = {"decoder_input_ids", "decoder_inputs_embeds", "labels"}


class _Sides(NamedTuple):
    source: Packing
    target: Packing

    @property
    def ignores_labels(self) -> bool:
        """As in `Packing`."""
        return self.target.ignores_labels

    @property
    def layout(self) -> Layout:
        """The layout of the source."""
        return self.source.layout

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of positions and tokens of both sides."""
        (positions, tokens), (more_positions, more_tokens) = self.source.sizes, self.target.sizes
        return positions + more_positions, tokens + more_tokens

    @property
    def length(self) -> int:
        """The length of the longest padded row."""
        return max(self.source.length, self.target.length)


class _TwoSidedCall(ModelCall):
    """A call of a patched encoder-decoder."""

    @property
    def inner(self) -> tuple[Any, ...]:
        """The patched models in this one."""
        return self.base, self.model.get_encoder()

    @functools.cached_property
    def packing(self) -> Any:
        """The `_Sides`, or None if there is no source. Syncs with the device at most once for each.

        The target's tokens are those of its mask or, without a mask, all up to the last label that is not ignored.
        """
        arguments, (source_mask, target_mask) = self.arguments, self.side_masks
        encoded = arguments.get("encoder_outputs")
        states = None if encoded is None else encoded if isinstance(encoded, Tensor) else encoded[0]
        source: Any = arguments.get("input_ids", arguments.get("inputs_embeds", states))
        if source is None:
            return None
        of_target = {"input_ids": _target_of(arguments), "attention_mask": target_mask}
        if (labels := self._labels) is not None:
            of_target["labels"] = labels
        sides = {"input_ids": source, "attention_mask": source_mask}, of_target
        packings: list[Any] = [read_packing(side, always=True, head="token") for side in sides]
        return _Sides(*packings)

    @property
    def _labels(self) -> Tensor | None:
        """The labels (B, Lt) of the target, if it has some."""
        labels: Tensor | None = self.arguments.get("labels")
        return None if labels is None or labels.shape != _target_of(self.arguments).shape[:2] else labels

    @functools.cached_property
    def side_masks(self) -> tuple[Tensor | None, ...]:
        mask, labels = self.arguments.get("decoder_attention_mask"), self._labels
        if mask is None and labels is not None:
            mask = (labels != _IGNORED).flip(1).cumsum(1).flip(1) > 0
        return self.arguments.get("attention_mask"), mask

    @property
    def length(self) -> int:
        """The length of the longest padded rows of both sides."""
        return longest_of(self.arguments, (*_SOURCE, *_TARGET))

    @property
    def packings(self) -> tuple[Any, ...]:
        """The packings of both sides."""
        return tuple(self.packing or ())

    def side_of(self, name: str) -> int:
        return 0 if name in (*_SOURCE, *OF_SOURCE, "attention_mask") else 1

    def join(self, sides: Iterable[Any]) -> Any:
        return _Sides(*sides)

    def packed(self, packings: Iterable[Packing], arguments: dict[str, Any]) -> PackedSides:
        return PackedSides(replace(self, arguments=arguments), self.join(packings))

    def tell_differences(self, padding: _Sides) -> None:
        """As in any call. Only its loss may differ."""
        if padding.ignores_labels:
            self.entry.handle.differ(LABELS)


class PackedSides(Packed):
    """The route of a packed call: the encoder runs on the packed source, and the rest on the packed target."""

    packing: Any  # `_Sides`

    @inline_only
    def run(self) -> Any:
        """Run the call."""
        model, arguments = self.call.model, dict(self.call.arguments)  # copied as in `Packed.run`
        packed = (model, *self.call.inner)
        as_dict = arguments.pop("return_dict", model.config.return_dict)
        encoded = arguments.pop("encoder_outputs", None)
        if encoded is None:
            row, inputs = self._pack_source(arguments)
            with running(row=row, packed=packed):
                encoded = model.get_encoder()(**inputs)
        else:
            encoded = _packed_outputs(encoded, self.packing.source)
        row, inputs = self._pack_target(arguments)
        with running(row=row, packed=packed):
            out = self.call.original(**inputs, encoder_outputs=encoded)
        of_source = [name for name in out if name in OF_SOURCE]
        pad_outputs(out, self.packing.source, names=of_source)
        pad_outputs(out, self.packing.target, names=[name for name in out if name not in of_source])
        return out if as_dict else out.to_tuple()

    @outside_of_graphs
    def _pack_source(self, arguments: dict[str, Any]) -> tuple[PackedRow, dict[str, Any]]:
        """The packed source, and the arguments of the encoder."""
        source, call = self.packing.source, self.call
        positions = default_position_ids(call.entry.plan, call.model, source, arguments.get("input_ids"))
        inputs: dict[str, Any] = {name: source.pack(arguments[name]) for name in _SOURCE & arguments.keys()}
        inputs |= {name: arguments[name] for name in ("output_hidden_states",) if name in arguments}
        inputs |= {"attention_mask": PackedMask.of(source.layout, form="pairs"), "return_dict": True}
        return PackedRow(source.layout, positions, source.length), inputs

    @outside_of_graphs
    def _pack_target(self, arguments: dict[str, Any]) -> tuple[PackedRow, dict[str, Any]]:
        """The packed target, and the arguments of the original forward but `encoder_outputs`."""
        (source, target), call = self.packing, self.call
        positions = default_position_ids(call.entry.plan, call.model, target, arguments.get("decoder_input_ids"))
        replaced = _SOURCE | _TARGET | {"attention_mask", "decoder_attention_mask", "use_cache"}
        inputs = {name: x for name, x in arguments.items() if name not in replaced}
        inputs |= {name: target.pack(arguments[name]) for name in _TARGET & arguments.keys()}
        inputs |= {
            "attention_mask": PackedMask.of(target.layout, source.layout, form="pairs"),
            "decoder_attention_mask": PackedMask.of(target.layout, form="pairs", is_causal=True),
            "use_cache": False,
            "return_dict": True,
        }
        ignore_past_end(inputs, target.layout)
        return PackedRow(target.layout, positions, target.length), inputs


@outside_of_graphs
def _packed_outputs(outputs: Any, source: Packing) -> BaseModelOutput:
    """The outputs of an encoder that the caller passes, (B, Ls, …), packed."""
    states = outputs if isinstance(outputs, Tensor) else outputs[0]
    hidden = outputs.get("hidden_states") if isinstance(outputs, ModelOutput) else None
    packed = None if hidden is None else tuple(source.pack(x) for x in hidden)
    return BaseModelOutput(last_hidden_state=source.pack(states), hidden_states=packed)


def _refuse_packed_rows(model: Any, arguments: dict[str, Any]) -> None:
    """Raise an error if the caller packed rows: nothing says which source a target in a row belongs to.

    Raises:
        ValueError: there are `cu_seq_lens_q`, or positions that restart.
    """
    decoder = {name.removeprefix("decoder_"): x for name, x in arguments.items() if name.startswith("decoder_")}
    if "cu_seq_lens_q" in arguments or is_packed(arguments) or is_packed(decoder):
        raise mixed_rows_error(model, "it is an encoder-decoder: pass padded batches with attention_mask")


def _target_of(arguments: dict[str, Any]) -> Any:
    """The ids or the embeddings of the target, or None."""
    return arguments.get("decoder_input_ids", arguments.get("decoder_inputs_embeds"))


def _add_target(model: Any, arguments: dict[str, Any]) -> None:
    """Add the decoder's input that the model makes from labels, or from its input."""
    if "decoder_input_ids" in arguments or "decoder_inputs_embeds" in arguments:
        return
    if "labels" not in arguments:
        _add_target_of_source(model, arguments)
    elif hasattr(model, "prepare_decoder_input_ids_from_labels"):
        arguments["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(arguments["labels"])
    elif (target := _shifted(model, arguments["labels"])) is not None:
        arguments["decoder_input_ids"] = target


def _add_target_of_source(model: Any, arguments: dict[str, Any]) -> None:
    """Add the target that BART and its like make from a source with padding on the right."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if getattr(model.config, "model_type", "") not in _TARGET_FROM_SOURCE or ids is None or mask is None:
        return
    if mask.dim() != 2 or not bool((mask[:, :-1] >= mask[:, 1:]).all()):  # one sync
        return
    target = _shifted(model, ids)
    if target is not None:
        arguments |= {"decoder_input_ids": target, "decoder_attention_mask": mask}


def _shifted(model: Any, ids: Tensor) -> Tensor | None:
    """The ids, shifted by the function of the model's file, or None if it has none."""
    shift = getattr(sys.modules[families.class_of(model).__module__], "shift_tokens_right", None)
    if shift is None:
        return None
    special = (getattr(model.config, name, None) for name in ("pad_token_id", "decoder_start_token_id"))
    shifted: Tensor = shift(ids, *itertools.islice(special, len(inspect.signature(shift).parameters) - 1))
    return shifted


# Model types that make the target from the source if a call has neither a target nor labels.
_TARGET_FROM_SOURCE = {"bart", "mbart", "mvp", "plbart"}


def _has_other_arguments(call: _TwoSidedCall) -> str | None:
    """An argument or the config asks for what packed rows can't give."""
    arguments = call.arguments
    if "decoder_input_ids" not in arguments and "decoder_inputs_embeds" not in arguments:
        return "it has neither decoder_input_ids nor labels"
    mask = arguments.get("decoder_attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its decoder_attention_mask is not (batch, length)"
    others = {name: x for name, x in arguments.items() if name not in _INPUTS}
    return why_arguments_not_packed(others, call.model, call.entry.is_routed)


def _has_no_padding(call: _TwoSidedCall) -> str | None:
    """Packing saves nothing."""
    if call.packing is None or all(side.saves_nothing for side in call.packing):
        return NO_PADDING
    return None if all(x.layout.total for x in call.packing) else "its source or its target has no tokens"


def _has_holes(call: _TwoSidedCall) -> str | None:
    """A row has padding between its tokens."""
    return "its rows have padding between tokens" if any(x.has_holes for x in call.packing) else None


@dataclass(frozen=True, eq=False)
class EncoderDecoderCall(ModelForward):
    """The `forward` of a patched encoder-decoder: packs both sides, or falls back to the original forward.

    Attributes:
        handle: the handle of the patch. It counts calls and warns.
        plan: how the model is packed.
        defaults: the parameters of the original forward, in the order of positional arguments, and their defaults.
        is_routed: whether attention runs through transformers' interface.
        head, first_batches: as in `PackedCall`.
    """

    before_graph: ClassVar[tuple[Rule, ...]] = (
        (is_divided_by_context_parallel, FallsBack),
        (needs_samples, FallsBack),
        (_has_other_arguments, FallsBack),
        (was_given_other_attention, FallsBack),
    )
    after_graph: ClassVar[tuple[Rule, ...]] = (
        (_has_no_padding, Unpatched),
        (_has_holes, FallsBack),
        (differs_from_padded, FallsBack),
    )
    handle: Handle
    plan: Plan
    defaults: dict[str, Any]
    is_routed: bool
    head: Head | None = None
    first_batches: Any = None

    @inline_only
    def __call__(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_recorded():
            return original(*args, **kwargs)
        arguments = arguments_of(self.defaults, args, kwargs)
        if arguments is None or isinstance(arguments.get("decoder_attention_mask"), PackedMask):
            return original(*args, **kwargs)  # if it is None, this raises an error
        return self.run(_TwoSidedCall(self, model, original, args, kwargs, arguments, active_compiler()))

    def prepare(self, call: ModelCall) -> None:
        """Add what the arguments lack. Raises a ValueError for packed rows."""
        super().prepare(call)
        _refuse_packed_rows(call.model, call.arguments)
        _add_target(call.model, call.arguments)

    def keeps_apart(self, model: Any) -> bool:
        """True: calls whose rows have several sequences were refused."""
        return True
