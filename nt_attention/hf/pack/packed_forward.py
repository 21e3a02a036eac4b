"""Runs the call of a patched Hugging Face model as one packed row, with its head and its loss.

Both the head and its base model have a patched `forward`, because some callers do not call the head's `forward`: TRL,
Liger, prefix tuning of PEFT, and `model.model(...)`. A call takes one of these paths:

- The head packs the batch, and its base model gets the packed row.
- The head and its base model run the original forward.
- The head runs the original forward, and its base model packs.
- The head is not called, and the base model packs.

Dimensions: B rows of a padded batch, L positions in a row, T tokens. With a mesh, each rank has N of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss
from transformers.utils import ModelOutput

from ...compiler import TRACING, active_compiler, can_be_read, compiled_by, inline_only, outside_of_graphs
from ...graphs.cache import is_part_of_a_graph
from ...graphs.device import NotCapturedError
from ...graphs.module_state import Snapshot
from ...layouts.known import SequenceLayout
from ...patching.forwards import (
    CONTEXT_PARALLEL,
    CONTINUES_FROM_CACHE,
    GRADIENTS_PER_SAMPLE,
    Handle,
    has_gradients_per_sample,
    is_context_parallel,
    refuse_export,
    replacement_of,
)
from ...torch_private import pytree
from .. import families
from ..families import Family
from ..proof import Head, Proof
from ..route.attention import NAME_OVER, NAMES, OtherLengthError, bypass_mask, is_bypass_mask, register
from ..route.hand_packed import is_packed, layout_of_lengths
from ..route.masks import is_all_true
from ..route.packed_mask import PackedMask
from ..route.packed_row import (
    PackedRow,
    current_row,
    extend_tables,
    is_running_padded,
    running_padded,
    running_row,
)
from ..transformers_private import ATTENTION, attention_of, has_other_loss
from .attention_code import make_cached_tensors
from .graphs import BoundedPacking, run_as_graph
from .packing import Packing
from .sharded_packing import ShardedPacking, add_losses, check_same_batch, why_call_not_sharded
from .small_batches import PaddedRows, Size, costs_of, may_run_padded
from .tensor_parallel import divides_tokens, is_distributed

Logits = Literal["padded"] | None
PackingMode = Literal["auto", "always"]

# Argument → why a call with it falls back to the padded forward.
_NOT_SUPPORTED = {
    "past_key_values": CONTINUES_FROM_CACHE,
    "use_cache": "it asks for a cache",
    "output_attentions": "it asks for attention weights",
    "output_router_logits": "it asks for router logits, whose loss needs the padded mask",
    "encoder_hidden_states": "it has encoder_hidden_states for cross-attention",
}


# The names of a config for the largest length of a row.
_MOST_POSITIONS = ("max_position_embeddings", "max_seq_len")


class Finished(NamedTuple):
    """The result of a call that ran as a CUDA graph."""

    out: Any


# What runs the original forward: the whole call, or only the head, so that the base model makes its own plan.
# "small": the whole call, and callers get what a packed call returns. "full": the same for a row without padding.
Unpacked = Literal["all", "head", "small", "full"]

# The parts of a model, such as its base model, that do not pack because the whole call runs the original forward.
_planned_by_head: ContextVar[tuple[Any, ...]] = ContextVar("models planned by their head", default=())
_set_planned = outside_of_graphs(lambda models: _planned_by_head.set(models))
_reset_planned = outside_of_graphs(lambda token: _planned_by_head.reset(token))


class planned_by_head:
    """A context in which these models do not pack or count, because their head has decided that they run padded."""

    @inline_only
    def __init__(self, *models: Any) -> None:
        self.models = models

    @inline_only
    def __enter__(self) -> None:
        self.before = _set_planned(self.models)

    @inline_only
    def __exit__(self, *error: object) -> None:
        _reset_planned(self.before)


def is_planned_by_head(model: Any) -> bool:
    """Whether the head of this model has decided that it runs padded."""
    models = _planned_by_head.get()
    return bool(models) and any(other is model for other in models)


# Models → the patch for which their first batch was found to be the same on all ranks of the mesh.
_checked: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Handle]] = weakref.WeakKeyDictionary()

# The base model of the head that runs, and the arguments of the head that say which sequences its rows have.
_rows_of_head: ContextVar[tuple[Any, dict[str, Any]]] = ContextVar("rows of the head", default=(None, {}))
_set_rows = outside_of_graphs(lambda base, rows: _rows_of_head.set((base, rows)))
_reset_rows = outside_of_graphs(lambda token: _rows_of_head.reset(token))


class passing_rows:
    """A context in which the base model gets the arguments of its head that say which sequences its rows have.

    Many heads do not pass them on. A head that does is followed.
    """

    @inline_only
    def __init__(self, model: PreTrainedModel, given: dict[str, Any]) -> None:
        names = families.ROW_INPUTS | {"position_ids"}
        self.rows = {name: x for name, x in given.items() if name in names}
        self.model = model

    @inline_only
    def __enter__(self) -> None:
        self.before = _set_rows(families.base_model(self.model), self.rows) if self.rows else None

    @inline_only
    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            _reset_rows(self.before)


def add_rows_of_head(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """Add the arguments of the head that runs, if it is that of this base model and has not passed them on."""
    base, rows = _rows_of_head.get()
    if base is not model:
        return
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    length = None if tokens is None else tokens.shape[1]
    for name in rows.keys() - given.keys():
        if name != "position_ids" or rows[name].shape[-1] == length:  # heads may extend or cut rows
            given[name] = rows[name]


@dataclass(frozen=True, eq=False)
class SequenceHeadCall:
    """The `forward` of a head that runs as before, on a base model that packs.

    Attributes:
        defaults: as in `PackedCall`.
        is_known: whether the head is one of transformers, which reads one token of a row.
    """

    defaults: dict[str, Any]
    is_known: bool

    @inline_only
    def __call__(self, model: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = given_arguments(self.defaults, args, kwargs) or {}
        if not self.is_known:
            _refuse_packed_rows(model, arguments)
        with passing_rows(model, arguments):
            return original(*args, **kwargs)


@outside_of_graphs
def _refuse_packed_rows(model: PreTrainedModel, given: dict[str, Any]) -> None:
    if is_packed(given):
        raise ValueError(
            f"{type(model).__name__} got rows with several sequences (cu_seq_lens_q, or position_ids that restart), "
            "and its head computes with whole rows: pass a padded batch with attention_mask."
        )


# Models that were called with graphs → whether they return a cache.
_returns_cache: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class PackedCall:
    """The `forward` of a patched model: runs a padded batch as one packed row, or falls back to the original forward.

    Attributes:
        handle: the handle of the patch. It counts calls and warns.
        proof, family: how to pack the model.
        head: how its head runs, or None. For a "sequence" head, this is the forward of the base model.
        logits: "padded", or None to leave logits packed in training with labels.
        defaults: the parameters of the original forward, in the order of positional arguments, and their defaults.
        is_base: whether this is the forward of the base model.
        takes_any: whether the original forward takes other keyword arguments too.
        is_routed: whether attention runs through transformers' interface.
        needs_row: whether modules of the model read `current_row`.
        is_causal: whether its attention is causal.
        size: the size of the model, by which a small batch runs padded; None if every batch is packed.
    """

    handle: Handle
    proof: Proof
    family: Family
    head: Head | None
    logits: Logits
    defaults: dict[str, Any]
    is_base: bool
    takes_any: bool
    is_routed: bool
    needs_row: bool
    is_causal: bool
    size: Size | None
    _is_small_shape: dict[tuple[object, ...], bool] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_is_small_shape": {}}  # a pickle may be loaded on another device

    @property
    def pool(self) -> families.Pool | None:
        """How the pooled output is computed."""
        return self.family.pool or (families.pool_first if self.proof.pool else None)

    # Only `original` is compiled: the code around it is the same for all models, so it would soon have too many graphs.
    @inline_only
    def __call__(self, model: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse_export()
        if is_running_padded() and not is_planned_by_head(model):  # a hook calls it in the forward of a small batch
            with running_padded(None):
                return self(model, original, *args, **kwargs)
        while isinstance(original, functools.partial) and not original.args:  # a wrapper passes some arguments
            kwargs = {**original.keywords, **kwargs}
            original = original.func
        given = given_arguments(self.defaults, args, kwargs)
        if given is None:
            return original(*args, **kwargs)  # this raises an error
        mask = given.get("attention_mask")
        if isinstance(mask, PackedMask) or ("cu_seq_lens_q" in given and is_bypass_mask(mask)):
            return self._run_row(original, given)  # the head has packed the batch
        plan = self._plan(model, original, given, active_compiler())
        if isinstance(plan, Finished):
            return plan.out
        if plan == "full":
            with running_padded(model):
                # other models may find padding by its id, or look for packed sequences
                if self.is_routed and not self.is_causal:
                    kwargs, args = {name: x for name, x in given.items() if name != "attention_mask"}, ()
                return self._run_unpacked(model, original, args, kwargs)
        try:
            if plan == "small":
                return self._run_small(model, original, given)
            if isinstance(plan, Packing):
                return self._run_packed(model, original, plan, given)
        except (_UnknownOutput, OtherLengthError) as unknown:  # the call runs again, and both are counted
            plan = self._fall_back(model, given, str(unknown))
        except (RuntimeError, ValueError):
            if (reason := families.adapter_of_rows(model)) is None:
                raise
            plan = self._fall_back(model, given, reason)
        if plan == "head":
            with passing_rows(model, given):
                return original(*args, **kwargs)
        return self._run_unpacked(model, original, args, kwargs)

    # Not compiled, because the host reads the lengths, and graphs support neither locks nor context variables.
    @outside_of_graphs
    def _plan(
        self, model: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any], compiler: Any
    ) -> Packing | Unpacked | Finished:
        """Return the packing of a call, or what runs the original forward, or the result. Counts the call.

        `compiler`: see `active_compiler`.
        """
        if is_planned_by_head(model):
            return "all"
        base = model if self.is_base else families.base_model(model)
        add_rows_of_head(model, given)
        if self.handle.mesh is None and is_context_parallel():
            return self._fall_back(model, given, CONTEXT_PARALLEL)
        if has_gradients_per_sample(model):
            return self._fall_back(model, given, GRADIENTS_PER_SAMPLE)
        if (reason := replacement_of(original, type(model))) is not None:
            return self._fall_back_head(model, reason)
        if base is not model and (reason := replacement_of(base.forward, type(base))) is not None:
            return self._fall_back(model, given, reason)  # the base model would get the packed row of the head
        if (reason := not_supported(given, model, self.is_routed)) is not None:
            return self._fall_back(model, given, reason)
        if "inputs_embeds" in given and not self.proof.embeds:
            return self._fall_back(model, given, "its inputs_embeds give other values in a packed row")
        if "token_type_ids" in given and not self.proof.token_types:
            return self._fall_back(model, given, "its token_type_ids give other values in a packed row")
        if self.proof.positions == "ids" and _padding_id(base) is None and "position_ids" not in given:
            return self._fall_back(model, given, "its positions depend on pad_token_id, which its config has not set")
        if self.head is not None and (reason := _head_not_supported(given, model)) is not None:
            return self._fall_back_head(model, reason)
        if compiler is not TRACING and (done := self._run_graph(model, original, given, compiler)) is not None:
            return done
        if compiler is None and self._is_small(base, given):
            self._count("the batch is too small to gain from packing")
            mask = given["attention_mask"]
            return "full" if len(mask) == 1 and is_all_true(mask) else "small"
        packing = _read_packing(given, self.handle.mesh is not None)
        if packing is not None and packing.has_holes:
            if not self.proof.holes:
                reason = "its rows have padding between tokens, which changes its values (windows do)"
                return self._fall_back(model, given, reason)
            if self.head == "next token" and "labels" in given:
                reason = "its rows have padding between tokens, and labels are shifted over it"
                return self._fall_back(model, given, reason)
        if packing is not None and self.handle.mesh is not None and packing.layout.total:
            if isinstance(sharded := self._shard(model, packing, given), str):
                return self._fall_back(model, given, sharded)
            packing = sharded
        if packing is None or packing.saves_nothing:
            return self._count("there is no padding to skip")
        if self.head == "span" and _points_at_padding(given, packing):
            reason = "its start_positions or end_positions point at padding, which has no logits"
            return self._fall_back(model, given, reason)
        self.handle.count(None)
        # No graph can do these, and layers may be compiled.
        make_cached_tensors(model, packing.layout.device)
        extend_tables(model, packing.length)
        return packing

    def _shard(self, model: PreTrainedModel, packing: Packing, given: dict[str, Any]) -> ShardedPacking | str:
        """Divide the tokens of a packing over the mesh, or return why the call falls back."""
        if (reason := why_call_not_sharded(model, self.head, given)) is not None:
            return reason
        divided = ShardedPacking.of_mesh(packing, self.handle.mesh, self.is_causal)
        if (checked := _checked.get(model)) is None or checked() is not self.handle:
            check_same_batch(given, self.handle.mesh)
            _checked[model] = weakref.ref(self.handle)
        return "it has too few tokens for the ranks of the mesh" if 0 in divided.sharded.sizes else divided

    def _run_graph(
        self, model: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any], compiler: Any
    ) -> Finished | None:
        """Run a call as a CUDA graph, or return None, and count why it did not. `compiler` compiles the model."""
        if self.handle.graphs is None or is_part_of_a_graph():
            return None

        def run(packing: Packing, arguments: dict[str, Any]) -> ModelOutput | tuple[Any, ...]:
            try:
                return compiled_by(compiler, self._run_packed, model, original, packing, arguments)
            except _UnknownOutput as unknown:
                raise NotCapturedError(str(unknown)) from unknown

        returns_cache = functools.partial(self._returns_cache, model, original, given)
        try:
            out = run_as_graph(
                self.handle.graphs, model, given, compiler is not None, self.proof.holes, returns_cache, run
            )
        except NotCapturedError as error:
            self.handle.graphs.count(str(error))
            return None
        self.handle.graphs.count(None)
        self.handle.count(None)
        return Finished(out)

    def _returns_cache(self, model: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any]) -> bool:
        """Whether the original forward returns a cache. It is tried once for each model."""
        if given.get("use_cache") is False or not getattr(model.config, "use_cache", False):
            return False
        if model not in _returns_cache:
            before, devices = Snapshot(model), [x.device for x in given.values() if isinstance(x, Tensor) and x.is_cuda]
            with torch.random.fork_rng(devices[:1]), torch.no_grad():
                out = self._run_unpacked(model, original, (), {**given, "return_dict": True})
            before.restore()
            _returns_cache[model] = out.get("past_key_values") is not None
        return _returns_cache[model]

    def _is_small(self, base: PreTrainedModel, given: dict[str, Any]) -> bool:
        tokens = given.get("inputs_embeds", given.get("input_ids"))
        if self.size is None or tokens is None or not may_run_padded(given):
            return False
        if not can_be_read(given["attention_mask"]):  # as on a CPU: an error says what to do
            return False
        if (parameter := families.first_parameter(base)) is None:  # a replica of DataParallel
            return False
        kind = tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
        # a checkpoint runs forwards without and with gradients, which must draw the same random numbers
        training = base.training or torch.is_grad_enabled()
        key = tokens.shape, tokens.device, dtype, training
        found = self._is_small_shape.get(key)
        if found is None:
            if len(self._is_small_shape) >= 4096:
                self._is_small_shape.clear()
            found = self._is_small_shape[key] = self._decide_if_small(base, tokens, dtype, training)
        return found

    def _decide_if_small(self, base: PreTrainedModel, tokens: Tensor, dtype: torch.dtype, training: bool) -> bool:
        assert self.size is not None
        if (costs := costs_of(tokens.device)) is None:
            return False
        rows, length = tokens.shape[:2]
        first = (_padding_id(base) or 0) + 1 if self.proof.positions == "ids" else 0
        most = (getattr(base.config, name, None) for name in _MOST_POSITIONS)
        if any(number is not None and first + length > number for number in most):
            return False  # the model has no positions for the padding
        return self.size.is_too_small(rows, length, dtype, costs, training)

    def _count(self, reason: str) -> Unpacked:
        self.handle.count(reason)
        return "all"

    def _fall_back(self, model: PreTrainedModel, given: dict[str, Any], reason: str) -> Unpacked:
        """Count a call that runs the original forward.

        Raises:
            ValueError: its rows have several sequences, which the original forward would mix.
        """
        if not self._keeps_apart(model) and is_packed(given):
            raise ValueError(
                f"{type(model).__name__} got rows with several sequences (cu_seq_lens_q, or position_ids that "
                f"restart), and would mix them, because this call can't run packed: {reason}."
            )
        self.handle.fall_back(reason)
        return "all"

    def _keeps_apart(self, model: PreTrainedModel) -> bool:
        """Whether the original forward keeps apart the sequences of rows that the caller packed: by our attention."""
        is_ours = self.is_routed and attention_of(model.config) in NAMES
        return is_ours and not self.needs_row and self.proof.extra is None

    def _fall_back_head(self, model: PreTrainedModel, reason: str) -> Unpacked:
        is_base = families.base_model(model) is model
        self.handle.fall_back(reason, "this call" if is_base else "the head of this call")
        return "head"

    @inline_only
    def _run_unpacked(
        self, model: PreTrainedModel, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the original forward, in which the base model does not pack or count."""
        planned = () if self.is_base else (families.base_model(model),)  # calls in its forward make plans of their own
        with running_row(None) if self.needs_row else nullcontext(), planned_by_head(*planned):
            return original(*args, **kwargs)

    @inline_only
    def _run_small(self, model: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run the original forward on the padded batch. Callers get what `_run_packed` returns.

        In evaluation mode, a model with a cache also returns that, because a batch without padding would get it.
        """
        rows = PaddedRows.of(given["attention_mask"])
        given = given | {"attention_mask": rows.mask}
        if model.training and "use_cache" in self.defaults:  # a cache makes compiled layers differ
            given["use_cache"] = False
        as_dict = given.pop("return_dict", model.config.return_dict)
        done = {"logits"} if self._keeps_logits_packed(model, given) else set()
        for name in {"labels", "shift_labels"} & given.keys():
            first = name == "labels" and self.head == "next token"
            given[name] = rows.ignore_labels(given[name], first)
        with running_padded(model):
            out = self._run_unpacked(model, original, (), {**given, "return_dict": True})
        if done and "logits" in out and out["logits"].shape[:2] == rows.token_shape:
            packing = Packing.of(rows.mask != 0, None, *rows.token_shape)
            if not packing.saves_nothing:  # else a packed call does not pack them either
                out["logits"] = packing.pack(out["logits"])
        self._restore(model, out, rows, None, done)
        return out if as_dict else out.to_tuple()

    @inline_only
    def _keeps_logits_packed(self, model: PreTrainedModel, given: dict[str, Any]) -> bool:
        return self.logits is None and model.training and bool({"labels", "shift_labels"} & given.keys())

    @outside_of_graphs
    def _restore(
        self,
        model: PreTrainedModel,
        out: ModelOutput,
        rows: Packing | PaddedRows,
        kept: tuple[Tensor, Tensor] | None,
        done: set[str],
    ) -> None:
        """Give all outputs, but those in `done`, the form that callers get."""
        hidden = out.get("last_hidden_state")
        if self.head == "sequence":  # the head may read the first or last position of a row, even if it is padding
            out["last_hidden_state"] = rows.pad_with_nearest(hidden)
            done.add("last_hidden_state")
        _pad_outputs(out, rows, kept, done)
        if self.pool is not None and out.get("pooler_output") is not None:
            first = rows.first_tokens(hidden if isinstance(rows, Packing) else out["last_hidden_state"])
            out["pooler_output"] = self.pool(model, first)

    @inline_only
    def _run_packed(
        self, model: PreTrainedModel, original: Callable[..., Any], packing: Packing, given: dict[str, Any]
    ) -> Any:
        family, head = self.family, self.head
        # A copy: a graph that removes items of its argument does not notice items that other calls add.
        given = {name: x for name, x in given.items() if name not in families.ROW_INPUTS}
        as_dict = given.pop("return_dict", model.config.return_dict)
        spans = {key: given.pop(key) for key in ("start_positions", "end_positions") if head == "span" and key in given}
        keep = given.pop("logits_to_keep", 0)
        kept = _tokens_to_keep(packing, keep) if isinstance(keep, Tensor) or keep else None
        done = {"logits"} if self._keeps_logits_packed(model, given) else set()

        packed, share = _pack_inputs(model, self.proof, family, head, packing, given)
        if kept is not None:
            packed["logits_to_keep"] = kept[0].flatten()
        row = PackedRow(packing.layout, packed["position_ids"], packing.length)
        with running_row(row) if self.needs_row else nullcontext():
            out = self._run_row(original, packed)
        if share is not None:
            out["loss"] = add_losses(out["loss"], share, cast(ShardedPacking, packing).sharded)
        if done and isinstance(packing, BoundedPacking) and "logits" in out:
            packing.packed.append(out["logits"])
        self._restore(model, out, packing, kept, done)
        if len(spans) == 2:
            loss = ForQuestionAnsweringLoss(out["start_logits"], out["end_logits"], **spans)
            out = out if loss is None else type(out)(**{**out, "loss": loss})
        return out if as_dict else out.to_tuple()

    @inline_only
    def _run_row(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run the original forward on a packed row, with the arguments that it takes."""
        if self.proof.mask is None:
            if self.family.embed is not None and self.is_base:  # its embeddings would read the mask
                return original(**{name: x for name, x in given.items() if name != "attention_mask"})
            return original(**given)
        row = current_row()
        if row is not None and "position_ids" in self.defaults:
            given = given | {"position_ids": row.position_ids}
        return original(**{name: x for name, x in given.items() if name in self.defaults or self.takes_any})


@inline_only
def given_arguments(defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call that are not their defaults, by name; None if the call has an argument twice."""
    given = kwargs
    if args:
        positional = dict(zip(defaults, args, strict=False))
        if len(args) > len(defaults) or positional.keys() & kwargs.keys():
            return None
        given = {**positional, **kwargs}
    if ignored := (families.IGNORED & given.keys()) - defaults.keys():
        given = {name: x for name, x in given.items() if name not in ignored}
    inputs = families.INPUTS
    return {
        name: x for name, x in given.items() if x is not defaults.get(name) and (x is not None or name not in inputs)
    }


def not_supported(given: dict[str, Any], model: PreTrainedModel, is_routed: bool) -> str | None:
    """Why a call of the head or of the base model can't be packed, or None."""
    config = model.config
    of_config = vars(config)  # the __getattribute__ of a config is a Python function, which takes µs
    is_ours = of_config.get(ATTENTION) in NAMES
    if not (is_routed and is_ours) and config.output_attentions:  # transformers allows it with its eager attention only
        return "the config asks for attention weights"
    if model.training and _has_noise(model):
        return "NEFTune scales its noise by the length of a row"
    if of_config.get("output_router_logits"):
        return _NOT_SUPPORTED["output_router_logits"]
    for name, x in given.items():
        if name in _NOT_SUPPORTED and x is not False:  # not its truth value: an empty cache is falsy
            return _NOT_SUPPORTED[name]
        if name not in families.INPUTS:
            return f"its argument {name!r} is not known, and may depend on padded rows"
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "its attention_mask is not (batch, length)"
    if position_ids is not None and position_ids.dim() != 2 and not _has_axes(position_ids, mask):
        return "its position_ids are not (batch, length)"
    if is_routed and not is_ours:
        return f"its attention was set to {attention_of(config)!r} after the patch"
    if divides_tokens(model):
        return "its parallel styles divide the tokens of a row over ranks, and a packed row may not divide evenly"
    return None


def _has_noise(model: PreTrainedModel) -> bool:
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # a class need not say what they are
        return False
    return bool(getattr(embeddings, "neftune_noise_alpha", None))


def _head_not_supported(given: dict[str, Any], model: PreTrainedModel) -> str | None:
    """Why the head can't run packed though its base model can, or None."""
    labels = given.get("labels", given.get("shift_labels"))
    if has_other_loss(model) or (labels is not None and not _has_usual_loss(model)):
        return "its loss_function was replaced, and may need padded rows"
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) and keep.dtype == torch.bool:
        return "its logits_to_keep is a mask"
    if labels is not None and (isinstance(keep, Tensor) or keep):
        return "it asks for a loss with logits_to_keep"
    return None


def _has_usual_loss(model: PreTrainedModel) -> bool:
    """Whether the loss is that of the class: transformers finds it by the class name."""
    module = getattr(model.loss_function, "__module__", "")
    return module.startswith("transformers.") and (model.loss_type or "") in type(model).__name__


def _points_at_padding(given: dict[str, Any], packing: Packing) -> bool:
    """Whether an answer begins or ends at padding, which has no logits. Syncs with the device once."""
    spans = [given[name].flatten() for name in ("start_positions", "end_positions") if name in given]  # (B,) or (B, 1)
    if not spans:
        return False
    positions = torch.stack(spans, 1)  # (B, 2)
    _, is_token = packing.tokens_at(positions.clamp(0, packing.length - 1))
    return bool(((positions < packing.length) & ~is_token).any())  # the loss ignores larger positions


def _has_axes(position_ids: Tensor, mask: Tensor | None) -> bool:
    """Whether positions are (axes, batch, length), as in M-RoPE. They don't show where sequences begin."""
    is_3d = position_ids.dim() == 3 and len(position_ids) > 1
    return is_3d and mask is not None and position_ids.shape[1:] == mask.shape


def _read_packing(given: dict[str, Any], always: bool) -> Packing | None:
    """The packing of a call. Unless `always`, it is None for a call that has neither a mask, positions nor offsets."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if position_ids is not None and _has_axes(position_ids, mask):
        position_ids = position_ids[0] if len(position_ids) == 4 else None  # transformers has those of text first
    is_by_hand = "cu_seq_lens_q" in given
    if tokens is None or (mask is None and position_ids is None and not (always or is_by_hand)):
        return None
    rows, length = tokens.shape[:2]
    if mask is None and position_ids is None and not is_by_hand:
        return Packing(SequenceLayout.from_lengths([length] * rows, device=tokens.device), None, rows, length)
    for name, x in (("attention_mask", mask), ("position_ids", position_ids)):
        if x is not None and x.shape != (rows, length) and (name == "attention_mask" or x.shape != (1, length)):
            hint = " To continue from a cache, pass use_cache=True in the first call: packed calls return no cache."
            raise ValueError(
                f"{name} is {tuple(x.shape)}, but the input is {(rows, length)} (batch, length)."
                f"{hint if length < x.shape[1] else ''}"
            )
    shapes = [given[key].shape[:2] for key in families.TOKEN_INPUTS & given.keys()]
    if any(shape not in ((rows, length), (1, length)) for shape in shapes):
        return None  # the model raises an error
    mask = None if mask is None else mask != 0  # any value but 0 is a token, as in transformers
    if is_by_hand:
        return Packing.of_packed_rows(layout_of_lengths(given, tokens), mask, rows, length)
    return Packing.of(mask, position_ids, rows, length)


# Not compiled, because it would become dozens of small graphs.
@outside_of_graphs
def _pack_inputs(
    model: PreTrainedModel, proof: Proof, family: Family, head: Head | None, packing: Packing, given: dict[str, Any]
) -> tuple[dict[str, Any], Tensor | None]:
    """The keyword arguments of the original forward for the packed row (1, T), and the share of this rank in the loss.

    With a mesh, they are those of the tokens of this rank. The share is None if the loss is that of all tokens.
    """
    layout = packing.layout
    given.pop("attention_mask", None)
    base: Any = families.base_model(model)
    if "position_ids" in given:
        ids = given["position_ids"]
        given["position_ids"] = packing.pack(ids) if ids.dim() == 2 else torch.stack([packing.pack(x) for x in ids])
    else:
        given["position_ids"] = default_position_ids(proof, base, packing, given.get("input_ids"))
    for key in families.TOKEN_INPUTS & given.keys():
        given[key] = packing.pack(given[key])
    if family.needs_token_types and "token_type_ids" not in given:
        given["token_type_ids"] = torch.zeros((1, layout.total), dtype=torch.int64, device=layout.device)
    if family.embed is not None and "input_ids" in given and "inputs_embeds" not in given:
        embeds = family.embed(base, given["input_ids"], given["position_ids"], layout)
        if embeds is not None:
            given["inputs_embeds"] = embeds
            del given["input_ids"]
    if head == "next token" and "labels" in given:  # the first token is not predicted
        ignored = given.get("ignore_index", -100)
        given["labels"] = given["labels"].masked_fill(layout.position_ids == 0, ignored)
    if not layout.knows_lengths:  # rows past the last token have no labels
        for key in {"labels", "shift_labels"} & given.keys():
            given[key] = layout.fill_past_end(given[key].squeeze(0), -100).unsqueeze(0)
    own: dict[str, Any] = {"use_cache": False, "return_dict": True}
    if proof.mask is not None:
        mask = PackedMask.of(layout, form=proof.mask, is_causal=proof.is_causal, packing=packing)
        return {**given, **own, "attention_mask": mask}, None
    if proof.extra == "seq_idx":
        own["seq_idx"] = layout.sequence_ids.int().unsqueeze(0)
    elif proof.extra == "sliding_window":
        own["sliding_window"] = base.config.sliding_window
    packed = {
        **given,
        **own,
        "attention_mask": bypass_mask(layout.device),
        "cu_seq_lens_q": layout.operator_offsets,
        "cu_seq_lens_k": layout.operator_offsets,
        "max_length_q": layout.max_seqlen,
        "max_length_k": layout.max_seqlen,
    }
    return packing.shard_inputs(model, head, packed) if isinstance(packing, ShardedPacking) else (packed, None)


def default_position_ids(proof: Proof, base: Any, packing: Packing, input_ids: Tensor | None) -> Tensor:
    """(1, T), the positions that the model would use in the padded row, or for each sequence of a row alone."""
    if proof.positions == "tokens":
        return packing.layout.position_ids.unsqueeze(0)
    padded = packing.own_positions.unsqueeze(0)
    if proof.positions == "padded":
        return padded
    padding = _padding_id(base)
    assert padding is not None
    if input_ids is None:
        return padded + padding + 1
    is_token = (input_ids != padding).long()
    if packing.shares_rows:
        is_token = packing.pack(is_token)
        total = is_token.cumsum(1) - is_token
        first = packing.layout.safe_offsets[:-1].clamp(max=packing.layout.total - 1)
        return (total - total[:, first[packing.layout.sequence_ids]] + 1) * is_token + padding
    return packing.pack(is_token.cumsum(1) * is_token + padding)


def _padding_id(base: Any) -> int | None:
    """The id that a model does not count in positions: that of its embeddings or, if they have none, of its config."""
    for module in base.modules():
        if not isinstance(module, nn.Embedding) and isinstance(found := vars(module).get("padding_idx"), int):
            return found
    padding: int | None = base.config.pad_token_id
    return padding


def _tokens_to_keep(packing: Packing, keep: int | Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at the last `keep` positions, or at the positions `keep`. See `Packing.tokens_at`."""
    positions = torch.arange(packing.length, device=packing.layout.device)
    return packing.tokens_at(positions[-keep:] if isinstance(keep, int) else positions[keep])


class _UnknownOutput(Exception):
    """An output can't be padded: it is a DTensor, or it is not known and may have a value for each token."""


@outside_of_graphs
def _pad_outputs(
    out: ModelOutput, packing: Packing | PaddedRows, kept: tuple[Tensor, Tensor] | None, done: set[str]
) -> None:
    """Pad every output with a value for each token: (1, T, …) → (B, L, …). With `PaddedRows`, write its padding.

    Raises:
        _UnknownOutput: an output of a packed row is a DTensor, or in no table and may have values in another form.
    """

    def pad_tokens(x: Tensor) -> Tensor:
        return packing.pad(x) if x.shape[:2] == packing.token_shape else x

    for name in [name for name in out if name not in done and name not in families.OTHER_OUTPUTS]:
        packed = out[name]
        if is_distributed(packed):
            if isinstance(packing, PaddedRows):
                continue  # as without the patch
            raise _UnknownOutput(f"its output {name!r} is a DTensor")
        if name == "logits" and kept is not None:
            tokens, found = kept
            out[name] = packed.view(*tokens.shape, -1).masked_fill(~found.unsqueeze(2), 0)
        elif name == "logits" and packed.dim() == 2:  # only of tokens with labels (sparse_prediction in ModernBERT)
            continue
        elif name in families.LOWEST_AT_PADDING:
            out[name] = packing.pad(packed, torch.finfo(packed.dtype).min)
        else:
            if isinstance(packing, Packing):
                if name in families.TOKEN_OUTPUTS:
                    _check_length(name, packed, packing.token_shape)
                _check_form(name, packed, packing.token_shape[1])
            elif name == "hidden_states" and any(x.dim() != 3 for x in pytree.tree_leaves(packed)):
                raise _UnknownOutput(_UNKNOWN.format(name))  # (altup, B, L, D) in Gemma3n
            whole = isinstance(packed, Tensor)  # pytrees take time
            out[name] = pad_tokens(packed) if whole else pytree.tree_map_only(Tensor, pad_tokens, packed)


def _check_length(name: str, value: Any, token_shape: tuple[int, int]) -> None:
    """Raise an error if an output has values for more or fewer tokens than the row."""
    for part in [value] if isinstance(value, Tensor) else pytree.tree_leaves(value):
        if isinstance(part, Tensor) and part.dim() == 3 and part.shape[:2] != token_shape:
            raise _UnknownOutput(f"its output {name!r} has {part.shape[1]} tokens, but the row has {token_shape[1]}")


def _check_form(name: str, value: Any, total: int) -> None:
    """Raise an error if an unknown output may have values for tokens, but not as (1, T, …)."""
    for part in pytree.tree_leaves(value):
        unknown = isinstance(part, dict | list | tuple)  # a subclass that pytrees do not open
        if isinstance(part, Tensor) and part.shape[:2] != (1, total):
            unknown = total in part.shape or part.numel() % max(total, 1) == 0 < part.dim()
        if unknown:
            raise _UnknownOutput(_UNKNOWN.format(name))


_UNKNOWN = "its output {!r} is not known, and may have a value for each token"


for _over in NAME_OVER:  # a patched model that is unpickled needs the names, and unpickling imports this file
    register(_over)
