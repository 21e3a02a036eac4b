"""Compares the first packed calls of a model with padded ones: on the user's batches, by a few of their rows.

A call is compared if none of its kind was (its mode, arguments, head and dtype), and again if its rows are twice as
long as any that were compared. The batch runs packed once more, without gradients and dropout. The shortest row, the
longest and one between run padded, and each of them alone. How much these two differ is the rounding of this model on
this device, by which the packed run is judged.

Dimensions: B rows of a padded batch, L positions in a row, T tokens, n tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...compiler import TRACING
from ...torch_private import backward_id, children_of, forward_hooks_of, is_replica, is_transformed
from .. import families
from ..pack.outputs import UnknownOutputError
from ..pack.padded_on_read import PaddedOnRead
from ..pack.routes import ModelCall, Unpatched
from ..route.attention import OtherLengthError
from .find import first_cause, first_line, of_cause
from .later import are_sharded
from .random_numbers import RandomNumbers
from .rows import unchanged, watching

CheckMode = Literal["first", "always", "never"]
MOST_ROWS = 3
LONGEST_ROW = 4096  # positions, of rows that run padded
FEWEST_TOKENS = 8  # of the shortest row, if another one has as many
SHARE = 64  # of the calls of a class that is not of transformers, one in so many is compared again
# Relative errors that are rounding whatever was measured, by the dtype in which a model computes.
_FLOOR = {torch.float64: 1e-6, torch.float32: 4e-4}
_FLOOR_OF_HALF = 3e-2
_FACTOR, _MOST_ROUNDING = 6, 0.05
# Calls with these arguments only are the usual ones. If they differ, no call of the model packs.
_USUAL = {"input_ids", "attention_mask", "labels", "shift_labels", "use_cache", "return_dict", "num_items_in_batch"}
_OUTPUTS = families.TOKEN_OUTPUTS - {"hidden_states"}


class _Structure:
    """The modules of a model, their hooks and their own `forward`, which may be changed after the check."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [children_of(module) for module in modules]
        self._hooks = [table for module in modules for table in forward_hooks_of(module)]
        self._attributes = [vars(module) for module in modules]
        self._seen: list[Any] = [self._read()]
        self._state, self._last = 0, self._seen[0]

    def _read(self) -> Any:
        children = [*map(tuple, map(dict.values, self._children))]
        return children, [*map(len, self._hooks)], [table.get("forward") for table in self._attributes]

    @property
    def state(self) -> int:
        """The number of the state in which the modules are now: the same for the same state."""
        now = self._read()
        if now != self._last:
            if now not in self._seen:
                self._seen.append(now)
            self._state, self._last = self._seen.index(now), now
        return self._state


