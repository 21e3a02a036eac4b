"""Compares the first packed calls of a model with padded ones: on the user's batches, by a few of their rows.

A call is compared if none of its kind was (its mode, arguments, head and dtype), and again if its rows, or the packed
row, are twice as long as any that were compared. The batch runs packed once more, without gradients and dropout. The
shortest row, the longest and one between run padded, and each of them alone. How much these two differ is the rounding
of this model on this device, by which the packed run is judged.

Dimensions: B rows of a padded batch, L positions in a row, T tokens, n tokens of a row.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...compiler import TRACING
from ...patching.handle import CheckMode
from ...torch_private import backward_id, children_of, forward_hooks_of, is_replica, is_transformed
from .. import families
from ..pack.outputs import UnknownOutputError
from ..pack.padded_on_read import PaddedOnRead
from ..pack.routes import ModelCall, Unpatched
from ..route.attention import OtherLengthError
from .errors import FACTOR, error_of, errors_of_tokens, floor_of, is_near_loss, most_rounding, relative_error
from .find import first_cause, first_line, of_cause
from .heads import ComparisonOfHead
from .later import are_sharded
from .rows import watching
from .running_again import choose_rows, comparing, comparing_model

SHARE = 64  # of the calls of a class that is not of transformers, one in so many is compared again
# Calls with these arguments only are the usual ones. If they differ, no call of the model packs.
_USUAL = {"input_ids", "attention_mask", "labels", "shift_labels", "use_cache", "return_dict", "num_items_in_batch"}
_OUTPUTS = families.TOKEN_OUTPUTS - {"hidden_states"}


_forward_of = operator.methodcaller("get", "forward")  # of the attributes of a module


class Structure:
    """Modules, their hooks and their own `forward`, which may be changed after the check."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._children = [children_of(module) for module in modules]
        self._hooks = [table for module in modules for table in forward_hooks_of(module)]
        self._attributes = [vars(module) for module in modules]
        self._seen: list[Any] = [self._read()]
        self._state, self._last = 0, self._seen[0]

    def _read(self) -> Any:
        # a hot path, without Python code for each module
        children = [*map(tuple, map(dict.values, self._children))]
        return children, [*map(len, self._hooks)], [*map(_forward_of, self._attributes)]

    @property
    def state(self) -> int:
        """The number of the state in which the modules are now: the same for the same state."""
        now = self._read()
        if now != self._last:
            if now not in self._seen:
                self._seen.append(now)
            self._state, self._last = self._seen.index(now), now
        return self._state


@dataclass
class Compared:
    """What was compared of a model.

    Attributes:
        structure: the modules of the model.
        sizes: kind of call → the length of the longest rows that were compared, and the most tokens of a packed row.
        wrong: kind of call → why such calls run padded. A kind that is a number is that of all calls in this state.
        calls: the number of calls.
    """

    structure: Structure
    sizes: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    wrong: dict[Hashable, str] = field(default_factory=dict)
    calls: int = 0

    def reason_of(self, kind: tuple[Hashable, ...]) -> str | None:
        """Why calls of a kind run padded, or None."""
        return self.wrong.get(kind, self.wrong.get(kind[0]))


# Patched models → what was compared of them. A copy of a model may be changed, so it is compared again.
_of_model: weakref.WeakKeyDictionary[nn.Module, Compared] = weakref.WeakKeyDictionary()


def compared_of(model: nn.Module, without: nn.Module | None = None) -> Compared:
    """What was compared of a model; of its modules, all but those of another one."""
    if model not in _of_model:
        others = set() if without is None else set(without.modules())
        _of_model[model] = Compared(Structure([x for x in model.modules() if x not in others]))
    return _of_model[model]


