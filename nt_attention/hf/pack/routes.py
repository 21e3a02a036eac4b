"""How a call of a patched Hugging Face model runs: a class for each route. `rules.py` says which one a call takes.

Dimensions: B rows of a padded batch, L positions in a row, T tokens.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss
from transformers.utils import ModelOutput

from ...compiler import compiled_by, inline_only, outside_of_graphs
from ...graphs.device import NotCapturedError
from ...graphs.module_state import Snapshot
from .. import families
from ..route.attention import OtherLengthError
from ..route.hand_packed import refuse_packed_rows
from ..route.packed_mask import PackedMask, bypass_mask
from ..route.packed_row import PackedRow, SmallCall, extend_tables, is_unpatched, running
from .attention_code import make_cached_tensors
from .differences import tell_differences
from .graphs import BoundedPacking, run_as_graph
from .inputs import default_position_ids, ignore_past_end, read_packing, tokens_to_keep
from .outputs import PaddedPacking, UnknownOutputError, pad_later, pad_outputs
from .packing import Packing
from .sharded_packing import ShardedPacking, add_losses, check_same_batch

if TYPE_CHECKING:
    from ...patching.forwards import Handle


@dataclass(eq=False)
class ModelCall:
    """A call of a patched model.

    Attributes:
        entry: the patched forward, such as a `PackedCall`, which knows how the model is packed.
        model, original: the model, and its original forward.
        args, kwargs: the arguments, as they came.
        arguments: those that are not their defaults, by name.
        compiler: what compiles the model, see `active_compiler`.
        begin: begins to time the call without a CUDA graph; None if its time is not asked for.
        span: its time, while it is measured.
    """

    entry: Any
    model: Any
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    compiler: Any
    begin: Callable[[], Any] | None = None
    span: Any = None

    @functools.cached_property
    def is_inner(self) -> bool:
        """Whether the model around this one runs unpatched, and has counted the call."""
        return is_unpatched(self.model)

    @functools.cached_property
    def base(self) -> PreTrainedModel:
        """The base model."""
        return families.base_model(self.model)

    @property
    def inner(self) -> tuple[Any, ...]:
        """The patched models in this one."""
        return () if self.base is self.model else (self.base,)

    @property
    def length(self) -> int:
        """The length L of the padded rows; 0 if they are not known."""
        return longest_of(self.arguments, ("input_ids", "inputs_embeds"))

    @functools.cached_property
    def packing(self) -> Packing | None:
        """The packing of the batch, or None; see `read_packing`. Syncs with the device once."""
        always = self.entry.handle.mesh is not None or self.entry.shares
        return read_packing(self.arguments, always, self.entry.head)

    @outside_of_graphs
    def tell_differences(self, padding: Any) -> None:
        """Tell the handle what this packed call gives that the padded one would not, and what it does not reach."""
        tell_differences(self, padding)
        if self.entry.has_head:
            self.entry.handle.note(WITHOUT_HEAD)

    @property
    def packings(self) -> tuple[Any, ...]:
        """The packing of the batch: of both sides, in an encoder-decoder."""
        return (self.packing,)

    @property
    def side_masks(self) -> tuple[Tensor | None, ...]:
        """The mask (B, L) of the batch, or None: of both sides, in an encoder-decoder."""
        return (self.arguments.get("attention_mask"),)

    def side_of(self, name: str) -> int:
        """Which side of the batch an argument or an output belongs to."""
        return 0

    def packing_of(self, name: str) -> Any:
        """The packing that an argument or an output belongs to."""
        return self.packings[self.side_of(name)]

    def join(self, sides: Iterable[Any]) -> Any:
        """A packing for all sides, of that of each side."""
        (side,) = sides
        return side

    def packed(self, packings: Iterable[Packing], arguments: dict[str, Any]) -> Packed:
        """The route of the packed call with these arguments, which is not counted."""
        return Packed(replace(self, arguments=arguments), self.join(packings))

    def as_packed(self) -> Packed:
        """The route of the packed call, which is not counted."""
        packing: Any = self.packing
        # No graph can do these, and layers may be compiled.
        make_cached_tensors(self.model, packing.layout.device)
        extend_tables(self.model, packing.length)
        on_mesh = self.entry.handle.mesh is not None
        return PackedOnMesh(self, self.sharded) if on_mesh else self.packed(self.packings, self.arguments)

    @functools.cached_property
    def sharded(self) -> ShardedPacking:
        """The packing, divided over the mesh."""
        assert self.packing is not None
        divided = ShardedPacking.of_mesh(self.packing, self.entry.handle.mesh, self.entry.is_causal)
        if (checked := _checked.get(self.model)) is None or checked() is not self.entry.handle:
            check_same_batch(self.arguments, self.entry.handle.mesh)
            _checked[self.model] = weakref.ref(self.entry.handle)
        return divided


def longest_of(arguments: dict[str, Any], names: Iterable[str]) -> int:
    """The largest second dimension of some arguments, or 0."""
    longest = 0
    for name in names:
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.dim() > 1:
            longest = max(longest, x.shape[1])
    return longest


WITHOUT_HEAD = "ran the base model alone: what computes logits from its output computes padded positions too"
# Models → the patch for which their first batch was found to be the same on all ranks of the mesh.
_checked: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Unpatched:
    """The original forward with the arguments as they came. The patched models in it run so too, and count nothing."""

    call: ModelCall
    small: SmallCall | None = None

    @classmethod
    def take(cls, call: ModelCall, reason: str) -> Unpatched:
        """Count the call, and return its route."""
        call.entry.handle.count(reason)
        return cls(call)

    @inline_only
    def run(self) -> Any:
        """Run the call."""
        call = self.call
        # Attention keeps rows apart that the caller packed, where the entry lets them pass.
        names_sequences = not families.ROW_INPUTS.isdisjoint(call.arguments) or "position_ids" in call.arguments
        of_call: dict[str, Any] = {}
        if not call.is_inner:  # else the model around it knows more
            of_call = {"small": self.small, "padded": not (names_sequences and call.entry.keeps_apart(call.model))}
        with running(row=None, unpatched=call.inner, **of_call):
            return call.original(*call.args, **call.kwargs)


class FallsBack(Unpatched):
    """`Unpatched`, because packing can't give the result. The user is warned."""

    @classmethod
    @outside_of_graphs
    def take(cls, call: ModelCall, reason: str) -> Unpatched:
        """Count and warn.

        Raises:
            ValueError: its rows have several sequences, which the original forward would mix.
        """
        if not call.entry.keeps_apart(call.model):
            refuse_packed_rows(call.model, call.arguments, f"this call can't run packed: {reason}")
        call.entry.handle.fall_back(reason)
        return cls(call)


