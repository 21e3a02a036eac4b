"""Packs the layers of encoders whose input is not tokens, such as those of audio and images.

What is before the layers (feature extractors, embeddings, convolutions) and after them (heads, losses) runs on padded
rows, as without the patch. A layer takes the tokens of its padded hidden states, runs on one packed row, and pads what
it gives. So whatever reads hidden states between layers gets them in their usual form. The next layer takes the packed
row itself, if nothing has changed the padded hidden states meanwhile.

Dimensions: B rows of a padded batch, L positions in a row, T tokens, E the width of hidden states.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from ...compiler import active_compiler, can_be_read, inline_only, is_compiling, outside_of_graphs
from ...patching.forwards import Handle, is_recorded, override_forward, replacement_of
from ...torch_private import (
    backward_hooks_of_tensor,
    forward_hooks_of,
    has_compiled_call,
    has_hooks_of_all_modules,
    inside_compiled,
    is_transformed,
    pytree,
    saved_tensors_hooks,
    version_of,
)
from .. import families
from ..plan import Plan
from ..route.masks import source_of
from ..route.packed_mask import PackedMask
from ..route.packed_row import LayerCalls, PackedRow, current_layers, is_compared, is_unpatched, running
from .attention_code import override_attention
from .change_model import attention_modules
from .packing import Packing
from .padded_modules import add_padded_modules, group_by_length
from .routes import FallsBack, ModelCall, Unpatched
from .rules import (
    NO_PADDING,
    TOO_SMALL,
    WEIGHTS,
    Rule,
    differs_from_padded,
    is_divided_by_context_parallel,
    needs_samples,
    route_of,
    was_given_other_attention,
)
from .small_batches import saves_little

MASK = "attention_mask"
_ROWS = "_nt_attention_rows_of_layers"


def encoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that may pack, by name: items of a list that attend, and get hidden states and an `attention_mask`."""
    layers: dict[str, nn.Module] = {}
    for path, items in model.named_modules():
        if not isinstance(items, nn.ModuleList) or any(path.startswith(f"{layer}.") for layer in layers):
            continue
        layers |= {f"{path}.{name}": layer for name, layer in items.named_children() if _is_layer(layer)}
    return layers


def _is_layer(module: nn.Module) -> bool:
    names = inspect.signature(type(module).forward).parameters
    takes_mask = MASK in names and "encoder_hidden_states" not in names
    return takes_mask and any("Attention" in type(part).__name__ for part in module.modules() if part is not module)


def why_no_layers(model: Any) -> str | None:
    """Why no layers of a model can pack, or None."""
    if model.main_input_name == "input_ids" or families.kind(model) in families.NOT_PACKED:
        return families.why_not_packed(model) or "its input is input_ids"
    kind: Any = families.class_of(model)
    names = inspect.signature(kind.forward).parameters
    if not any(name in names for name in (MASK, f"pixel_{MASK}")):
        return "its call takes no mask of padding"
    return None if encoder_layers(model) else "its layers take no mask of padding"


def kinds_of_layers(model: nn.Module) -> list[str]:
    """The classes of the layers that may pack."""
    return sorted({type(layer).__name__ for layer in encoder_layers(model).values()})


def pack_layers(model: PreTrainedModel, handle: Handle, first_batches: Any, *, always: bool) -> None:
    """Make the layers of a model pack, and count the calls of the model and of the models in it.

    `first_batches`: a `check.layers.FirstBatchesOfLayers`, which compares calls, and finds what runs padded. `always`:
    whether batches that are too small to gain are packed too.
    """
    is_routed = families.routes_attention(model)
    for part in [x for x in model.modules() if isinstance(x, PreTrainedModel)]:
        names = tuple(inspect.signature(part.forward).parameters)
        if any(name.endswith(MASK) for name in names):
            override_forward(part, EncoderCall(handle, first_batches, names, is_routed), handle)
    for layer in encoder_layers(model).values():
        names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
        override_forward(layer, LayerCall(handle, names, always), handle)
        for module in attention_modules(layer).values():
            override_attention(module, is_routed, handle)


