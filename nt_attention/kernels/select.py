"""Which backend runs a call, by name or by the shortest expected time, and why the others can't.

Only this file lists the backends. To add one, write its file and put it into ``BACKENDS``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch.nn.attention import current_flash_attention_impl

from . import cost_model, custom_ops, support, token_tiled
from .backend import Backend
from .backends import cpu, flash_attn_2, flash_attn_4, flex, reference, torch_efficient, torch_flash
from .call import AttentionSpec, Call
from .cost_model import CallSize

ENVIRONMENT_VARIABLE = "NT_ATTENTION_BACKEND"

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND
    for module in (token_tiled, flash_attn_4, torch_flash, flash_attn_2, torch_efficient, flex, cpu, reference)
}
_requested: ContextVar[str] = ContextVar("nt_attention_backend", default="auto")


class SlowBackendWarning(UserWarning):
    """With ``backend="auto"``, only the reference can run a call."""


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, and why the others can't. ``print`` shows it as a table.

    Attributes:
        chosen: the backend's name, or None if the requested one can't run.
        reasons: for every backend, why it can't run; empty if it can.
        asked: "auto" or the requested name.
        basis: whether support was verified or is only documented, in words; empty on a CPU.
        expected_us: the expected time on the device, in µs, of each backend that can run and was measured.
    """

    chosen: str | None
    reasons: dict[str, tuple[str, ...]]
    asked: str
    basis: str = ""
    expected_us: dict[str, float] | None = None

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        basis = f" Support: {self.basis}." if self.basis else ""
        runs = f"{self.chosen} runs." if self.chosen else "it can't run this call."
        lines = [f"backend={self.asked!r}: {runs}{basis}"]
        for name, reasons in self.reasons.items():
            state = "chosen" if name == self.chosen else "can run" if not reasons else "can't run"
            details = " ".join(reasons) or BACKENDS[name].about
            if not reasons and name in (self.expected_us or {}):
                details += f"; about {self.expected_us[name]:.0f} µs"  # type: ignore[index]
            lines.append(f"  {name:<{width}}  {state:<9}  {details}")
        return "\n".join(lines)


def explain_call(call: Call, backend: str) -> Explanation:
    """``explain_spec``, with the call's size from its layouts."""
    return explain_spec(call.spec, CallSize.of(call), backend)


def explain_spec(spec: AttentionSpec, size: CallSize, backend: str = "auto") -> Explanation:
    """Which backend ``choose`` would return, and why."""
    name = _resolve(backend)
    reasons = {other: tuple(_reasons(candidate, spec)) for other, candidate in BACKENDS.items()}
    candidates = fastest_first(spec, size) if name == "auto" else (name,)
    chosen = next((other for other in candidates if not reasons[other]), None)
    expected = {other: us for other, us in cost_model.expected_us(spec, size).items() if not reasons[other]}
    return Explanation(chosen, reasons, name, support.basis(spec.device), expected)


def fastest_first(spec: AttentionSpec, size: CallSize) -> tuple[str, ...]:
    """The backends that ``"auto"`` tries, in this order. The first that can run is chosen.

    On a GPU they are ordered by expected time (``cost_model.py``). Those that were not measured for this kind of call
    follow. On a CPU see docs/design.md; Triton is not tried, since it only runs there in its interpreter, for tests.
    """
    if spec.device.type == "cpu":
        return ("cpu", "reference")
    expected = cost_model.expected_us(spec, size)
    others = [name for name in BACKENDS if name not in expected and name not in ("cpu", "reference")]
    return (*sorted(expected, key=expected.__getitem__), *others, "reference")


def choose_for(call: Call, backend: str) -> tuple[Backend, tuple[int, int] | None]:
    """The backend of ``choose``, and the head dims (D, Dv) that it is called with."""
    chosen = choose(call.spec, CallSize.of(call), backend)
    return chosen, support.head_dims(chosen, call.spec)


def choose(spec: AttentionSpec, size: CallSize, backend: str = "auto") -> Backend:
    """The backend that runs this call.

    For ``"auto"`` it is the one of ``use_backend``, else of the environment variable NT_ATTENTION_BACKEND, else the
    first of ``fastest_first`` that can run. A named backend never falls back to another one.

    Raises:
        ValueError: no backend of that name, or it can't run this call. The message has every backend's reasons.
    """
    name = _resolve(backend)
    for candidate in fastest_first(spec, size) if name == "auto" else (name,):
        if _can_run(BACKENDS[candidate], spec):
            return BACKENDS[candidate]
    raise ValueError(str(explain_spec(spec, size, name)))


