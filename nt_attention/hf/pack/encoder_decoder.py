"""Runs the call of a patched Hugging Face encoder-decoder with packed rows on both sides.

The encoder runs on the packed source. The decoder runs on the packed target: self-attention with the lengths of the
target, cross-attention with queries of the target and keys of the source. Both layouts travel in the masks
(`packed_mask.py`).

Dimensions: B rows, Ls and Lt positions of a padded source and target, S and T tokens of the packed ones.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...compiler import inline_only, outside_of_graphs
from ...patching.forwards import (
    CONTEXT_PARALLEL,
    GRADIENTS_PER_SAMPLE,
    Handle,
    has_gradients_per_sample,
    is_context_parallel,
    refuse_export,
    replacement_of,
)
from .. import families
from ..proof import Proof
from ..route.hand_packed import is_packed
from ..route.packed_mask import PackedMask
from ..route.packed_row import PackedRow, extend_tables, running_row
from .attention_code import make_cached_tensors
from .packed_forward import (
    Logits,
    add_rows_of_head,
    default_position_ids,
    given_arguments,
    is_planned_by_head,
    not_supported,
    planned_by_head,
)
from .packing import Packing

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
        given = given_arguments(self.defaults, args, kwargs)
        if given is None or isinstance(given.get("decoder_attention_mask"), PackedMask):
            return original(*args, **kwargs)  # if it is None, this raises an error
        sides = self._plan(model, original, given)
        if sides == "head":
            return original(*args, **kwargs)
        if sides == "padded":
            with running_row(None), planned_by_head(families.base_model(model), model.get_encoder()):
                return original(**given)
        return self._run_packed(model, original, sides, given)

    @outside_of_graphs
    def _plan(
        self, model: Any, original: Callable[..., Any], given: dict[str, Any]
    ) -> _Sides | Literal["padded", "head"]:
        """The packing of both sides, or else what runs the original forward. Counts the call.

        Adds the decoder's input to `given`, if the model would make it from labels or from its input.
        """
        if is_planned_by_head(model):
            return "head"
        add_rows_of_head(model, given)
        _refuse_packed_rows(model, given)
        _add_target(model, given)
        reason = CONTEXT_PARALLEL if is_context_parallel() else replacement_of(original, type(model))
        reason = reason or (GRADIENTS_PER_SAMPLE if has_gradients_per_sample(model) else None)
        reason = reason or _not_supported(given, model, self.is_routed)
        if reason is not None:
            self.handle.fall_back(reason)
            return "padded"
        sides = _read_sides(given)
        if sides is None or (sides.source.saves_nothing and sides.target.saves_nothing):
            self.handle.count("there is no padding to skip")
            return "padded"
        if not (sides.source.layout.total and sides.target.layout.total):
            self.handle.count("its source or its target has no tokens")
            return "padded"
        if sides.source.has_holes or sides.target.has_holes:
            self.handle.fall_back("its rows have padding between tokens")
            return "padded"
        self.handle.count(None)
        if self.handle.graphs is not None:
            self.handle.graphs.count("it is a call of an encoder-decoder")
        # No graph can do these, and layers may be compiled.
        make_cached_tensors(model, sides.source.layout.device)
        extend_tables(model, max(sides.source.length, sides.target.length))
        return sides

    @inline_only
    def _run_packed(self, model: Any, original: Callable[..., Any], sides: _Sides, given: dict[str, Any]) -> Any:
        source, given = sides.source, dict(given)  # copied for the reason in `PackedCall._run_packed`
        as_dict = given.pop("return_dict", model.config.return_dict)
        keep_packed = self.logits is None and model.training and "labels" in given
        encoded = given.pop("encoder_outputs", None)
        if encoded is None:
            row, inputs = self._pack_source(model, source, given)
            with running_row(row):
                encoded = model.get_encoder()(**inputs)
        else:
            encoded = _packed_outputs(encoded, source)
        row, inputs = self._pack_target(model, sides, given)
        with running_row(row):
            out = original(**inputs, encoder_outputs=encoded)
        _pad_outputs(out, sides, {"logits"} if keep_packed else set())
        return out if as_dict else out.to_tuple()

    @outside_of_graphs
    def _pack_source(self, model: Any, source: Packing, given: dict[str, Any]) -> tuple[PackedRow, dict[str, Any]]:
        """The packed source, and the arguments of the encoder."""
        positions = default_position_ids(self.proof, model, source, given.get("input_ids"))
        inputs: dict[str, Any] = {name: source.pack(given[name]) for name in _SOURCE & given.keys()}
        inputs |= {name: given[name] for name in ("output_hidden_states",) if name in given}
        inputs |= {"attention_mask": PackedMask.of(source.layout, form="pairs"), "return_dict": True}
        return PackedRow(source.layout, positions, source.length), inputs

    @outside_of_graphs
    def _pack_target(self, model: Any, sides: _Sides, given: dict[str, Any]) -> tuple[PackedRow, dict[str, Any]]:
        """The packed target, and the arguments of the original forward but `encoder_outputs`."""
        source, target = sides
        positions = default_position_ids(self.proof, model, target, given.get("decoder_input_ids"))
        replaced = _SOURCE | _TARGET | {"attention_mask", "decoder_attention_mask", "use_cache"}
        inputs = {name: x for name, x in given.items() if name not in replaced}
        inputs |= {name: target.pack(given[name]) for name in _TARGET & given.keys()}
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


def _refuse_packed_rows(model: Any, given: dict[str, Any]) -> None:
    """Raise an error if the caller packed rows: nothing says which source a target in a row belongs to.

    Raises:
        ValueError: there are `cu_seq_lens_q`, or positions that restart.
    """
    decoder = {name.removeprefix("decoder_"): x for name, x in given.items() if name.startswith("decoder_")}
    if "cu_seq_lens_q" in given or is_packed(given) or is_packed(decoder):
        raise ValueError(
            f"{type(model).__name__} got rows with several sequences (cu_seq_lens_q, or position_ids that restart), "
            "which an encoder-decoder can't keep apart: pass padded batches with attention_mask."
        )


def _add_target(model: Any, given: dict[str, Any]) -> None:
    """Add the decoder's input that the model makes from labels, or from its input."""
    if "decoder_input_ids" in given or "decoder_inputs_embeds" in given:
        return
    if "labels" not in given:
        _add_target_of_source(model, given)
    elif hasattr(model, "prepare_decoder_input_ids_from_labels"):
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(given["labels"])
    elif (target := _shifted(model, given["labels"])) is not None:
        given["decoder_input_ids"] = target


