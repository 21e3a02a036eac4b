"""A Hugging Face model's call as one packed row, from the model's entry to its exit, head and loss included.

Dimensions: B rows of a padded batch, L places in a row, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss
from transformers.utils import ModelOutput

from ..hf import models
from ..hf.interface import NAME_OVER, bypass_mask
from ..hf.models import Family, Head
from .packing import Packing
from .patch import PatchHandle

Logits = Literal["padded"] | None

# What a caller may ask for that packing can't give; the call then runs as it did before.
_STEPS_ASIDE = {
    "past_key_values": "it continues from a cache",
    "use_cache": "it asks for a cache",
    "output_attentions": "it asks for attention weights",
    "output_router_logits": "it asks for router logits, which are counted with a padded mask",
    "encoder_hidden_states": "it attends across to another model's states",
}


@dataclass(frozen=True, eq=False)
class PackedCall:
    """The ``forward`` of a patched model: a padded call as one packed row, or as it was before, and why.

    Attributes:
        handle: of the patch; it counts and tells.
        family, head: what the model is. Under a "sequence" head this is the base model's forward.
        logits: "padded", or None to leave them packed in training with labels.
        names: of the model's parameters that can be given by place.
    """

    handle: PatchHandle
    family: Family
    head: Head | None
    logits: Logits
    names: tuple[str, ...]

    def __call__(self, model: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        by_place = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names) or by_place.keys() & kwargs.keys():
            return original(*args, **kwargs)  # which refuses it
        given = {name: value for name, value in {**by_place, **kwargs}.items() if value is not None}
        packing = self._packing(model, given)
        return original(*args, **kwargs) if packing is None else self._run(model, original, packing, given)

    def _packing(self, model: PreTrainedModel, given: dict[str, Any]) -> Packing | None:
        """Where the tokens stand; None, counted with the reason, if the call has to run as it did before."""
        if "cu_seq_lens_q" in given:
            self.handle.count("it was packed already")
            return None
        why = _why_not(given, model, self.family)
        packing = _packing(given) if why is None else None
        if packing is not None and packing.has_holes:
            if _has_windows(model.config):
                why = "its rows hold padding between tokens, over which a window counts"
            elif self.head == "next token" and "labels" in given:
                why = "its rows hold padding between tokens, over which labels are shifted"
        if why is not None:
            self.handle.not_packed(why, frames=7)
            return None
        if packing is not None and packing.saves_nothing:
            packing = None
        self.handle.count("there is no padding to skip" if packing is None else None)
        return packing

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


def _why_not(given: dict[str, Any], model: PreTrainedModel, family: Family) -> str | None:
    if model.config._attn_implementation not in NAME_OVER.values():
        return f"its attention has been set to {model.config._attn_implementation!r} since"
    loss = vars(model).get("_loss_function")
    if loss is not None and not getattr(loss, "__module__", "").startswith("transformers."):
        return "its loss_function has been set, and may read rows"
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return "NEFTune scales its noise by the length of a row"
    if family.apart_under and getattr(model.config, family.apart_under, None):
        return f"under {family.apart_under} its attention is not told what its mask says"
    if model.config.output_attentions:
        return "the config asks for attention weights"
    if getattr(model.config, "output_router_logits", False):
        return _STEPS_ASIDE["output_router_logits"]
    for name, why in _STEPS_ASIDE.items():
        if given.get(name, False) is not False:  # an empty cache, which is falsy, is one all the same
            return why
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its attention_mask is not (batch, length)"
    keep, labels = given.get("logits_to_keep", 0), given.get("labels", given.get("shift_labels"))
    if isinstance(keep, Tensor) and keep.dtype == torch.bool:
        return "its logits_to_keep is a mask"
    if labels is not None and (isinstance(keep, Tensor) or keep):
        return "it asks for a loss of the logits of some positions only"
    positions = given.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return "its position_ids are not (batch, length)"
    return None


# not compiled: lengths are read on the host, and dozens of small graphs would be made of these three
@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    widths = [given[key].shape[:2] for key in models.TOKEN_INPUTS & given.keys()]
    if any(shape not in ((rows, length), (1, length)) for shape in widths):
        return None  # for the model to refuse
    # as transformers reads a mask
    return Packing.of(None if mask is None else mask != 0, positions, rows, length)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pack_inputs(
    model: PreTrainedModel, family: Family, head: Head | None, packing: Packing, given: dict[str, Any]
) -> dict[str, Any]:
    """The keywords that make (1, T) tokens a packed row to transformers."""
    layout = packing.layout
    given.pop("attention_mask", None)
    base: Any = models.base_model(model, family)
    if "position_ids" not in given:
        given["position_ids"] = _positions(family, base, packing, given.get("input_ids"))
    else:
        given["position_ids"] = packing.pack(given["position_ids"])
    for key in models.TOKEN_INPUTS & given.keys():
        given[key] = packing.pack(given[key])
    if family.embed is not None and "input_ids" in given and "inputs_embeds" not in given:
        embeds = family.embed(base, given["input_ids"], given["position_ids"], layout)
        if embeds is not None:
            given["inputs_embeds"] = embeds
            del given["input_ids"]
    if head == "next token" and "labels" in given:  # the first token of a sequence follows no token of it
        given["labels"] = given["labels"].masked_fill(layout.position_ids == 0, -100)
    return {
        **given,
        # a model whose embeddings read the mask is handed none
        **({} if family.embed is not None else {"attention_mask": bypass_mask(layout.device)}),
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pad_outputs(out: ModelOutput, packing: Packing, kept: tuple[Tensor, Tensor] | None, done: set[str]) -> None:
    """Give every output with a place for each token, (1, T, …), its padded form (B, L, …)."""
    for name, value in models.TOKEN_OUTPUTS.items():
        packed = out.get(name)
        if packed is None or name in done:
            continue
        if name == "logits" and kept is not None:
            tokens, there = kept
            out[name] = packed.view(*tokens.shape, -1).masked_fill(~there.unsqueeze(2), 0)
        elif isinstance(packed, tuple):
            out[name] = tuple(packing.pad(part) for part in packed)
        else:
            out[name] = packing.pad(packed, 0.0 if value == 0 else torch.finfo(packed.dtype).min)


def _has_windows(config: Any) -> bool:
    """Whether some layer attends in a window, which counts places of the padded row."""
    return any(getattr(config, name, None) for name in ("sliding_window", "local_attention"))