class HeadFallsBack(Unpatched):
    """The original forward of the head. Its base model takes a route of its own."""

    @classmethod
    def take(cls, call: ModelCall, reason: str) -> Unpatched:
        """Count and warn."""
        call.entry.handle.fall_back(reason, "this call" if call.base is call.model else "the head of this call")
        return cls(call)

    @inline_only
    def run(self) -> Any:
        """Run the call."""
        with passing_rows(self.call):
            return self.call.original(*self.call.args, **self.call.kwargs)


@inline_only
def passing_rows(call: ModelCall) -> running:
    """A context in which the base model gets the arguments of its head that say which sequences its rows have."""
    names = families.ROW_INPUTS | {"position_ids"}
    return running(rows_of_head=(call.base, {name: x for name, x in call.arguments.items() if name in names}))


class SmallBatch(Unpatched):
    """`Unpatched`, because the batch is too small to gain.

    One thing is as in a packed call: outputs are 0 at padding.
    """

    @inline_only
    def run(self) -> Any:
        """Run the call."""
        call, entry = self.call, self.call.entry
        as_dict = call.arguments.get("return_dict", call.model.config.return_dict)
        stock = replace(call, args=(), kwargs={**call.arguments, "return_dict": True})
        out = Unpatched(stock, SmallCall(call.model)).run()
        rows = PaddedPacking(call.arguments["attention_mask"] == 0)
        pad_outputs(out, rows, names=_padded_names(entry, out))
        return out if as_dict else out.to_tuple()


