"""Select the backend of a call, by its name or by the shortest expected time, and explain the choice."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.nn.attention import current_flash_attention_impl

from .._warnings import warn
from ..layouts.bounded import LengthsUnknownError
from . import cost_model, registry, support, tree
from .adapters import is_direct
from .backend import Backend
from .call import AttentionSpec, Call
from .call_size import CallSize
from .registry import BACKENDS

ENVIRONMENT_VARIABLE = "NT_ATTENTION_BACKEND"

_requested: ContextVar[str] = ContextVar("nt_attention_backend", default="auto")
_ignores_requests: ContextVar[bool] = ContextVar("nt_attention_automatic_choice", default=False)


class SlowBackendWarning(UserWarning):
    """A call with `backend="auto"` runs on the slow reference backend, because no faster one can run it.

    Example:
        >>> import warnings
        >>> import torch, nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 3])
        >>> x = torch.randn(layout.total, 4, 16)
        >>> gains = torch.ones(4, requires_grad=True)
        >>> learned = lambda score, b, h, q_idx, kv_idx: score * gains[h]
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", nta.SlowBackendWarning)
        ...     out = nta.varlen_attention(x, x, x, layout, score_mod=learned)
        >>> print(caught[0].message)
        attention runs on the slow reference backend because cpu cannot run this call: score_mod reads a tensor ...
    """

    __module__ = "nt_attention"


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, and why the others cannot. `print` shows it as a table.

    Attributes:
        chosen: The name of the backend, or None if no requested backend can run the call.
        reasons: Backend → why it cannot run the call; empty if it can.
        asked: "auto" or the requested name.
        basis: A text that says whether support was verified on this GPU or is only documented; empty on a CPU.
        expected_us: The expected device time, in µs, of each backend that can run the call and was measured, or that
            says itself how fast it is.
        about: The description of each backend.
        prefixes: How the chosen backend runs a call in which sequences share prefixes; empty for other calls.
        times: Where the expected times of this library's backends are from; empty if there are none.

    Example:
        >>> import torch, nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 3])
        >>> x = torch.randn(layout.total, 4, 16)
        >>> explanation = nta.explain(x, x, x, layout, batch_invariant=True, backend="cpu")
        >>> explanation.chosen is None
        True
        >>> explanation.reasons["cpu"]
        ('batch invariance is not supported: leave batch_invariant at False.',)
        >>> print(explanation)
        backend='cpu': it cannot run this call.
        ...
          cpu              cannot run  batch invariance is not supported: leave batch_invariant at False.
          reference        cannot run  batch invariance is not supported: leave batch_invariant at False.
    """

    __module__ = "nt_attention"

    chosen: str | None
    reasons: dict[str, tuple[str, ...]]
    asked: str
    basis: str = ""
    expected_us: dict[str, float] | None = None
    about: dict[str, str] = field(default_factory=dict, repr=False)
    prefixes: str = ""
    times: str = ""

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        basis = f" Support: {self.basis}." if self.basis else ""
        runs = f"{self.chosen} runs this call." if self.chosen else "it cannot run this call."
        lines = [f"backend={self.asked!r}: {runs}{basis}"]
        for name, reasons in self.reasons.items():
            state = "chosen" if name == self.chosen else "can run" if not reasons else "cannot run"
            details = " ".join(reasons) or self.about.get(name, "")
            if not reasons and name in (self.expected_us or {}):
                details += f"; expected time {self.expected_us[name]:.0f} µs"  # type: ignore[index]
            lines.append(f"  {name:<{width}}  {state:<10}  {details}")
        lines += [f"  {self.prefixes}"] if self.prefixes else []
        lines += [f"  expected times: {self.times}"] if self.times else []
        return "\n".join(lines)


