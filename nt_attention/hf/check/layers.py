"""Compares the first calls of an encoder of audio or images whose layers pack with calls whose layers do not.

A few rows of the user's batch run twice: with packed and with padded layers, without gradients and dropout. Both must
give the same at tokens: what each layer gives, the outputs of the model, and its loss. A module of a layer that gives
something else runs on padded rows from then on.

Dimensions: B rows of a padded batch, L positions of the layers in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...patching.handle import CheckMode
from ...torch_private import backward_id, pytree
from .. import families
from ..pack.encoder_layers import EncoderModelCall, add_padded_to_layers, encoder_layers, packing_of
from ..pack.packing import Packing
from ..route.dropout import without_dropout
from ..route.packed_row import LayerCalls, running
from .errors import error_of, floor_of
from .find import MOST_PADDED_CLASSES, why_raised
from .first_batches import compared_of
from .later import are_sharded
from .rows import hooked, seed_all, unchanged
from .running_again import choose_rows, comparing, pick_rows


@dataclass
class FirstBatchesOfLayers:
    """What compares the calls of an encoder.

    Attributes:
        mode: which calls are compared. With "never", the first of each kind still is: it finds the modules that mix.
        padded: classes of modules in layers that run on padded rows.
    """

    mode: CheckMode = "first"
    padded: tuple[str, ...] = ()

    def why_padded(self, call: EncoderModelCall) -> str | None:
        """Why the layers of a call run padded, or None. Compares the call if it is due."""
        model, arguments = call.model, call.arguments
        mask = next((x for n, x in arguments.items() if n.endswith("attention_mask") and _is_mask(x)), None)
        if mask is None or backward_id() != -1:
            return None
        compared = compared_of(model)
        kind = compared.structure.state, model.training, frozenset(arguments), families.dtype_of(model)
        if reason := compared.wrong.get(kind):
            return reason
        length, (before, _) = mask.shape[1], compared.sizes.get(kind, (0, 0))
        is_due = before == 0 or (self.mode == "first" and length >= 2 * before) or self.mode == "always"
        if not is_due or are_sharded(model):
            return None
        if not (rows := choose_rows((mask != 0).sum(1).tolist(), longest=2**20)):
            return None
        with comparing() as is_free:  # waits for a thread that may compare a call of this kind
            if is_free and compared.sizes.get(kind, (0, 0)) == (before, 0):
                picked = {name: pick_rows(x, rows, len(mask)) for name, x in arguments.items()}
                reason, largest = self._compare(replace(call, arguments=picked))
                if reason is not None:
                    compared.wrong[kind] = f"its first batch gave other values with packed layers: {reason}"
                elif largest is not None:
                    call.entry.handle.counts.compare(largest)
                compared.sizes[kind] = max(before, length), 0
            return compared.wrong.get(kind)

    def _compare(self, call: EncoderModelCall) -> tuple[str | None, float | None]:
        """Why the packed layers are wrong, or None, and the largest difference. Finds the modules that run padded."""
        first: str | None = None
        while True:
            comparison = _Comparison(call)
            reason, kind = comparison.why_different()
            if reason is None:
                return None, comparison.largest
            first = first or reason
            if kind is None or kind in self.padded or len(self.padded) == MOST_PADDED_CLASSES:
                return first, None
            self.padded += (kind,)
            add_padded_to_layers(call.model, self.padded, call.entry.handle)


_OF_TORCH = set(vars(nn))  # the module around one of these is the one that mixes


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


@dataclass
class _Run:
    """What a call gave.

    Attributes:
        layers: what each call of a layer gave (B, L, E), in the order of the calls.
        packing: how the layers were packed, or None.
        parts: what each part of a layer gave for the tokens (T, …) or positions, by name, in the order of the calls.
        out: the outputs of the model, by name.
    """

    layers: list[Tensor] = field(default_factory=list)
    packing: Packing | None = None
    parts: list[tuple[str, Tensor]] = field(default_factory=list)
    out: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Comparison:
    """The comparison of a call with some of its rows. `largest` is the largest difference, or None if nothing packs."""

    call: EncoderModelCall
    largest: float | None = None

    @property
    def model(self) -> Any:
        """The model that is called."""
        return self.call.model

    def why_different(self) -> tuple[str | None, str | None]:
        """What differs, and the class of the module, if it is known."""
        with unchanged(self.model), without_dropout():
            want = self._run(running(unpatched=self.call.inner))
            try:
                got = self._run(running(layers=LayerCalls(lambda reason: None), compared=True))
            except torch.OutOfMemoryError:  # the padded run needs more
                raise
            except Exception as error:  # the code of any model
                found = why_raised(self.model, error)
                return str(found), found.module_class
        if got.packing is None:
            return None, None
        floor = floor_of(self.model)
        mask = got.packing.pad(torch.ones(got.packing.token_shape, dtype=torch.bool, device=got.layers[0].device))
        errors = [error_of(a[mask], b[mask]) for a, b in zip(got.layers, want.layers, strict=True)]
        if max(errors) > floor:
            return self._first_part(got, want, mask, floor)
        for name, theirs in want.out.items():
            mine = got.out.get(name)
            if mine is None or mine.shape != theirs.shape:
                return f"its output {name!r} has another form", None
            mine, theirs = (x[mask] if x.shape[:2] == mask.shape else x.flatten()[None] for x in (mine, theirs))
            errors.append(error_of(mine, theirs))
            if errors[-1] > floor:
                return f"its output {name!r} differs by {errors[-1]:.1e}", None
        self.largest = max(errors)
        return None, None

    def _run(self, context: running) -> _Run:
        run = _Run()
        seed_all(0)
        with context, _recorded(self.model, run):
            arguments = {n: x.clone() if isinstance(x, Tensor) else x for n, x in self.call.arguments.items()}
            out = self.call.original(**arguments)
        items = out.items() if hasattr(out, "items") else enumerate(pytree.tree_leaves(out))
        run.out = {
            f"{name}{n or ''}": x
            for name, value in items
            if name not in families.CACHE
            for n, x in enumerate(pytree.tree_leaves(value))
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        return run

    def _first_part(self, got: _Run, want: _Run, mask: Tensor, floor: float) -> tuple[str, str | None]:
        """The first part of a layer that gives other values at tokens, and its class if it may run padded."""
        kinds = {name: type(x).__name__ for name, x in self.model.named_modules()}
        layers = set(map(type, encoder_layers(self.model).values()))
        theirs: dict[str, list[Tensor]] = {}
        for name, x in want.parts:
            theirs.setdefault(name, []).append(x)
        for name, mine in got.parts:
            if not theirs.get(name):  # attention modules may not call all of their parts
                continue
            x = theirs[name].pop(0)
            if mine.shape[:2] != (1, int(mask.sum())) or x.shape[:2] != mask.shape:
                continue
            if kinds[name] not in _OF_TORCH and error_of(mine[0], x[mask]) > floor:
                is_layer = type(self.model.get_submodule(name)) in layers
                reason = f"{name} ({kinds[name]}) gives other values in a packed row"
                return reason, None if is_layer else kinds[name]
        return "its layers give other values in a packed row", None


@contextmanager
def _recorded(model: Any, run: _Run) -> Iterator[None]:
    """Record what layers and their parts give."""
    layers = encoder_layers(model)
    names = {
        part: f"{path}.{name}".rstrip(".") for path, layer in layers.items() for name, part in layer.named_modules()
    }

    def record(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        first = next((x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)), None)
        if first is None:
            return
        run.parts.append((names[module], first))
        if names[module] in layers:
            run.layers.append(first)
            run.packing = run.packing or packing_of(itertools.chain(args, kwargs.values()))

    with hooked(names, record, with_kwargs=True):
        yield
