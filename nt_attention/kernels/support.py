"""What a backend claims on a card: what was run there against float64, or else what its documentation says.

``checked/sm90.json`` and its like hold what held, one file for each compute capability, written by
``python -m nt_attention check --save`` (``cli/check.py``). On such a card nothing else is claimed. Where no file
is, a backend claims what it declares in its own file, and ``explain`` says so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from .call import AttentionSpec, Backend

_in_force: ContextVar[bool] = ContextVar("nt_attention_claims", default=True)


@dataclass(frozen=True)
class Checked:
    """What was run on a card.

    Attributes:
        card: its name.
        versions: of the packages that were run.
        held: backend → dtype → "head dims" or "features" → which one ("64", "192/128"; "causal") → "both",
            "forward" where the gradients are wrong or refused, or "no".
    """

    card: str
    versions: dict[str, str]
    held: dict[str, dict[str, dict[str, dict[str, str]]]]

    def holds(self, backend: Backend, spec: AttentionSpec, kind: str, which: str) -> bool:
        row = self.held.get(backend.name, {}).get(_name(spec.dtype), {})
        return row.get(kind, {}).get(which) in (("both",) if spec.needs_grad else ("both", "forward"))

    def head_dims(self, backend: Backend, spec: AttentionSpec) -> tuple[int, int] | None:
        """The head dims (D, Dv) to pad a call to, so that it is one that held; None if there are none."""
        listed = self.held.get(backend.name, {}).get(_name(spec.dtype), {}).get("head dims", {})
        right = [_dims(which) for which in listed if self.holds(backend, spec, "head dims", which)]
        wanted = backend.padded(spec.head_dim, spec.value_dim)
        if backend.head_dims is None and wanted is not None and self._is_right(backend, wanted, listed, right):
            return wanted
        enough = [(d, v) for d, v in right if d >= spec.head_dim and v >= spec.value_dim]
        return min(enough, key=sum, default=None)

    @staticmethod
    def _is_right(backend: Backend, dims: tuple[int, int], listed: Iterable[str], right: list[tuple[int, int]]) -> bool:
        """Whether these held or, if they were not run, those whose kernel runs them: it does nothing new between."""
        run = [_dims(which) for which in listed]
        if dims in run:
            return dims in right
        kernels = backend.compiled_for or [d for d, v in run if d == v]
        wider = min((d for d in kernels if d >= max(dims)), default=0)
        return (wider, wider) in right

    def reasons(self, backend: Backend, spec: AttentionSpec) -> list[str]:
        """Why a call that the documentation allows is not one that held here."""
        told = f"on {self.card}, by `python -m nt_attention check`"
        if backend.name not in self.held:
            return [f"was not run {told}: name another, or run that command with --save where this one is installed."]
        if _name(spec.dtype) not in self.held[backend.name]:
            return [f"is not right in {spec.dtype} {told}: cast the inputs, or name another."]
        way = " with gradients" if spec.needs_grad else ""
        reasons = []
        if self.head_dims(backend, spec) is None:
            dims = (
                spec.head_dim if spec.head_dim == spec.value_dim else f"{spec.head_dim} with values of {spec.value_dim}"
            )
            reasons.append(f"has no head dim that is right for {dims}{way} {told}: name another.")
        for feature in sorted(spec.features & backend.features):
            if not self.holds(backend, spec, "features", feature):
                reasons.append(f"is not right{way} under {feature!r} {told}: leave it out, or name another.")
        return reasons


@functools.cache
def checked_on(capability: tuple[int, int]) -> Checked | None:
    """What was run on cards of this compute capability, if anything."""
    file = resources.files(__package__) / "verified" / f"sm{capability[0]}{capability[1]}.json"
    if not file.is_file():
        return None
    table: dict[str, Any] = json.loads(file.read_text())
    return Checked(table["card"], table["versions"], table["held"])


def checked_for(device: torch.device) -> Checked | None:
    if device.type != "cuda" or not _in_force.get() or torch.version.hip:
        return None
    return checked_on(torch.cuda.get_device_capability(device))


def reasons(backend: Backend, spec: AttentionSpec) -> list[str]:
    """Why a backend can't run a call, each a sentence that says what to change; empty if it can."""
    documented = backend.unsupported(spec)
    checked = checked_for(spec.device)
    if documented or checked is None or backend.is_reference:
        return documented
    return checked.reasons(backend, spec)


def head_dims(backend: Backend, spec: AttentionSpec) -> tuple[int, int] | None:
    """The head dims (D, Dv) that a backend is called with, zeros added; None if it has none that are enough."""
    checked = checked_for(spec.device)
    if checked is not None and not backend.is_reference:
        return checked.head_dims(backend, spec)
    return backend.padded(spec.head_dim, spec.value_dim, any_of_them=not _in_force.get())


def basis(device: torch.device) -> str:
    """On what a claim rests, in words."""
    if device.type != "cuda":
        return ""
    checked = checked_for(device)
    return "by its documentation; not run on this card yet" if checked is None else f"run on {checked.card}"


@contextmanager
def by_documentation() -> Iterator[None]:
    """Within the block, claim what is documented, whatever was run: to find out what holds."""
    token = _in_force.set(False)
    try:
        yield
    finally:
        _in_force.reset(token)


def in_force() -> bool:
    return _in_force.get()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(which: str) -> tuple[int, int]:
    head_dim, _, value_dim = which.partition("/")
    return int(head_dim), int(value_dim or head_dim)
