"""A Hugging Face model's call as one packed row, from the model's entry to its exit, head and loss included.

A head and its base model both have an entry, so that callers who go past the head's ``forward`` (TRL, Liger, PEFT's
prefix tuning, ``model.model(...)``) run packed as well. The path of a call:

- the head packs, and its base model finds the row packed and passes it through;
- or the head falls back for a reason that holds for its base model too, which then passes the call through;
- or the reason is the head's alone, and the base model packs;
- or the head is never called, and the base model packs.

Dimensions: B rows of a padded batch, L places in a row, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss
from transformers.utils import ModelOutput

from .._forwards import outside_of_graphs, replacement_of
from ..patching.patch import PatchHandle
from . import families
from .attention import NAME_OVER, bypass_mask, is_bypass_mask
from .families import Family, Head
from .packing import Packing
from .rope import scaled_apart

Logits = Literal["padded"] | None

# What a caller may ask for that packing can't give; the call then falls back to the padded forward.
_FALLS_BACK = {
    "past_key_values": "it continues from a cache",
    "use_cache": "it asks for a cache",
    "output_attentions": "it asks for attention weights",
    "output_router_logits": "it asks for router logits, which are counted with a padded mask",
    "encoder_hidden_states": "it attends across to another model's states",
}

# How a call runs that is not packed at this entry: the base model beneath it may still pack, or runs it as it is.
Unpacked = Literal["base model decides", "as it is"]

# The base model that runs its call as it is, since its head has decided so.
_decided_for: ContextVar[Any] = ContextVar("the base model that runs its call as it is", default=None)


@dataclass(frozen=True, eq=False)
class PackedCall:
    """The ``forward`` of a patched model: a padded call as one packed row, or the forward that it had, and why.

    Attributes:
        handle: of the patch; it counts and warns.
        family, head: what the model is. Under a "sequence" head this is the base model's forward.
        logits: "padded", or None to leave them packed in training with labels.
        names: of the model's parameters that can be positional arguments.
        scales_rope: whether its rotary embedding is scaled by a sequence's length.
    """

    handle: PatchHandle
    family: Family
    head: Head | None
    logits: Logits
    names: tuple[str, ...]
    scales_rope: bool = False

    def __call__(self, model: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while isinstance(original, functools.partial) and not original.args:  # options that somebody has fixed
            kwargs = {**original.keywords, **kwargs}
            original = original.func
        by_place = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names) or by_place.keys() & kwargs.keys():
            return original(*args, **kwargs)  # which refuses it
        given = {name: value for name, value in {**by_place, **kwargs}.items() if value is not None}
        if _is_packed_above(given):
            if self.family.embed is not None:  # whose embeddings read the mask
                del given["attention_mask"]
            return original(**given)
        how = self._decide(model, original, given)
        if how == "as it is":
            return self._run_as_it_is(model, original, args, kwargs)
        if how == "base model decides":
            return original(*args, **kwargs)
        try:
            return self._run(model, original, how, dict(given))
        except (
            _UnknownOutput
        ) as unknown:  # counted as packed, which it ran, and with the reason for which it runs again
            self._fall_back(str(unknown))
        return self._run_as_it_is(model, original, args, kwargs)

    # not compiled: lengths are read on the host, and graphs know neither locks nor context variables
    @outside_of_graphs
    def _decide(
        self, model: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any]
    ) -> Packing | Unpacked:
        """Where the tokens stand, or how the call runs instead, counted with the reason."""
        if _decided_for.get() is model:
            return "as it is"
        if "cu_seq_lens_q" in given:
            self.handle.count("it was packed already")
            return "as it is"
        replacement = replacement_of(original, type(model))
        if replacement is not None:
            return self._leave_to_base(model, _replaced(replacement, model))
        base = families.base_model(model, self.family)
        replacement = None if base is model else replacement_of(base.forward, type(base))
        if replacement is not None:  # it would get the packed row of the head
            return self._fall_back(_replaced(replacement, base))
        why = _why_not(given, model, self.family)
        if why is not None:
            return self._fall_back(why)
        why = None if self.head is None else _why_not_head(given, model)
        if why is not None:
            return self._leave_to_base(model, why)
        packing = _packing(given)
        if packing is not None and packing.has_holes:
            if _has_windows(model.config):
                return self._fall_back("its rows hold padding between tokens, over which a window counts")
            if self.head == "next token" and "labels" in given:
                return self._fall_back("its rows hold padding between tokens, over which labels are shifted")
        if packing is None or packing.saves_nothing:
            self.handle.count("there is no padding to skip")
            return "as it is"
        if self.head == "span" and _points_at_padding(given, packing):
            return self._fall_back("its start_positions or end_positions point at padding, which has no logits then")
        self.handle.count(None)
        return packing

    def _fall_back(self, why: str) -> Unpacked:
        self.handle.not_packed(why)
        return "as it is"

    def _leave_to_base(self, model: PreTrainedModel, why: str) -> Unpacked:
        alone = families.base_model(model, self.family) is model
        self.handle.not_packed(why, "this call" if alone else "the head of this call")
        return "base model decides"

    def _run_as_it_is(
        self, model: PreTrainedModel, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward that the model had, in which its base model decides nothing and counts nothing."""
        base = families.base_model(model, self.family)
        with scaled_apart(None) if self.scales_rope else nullcontext():
            if base is model:
                return original(*args, **kwargs)
            before = _decide_for(base)
            try:
                return original(*args, **kwargs)
            finally:
                _forget(before)

    def _run(
        self, model: PreTrainedModel, original: Callable[..., Any], packing: Packing, given: dict[str, Any]
    ) -> Any:
        family, head = self.family, self.head
        as_dict = given.pop("return_dict", None)
        spans = {key: given.pop(key) for key in ("start_positions", "end_positions") if head == "span" and key in given}
        keep = given.pop("logits_to_keep", 0)
        kept = _kept(packing, keep) if isinstance(keep, Tensor) or keep else None
        loss_alone = self.logits is None and model.training and bool({"labels", "shift_labels"} & given.keys())

        packed = _pack_inputs(model, family, head, packing, given)
        if kept is not None:
            packed["logits_to_keep"] = kept[0].flatten()
        with scaled_apart(packing.layout) if self.scales_rope else nullcontext():
            out = original(**packed)
        if family.pool is not None and out.get("pooler_output") is not None:
            out["pooler_output"] = family.pool(model, packing.first_tokens(out["last_hidden_state"]))
        done = {"logits"} if loss_alone else set()
        if head == "sequence":  # it may read the first or the last place of a row, where padding may stand
            out["last_hidden_state"] = packing.spread(out["last_hidden_state"])
            done.add("last_hidden_state")
        _pad_outputs(out, packing, kept, done)
        if spans:
            loss = ForQuestionAnsweringLoss(out["start_logits"], out["end_logits"], **spans)
            out = out if loss is None else type(out)(**{**out, "loss": loss})
        wants_dict = model.config.return_dict if as_dict is None else as_dict
        return out if wants_dict else out.to_tuple()


