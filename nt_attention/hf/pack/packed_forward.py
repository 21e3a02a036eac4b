"""The `forward` of a patched Hugging Face model: takes a route (`rules.py`) and runs it (`routes.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel

from ...compiler import TRACING, active_compiler, can_be_read, inline_only, outside_of_graphs
from ...graphs.cache import is_part_of_a_graph
from ...graphs.device import NotCapturedError
from ...patching.forwards import Handle, is_recorded
from .. import families
from ..families import Family
from ..plan import Head, Plan
from ..route.attention import NAME_OVER, NAMES, register
from ..route.by_name import why_rows_mixed
from ..route.hand_packed import refuse_packed_rows
from ..route.packed_mask import PackedMask, is_bypass_mask
from ..route.packed_row import current_row, is_compared, rows_of_head, runs_packed
from ..transformers_private import attention_of
from .inputs import arguments_of
from .routes import AsGraph, ModelCall, Packed, SmallBatch, Unpatched, passing_rows, run_route
from .rules import AFTER_GRAPH, BEFORE_GRAPH, Rule, route_of
from .shared_prefixes import IS_COMPILED, run_shared
from .small_batches import Size, is_measured, may_run_padded

PackingMode = Literal["auto", "always"]


@dataclass(frozen=True, eq=False)
class SequenceHeadCall:
    """The `forward` of a head that runs as before, on a base model that packs.

    Attributes:
        handle, defaults, first_batches: as in `PackedCall`.
        is_known: whether the head is one of transformers, which reads one token of a row.
    """

    handle: Handle
    defaults: dict[str, Any]
    is_known: bool
    first_batches: Any
    head: ClassVar[Head] = "sequence"

    @inline_only
    def __call__(self, model: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_recorded():
            return original(*args, **kwargs)
        arguments = arguments_of(self.defaults, args, kwargs) or {}
        if not self.is_known:
            refuse_packed_rows(
                model, arguments, "its head computes with whole rows: pass a padded batch with attention_mask"
            )
        call = ModelCall(self, model, original, args, kwargs, arguments, active_compiler())
        if (reason := self._why_padded(call)) is not None:
            refuse_packed_rows(model, arguments, f"this call can't run packed: {reason}")
            self.handle.fall_back(reason)
            return Unpatched(call).run()
        with passing_rows(call):
            return original(*args, **kwargs)

    @outside_of_graphs
    def _why_padded(self, call: ModelCall) -> str | None:
        return None if self.first_batches is None or call.is_inner else self.first_batches.why_padded(call)

    def keeps_apart(self, model: PreTrainedModel) -> bool:
        """False: a head that runs padded gets one sequence in a row."""
        return False


def add_rows_of_head(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Add the arguments of the head that runs, if it is that of this base model and has not passed them on."""
    rows = rows_of_head(model)
    if not rows:
        return
    tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
    length = None if tokens is None else tokens.shape[1]
    for name in rows.keys() - arguments.keys():
        if name != "position_ids" or rows[name].shape[-1] == length:  # heads may extend or cut rows
            arguments[name] = rows[name]


class ModelForward:
    """Runs the calls of a patched `forward`: as a CUDA graph, packed, or as its rules say.

    Attributes:
        before_graph, after_graph: its rules, as `BEFORE_GRAPH` and `AFTER_GRAPH`.
        handle, first_batches: as in `PackedCall`.
    """

    before_graph: ClassVar[tuple[Rule, ...]] = BEFORE_GRAPH
    after_graph: ClassVar[tuple[Rule, ...]] = AFTER_GRAPH
    handle: Handle
    first_batches: Any

    def prepare(self, call: ModelCall) -> None:
        """Add what the arguments lack."""
        add_rows_of_head(call.model, call.arguments)

    @inline_only
    def run(self, call: ModelCall) -> Any:
        """Run a call."""
        route = self._first_route(call)
        if isinstance(route, AsGraph):
            try:
                return route.run()
            except NotCapturedError as error:
                call.begin = error.begin
                route = self._packed_route(call)
        if call.span is None:
            return run_route(route)
        out = run_route(route)
        self._end(call)
        return out

    # Not compiled, because the host reads the lengths, and graphs support neither locks nor context variables.
    @outside_of_graphs
    def _first_route(self, call: ModelCall) -> Unpatched | Packed | AsGraph:
        if call.is_inner:
            return Unpatched(call)
        self.prepare(call)
        if (route := route_of(call, self.before_graph)) is not None:
            return route
        may_be_graph = self.handle.graphs is not None and call.compiler is not TRACING and not is_compared()
        may_be_graph = may_be_graph and not is_part_of_a_graph()
        if may_be_graph and (self.first_batches is None or self.first_batches.is_settled(call)):
            return AsGraph(call)
        return self._packed_route(call)

    @outside_of_graphs
    def _packed_route(self, call: ModelCall) -> Unpatched | Packed:
        route = route_of(call, self.after_graph) or Packed.take(call)
        if call.compiler is not TRACING and not is_part_of_a_graph():
            tokens = call.arguments.get("inputs_embeds", call.arguments.get("input_ids"))
            packs = isinstance(route, Packed | SmallBatch)
            if call.begin is not None and (packs or type(route) is Unpatched):  # without padding
                call.span = call.begin()
            elif packs and self.handle.graphs is None and tokens is not None and not is_compared():
                call.span = self.handle.counts.waits.begin(tokens.device)
        return route

    @outside_of_graphs
    def _end(self, call: ModelCall) -> None:
        """The call was timed, and its kernels are launched."""
        call.span.end()
        if self.handle.graphs is None:
            self.handle.advise()


