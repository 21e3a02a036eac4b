"""Which backend runs: by name, by what is fastest, and why not the others.

The only file that knows the list. To add a backend, write its file and put it into ``BACKENDS``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from . import cpu, reference, token_tiled, torch_flash
from .spec import AttentionSpec, Backend

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (token_tiled.BACKEND, torch_flash.BACKEND, cpu.BACKEND, reference.BACKEND)
}


def fastest_first(spec: AttentionSpec) -> tuple[str, ...]:
    """What ``"auto"`` asks, in this order, and takes the first that can run.

    GPU: benchmarks/results/token_tiled_h200.md. token_tiled is ahead of torch_flash on every batch there, but for one
    kind: forward and backward at head dims 129 to 192, which token_tiled pads to 256 and torch_flash to 192.
    token_tiled has 0.86 to 0.95 of its speed there on lengths of 112 and 450 in the mean, and 1.5 times it on 28.
    CPU: docs/design.md; Triton runs there in its interpreter alone, for tests, and is not asked.
    """
    if spec.device.type == "cpu":
        return ("cpu", "reference")
    if 128 < max(spec.head_dim, spec.value_dim) <= 192 and spec.needs_grad and spec.mean_queries > 64:
        return ("torch_flash", "token_tiled", "reference")
    return ("token_tiled", "torch_flash", "reference")


_wanted: ContextVar[str] = ContextVar("nt_attention_backend", default="auto")


class SlowBackendWarning(UserWarning):
    """``"auto"`` found nothing but the reference that can run a call."""


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, and for each other one why not; printed as a table.

    Attributes:
        chosen: the backend's name, or None where the one asked for can't run.
        reasons: for every backend its reasons, empty where it can run.
        asked: "auto" or the name asked for.
    """

    chosen: str | None
    reasons: dict[str, tuple[str, ...]]
    asked: str

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [f"backend={self.asked!r}: " + (f"{self.chosen} runs." if self.chosen else "it can't run this call.")]
        for name, reasons in self.reasons.items():
            state = "chosen" if name == self.chosen else "can run" if not reasons else "can't run"
            lines.append(f"  {name:<{width}}  {state:<9}  {' '.join(reasons) or BACKENDS[name].about}")
        return "\n".join(lines)


def explain_spec(spec: AttentionSpec, backend: str = "auto") -> Explanation:
    """What ``choose`` does, told rather than done."""
    asked = _asked(backend)
    reasons = {name: tuple(_reasons(candidate, spec)) for name, candidate in BACKENDS.items()}
    if asked == "auto":
        able = [name for name in fastest_first(spec) if not reasons[name]]
    else:
        able = [asked] if not reasons[asked] else []
    return Explanation(able[0] if able else None, reasons, asked)


def choose(spec: AttentionSpec, backend: str = "auto") -> Backend:
    """The backend that runs this call.

    ``"auto"`` gives way to ``use_backend``, then takes the first of ``fastest_first`` that can run; where that is the
    reference, it says so in a SlowBackendWarning. A name is taken at its word.

    Raises:
        ValueError: no backend of that name, or it can't run this call; the message holds every backend's reasons.
    """
    asked = _asked(backend)
    if asked == "auto":
        for candidate in map(BACKENDS.__getitem__, fastest_first(spec)):
            if not _reasons(candidate, spec):
                if candidate is reference.BACKEND:
                    _warn_slow(spec)
                return candidate
    elif not _reasons(BACKENDS[asked], spec):
        return BACKENDS[asked]
    raise ValueError(str(explain_spec(spec, asked)))


def available_backends() -> dict[str, str | None]:
    """Every backend's name, with None if it can run on this machine, else the reason why it can't."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, run every call that asks for ``"auto"`` on this backend, or raise where it can't.

    Holds for this thread and asyncio task alone. Blocks nest; ``"auto"`` gives the choice back.

    Raises:
        ValueError: no backend of that name.
    """
    _check_name(backend)
    token = _wanted.set(backend)
    try:
        yield
    finally:
        _wanted.reset(token)


def _asked(backend: str) -> str:
    _check_name(backend)
    return _wanted.get() if backend == "auto" else backend


def _check_name(backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}: pass 'auto' or one of {', '.join(map(repr, BACKENDS))}.")


def _reasons(backend: Backend, spec: AttentionSpec) -> list[str]:
    missing = backend.missing()
    return [missing] if missing is not None else backend.unsupported(spec)


def _warn_slow(spec: AttentionSpec) -> None:
    fast = BACKENDS[fastest_first(spec)[0]]
    warnings.warn(
        f"attention runs on the reference backend, which is slow: {fast.name} {' '.join(_reasons(fast, spec))} "
        "(nta.explain shows every backend; backend='reference' asks for this one and does not warn.)",
        SlowBackendWarning,
        stacklevel=4,
    )