@dataclass(eq=False)
class FirstBatches:
    """What was compared of the calls of a patched model.

    Attributes:
        model: the patched model.
        mode: which calls are compared.
        is_foreign: whether a class in it is not of transformers or torch.
        compared: kind of call → the length of the longest rows that were compared.
        wrong: kind of call → why such calls run padded.
    """

    model: nn.Module
    mode: CheckMode = "first"
    is_foreign: bool = False
    compared: dict[Hashable, int] = field(default_factory=dict)
    wrong: dict[Hashable, str] = field(default_factory=dict)
    calls: int = 0
    structure: _Structure | None = None

    def is_settled(self, call: ModelCall) -> bool:
        """Whether a call packs and need not be compared. Reads no tensor."""
        kind = self._kind(call)
        return kind not in self.wrong and kind[0] not in self.wrong and not self._is_due(kind, call)

    def why_padded(self, call: ModelCall) -> str | None:
        """Why a call that could run packed runs padded, or None. Compares it if it is due."""
        if self.mode == "never" or call.compiler is TRACING:
            return None
        kind = self._kind(call)
        if kind[1:] and call.packing is not None and call.packing.has_holes:
            kind = (*kind, "holes")
        if reason := self.wrong.get(kind, self.wrong.get(kind[0])):
            return reason
        self.calls += 1
        if not self._is_due(kind, call) or not (rows := call.rows_to_compare(_choose_rows)):
            return None
        self.compared[kind] = max(self.compared.get(kind, 0), call.length)
        comparison = _Comparison(call, rows)
        reason = comparison.why_different()
        if reason is None:
            call.entry.handle.counts.compare(comparison.largest)
            return None
        reason = f"its first batch gave other values packed than padded: {reason}"
        self.wrong[kind[0] if call.arguments.keys() <= _USUAL and "holes" not in kind else kind] = reason
        return reason

    def _kind(self, call: ModelCall) -> tuple[Hashable, ...]:
        """What calls have in common that are compared once. Its first item is the state of the modules."""
        if self.structure is None:
            self.structure = _Structure(self.model)
        return self.structure.state, call.entry.head, call.model.training, frozenset(call.arguments), _dtype_of(call)

    def _is_due(self, kind: Hashable, call: ModelCall) -> bool:
        is_new = call.length >= 2 * self.compared.get(kind, 0)
        is_again = self.mode == "always" or (self.is_foreign and self.calls % SHARE == 0)
        if not (is_new or is_again):
            return False
        is_observed = is_transformed() or backward_id() != -1 or is_replica(call.model)
        # Ranks of a mesh, and those that gather parameters, must run the same calls whatever their batches are.
        is_alone = call.entry.handle.mesh is None and not are_sharded(call.model)
        return is_alone and not is_observed and not families.ROW_INPUTS & call.arguments.keys()