def explain_call(call: Call, backend: str) -> Explanation:
    """`explain_spec` for a call with layouts, from which its size follows."""
    explanation = explain_spec(call.spec, CallSize.of(call), backend)
    if call.spec.tree and explanation.chosen is not None:
        chosen = registry.backends()[explanation.chosen]
        return replace(explanation, prefixes=tree.explain_way(chosen, call))
    return explanation


def explain_spec(spec: AttentionSpec, size: CallSize, backend: str = "auto") -> Explanation:
    """Which backend `choose` would return, and why not the others."""
    name, backends = _resolve(backend), registry.backends()
    reasons = {other: tuple(_reasons(candidate, spec)) for other, candidate in backends.items()}
    candidates = fastest_first(spec, size, backends) if name == "auto" else (name,)
    chosen = next((other for other in candidates if not reasons.get(other, True)), None)
    expected = {other: us for other, us in _expected_us(spec, size, backends).items() if not reasons[other]}
    about = {other: candidate.about for other, candidate in backends.items()}
    costs = cost_model.costs_of(spec, size)
    times = "" if costs is None else costs.about
    return Explanation(chosen, reasons, name, support.basis(spec.device), expected, about, times=times)


def fastest_first(
    spec: AttentionSpec, size: CallSize, backends: Mapping[str, Backend] | None = None
) -> tuple[str, ...]:
    """The backends that `"auto"` tries, in this order. The first that can run is chosen.

    On a GPU they are sorted by expected time (`cost_model.py`), followed by those of our own that were not measured for
    this kind of call. If there are few queries, `split_kv` is the first of our own if it was not measured for them, or
    if keys are in pools, which others copy. On a CPU Triton is not tried, because there it only runs in its
    interpreter, for tests. Registered backends that say how fast they are and can run the call are sorted in. On a CPU
    they are tried first. Other registered backends are not tried.
    """
    expected = _expected_us(spec, size, registry.backends() if backends is None else backends)
    by_time = sorted(expected, key=expected.__getitem__)
    if spec.device.type == "cpu":
        return (*by_time, "cpu", "reference")
    others = [name for name in BACKENDS if name not in expected and name not in ("cpu", "reference")]
    order = [*by_time, *others, "reference"]
    if ("split_kv" not in expected or spec.paged) and cost_model.has_few_queries(spec, size):
        order.remove("split_kv")
        order.insert(next(i for i, name in enumerate(order) if name in BACKENDS), "split_kv")
    return tuple(order)


def _expected_us(spec: AttentionSpec, size: CallSize, backends: Mapping[str, Backend]) -> dict[str, float]:
    """Backend → its expected time in µs, by the cost model or by its own `expected_us` if it can run the call."""
    expected = cost_model.expected_us(spec, size)
    if not expected.keys() <= backends.keys():  # the user's file may be from another version of this library
        expected = {name: us for name, us in expected.items() if name in backends}
    if size.tree is not None and expected:
        of_ways = {name: tree.expected_us(backends[name], spec, size.tree) for name in expected}
        expected = {name: min(times.values()) for name, times in of_ways.items()}
    for name, backend in backends.items():
        if backend.expected_us is None or _ignores_requests.get() or not _can_run(backend, spec):
            continue
        us = backend.expected_us(spec, size)
        if us is None:
            continue
        if not isinstance(us, (int, float)) or math.isnan(us) or us < 0:
            raise ValueError(f"expected_us of backend {name!r} must return a time in µs, ≥ 0, or None, got {us!r}.")
        expected[name] = us
    return expected


class Choice(NamedTuple):
    """The backend that was selected for a call, and the fields of `Call` that follow from it."""

    backend: Backend
    head_dims: tuple[int, int] | None
    is_direct: bool

    @classmethod
    def of(cls, backend: Backend, call: Call) -> Choice:
        dims = support.head_dims(backend, call.spec)
        return cls(backend, dims, is_direct(backend, call, dims))


def choose_for(call: Call, backend: str) -> Choice:
    """The backend of `choose` for a call with layouts."""
    return Choice.of(choose(call.spec, CallSize.of(call), backend), call)