@outside_of_graphs
def _decide_for(base: Any) -> Token[Any]:
    return _decided_for.set(base)


@outside_of_graphs
def _forget(before: Token[Any]) -> None:
    _decided_for.reset(before)


def _is_packed_above(given: dict[str, Any]) -> bool:
    """Whether a call is a packed row of the head's, whose entry made its mask."""
    mask = given.get("attention_mask")
    return "cu_seq_lens_q" in given and isinstance(mask, Tensor) and is_bypass_mask(mask)


def _why_not(given: dict[str, Any], model: PreTrainedModel, family: Family) -> str | None:
    """Why a call can't be packed, at the head's entry or the base model's."""
    if model.config._attn_implementation not in NAME_OVER.values():
        if model.config.output_attentions:
            return "the config asks for attention weights"
        return f"its attention has been set to {model.config._attn_implementation!r} since"
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return "NEFTune scales its noise by the length of a row"
    if family.apart_under and getattr(model.config, family.apart_under, None):
        return f"under {family.apart_under} its attention is not told what its mask says"
    if model.config.output_attentions:
        return "the config asks for attention weights"
    if getattr(model.config, "output_router_logits", False):
        return _FALLS_BACK["output_router_logits"]
    for name, why in _FALLS_BACK.items():
        if given.get(name, False) is not False:  # an empty cache, which is falsy, is one all the same
            return why
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its attention_mask is not (batch, length)"
    positions = given.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return "its position_ids are not (batch, length)"
    return None


