"""Looks whether heads that get padded hidden states read those at padding, which are not what the padded run has.

Some rows of the batch run padded twice: as they are, and with the states at padding that a packed call gives. Where the
head gives the same, it reads none of them. Else it must give what it gives for each row alone.

Dimensions: R rows that are compared, L positions in a row, n tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .. import families
from ..pack.differences import HEAD
from ..pack.packing import Packing
from ..pack.routes import ModelCall, Unpatched
from .errors import errors_of_tokens, floor_of, is_near_loss, most_rounding, relative_error
from .rows import hooked
from .running_again import choose_rows, comparing_model, pick_rows


@dataclass
class ComparisonOfHead:
    """The comparison of a call of a head.

    Attributes:
        call: the call, with the rows that are compared.
        packing: that of these rows.
    """

    call: ModelCall
    packing: Packing

    @classmethod
    def of(cls, call: ModelCall) -> ComparisonOfHead | None:
        """The comparison of a call, or None if its rows are not known. Syncs with the device."""
        mask = call.arguments.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or families.is_encoder_decoder(call.model):
            return None
        rows = choose_rows((mask != 0).sum(1).tolist(), fewest=1)
        picked = {name: pick_rows(x, rows, len(mask)) for name, x in call.arguments.items()}
        packing = Packing.of(picked["attention_mask"], None, len(rows), mask.shape[1]) if rows else None
        if packing is None or packing.saves_nothing:
            return None
        return cls(replace(call, args=(), kwargs=picked, arguments=picked), packing)

    def why_different(self) -> str | None:
        """What differs, or None."""
        try:
            padded = self._run(self.call.arguments)
            with as_if_packed(self.call.base, self.packing):
                got = self._run(self.call.arguments)
            names = [name for name, x in padded.items() if not self._is_same(x, got.get(name))]
            if not names:
                return None
            alone = [self._alone(row) for row in range(self.packing.rows)]
        except Exception:  # the code of any model: the call itself raises it too
            return None
        is_of_rows = {name: padded[name].dim() > 0 and len(padded[name]) == self.packing.rows for name in names}
        for name in names:
            if is_of_rows[name] and (error := self._error_alone(name, got[name], alone)) > self._limit:
                return f"its head reads padding, by which {name} differs by {error:.1e}"
        if not any(is_of_rows.values()):  # a loss that reads padding though the outputs do not
            error = relative_error(got[names[0]], padded[names[0]])
            return f"its head reads padding, by which {names[0]} differs by {error:.1e}"
        self.call.entry.handle.differ(HEAD)
        return None

    @property
    def _limit(self) -> float:
        model = self.call.model
        return max(floor_of(model), most_rounding(model) if families.dtype_of(model).itemsize < 4 else 0.0)

    def _run(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        with comparing_model(self.call):  # each time, because heads may have a state
            return values_by_name(Unpatched(replace(self.call, kwargs=arguments, arguments=arguments)).run())

    def _alone(self, row: int) -> dict[str, Tensor]:
        """What the head gives for a row without padding."""
        positions, (rows, length) = self.packing.positions_of_row(row), (self.packing.rows, self.packing.length)
        arguments = {}
        for name, x in self.call.arguments.items():
            x = pick_rows(x, [row], rows)
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length:
                x = x.narrow(1, int(positions[0]), int(positions[-1] - positions[0]) + 1)
            arguments[name] = x
        return self._run(arguments)

    def _is_same(self, padded: Tensor, got: Tensor | None) -> bool:
        """Whether an output is the same at tokens, or everywhere if it has no positions."""
        if got is None or got.shape != padded.shape:
            return False
        if not padded.dim():
            return is_near_loss(got, padded, families.dtype_of(self.call.model), 0.0)
        if padded.shape[:2] == (self.packing.rows, self.packing.length):
            padded, got = self.packing.pack(padded), self.packing.pack(got)
        error = float(errors_of_tokens(got.flatten()[None], padded.flatten()[None]).max())
        return error <= floor_of(self.call.model) / 10

    def _error_alone(self, name: str, got: Tensor, alone: list[dict[str, Tensor]]) -> float:
        """The largest relative error of a row, compared with the row alone."""
        errors = []
        for row, x in enumerate(got):
            positions, of_row = self.packing.positions_of_row(row), alone[row].get(name)
            if of_row is None or not len(of_row):
                return float("inf")
            mine, theirs = x, of_row[0]
            if got.shape[:2] == (self.packing.rows, self.packing.length) and of_row.dim() > 1:
                mine, theirs = x[positions], theirs[positions - positions[0]]
            if mine.shape != theirs.shape:
                return float("inf")
            errors.append(float(errors_of_tokens(mine.flatten()[None], theirs.flatten()[None]).max()))
        return max(errors)


@contextmanager
def as_if_packed(base: nn.Module, packing: Packing) -> Iterator[None]:
    """A context in which a base model that runs padded gives at padding what a packed call gives there."""

    def has_rows(x: Any) -> bool:  # heads may extend rows or cut them
        return isinstance(x, Tensor) and x.shape[:2] == (packing.rows, packing.length)

    def changed(name: Any, x: Any) -> Any:
        if name in (0, "last_hidden_state") and has_rows(x):
            return packing.pad_with_nearest(packing.pack(x))
        if name == "hidden_states" and isinstance(x, tuple):
            return tuple(packing.pad(packing.pack(each)) if has_rows(each) else each for each in x)
        return x

    def change(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Mapping):
            return type(out)(**{name: changed(name, x) for name, x in out.items()})
        return tuple(changed(at, x) for at, x in enumerate(out))

    with hooked([base], change):
        yield


def values_by_name(out: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of numbers in the outputs of a forward, by path: in mappings, dataclasses, tuples and lists."""
    if isinstance(out, Tensor):
        return {name or "its output": out} if out.is_floating_point() else {}
    if dataclasses.is_dataclass(out) and not isinstance(out, Mapping):
        out = vars(out)
    named = out.items() if isinstance(out, Mapping) else enumerate(out if isinstance(out, tuple | list) else ())
    found: dict[str, Tensor] = {}
    for key, x in named:
        found |= values_by_name(x, f"{name}.{key}" if name else str(key))
    return found