@dataclass(frozen=True)
class FirstBatches:
    """What compares the calls of a patched model.

    Attributes:
        mode: which calls are compared.
        is_foreign: whether a class in it is of a package whose modules are not known.
        scales_by_length: whether it has rotary embeddings that are scaled by the length of a sequence. The padded run
            scales them by that of the longest row, and they keep what they were scaled by.
    """

    mode: CheckMode = "first"
    is_foreign: bool = False
    scales_by_length: bool = False

    def of_head(self) -> FirstBatches:
        """What compares the calls of a head that gets padded hidden states."""
        return FirstBatchesOfHead(self.mode, self.is_foreign, self.scales_by_length)

    def is_settled(self, call: ModelCall) -> bool:
        """Whether a call packs and need not be compared. Reads no tensor."""
        if self.mode == "never":
            return True
        compared = self._compared(call)
        kind = _kind_of(call, compared)
        return compared.reason_of(kind) is None and not self._is_due(kind, call, compared)

    def why_padded(self, call: ModelCall) -> str | None:
        """Why a call that could run packed runs padded, or None. Compares it if it is due."""
        if self.mode == "never" or call.compiler is TRACING:
            return None
        compared = self._compared(call)
        kind, total = self._kind_and_size(call, compared)
        if reason := compared.reason_of(kind):
            return reason
        compared.calls += 1
        if not self._is_due(kind, call, compared, total) or (comparison := self._comparison(call)) is None:
            return None
        with comparing() as is_free:  # waits for a thread that may compare a call of this kind
            if is_free and compared.reason_of(kind) is None and self._is_due(kind, call, compared, total):
                self._compare(comparison, kind, call, compared, total)
            return compared.reason_of(kind)

    def _compare(
        self, comparison: Any, kind: tuple[Hashable, ...], call: ModelCall, compared: Compared, total: int
    ) -> None:
        """Compare a call, and note the result."""
        reason = comparison.why_different()
        if reason is not None:
            is_usual = call.arguments.keys() <= _USUAL and len(kind) == _LENGTH_OF_KIND
            compared.wrong[kind[0] if is_usual else kind] = (
                f"its first batch gave other values packed than padded: {reason}"
            )
        elif isinstance(comparison, _Comparison):  # that of a head is a part of the same call
            call.entry.handle.counts.compare(comparison.largest)
        longest, most = compared.sizes.get(kind, (0, 0))
        compared.sizes[kind] = max(longest, call.length), max(most, total)

    def _compared(self, call: ModelCall) -> Compared:
        return compared_of(call.model)

    def _kind_and_size(self, call: ModelCall, compared: Compared) -> tuple[tuple[Hashable, ...], int]:
        """The kind of a call, and its number of tokens. Reads the lengths of its rows."""
        kind, packings = _kind_of(call, compared), call.packings
        total, has_holes = 0, False
        for packing in packings:
            total += packing.layout.total
            has_holes |= packing.has_holes
        return (*kind, "with padding between tokens") if has_holes else kind, total

    def _comparison(self, call: ModelCall) -> Any:
        """What compares a call, or None if no row of it can be compared."""
        rows = _rows_to_compare(call)
        return _Comparison(call, rows) if rows else None

    def _is_due(self, kind: Hashable, call: ModelCall, compared: Compared, total: int = 0) -> bool:
        longest, most = compared.sizes.get(kind, (0, 0))
        is_new = call.length >= 2 * longest or 0 < 2 * most <= total  # of a head, no number of tokens is known
        is_again = self.mode == "always" or (self.is_foreign and compared.calls % SHARE == 0)
        if not (is_new or is_again) or families.ROW_INPUTS & call.arguments.keys() or self.scales_by_length:
            return False
        is_observed = is_transformed() or backward_id() != -1 or is_replica(call.model)
        # Ranks of a mesh, and those that gather parameters, must run the same calls whatever their batches are.
        return not is_observed and call.entry.handle.mesh is None and not are_sharded(call.model)


class FirstBatchesOfHead(FirstBatches):
    """The same for a head that gets padded hidden states. It may read those of padding."""

    def _compared(self, call: ModelCall) -> Compared:
        return compared_of(call.model, without=call.base)

    def _kind_and_size(self, call: ModelCall, compared: Compared) -> tuple[tuple[Hashable, ...], int]:
        return _kind_of(call, compared), 0

    def _comparison(self, call: ModelCall) -> Any:
        return ComparisonOfHead.of(call)


_LENGTH_OF_KIND = 5


def _kind_of(call: ModelCall, compared: Compared) -> tuple[Hashable, ...]:
    """What calls have in common of which one is compared. Its first item is the state of the modules."""
    state, model = compared.structure.state, call.model
    return state, call.entry.head, model.training, frozenset(call.arguments), families.dtype_of(model)


def _rows_to_compare(call: ModelCall) -> list[int]:
    packings = call.packings
    if not packings or "encoder_outputs" in call.arguments or not all(x.is_row_per_sequence for x in packings):
        return []
    of_sides = [[len(x.tokens_of_row(row)) for row in range(x.rows)] for x in packings]
    return choose_rows([min(lengths) and max(lengths) for lengths in zip(*of_sides, strict=True)])