def add_padded_to_layers(model: nn.Module, classes: tuple[str, ...], handle: Handle) -> None:
    """Let modules of these classes in the layers run on padded rows."""
    for layer in encoder_layers(model).values():
        add_padded_modules(layer, Plan(padded=classes), handle, group_by_length)


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """The `forward` of a model whose layers pack: counts the call, or lets the layers run padded.

    Attributes:
        handle: the handle of the patch. It counts calls and warns.
        first_batches: what compares calls with calls whose layers are padded.
        names: the names of the model's arguments.
        is_routed: whether attention runs through transformers' interface.
    """

    handle: Handle
    first_batches: Any
    names: tuple[str, ...]
    is_routed: bool

    @inline_only
    def __call__(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_recorded():
            return original(*args, **kwargs)
        if is_unpatched(model) or current_layers() is not None:  # the model around it counts the call
            return original(*args, **kwargs)
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        call = EncoderModelCall(self, model, original, args, kwargs, arguments, active_compiler())
        if (route := self._route(call)) is not None:
            return route.run()
        layers = LayerCalls(self.handle.fall_back)
        with running(layers=layers):
            out = original(*args, **kwargs)
        if layers.reason is None or layers.packed:
            padded = TOO_SMALL if layers.is_small else NO_PADDING
            self.handle.count(None if layers.packed else padded, *(layers.packed or ()))
        return out

    @outside_of_graphs
    def _route(self, call: EncoderModelCall) -> Unpatched | None:
        return route_of(call, _RULES) if call.masks else None

    def keeps_apart(self, model: Any) -> bool:
        """True: a row has one recording or image."""
        return True


class EncoderModelCall(ModelCall):
    """A call of a model whose layers pack."""

    @property
    def inner(self) -> tuple[Any, ...]:
        """The patched models and layers in this one."""
        return parts_of_call(self.model)

    @property
    def masks(self) -> list[Tensor]:
        """The masks of padding."""
        return [x for name, x in self.arguments.items() if name.endswith(MASK) and isinstance(x, Tensor)]


def _asks_for_weights(call: EncoderModelCall) -> str | None:
    """It, or its config, asks for what our attention does not compute."""
    asks = call.arguments.get("output_attentions") or getattr(call.model.config, "output_attentions", False)
    return WEIGHTS if asks else None


def _has_compiled_layers(call: EncoderModelCall) -> str | None:
    """A layer is compiled as a whole."""
    if any(has_compiled_call(layer) or inside_compiled(layer) is not layer for layer in _items(call.model)):
        return "its layers are compiled: compile their parts instead"
    return None


def _is_compiled(call: EncoderModelCall) -> str | None:
    """The model is compiled as a whole."""
    return None if call.compiler is None else "torch.compile runs it: compile the parts of its layers instead"


def _has_unreadable_mask(call: EncoderModelCall) -> str | None:
    """The host can't know where padding is."""
    return None if all(map(can_be_read, call.masks)) else "the host can't read its mask"


def _has_batch_norms(call: EncoderModelCall) -> str | None:
    """Statistics of a batch depend on how much padding it has."""
    if not call.model.training:
        return None
    modules = (module for layer in _items(call.model) for module in layer.modules())
    if any(isinstance(x, _BatchNorm) and x.training for x in modules):
        return "the batch norms of its layers compute with padding in training"
    return None


def _checkpoints_padded_modules(call: EncoderModelCall) -> str | None:
    """A checkpoint would run a module on padded rows again."""
    if call.entry.first_batches.padded and any(map(_is_checkpointed, _items(call.model))):
        return "gradient checkpoints would run its convolutions again, which is not supported for packed layers"
    return None


_RULES: tuple[Rule, ...] = (
    (is_divided_by_context_parallel, FallsBack),
    (needs_samples, FallsBack),
    (_asks_for_weights, FallsBack),
    (was_given_other_attention, FallsBack),
    (_has_compiled_layers, FallsBack),
    (_is_compiled, FallsBack),
    (_has_unreadable_mask, FallsBack),
    (_has_batch_norms, FallsBack),
    (differs_from_padded, FallsBack),  # it may find modules that run padded
    (_checkpoints_padded_modules, FallsBack),
)


def _is_checkpointed(layer: nn.Module) -> bool:
    return bool(vars(layer).get("gradient_checkpointing")) and layer.training


def _items(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, also those that have taken the place of its layers."""
    if model not in _lists:
        paths = {path.rpartition(".")[0] for path in encoder_layers(model)}
        _lists[model] = [model.get_submodule(path) for path in paths]
    return [layer for items in _lists[model] for layer in items.children()]


@outside_of_graphs
def parts_of_call(model: nn.Module) -> tuple[nn.Module, ...]:
    """The patched models and layers in a model."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return (*models, *map(inside_compiled, _items(model)))


# Models → the lists of their layers.
_lists: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = weakref.WeakKeyDictionary()


class _Rows(NamedTuple):
    """How the layers of a call pack: the packing, the row for modules that need it, and masks by shape and dtype."""

    packing: Packing
    row: PackedRow
    masks: dict[Any, PackedMask]

    @classmethod
    def of(cls, packing: Packing) -> _Rows:
        positions = packing.layout.position_ids.unsqueeze(0)
        return cls(packing, PackedRow(packing.layout, positions, packing.length, of_layer=True), {})

    def mask_like(self, mask: Tensor) -> PackedMask:
        """The mask of the packed row, in the form of a mask (B, L), (B, L, L) or (B, 1, L, L)."""
        key = mask.dim(), mask.dtype
        if key not in self.masks:
            form: Any = "row" if mask.dim() == 2 else "pairs"
            packed, total = PackedMask.of(self.packing.layout, form=form, packing=self.packing), self.row.layout.total
            visible = 0.0 if mask.is_floating_point() and mask.dim() > 2 else 1
            shape = (1, *[1] * (mask.dim() - 3), *[total] * min(2, mask.dim() - 1))
            self.masks[key] = packed.filled(visible, shape, mask.dtype)
        return self.masks[key]

    def pack(self, x: Any, mask: Tensor) -> Any:
        """An argument of a layer for the packed row: masks, values for each position, or tuples of them."""
        if isinstance(x, tuple | list):
            return type(x)(self.pack(each, mask) for each in x)
        if not isinstance(x, Tensor):
            return x
        if x is mask:
            return self.mask_like(x)
        rows, length = self.packing.rows, self.packing.length
        return self.packing.pack(x) if x.dim() > 1 and x.shape[:2] in ((rows, length), (1, length)) else x

    def pad(self, x: Tensor) -> Tensor:
        """A result of a layer: (1, T, …) → (B, L, …), 0 at padding. Others stay as they are."""
        return self.packing.pad(x) if x.shape[:2] == self.packing.token_shape else x


class _Decision(NamedTuple):
    """What was decided for a mask: its `_Rows`, or None if layers run padded; in which call; the mask's version."""

    rows: _Rows | None
    call: object
    version: int


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The `forward` of a layer that packs.

    Attributes:
        handle: as in `EncoderCall`.
        names: the names of the layer's arguments. The first are the hidden states (B, L, E).
        always: whether batches that are too small to gain are packed too.
    """

    handle: Handle
    names: tuple[str, ...]
    always: bool

    @inline_only
    def __call__(self, module: Any, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_recorded():
            return original(*args, **kwargs)
        return self._run(module, original, args, kwargs)

    @outside_of_graphs
    def _run(self, module: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        hidden, mask = arguments.pop(self.names[0]), arguments.get(MASK)
        rows = self._rows(module, original, hidden, mask) if isinstance(mask, Tensor) else None
        if rows is None:
            return original(*args, **kwargs)
        is_observed = any(forward_hooks_of(module)) or has_hooks_of_all_modules()
        is_observed |= saved_tensors_hooks(True) is not None  # a checkpoint runs the layer again, without the last one
        call = None if is_observed else current_layers()
        values = None if call is None else _packed_before(hidden, call)
        values = rows.packing.pack(hidden) if values is None else values
        with running(row=rows.row):
            out = original(values, **{name: rows.pack(x, mask) for name, x in arguments.items()})
        packed = next((x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)), None)
        out = pytree.tree_map_only(Tensor, rows.pad, out)
        if call is not None and packed is not None:
            padded = next(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
            call.last = None if padded.is_inference() else _Last(weakref.ref(padded), packed, version_of(padded))
        return out

    def _rows(self, module: Any, original: Callable[..., Any], hidden: Any, mask: Tensor) -> _Rows | None:
        """How this call packs. It is decided once for each mask of a call of the model.

        The decision is kept on the storage of the mask, where a checkpoint that runs the layer again finds it.
        """
        if is_transformed():  # tensors have no storage; `EncoderCall` has counted why it runs padded
            return None
        layers, storage = current_layers(), mask.untyped_storage()
        version = -1 if mask.is_inference() else version_of(mask)
        kept: _Decision | None = getattr(storage, _ROWS, None)
        if is_unpatched(module):
            kept = _Decision(None, None, version)
        elif kept is None or kept.version != version or (layers is not None and kept.call is not layers.token):
            rows = self._decide(module, original, hidden, mask, layers)
            kept = _Decision(rows, None if layers is None else layers.token, version)
        setattr(storage, _ROWS, kept)
        return kept.rows

    def _decide(
        self, module: Any, original: Callable[..., Any], hidden: Any, mask: Tensor, layers: LayerCalls | None
    ) -> _Rows | None:
        """How a call packs, or None if it runs padded, which is counted. Syncs with the device, once or twice."""
        tokens, reason = None, replacement_of(original, type(module))
        if reason is None and not (isinstance(hidden, Tensor) and hidden.dim() == 3):
            reason = "its hidden states are not (batch, length, width)"
        if reason is None:
            tokens, reason = tokens_of(mask, *hidden.shape[:2])
        if tokens is not None:
            packing = Packing.of(tokens, None, *tokens.shape)
            if packing.saves_nothing:
                return None
            is_small = saves_little(*packing.sizes, hidden.shape[2], hidden.device)
            if is_small and not self.always and not is_compared():
                if layers is not None:
                    layers.is_small = True
                return None
            if not packing.has_holes:
                if layers is not None:
                    layers.packed = packing.sizes
                return _Rows.of(packing)
            reason = "its rows have padding between tokens"
        if reason is not None and layers is not None:
            layers.fall_back(reason)
        return None


def tokens_of(mask: Tensor, rows: int, length: int) -> tuple[Tensor | None, str | None]:
    """Which positions are tokens (B, L), from the mask that a layer gets; None without padding. Or why that is unknown.

    Args:
        mask: (B, L), not 0 at tokens; or (B, 1, 1 or L, L), true or 0 where a query sees a key. Syncs for the second.
        rows, length: B and L.
    """
    if mask.shape == (rows, length):
        return mask != 0, None
    source = source_of(mask)
    if source is not None:
        if source.sees_all:
            return (None if source.token_mask is None else source.token_mask != 0), None
        return None, "its mask is not only of padding"
    if mask.dim() != 4 or mask.shape[0] != rows or mask.shape[1] != 1 or mask.shape[3] != length:
        return None, f"the mask of its layers is {tuple(mask.shape)}, which is not of padding"
    pairs = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    keys = pairs.any(1)
    hides = pairs.expand(rows, length, length) != keys[:, None]
    is_plain = ~(hides & keys[:, :, None]).any()  # queries at padding may see anything
    if mask.is_floating_point():
        is_plain &= ((mask == 0) | (mask < -1e4)).all()
    return (keys, None) if bool(is_plain) else (None, "its mask is not only of padding")


class _Last(NamedTuple):
    """The hidden states that the last layer gave, padded and packed, and the version of the padded ones."""

    padded: weakref.ref[Tensor]
    packed: Tensor
    version: int


def _packed_before(hidden: Tensor, call: LayerCalls) -> Tensor | None:
    """The packed row of these hidden states, if the last layer gave them, and nothing has changed them."""
    last: _Last | None = call.last
    if last is None or last.padded() is not hidden or last.version != version_of(hidden):
        return None
    # Reentrant checkpoints run layers without gradients, and hooks on the gradient of the padded tensor must run.
    is_watched = hidden.retains_grad or backward_hooks_of_tensor(hidden) is not None
    return None if is_watched or last.packed.requires_grad != hidden.requires_grad else last.packed


def packing_of(arguments: Any) -> Packing | None:
    """The packing of a layer that has run packed, from its arguments, or None."""
    for x in arguments:
        decision = getattr(x.untyped_storage(), _ROWS, None) if isinstance(x, Tensor) else None
        if decision is not None and decision.rows is not None:
            packing: Packing = decision.rows.packing
            return packing
    return None