def _choose_rows(lengths: list[int]) -> list[int]:
    """The longest row that is not too long, the shortest and one between. The longest is first."""
    order = sorted((n, row) for row, n in enumerate(lengths) if 0 < n <= LONGEST_ROW)
    if not order:
        return []
    enough = next((at for at, (n, _) in enumerate(order) if n >= FEWEST_TOKENS), len(order) - 1)
    chosen = {order[-1][1], order[enough][1], order[(enough + len(order) - 1) // 2][1]}
    return sorted(chosen, key=lambda row: -lengths[row])[:MOST_ROWS]


class _Comparison:
    """The comparison of a call, by some of its rows.

    Attributes:
        largest: the largest relative difference, of rows that are the same.
    """

    def __init__(self, call: ModelCall, rows: list[int]) -> None:
        self.call, self.rows, self.largest = call, rows, 0.0

    def why_different(self) -> str | None:
        """What differs, and in which module, or None."""
        with unchanged(self.call.model), RandomNumbers(drops=False), torch.compiler.set_stance("force_eager"):
            try:
                got = self._packed(self.call)
            except (UnknownOutputError, OtherLengthError):  # the call itself falls back
                return None
            except Exception as error:  # the code of any model
                return f"it raises {first_line(error)}"
            padded = self._padded(self.rows)
            alone = [self._padded([row], alone=True) for row in self.rows]
            for name in sorted(_OUTPUTS & got.keys() & padded.keys()):
                if isinstance(got[name], Tensor) and (reason := self._compare(name, got, padded, alone)):
                    return reason
            return self._compare_losses(padded)

    def _packed(self, call: ModelCall) -> Any:
        """What the packed call gives."""
        call = replace(call, arguments={**call.arguments, "return_dict": True})
        return call.as_packed().run()

    def _padded(self, rows: list[int], alone: bool = False) -> Any:
        """What the original forward gives for some rows: padded, or one row without padding."""
        arguments = {**self.call.pick(rows, alone), "return_dict": True}
        return Unpatched(replace(self.call, args=(), kwargs=arguments, arguments=arguments)).run()

    def _compare(self, name: str, got: Any, padded: Any, alone: list[Any]) -> str | None:
        """Compare an output at the tokens of each row."""
        rounding, errors = [], []
        packing = self.call.packing_of(name)
        for at, row in enumerate(self.rows):
            tokens, positions = packing.tokens_of_row(row), packing.positions_of_row(row)
            mine = _values_of(got[name], tokens, row, positions)
            if mine is None or padded[name].dim() < 2 or padded[name].shape[1] <= int(positions.max(initial=0)):
                return None  # not an output for each token
            theirs, own = padded[name][at, positions], alone[at][name][0]
            if positions.numel() and own.shape[0] != len(tokens):  # with padding between its tokens
                own = own[positions - positions[0]] if own.shape[0] > int(positions[-1] - positions[0]) else theirs
            rounding.append(_error(theirs, own))
            errors.append(min(_error(mine, theirs), _error(mine, own)))
        measured = max(rounding)
        limit = _floor(self.call) + _FACTOR * (measured if measured <= _MOST_ROUNDING else 0.0)
        worst = max(range(len(errors)), key=lambda at: errors[at])
        if errors[worst] <= limit:
            self.largest = max(self.largest, *errors)
            return None
        tokens = packing.tokens_of_row(self.rows[worst])
        return (
            f"{name} differs by {errors[worst]:.1e} in a row of {len(tokens)} tokens, where rounding explains "
            f"{limit:.0e}{self._module(self.rows[worst])}"
        )

    def _compare_losses(self, padded: Any) -> str | None:
        """Compare the loss of the rows that were chosen."""
        want, call = padded.get("loss"), self.call
        if want is None or call.entry.head not in ("token", "next token") or call.packing.ignores_labels:
            return None
        call = replace(call, arguments=call.pick(self.rows))
        if call.packing is None or call.packing.saves_nothing or not bool(want.isfinite()):
            return None
        got = self._packed(call).get("loss")
        if got is None:
            return None
        error = float((got.double() - want.double()).abs() / want.double().abs().clamp(min=1e-6))
        return None if error <= 4 * _floor(self.call) else f"the loss differs by {error:.1e}"

    def _module(self, row: int) -> str:
        """The first module that gives something else for a row packed than alone, as the end of a sentence."""
        packing = self.call.packing_of("")
        tokens = packing.tokens_of_row(row)
        with watching(self.call.base, {packing.layout.total: slice(tokens.start, tokens.stop)}) as seen:
            self._packed(self.call)
        with watching(self.call.base, {len(tokens): slice(None)}) as alone:
            self._padded([row], alone=True)
        cause = first_cause(seen, alone, _floor(self.call))
        return "" if cause is None else f"; first in {of_cause(cause)}"


def _values_of(x: Any, tokens: range, row: int, positions: Tensor) -> Tensor | None:
    """The values (n, …) of a row, of an output that is padded, or is when it is read."""
    if isinstance(x, PaddedOnRead):
        packed = x.source.packed
        return packed[0, tokens.start : tokens.stop] if packed.shape[0] == 1 else packed[row, positions]
    return x[row, positions] if x.dim() > 1 and x.shape[1] > int(positions.max(initial=0)) else None


def _error(got: Tensor, want: Tensor) -> float:
    """The relative error that nine tenths of the tokens stay below, or half of few tokens. Experts flip by rounding."""
    errors = []
    for mine, theirs in zip(got.flatten(1).split(1024), want.flatten(1).split(1024), strict=True):
        mine, theirs = mine.float(), theirs.float()
        errors.append((mine - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-12))
    ordered = torch.cat(errors).nan_to_num(float("inf")).sort().values
    share = 0.9 if len(ordered) >= 10 else 0.5
    return float(ordered[math.ceil(share * len(ordered)) - 1])


def _dtype_of(call: ModelCall) -> torch.dtype:
    """The dtype in which a model computes."""
    parameter = families.first_parameter(call.model)
    if parameter is None:
        return torch.float32
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def _floor(call: ModelCall) -> float:
    """What is rounding in any case."""
    return _FLOOR.get(_dtype_of(call), _FLOOR_OF_HALF)


__all__ = ["CheckMode", "FirstBatches"]