def warn_if_slow(call: Call, backend: str, stacklevel: int) -> None:
    """Warn that the reference runs, unless it was requested by name."""
    if _resolve(backend) == "auto":
        order = fastest_first(call.spec, CallSize.of(call))
        installed = [BACKENDS[name] for name in order if BACKENDS[name].missing() is None]
        fast = installed[0] if not installed[0].is_reference else BACKENDS[order[0]]
        why = " ".join(_reasons(fast, call.spec))
        warnings.warn(
            f"attention runs on the reference backend, which is slow: {fast.name} {why} "
            "(nta.explain shows every backend; backend='reference' asks for this one and does not warn.)",
            SlowBackendWarning,
            stacklevel=stacklevel,
        )


def can_choose_later(spec: AttentionSpec, backend: str) -> bool:
    """Whether some custom operator can take this call, so that a graph can choose the backend when it runs."""
    check_backend_name(backend)
    candidates = BACKENDS.values() if backend == "auto" else (BACKENDS[backend],)
    return any(
        # cheap checks first, because a compiler traces them
        one.backward is not None and one.device_type in (None, spec.device.type) and not one.unsupported(spec)
        for one in candidates
    )


def _choose_in_graph(call: Call, backend: str) -> int:
    """The index of the chosen backend in ``BACKENDS``, by which the backward finds it."""
    chosen = choose(call.spec, CallSize.of(call), backend)
    if chosen.backward is None:
        raise ValueError(
            f"{chosen.name} is no operator, so a graph can't choose it when it runs: pass backend={chosen.name!r} to "
            f"this call, or make it outside of the graph.\n{explain_call(call, backend)}"
        )
    return list(BACKENDS.values()).index(chosen)


def _backend_at(index: int, call: Call) -> Backend:
    """The backend at that index of ``BACKENDS``.

    Raises:
        ValueError: it can't run this call, for example if a graph that was recorded without gradients chose a backend
            that only supports the forward.
    """
    backend = list(BACKENDS.values())[index]
    if not _can_run(backend, call.spec):
        raise ValueError(f"{backend.name} {' '.join(_reasons(backend, call.spec))} Record the graph with gradients.")
    return backend


def selection_key(backend: str) -> tuple[object, ...]:
    """What ``choose`` depends on besides the call, as a part of a cache key."""
    return _resolve(backend), support.uses_results(), current_flash_attention_impl()


def available_backends() -> dict[str, str | None]:
    """Every backend's name → None if it can run on this machine, else why it can't."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, run every call with ``backend="auto"`` on this backend, or raise if it can't.

    Applies to the current thread or asyncio task only. Blocks nest; ``"auto"`` restores the automatic choice.

    Raises:
        ValueError: no backend of that name.
    """
    check_backend_name(backend)
    token = _requested.set(backend)
    try:
        yield
    finally:
        _requested.reset(token)


def _resolve(backend: str) -> str:
    """A backend's name, or "auto" if neither the caller, ``use_backend`` nor the environment variable names one."""
    if backend == "auto":
        backend = _requested.get()
    if backend == "auto" and (name := os.environ.get(ENVIRONMENT_VARIABLE)):
        check_backend_name(name, f"{ENVIRONMENT_VARIABLE} asks for it, and ")
        return name
    check_backend_name(backend)
    return backend


def check_backend_name(backend: str, source: str = "") -> None:
    if backend != "auto" and backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"{source}there is no backend {backend!r}: pass 'auto' or one of {names}.")


_cached: dict[tuple[object, ...], tuple[Backend, bool]] = {}  # keeps the backend alive, so its id is not used again


def _can_run(backend: Backend, spec: AttentionSpec) -> bool:
    """Whether ``_reasons`` is empty. Cached by the spec, for all batches."""
    if spec.score_mod is not None or spec.mask_mod is not None:  # a cache would keep these functions alive
        return not _reasons(backend, spec)
    key = (id(backend), spec, support.uses_results(), current_flash_attention_impl())
    if key not in _cached:
        if len(_cached) > 4096:
            _cached.clear()
        _cached[key] = (backend, not _reasons(backend, spec))
    return _cached[key][1]


def _reasons(backend: Backend, spec: AttentionSpec) -> list[str]:
    missing = backend.missing()
    return [missing] if missing is not None else support.reasons(backend, spec)


for _backend in BACKENDS.values():
    if _backend.backward is not None:
        custom_ops.register(_backend)
custom_ops.register_auto(_choose_in_graph, _backend_at)