def choose(spec: AttentionSpec, size: CallSize, backend: str = "auto", *, in_graph: bool = False) -> Backend:
    """The backend that runs this call. `in_graph`: without registered backends that have no operator, for "auto".

    For `"auto"` it is the backend of `use_backend`, else that of the environment variable NT_ATTENTION_BACKEND, else
    the first of `fastest_first` that can run. A named backend never falls back to another one.

    Raises:
        ValueError: There is no backend of that name, or it cannot run this call. The message has the reasons of every
            backend. It is a `LengthsUnknownError` if the host only knows bounds of the lengths.
    """
    name, backends = _resolve(backend), registry.backends()
    if name == "auto":
        order = fastest_first(spec, size, backends)
        candidates = [backends[one] for one in order if not in_graph or one in BACKENDS or backends[one].has_operators]
    else:
        candidates = [backends[name]] if name in backends else []  # it may have been removed by another thread
    for candidate in candidates:
        if _can_run(candidate, spec):
            return candidate
    message = str(explain_spec(spec, size, name))
    if not spec.bounded:
        raise ValueError(message)
    able = [one for one in backends.values() if "bounds" in one.features and name in ("auto", one.name)]
    why = "; ".join(f"{one.name}: {' '.join(_reasons(one, spec))}" for one in able) or f"{name} needs the lengths"
    raise LengthsUnknownError(f"no backend runs this call with bounds in place of lengths ({why})\n{message}")


def warn_if_slow(call: Call, backend: str) -> None:
    """Warn that the reference backend runs, unless it was requested by name."""
    if _resolve(backend) == "auto" and call.layout.device.type != "meta":  # nothing is computed there
        backends = registry.backends()
        order = [backends[name] for name in fastest_first(call.spec, CallSize.of(call), backends)]
        installed = [one for one in order if one.missing() is None]
        fast = installed[0] if not installed[0].is_reference else order[0]
        why = " ".join(_reasons(fast, call.spec))
        warn(
            f"attention runs on the slow reference backend because {fast.name} cannot run this call: {why} "
            "nta.explain shows the reasons of every backend; backend='reference' runs without this warning.",
            SlowBackendWarning,
        )


def can_choose_later(spec: AttentionSpec, backend: str) -> bool:
    """Whether some custom operator supports this call, so that a graph can select the backend when it runs.

    Raises:
        ValueError: The lengths are not known, and the call has dropout: the backward could select another backend.
    """
    check_backend_name(backend)
    if spec.bounded and spec.dropout_p and backend == "auto":
        raise ValueError(
            "in a graph, dropout with a layout that was made with max_tokens needs a backend by name: pass "
            'backend="token_tiled".'
        )
    if spec.has_mods:  # functions can't be arguments of operators
        return False
    if spec.paged:
        return True
    # A graph that names no registered backend must not depend on them: each registration would compile it again.
    known = BACKENDS if backend in ("auto", *BACKENDS) else registry.backends()
    candidates = [one for name, one in known.items() if backend in ("auto", name)]
    return any(
        # cheap checks first, because a compiler traces this code
        one.has_operators and one.device_type in (None, spec.device.type) and not one.unsupported(spec)
        for one in candidates
    )


def select_in_operator(call: Call, name: str) -> Choice:
    """`choose_for` in an operator, when a graph runs."""
    chosen = choose(call.spec, CallSize.of(call), name, in_graph=True)
    if not (chosen.has_operators or call.spec.paged):
        raise ValueError(
            f"{chosen.name!r} is not a custom operator, so a graph cannot select it when it runs: pass "
            f"backend={chosen.name!r}, or run this call outside of the graph.\n{explain_call(call, name)}"
        )
    if chosen.is_reference:
        warn_if_slow(call, name)
    return Choice.of(chosen, call)