def _why_not_head(given: dict[str, Any], model: PreTrainedModel) -> str | None:
    """Why a head can't be packed, though its base model can."""
    labelled = {"labels", "shift_labels"} & given.keys()
    loss = model.loss_function if labelled else vars(model).get("_loss_function")
    if loss is not None and not getattr(loss, "__module__", "").startswith("transformers."):
        return "its loss_function has been set, and may read rows"
    keep, labels = given.get("logits_to_keep", 0), given.get("labels", given.get("shift_labels"))
    if isinstance(keep, Tensor) and keep.dtype == torch.bool:
        return "its logits_to_keep is a mask"
    if labels is not None and (isinstance(keep, Tensor) or keep):
        return "it asks for a loss of the logits of some positions only"
    return None


def _replaced(replacement: str, model: Any) -> str:
    return f"{replacement} stands in the place of {type(model).__name__}.forward, and may read rows"


def _points_at_padding(given: dict[str, Any], packing: Packing) -> bool:
    """Whether an answer begins or ends at padding, whose logits would be the lowest. Reads the device once more."""
    spans = [given[name] for name in ("start_positions", "end_positions") if name in given]
    spans = [x.squeeze(-1) if x.dim() > 1 else x for x in spans]
    if not spans:
        return False
    places = torch.stack(spans, 1)  # (B, 2)
    inside = places < packing.length  # the others are ignored by the loss
    flat = torch.arange(packing.rows, device=places.device)[:, None] * packing.length + places.clamp(
        0, packing.length - 1
    )
    there = torch.zeros(packing.rows * packing.length, dtype=torch.bool, device=places.device)
    there = there.fill_(True) if packing.index is None else there.index_fill_(0, packing.index, True)
    return bool((inside & ~there[flat]).any())


def _packing(given: dict[str, Any]) -> Packing | None:
    """None if neither mask nor positions tell of anything to pack."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if tokens is None or (mask is None and positions is None):
        return None
    rows, length = tokens.shape[:2]
    for name, of in (("attention_mask", mask), ("position_ids", positions)):
        if of is not None and of.shape != (rows, length) and (name == "attention_mask" or of.shape != (1, length)):
            hint = " To decode on from a cache, pass use_cache=True in the first call: a packed call returns none."
            raise ValueError(
                f"{name} is {tuple(of.shape)}, but the input is {(rows, length)} (batch, length)."
                f"{hint if length < of.shape[1] else ''}"
            )
    widths = [given[key].shape[:2] for key in families.TOKEN_INPUTS & given.keys()]
    if any(shape not in ((rows, length), (1, length)) for shape in widths):
        return None  # for the model to refuse
    # as transformers reads a mask
    return Packing.of(None if mask is None else mask != 0, positions, rows, length)


# not compiled: dozens of small graphs would be made of it
@outside_of_graphs
def _pack_inputs(
    model: PreTrainedModel, family: Family, head: Head | None, packing: Packing, given: dict[str, Any]
) -> dict[str, Any]:
    """The keywords that make (1, T) tokens a packed row to transformers."""
    layout = packing.layout
    given.pop("attention_mask", None)
    base: Any = families.base_model(model, family)
    if "position_ids" not in given:
        given["position_ids"] = _positions(family, base, packing, given.get("input_ids"))
    else:
        given["position_ids"] = packing.pack(given["position_ids"])
    for key in families.TOKEN_INPUTS & given.keys():
        given[key] = packing.pack(given[key])
    if family.embed is not None and "input_ids" in given and "inputs_embeds" not in given:
        embeds = family.embed(base, given["input_ids"], given["position_ids"], layout)
        if embeds is not None:
            given["inputs_embeds"] = embeds
            del given["input_ids"]
    if head == "next token" and "labels" in given:  # the first token of a sequence follows no token of it
        ignored = given.get("ignore_index", -100)
        given["labels"] = given["labels"].masked_fill(layout.position_ids == 0, ignored)
    return {
        **given,
        # a model whose embeddings read the mask is handed none: below a head, its own entry takes this one away
        **({} if family.embed is not None and base is model else {"attention_mask": bypass_mask(layout.device)}),
        "cu_seq_lens_q": layout.cu_seqlens,
        "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": layout.max_seqlen,
        "max_length_k": layout.max_seqlen,
        "use_cache": False,
        "return_dict": True,
    }


def _positions(family: Family, base: Any, packing: Packing, input_ids: Tensor | None) -> Tensor:
    """(1, T): what the model would have counted in the padded row."""
    if family.counts == "tokens":
        return packing.layout.position_ids.unsqueeze(0)
    rotary = getattr(base.config, "position_embedding_type", None) == "rotary"
    if family.counts == "places" or rotary:
        return packing.places.unsqueeze(0)
    padding = base.config.pad_token_id
    if input_ids is None:
        return packing.places.unsqueeze(0) + padding + 1
    real = (input_ids != padding).long()
    return packing.pack(real.cumsum(1) * real + padding)


def _kept(packing: Packing, keep: int | Tensor) -> tuple[Tensor, Tensor]:
    """The tokens whose logits are wanted, (B, K), and where there is one; ``keep`` is the last places, or places."""
    places = torch.arange(packing.length, device=packing.layout.device)
    return packing.tokens_at(places[-keep:] if isinstance(keep, int) else places[keep])


class _UnknownOutput(Exception):
    """An output that is in no table has a form of which can't be told whether it has a place for every token."""