def _add_target_of_source(model: Any, given: dict[str, Any]) -> None:
    """Add the target that BART and its like make from a source with padding on the right."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if getattr(model.config, "model_type", "") not in _TARGET_FROM_SOURCE or ids is None or mask is None:
        return
    if mask.dim() != 2 or not bool((mask[:, :-1] >= mask[:, 1:]).all()):  # one sync
        return
    target = _shifted(model, ids)
    if target is not None:
        given |= {"decoder_input_ids": target, "decoder_attention_mask": mask}


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


def _not_supported(given: dict[str, Any], model: PreTrainedModel, is_routed: bool) -> str | None:
    """Why a call can't run packed, or None."""
    if "decoder_input_ids" not in given and "decoder_inputs_embeds" not in given:
        return "it has neither decoder_input_ids nor labels"
    mask = given.get("decoder_attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its decoder_attention_mask is not (batch, length)"
    return not_supported({name: x for name, x in given.items() if name not in _INPUTS}, model, is_routed)


def _read_sides(given: dict[str, Any]) -> _Sides | None:
    """The packing of the source and of the target. Syncs with the device at most once for each.

    The target's tokens are those of its mask or, without a mask, all up to the last label that is not ignored.
    """
    encoded = given.get("encoder_outputs")
    states = None if encoded is None else encoded if isinstance(encoded, Tensor) else encoded[0]
    source: Any = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), states)
    target: Any = given.get("decoder_input_ids", given.get("decoder_inputs_embeds"))
    mask, labels = given.get("decoder_attention_mask"), given.get("labels")
    if mask is None and labels is not None and labels.shape == target.shape[:2]:
        mask = (labels != _IGNORED).flip(1).cumsum(1).flip(1) > 0
    if source is None:
        return None
    return _Sides(_packing(given.get("attention_mask"), source), _packing(mask, target))


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