@dataclass(frozen=True, eq=False)
class Packed:
    """The original forward on one packed row, with its head and its loss."""

    call: ModelCall
    packing: Packing

    @classmethod
    def take(cls, call: ModelCall) -> Packed:
        """Count the call, and return its route."""
        packing: Any = call.packing
        call.tell_differences(packing)
        call.entry.handle.count(None, *packing.sizes)
        return call.as_packed()

    @inline_only
    def run(self) -> Any:
        """Run the call."""
        call, entry, packing = self.call, self.call.entry, self.packing
        # A copy: a graph that removes items of its argument does not notice items that other calls add.
        arguments = {name: x for name, x in call.arguments.items() if name not in families.ROW_INPUTS}
        as_dict = arguments.pop("return_dict", call.model.config.return_dict)
        spans = {}
        if entry.head == "span":
            spans = {name: arguments.pop(name) for name in families.SPANS if name in arguments}
        keep = arguments.pop("logits_to_keep", 0)
        kept = tokens_to_keep(packing, keep) if isinstance(keep, Tensor) or keep else None

        packed, share = self._inputs(arguments)
        if kept is not None:
            packed["logits_to_keep"] = kept[0].flatten()
        row = PackedRow(packing.layout, packed["position_ids"], packing.length)
        with running(row=row if entry.needs_row else None, packed=(call.model, *call.inner), small=None):
            out = entry.run_row(call.model, call.original, packed)
        self._finish_loss(out, share)
        self._restore(out, kept)
        if len(spans) == 2:
            loss = ForQuestionAnsweringLoss(out["start_logits"], out["end_logits"], **spans)
            out = out if loss is None else type(out)(**{**out, "loss": loss})
        return out if as_dict else out.to_tuple()

    # Not compiled, because it would become dozens of small graphs.
    @outside_of_graphs
    def _inputs(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The arguments of the original forward, and the share of this rank in the loss: None, all of it."""
        return _pack_inputs(self.call.entry, self.call.base, self.packing, arguments), None

    @inline_only
    def _finish_loss(self, out: ModelOutput, share: Tensor | None) -> None:
        """Make the loss that of all tokens."""

    @outside_of_graphs
    def _restore(self, out: ModelOutput, kept: tuple[Tensor, Tensor] | None) -> None:
        """Give all outputs the form that callers get."""
        entry, hidden = self.call.entry, out.get("last_hidden_state")
        if entry.head == "sequence":  # the head may read the first or last position of a row, even if it is padding
            out["last_hidden_state"] = self.packing.pad_with_nearest(hidden)
        pad_outputs(out, self.packing, kept, _padded_names(entry, out))
        if entry.pool is not None and out.get("pooler_output") is not None:
            out["pooler_output"] = entry.pool(self.call.model, self.packing.first_tokens(hidden))


def _padded_names(entry: Any, out: ModelOutput) -> list[str] | None:
    """The outputs that are 0 at padding; None for all. The head of a sequence may read a state there."""
    return [name for name in out if name != "last_hidden_state"] if entry.head == "sequence" else None


@inline_only
def run_route(route: Any) -> Any:
    """Run a call. If it turns out that it can't run packed, it runs again, and both are counted."""
    if isinstance(route, Unpatched):
        return route.run()
    try:
        return route.run()
    except (UnknownOutputError, OtherLengthError) as error:
        reason = str(error)
    except (RuntimeError, ValueError):
        if (adapter := families.adapter_of_rows(route.call.model)) is None:
            raise
        reason = adapter
    return FallsBack.take(route.call, reason).run()


class PackedOnMesh(Packed):
    """`Packed`, with the tokens of this rank of the mesh."""

    packing: ShardedPacking

    @outside_of_graphs
    def _inputs(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The arguments of the original forward for the tokens of this rank, and its share in the loss."""
        inputs = _pack_inputs(self.call.entry, self.call.base, self.packing, arguments)
        return self.packing.shard_inputs(self.call.model, self.call.entry.head, inputs)

    @inline_only
    def _finish_loss(self, out: ModelOutput, share: Tensor | None) -> None:
        """Add the losses of the ranks."""
        if share is not None:
            out["loss"] = add_losses(out["loss"], share, self.packing.sharded)


@dataclass(frozen=True, eq=False)
class AsGraph:
    """`Packed` as a CUDA graph."""

    call: ModelCall

    @outside_of_graphs
    def run(self) -> Any:
        """Run the call, or count why not.

        Raises:
            NotCapturedError: the call can't run as a graph. Nothing was computed.
        """
        call, graphs = self.call, self.call.entry.handle.graphs
        assert graphs is not None
        with graphs.counting():
            out, masks = run_as_graph(call, self._returns_cache, self._run_packed)
        read = call.join(masks)
        call.tell_differences(read)
        call.entry.handle.count(None, *read.sizes)
        if out.get("loss") is not None:
            packings = [mask.packing(out["loss"].device) for mask in masks]
            pad_later(out, lambda name: packings[call.side_of(name)])
        as_dict = call.arguments.get("return_dict", call.model.config.return_dict)
        return out if as_dict else out.to_tuple()

    def _run_packed(self, packings: list[BoundedPacking], arguments: dict[str, Any]) -> Any:
        try:
            return compiled_by(self.call.compiler, self.call.packed(packings, arguments).run)
        except UnknownOutputError as error:
            raise NotCapturedError(str(error)) from error

    def _returns_cache(self) -> bool:
        """Whether the original forward returns a cache. It is tried once for each model."""
        model, arguments = self.call.model, self.call.arguments
        if arguments.get("use_cache") is False or not getattr(model.config, "use_cache", False):
            return False
        if model not in _returns_cache:
            before, devices = Snapshot(model), [x.device for x in arguments.values() if getattr(x, "is_cuda", False)]
            with torch.random.fork_rng(devices[:1]), torch.no_grad():
                out = Unpatched(replace(self.call, args=(), kwargs={**arguments, "return_dict": True})).run()
            before.restore()
            _returns_cache[model] = any(out.get(name) is not None for name in families.CACHE)
        return _returns_cache[model]


# Models that were called with graphs → whether they return a cache.
_returns_cache: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def _pack_inputs(entry: Any, base: Any, packing: Packing, arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the original forward for the packed row (1, T). Changes `arguments`."""
    layout, plan, family = packing.layout, entry.plan, entry.family
    arguments.pop("attention_mask", None)
    if "position_ids" in arguments:
        ids = arguments["position_ids"]
        arguments["position_ids"] = packing.pack(ids) if ids.dim() == 2 else torch.stack([packing.pack(x) for x in ids])
    else:
        arguments["position_ids"] = default_position_ids(plan, base, packing, arguments.get("input_ids"))
    for key in families.TOKEN_INPUTS & arguments.keys():
        arguments[key] = packing.pack(arguments[key])
    if family.needs_token_types and "token_type_ids" not in arguments:
        arguments["token_type_ids"] = torch.zeros((1, layout.total), dtype=torch.int64, device=layout.device)
    if family.embed is not None and "input_ids" in arguments and "inputs_embeds" not in arguments:
        embeds = family.embed(base, arguments["input_ids"], arguments["position_ids"], layout)
        if embeds is not None:
            arguments["inputs_embeds"] = embeds
            del arguments["input_ids"]
    if entry.head == "next token" and "labels" in arguments:  # the first token is not predicted
        ignored = arguments.get("ignore_index", -100)
        arguments["labels"] = arguments["labels"].masked_fill(layout.position_ids == 0, ignored)
    ignore_past_end(arguments, layout)
    arguments |= {"use_cache": False, "return_dict": True}
    if plan.mask is not None:
        mask = PackedMask.of(layout, form=plan.mask, is_causal=plan.is_causal, packing=packing)
        return arguments | {"attention_mask": mask}
    offsets = layout.operator_offsets
    return arguments | {
        "attention_mask": bypass_mask(layout),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": layout.max_seqlen,
        "max_length_k": layout.max_seqlen,
    }