@outside_of_graphs
def _pad_outputs(out: ModelOutput, packing: Packing, kept: tuple[Tensor, Tensor] | None, done: set[str]) -> None:
    """Give every output with a place for each token, (1, T, …), its padded form (B, L, …).

    Raises:
        _UnknownOutput: one that is in no table may have such places in some other form.
    """
    for name in [name for name in out if name not in done and name not in families.OTHER_OUTPUTS]:
        packed = out[name]
        if name == "logits" and kept is not None:
            tokens, there = kept
            out[name] = packed.view(*tokens.shape, -1).masked_fill(~there.unsqueeze(2), 0)
        elif name == "logits" and packed.dim() == 2:  # of the labelled tokens alone (ModernBERT's sparse_prediction)
            continue
        elif families.TOKEN_OUTPUTS.get(name) == "lowest":
            out[name] = packing.pad(packed, torch.finfo(packed.dtype).min)
        elif name in families.TOKEN_OUTPUTS:
            out[name] = _padded(packed, packing)
        else:
            _check_form(name, packed, packing)
            out[name] = _padded(packed, packing)


def _padded(value: Any, packing: Packing) -> Any:
    """(1, T, …) tensors padded, in whatever holds them; everything else as it is."""
    if isinstance(value, Tensor):
        return packing.pad(value) if value.shape[:2] == (1, packing.layout.total) else value
    if isinstance(value, dict):
        return type(value)(**{name: _padded(part, packing) for name, part in value.items()})
    return type(value)(_padded(part, packing) for part in value) if type(value) in (tuple, list) else value


def _check_form(name: str, value: Any, packing: Packing) -> None:
    """Raise if an output that is in no table may have places for tokens, but not as (1, T, …)."""
    total = packing.layout.total
    for part in _tensors(value):
        if part.shape[:2] != (1, total) and (total in part.shape or part.numel() % max(total, 1) == 0 < part.dim()):
            raise _UnknownOutput(f"its output {name!r} is not known, and may have places for tokens")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for part in value.values() for tensor in _tensors(part))
    elif isinstance(value, tuple | list):
        yield from (tensor for part in value for tensor in _tensors(part))


def _has_windows(config: Any) -> bool:
    """Whether some layer attends in a window, which counts places of the padded row."""
    return any(getattr(config, name, None) for name in ("sliding_window", "local_attention"))