def pick(call: ModelCall, rows: list[int], alone: bool = False) -> dict[str, Any]:
    """The arguments of a call for some rows; for one row `alone`, from its first token to its last."""
    found = {}
    for name, x in call.arguments.items():
        found[name] = x
        packing = call.packing_of(name)
        size = packing.rows, packing.length
        if not isinstance(x, Tensor) or not x.dim():
            continue
        axis = 1 if name == "position_ids" and x.dim() == 3 else 0  # (axes, B, L)
        if x.shape[axis] == size[0] and (size[0] > 1 or x.dim() > 1):
            x = x.index_select(axis, torch.tensor(rows, device=x.device))
        if alone and x.dim() > axis + 1 and x.shape[axis + 1] == size[1]:
            positions = packing.positions_of_row(rows[0])
            x = x.narrow(axis + 1, int(positions[0]), int(positions[-1] - positions[0]) + 1)
        found[name] = x.clone()  # some losses change positions in place
    return found


class _Comparison:
    """The comparison of a call, by some of its rows.

    Attributes:
        largest: the largest relative difference, of rows that are the same.
        rounding: that between padded rows and each of them alone.
        suspicious: outputs and rows in which a token differs by more than rounding explains in most models.
    """

    def __init__(self, call: ModelCall, rows: list[int]) -> None:
        self.call, self.rows, self.largest, self.rounding = call, rows, 0.0, 0.0
        self.suspicious: list[tuple[str, int]] = []

    def why_different(self) -> str | None:
        """What differs, and in which module, or None."""
        with comparing_model(self.call):
            try:
                got = self._packed(self.call)
            except (UnknownOutputError, OtherLengthError):  # the call itself falls back
                return None
            except torch.OutOfMemoryError:  # the padded run needs more
                raise
            except Exception as error:  # the code of any model
                return f"it raises {first_line(error)}"
            try:
                padded = self._padded(self.rows)
                alone = [self._padded([row], alone=True) for row in self.rows]
            except Exception:  # as with ids at padding that the model does not have
                return None
            for name in sorted(_OUTPUTS & got.keys() & padded.keys()):
                if isinstance(got[name], Tensor) and (reason := self._compare(name, got, padded, alone)):
                    return reason
            return self._compare_pooled(got, padded) or self._compare_neighbors(got) or self._compare_losses(padded)

    def _packed(self, call: ModelCall) -> Any:
        """What the packed call gives."""
        call = replace(call, arguments={**call.arguments, "return_dict": True})
        return call.as_packed().run()

    def _padded(self, rows: list[int], alone: bool = False) -> Any:
        """What the original forward gives for some rows: padded, or one row without padding."""
        arguments = {**pick(self.call, rows, alone), "return_dict": True}
        return Unpatched(replace(self.call, args=(), kwargs=arguments, arguments=arguments)).run()

    def _compare(self, name: str, got: Any, padded: Any, alone: list[Any]) -> str | None:
        """Compare an output at the tokens of each row."""
        rounding, errors = [], []
        packing = self.call.packing_of(name)
        for at, row in enumerate(self.rows):
            tokens, positions = packing.tokens_of_row(row), packing.positions_of_row(row)
            mine, theirs = _values_of(got[name], tokens, row, positions), _at(padded[name], at, positions)
            own = _at(alone[at][name], 0, positions - positions[0])
            if mine is None or theirs is None or own is None:
                return None  # not an output for each token
            rounding.append(error_of(theirs, own))
            errors.append(min(error_of(mine, theirs), error_of(mine, own)))
            worst_token = min(float(errors_of_tokens(mine, x).max()) for x in (theirs, own))
            if worst_token > floor_of(self.call.model):
                self.suspicious.append((name, row))
        measured = max(rounding)
        self.rounding = max(self.rounding, measured)
        most = most_rounding(self.call.model)
        limit = floor_of(self.call.model) + FACTOR * (measured if measured <= most else 0.0)
        worst = max(range(len(errors)), key=lambda at: errors[at])
        if errors[worst] <= limit:
            self.largest = max(self.largest, *errors)
            return None
        tokens = packing.tokens_of_row(self.rows[worst])
        return (
            f"{name} differs by {errors[worst]:.1e} in a row of {len(tokens)} tokens, where rounding explains "
            f"{limit:.0e}{self._module(self.rows[worst])}"
        )

    def _compare_pooled(self, got: Any, padded: Any) -> str | None:
        """Compare the pooled output (B, E) of each row, unless the padded run pools padding."""
        mine, theirs = got.get("pooler_output"), padded.get("pooler_output")
        packing = self.call.packing
        if mine is None or theirs is None or packing is None or mine.shape[0] != packing.rows:
            return None
        if any(int(packing.positions_of_row(row)[0]) for row in self.rows) or self.call.entry.plan.reads_padding:
            return None
        error = float(errors_of_tokens(mine[self.rows], theirs).max())
        # One value of each row, of which no nine tenths can be taken.
        return None if error <= most_rounding(self.call.model) else f"pooler_output differs by {error:.1e}"

    def _compare_neighbors(self, got: Any) -> str | None:
        """Why a token that differs depends on other rows, or None: then it differs by rounding, as experts do.

        The batch runs packed again, with other tokens in all other rows.
        """
        for name, row in self.suspicious[:2]:
            packing, arguments = self.call.packing_of(name), dict(self.call.arguments)
            for key in {"input_ids", "inputs_embeds", "decoder_input_ids"} & arguments.keys():
                x = arguments[key]
                others = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
                for at in set(range(len(x))) - {row}:
                    others[at, self.call.packing_of(key).positions_of_row(at)] = True
                arguments[key] = x.clone()
                arguments[key][others] = x[others].flip(0).roll(1, 0)
            again = self._packed(replace(self.call, arguments=arguments))
            tokens, positions = packing.tokens_of_row(row), packing.positions_of_row(row)
            mine, other = _values_of(got[name], tokens, row, positions), _values_of(again[name], tokens, row, positions)
            if mine is None or other is None:
                continue
            error = float(errors_of_tokens(other, mine).max())
            if error > floor_of(self.call.model):
                return f"{name} of a token differs by {error:.1e} if other rows have other tokens"
        return None

    def _compare_losses(self, padded: Any) -> str | None:
        """Compare the loss of the rows that were chosen."""
        want, call = padded.get("loss"), self.call
        heads = ("token", "next token")
        if want is None or call.entry.head not in heads or self._ignores_labels or call.entry.plan.reads_padding:
            return None
        call = replace(call, arguments=pick(call, self.rows))
        if call.packing is None or all(x.saves_nothing for x in call.packings) or not bool(want.isfinite()):
            return None
        got = self._packed(call).get("loss")
        if got is None:
            return None
        if is_near_loss(got, want, families.dtype_of(self.call.model), max(self.rounding, self.largest)):
            return None
        return f"the loss differs by {relative_error(got, want):.1e}"

    @property
    def _ignores_labels(self) -> bool:
        """Whether the padded loss counts labels that the packed one leaves out, which is said elsewhere."""
        return any(packing.ignores_labels for packing in self.call.packings)

    def _module(self, row: int) -> str:
        """The first module that gives something else for a row packed than alone, as the end of a sentence."""
        packing = self.call.packing_of("")
        tokens = packing.tokens_of_row(row)
        with watching(self.call.base, {packing.layout.total: slice(tokens.start, tokens.stop)}) as seen:
            self._packed(self.call)
        with watching(self.call.base, {len(tokens): slice(None)}) as alone:
            self._padded([row], alone=True)
        cause = first_cause(seen, alone, floor_of(self.call.model))
        return "" if cause is None else f"; first in {of_cause(cause)}"


def _values_of(x: Any, tokens: range, row: int, positions: Tensor) -> Tensor | None:
    """The values (n, …) of a row, of an output that is padded, or is when it is read."""
    if isinstance(x, PaddedOnRead) and x.source.packed.shape[0] == 1:
        return x.source.packed[0, tokens.start : tokens.stop]
    return _at(x, row, positions)


def _at(x: Tensor, row: int, positions: Tensor) -> Tensor | None:
    """The values (n, …) at some positions of a row, or None if the output has no such positions."""
    return x[row, positions] if x.dim() > 1 and x.shape[1] > int(positions[-1]) else None


# Packages whose modules compute each token by itself, or are checked as those of transformers are.
_KNOWN = {"torch", "transformers", "nt_attention", "peft", "bitsandbytes", "torchao", "accelerate"}


def is_foreign(model: nn.Module) -> bool:
    """Whether a class in a model is of a package that is not known."""
    return any(families.class_of(module).__module__.partition(".")[0] not in _KNOWN for module in model.modules())
