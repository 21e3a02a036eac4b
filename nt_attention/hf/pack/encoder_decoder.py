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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...compiler import inline_only, outside_of_graphs
from ...patching.forwards import Handle, refuse_export
from .. import families
from ..proof import Proof
from ..route.hand_packed import is_packed, mixed_rows_error
from ..route.packed_mask import PackedMask
from ..route.packed_row import PackedRow, extend_tables, running
from .attention_code import make_cached_tensors
from .inputs import arguments_of, default_position_ids
from .packed_forward import Logits, add_rows_of_head
from .packing import Packing
from .routes import Call, FallsBack, Unpatched
from .rules import (
    AS_OUTER_MODEL,
    Rule,
    is_divided_by_context_parallel,
    needs_samples,
    route_of,
    was_replaced,
    why_arguments_not_packed,
)

# Arguments of an encoder-decoder, beside those in `families.INPUTS`. A call with any other one can't run packed.
_INPUTS = {
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "encoder_outputs",
}  # fmt: skip
# Outputs with a value for each token of the source. Others have one for each token of the target.
OF_SOURCE = ("encoder_last_hidden_state", "encoder_hidden_states")
_IGNORED = -100  # labels with this value have no loss


class _Sides(NamedTuple):
    source: Packing
    target: Packing


@dataclass(frozen=True, eq=False)
class EncoderDecoderCall:
    """The `forward` of a patched encoder-decoder: packs both sides, or falls back to the original forward.

    Attributes:
        handle: the handle of the patch. It counts calls and warns.
        proof: how the model is packed.
        defaults: the parameters of the original forward, in the order of positional arguments, and their defaults.
        logits: "padded", or None to leave logits packed in training with labels.
        is_routed: whether attention runs through transformers' interface.
    """

    handle: Handle
    proof: Proof
    defaults: dict[str, Any]
    logits: Logits
    is_routed: bool

    @inline_only
    def __call__(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse_export()
        arguments = arguments_of(self.defaults, args, kwargs)
        if arguments is None or isinstance(arguments.get("decoder_attention_mask"), PackedMask):
            return original(*args, **kwargs)  # if it is None, this raises an error
        call = _TwoSidedCall(self, model, original, args, kwargs, arguments, None)
        route = self._route(call)
        return self._run_packed(call) if route is None else route.run()

    @outside_of_graphs
    def _route(self, call: _TwoSidedCall) -> Unpatched | None:
        """The route of a call, counted. None if both sides run packed."""
        if (route := route_of(call, AS_OUTER_MODEL)) is not None:
            return route
        add_rows_of_head(call.model, call.arguments)
        _refuse_packed_rows(call.model, call.arguments)
        _add_target(call.model, call.arguments)
        if (route := route_of(call, _RULES)) is not None:
            return route
        self.handle.count(None)
        if self.handle.graphs is not None:
            self.handle.graphs.count("it is a call of an encoder-decoder")
        assert call.sides is not None
        source, target = call.sides
        # No graph can do these, and layers may be compiled.
        make_cached_tensors(call.model, source.layout.device)
        extend_tables(call.model, max(source.length, target.length))
        return None

    def keeps_apart(self, model: Any) -> bool:
        """True: calls whose rows have several sequences were refused."""
        return True

    @inline_only
    def _run_packed(self, call: _TwoSidedCall) -> Any:
        model, sides, arguments = call.model, call.sides, dict(call.arguments)  # copied as in `Packed.run`
        assert sides is not None
        source = sides.source
        as_dict = arguments.pop("return_dict", model.config.return_dict)
        keep_packed = self.logits is None and model.training and "labels" in arguments
        encoded = arguments.pop("encoder_outputs", None)
        if encoded is None:
            row, inputs = self._pack_source(model, source, arguments)
            with running(row=row, known=(model, *call.inner)):
                encoded = model.get_encoder()(**inputs)
        else:
            encoded = _packed_outputs(encoded, source)
        row, inputs = self._pack_target(model, sides, arguments)
        with running(row=row, known=(model, *call.inner)):
            out = call.original(**inputs, encoder_outputs=encoded)
        _pad_outputs(out, sides, {"logits"} if keep_packed else set())
        return out if as_dict else out.to_tuple()

    @outside_of_graphs
    def _pack_source(self, model: Any, source: Packing, arguments: dict[str, Any]) -> tuple[PackedRow, dict[str, Any]]:
        """The packed source, and the arguments of the encoder."""
        positions = default_position_ids(self.proof, model, source, arguments.get("input_ids"))
        inputs: dict[str, Any] = {name: source.pack(arguments[name]) for name in _SOURCE & arguments.keys()}
        inputs |= {name: arguments[name] for name in ("output_hidden_states",) if name in arguments}
        inputs |= {"attention_mask": PackedMask.of(source.layout, form="pairs"), "return_dict": True}
        return PackedRow(source.layout, positions, source.length), inputs

    @outside_of_graphs
    def _pack_target(self, model: Any, sides: _Sides, arguments: dict[str, Any]) -> tuple[PackedRow, dict[str, Any]]:
        """The packed target, and the arguments of the original forward but `encoder_outputs`."""
        source, target = sides
        positions = default_position_ids(self.proof, model, target, arguments.get("decoder_input_ids"))
        replaced = _SOURCE | _TARGET | {"attention_mask", "decoder_attention_mask", "use_cache"}
        inputs = {name: x for name, x in arguments.items() if name not in replaced}
        inputs |= {name: target.pack(arguments[name]) for name in _TARGET & arguments.keys()}
        inputs |= {
            "attention_mask": PackedMask.of(target.layout, source.layout, form="pairs"),
            "decoder_attention_mask": PackedMask.of(target.layout, form="pairs", is_causal=True),
            "use_cache": False,
            "return_dict": True,
        }
        return PackedRow(target.layout, positions, target.length), inputs


# Inputs with a value for each position of the source, and of the target.
_SOURCE = {"input_ids", "inputs_embeds"}
_TARGET = {"decoder_input_ids", "decoder_inputs_embeds", "labels"}


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


class _TwoSidedCall(Call):
    """A call of a patched encoder-decoder."""

    @property
    def inner(self) -> tuple[Any, ...]:
        """The patched models in this one."""
        return self.base, self.model.get_encoder()

    @functools.cached_property
    def sides(self) -> _Sides | None:
        """The packing of both sides."""
        return _read_sides(self.arguments)


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
    if call.sides is None or all(side.saves_nothing for side in call.sides):
        return "there is no padding to skip"
    return None if all(x.layout.total for x in call.sides) else "its source or its target has no tokens"


def _has_holes(call: _TwoSidedCall) -> str | None:
    """A row has padding between its tokens."""
    assert call.sides is not None
    return "its rows have padding between tokens" if any(x.has_holes for x in call.sides) else None


_RULES: tuple[Rule, ...] = (
    (is_divided_by_context_parallel, FallsBack),
    (was_replaced, FallsBack),
    (needs_samples, FallsBack),
    (_has_other_arguments, FallsBack),
    (_has_no_padding, Unpatched),
    (_has_holes, FallsBack),
)


def _read_sides(arguments: dict[str, Any]) -> _Sides | None:
    """The packing of the source and of the target. Syncs with the device at most once for each.

    The target's tokens are those of its mask or, without a mask, all up to the last label that is not ignored.
    """
    encoded = arguments.get("encoder_outputs")
    states = None if encoded is None else encoded if isinstance(encoded, Tensor) else encoded[0]
    source: Any = next((arguments[name] for name in ("input_ids", "inputs_embeds") if name in arguments), states)
    target: Any = arguments.get("decoder_input_ids", arguments.get("decoder_inputs_embeds"))
    mask, labels = arguments.get("decoder_attention_mask"), arguments.get("labels")
    if mask is None and labels is not None and labels.shape == target.shape[:2]:
        mask = (labels != _IGNORED).flip(1).cumsum(1).flip(1) > 0
    if source is None:
        return None
    return _Sides(_packing(arguments.get("attention_mask"), source), _packing(mask, target))


def _packing(mask: Tensor | None, tokens: Tensor) -> Packing:
    rows, length = tokens.shape[:2]
    if mask is not None and mask.shape != (rows, length):
        raise ValueError(f"a mask is {tuple(mask.shape)}, but its tokens are {(rows, length)} (batch, length).")
    mask = torch.ones(rows, length, dtype=torch.bool, device=tokens.device) if mask is None else mask != 0
    return Packing.of(mask, None, rows, length)


@outside_of_graphs
def _pad_outputs(out: ModelOutput, sides: _Sides, done: set[str]) -> None:
    """Pad every output with a value for each token: (1, S or T, …) → (B, Ls or Lt, …)."""
    for name, value in list(out.items()):
        if name in families.OTHER_OUTPUTS | done:
            continue
        packing = sides.source if name in OF_SOURCE else sides.target
        many = isinstance(value, tuple)
        padded = tuple(packing.pad(x) for x in (value if many else (value,)))
        out[name] = padded if many else padded[0]