def select_again(call: Call, number: int) -> Choice:
    """The backend with this number, which `select_in_operator` has selected for the forward.

    Raises:
        ValueError: It cannot run this call, for example because a graph that was recorded without gradients selected a
            backend that only supports the forward.
    """
    backend = registry.find_by_number(number)
    if not _can_run(backend, call.spec):
        why = " ".join(_reasons(backend, call.spec))
        raise ValueError(f"{backend.name} cannot run this call: {why} Record the graph with gradients.")
    return Choice.of(backend, call)


def selection_key(backend: str) -> tuple[object, ...]:
    """Everything besides the call on which `choose` depends, as a part of a cache key."""
    settings = support.uses_results.get(), _ignores_requests.get(), current_flash_attention_impl()
    return _resolve(backend), registry.registered, *settings


def available_backends() -> dict[str, str | None]:
    """The backends, and whether they can run on this machine.

    Returns:
        The name of every backend → None if it can run on this machine, else why it cannot.

    Example:
        >>> import nt_attention as nta
        >>> backends = nta.available_backends()
        >>> [name for name, reason in backends.items() if reason is None]
        [...'cpu', 'reference']
    """
    return {name: backend.missing() for name, backend in registry.backends().items()}


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, calls with `backend="auto"` run on this backend, or raise an error if it cannot run them.

    This applies to the current thread or asyncio task only. Blocks can be nested.

    Args:
        backend: A name from `available_backends()`, or "auto" for the automatic choice.

    Raises:
        ValueError: There is no backend of that name.

    Example:
        >>> import torch, nt_attention as nta
        >>> layout = nta.SequenceLayout.from_lengths([2, 3])
        >>> x = torch.randn(layout.total, 4, 16)
        >>> with nta.use_backend("reference"):
        ...     nta.explain(x, x, x, layout).chosen
        'reference'
    """
    check_backend_name(backend)
    token = _requested.set(backend)
    try:
        yield
    finally:
        _requested.reset(token)


@contextmanager
def automatic_choice() -> Iterator[None]:
    """Within the block, only backends of this library run under "auto", in this thread.

    `use_backend` outside of the block, the environment variable and registered backends have no effect.
    """
    token = _ignores_requests.set(True)
    try:
        yield
    finally:
        _ignores_requests.reset(token)


def _resolve(backend: str) -> str:
    """A backend's name, or "auto" if neither the caller, `use_backend` nor the environment variable names one."""
    if backend == "auto" and not _ignores_requests.get():
        backend = _requested.get()
        if backend == "auto" and (name := os.environ.get(ENVIRONMENT_VARIABLE)):
            check_backend_name(name, f"environment variable {ENVIRONMENT_VARIABLE}: ")
            return name
    if backend != "auto":
        check_backend_name(backend)
    return backend


def check_backend_name(backend: str, source: str = "") -> None:
    """Check that there is a backend of this name; `source` is put before the error message.

    Raises:
        ValueError: There is none.
    """
    # Our own names first: a graph that has one must not depend on what is registered.
    is_own = isinstance(backend, str) and (backend == "auto" or backend in BACKENDS)
    if not is_own and not (isinstance(backend, str) and backend in registry.backends()):
        names = ", ".join(map(repr, registry.backends()))
        raise ValueError(f"{source}there is no backend {backend!r}: pass 'auto' or one of {names}.")


_cached: dict[tuple[object, ...], bool] = {}


def _can_run(backend: Backend, spec: AttentionSpec) -> bool:
    """Whether `_reasons` is empty; cached for all batches with the same spec."""
    if spec.has_mods:  # a cache would keep these functions alive
        return not _reasons(backend, spec)
    key = (backend, spec, support.uses_results.get(), current_flash_attention_impl())
    if (found := _cached.get(key)) is None:
        if len(_cached) > 4096:
            _cached.clear()
        found = _cached[key] = not _reasons(backend, spec)
    return found


def _reasons(backend: Backend, spec: AttentionSpec) -> list[str]:
    missing = backend.missing()
    return [missing] if missing is not None else support.reasons(backend, spec)