@dataclass(frozen=True, eq=False)
class PackedCall(ModelForward):
    """The `forward` of a patched model: runs a padded batch as one packed row, or falls back to the original forward.

    Attributes:
        handle: the handle of the patch. It counts calls and warns.
        plan, family: how to pack the model.
        head: how its head runs, or None. For a "sequence" head, this is the forward of the base model.
        defaults: the parameters of the original forward, in the order of positional arguments, and their defaults.
        is_base: whether this is the forward of the base model.
        takes_any: whether the original forward takes other keyword arguments too.
        is_routed: whether attention runs through transformers' interface.
        needs_row: whether modules of the model read `current_row`.
        is_causal: whether its attention is causal.
        size: the size of the model, by which a small batch runs padded; None if every batch is packed.
        shares: whether the base model shares prefixes.
        scales_by_length: whether it has rotary embeddings that are scaled by the length of a sequence.
        has_head: whether this is the base model of a head that packs too.
        has_windows: whether its attention has windows or chunks of positions.
        first_batches: a `check.first_batches.FirstBatches`, which compares calls with padded ones; None in the check.
    """

    handle: Handle
    plan: Plan
    family: Family
    head: Head | None
    defaults: dict[str, Any]
    is_base: bool
    takes_any: bool
    is_routed: bool
    needs_row: bool
    is_causal: bool
    size: Size | None
    shares: bool = False
    scales_by_length: bool = False
    has_head: bool = False
    has_windows: bool = False
    first_batches: Any = None

    @functools.cached_property
    def pool(self) -> families.Pool | None:
        """How the pooled output is computed."""
        return self.family.pool or (families.pool_first if self.plan.pool else None)

    # Only `original` is compiled: the code around it is the same for all models, so it would soon have too many graphs.
    @inline_only
    def __call__(self, model: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_recorded():
            return original(*args, **kwargs)
        while isinstance(original, functools.partial) and not original.args:  # a wrapper passes some arguments
            kwargs = {**original.keywords, **kwargs}
            original = original.func
        arguments = arguments_of(self.defaults, args, kwargs)
        if arguments is None:
            return original(*args, **kwargs)  # this raises an error
        mask = arguments.get("attention_mask")
        if isinstance(mask, PackedMask) or is_bypass_mask(mask) or (mask is None and self._is_packed_by_head(model)):
            return self.run_row(model, original, arguments)
        return self.run(ModelCall(self, model, original, args, kwargs, arguments, active_compiler()))

    @inline_only
    def _is_packed_by_head(self, model: PreTrainedModel) -> bool:
        """Whether the head has packed the batch, though it passes no mask to its base model."""
        return self.is_base and self.needs_row and runs_packed(model)

    def is_small(self, call: ModelCall) -> bool:
        """Whether a batch is too small to gain from packing. This is decided from shapes."""
        arguments, base = call.arguments, call.base
        tokens = arguments.get("inputs_embeds", arguments.get("input_ids"))
        if call.compiler is not None or self.size is None or tokens is None or is_compared():
            return False
        if call.begin is not None:
            return False  # its time without a graph is asked for
        first = self.first_batches
        if self.handle.graphs is not None and first is not None and not first.is_settled(call):
            return False  # it is compared first, so that later calls run as graphs
        if not is_measured(tokens.device) or not may_run_padded(arguments):
            return False
        if not can_be_read(arguments["attention_mask"]):  # as on a CPU: an error says what to do
            return False
        if families.first_parameter(base) is None:  # a replica of DataParallel
            return False
        rows, length = tokens.shape[:2]
        return self.size.is_too_small(rows, length, families.dtype_of(base).itemsize)

    def keeps_apart(self, model: PreTrainedModel) -> bool:
        """Whether the original forward keeps apart the sequences of rows that the caller packed: by our attention."""
        is_ours = self.is_routed and attention_of(model.config) in NAMES
        return is_ours and not self.needs_row and why_rows_mixed(model) is None

    @inline_only
    def run_row(self, model: PreTrainedModel, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Run the original forward on a packed row, with the arguments that it takes."""
        if self.shares and self.is_base:
            if active_compiler() is None:
                return run_shared(self.handle.prefixes, model, original, arguments)
            self.handle.prefixes.add(IS_COMPILED)
        if self.plan.mask is None:
            if self.family.embed is not None and self.is_base:  # its embeddings would read the mask
                return original(**{name: x for name, x in arguments.items() if name != "attention_mask"})
            return original(**arguments)
        row = current_row()
        if row is not None and "position_ids" in self.defaults:
            arguments = arguments | {"position_ids": row.position_ids}
        return original(**{name: x for name, x in arguments.items() if name in self.defaults or self.takes_any})


for _over in NAME_OVER:  # a patched model that is unpickled needs the names, and unpickling imports this file
    register(_over)
