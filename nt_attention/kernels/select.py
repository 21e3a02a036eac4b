"""Which backend runs: by name, by what is fastest, and why not the others.

The only file that knows the list. To add a backend, write its file and put it into ``BACKENDS``.
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
from .backends import cpu, flash_attn_2, flash_attn_4, flex, reference, torch_efficient, torch_flash
from .call import AttentionSpec, Backend, Problem
from .work import Work, work

ENVIRONMENT_VARIABLE = "NT_ATTENTION_BACKEND"

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        *(token_tiled.BACKEND, flash_attn_4.BACKEND, torch_flash.BACKEND, flash_attn_2.BACKEND),
        *(torch_efficient.BACKEND, flex.BACKEND, cpu.BACKEND, reference.BACKEND),
    )
}
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
        basis: on what the claims rest, in words; empty on a CPU.
        expected_us: what each backend that can run is expected to take, in µs on the device, where that was measured.
    """

    chosen: str | None
    reasons: dict[str, tuple[str, ...]]
    asked: str
    basis: str = ""
    expected_us: dict[str, float] | None = None

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        basis = f" Claims: {self.basis}." if self.basis else ""
        runs = f"{self.chosen} runs." if self.chosen else "it can't run this call."
        lines = [f"backend={self.asked!r}: {runs}{basis}"]
        for name, reasons in self.reasons.items():
            state = "chosen" if name == self.chosen else "can run" if not reasons else "can't run"
            told = " ".join(reasons) or BACKENDS[name].about
            if not reasons and name in (self.expected_us or {}):
                told += f"; about {self.expected_us[name]:.0f} µs"  # type: ignore[index]
            lines.append(f"  {name:<{width}}  {state:<9}  {told}")
        return "\n".join(lines)


def explain_spec(spec: AttentionSpec, size: Work, backend: str = "auto") -> Explanation:
    """What ``choose`` does, told rather than done."""
    asked = _asked(backend)
    reasons = {name: tuple(_reasons(candidate, spec)) for name, candidate in BACKENDS.items()}
    if asked == "auto":
        able = [name for name in fastest_first(spec, size) if not reasons[name]]
    else:
        able = [asked] if not reasons[asked] else []
    expected = {name: us for name, us in cost_model.expected_us(spec, size).items() if not reasons[name]}
    return Explanation(able[0] if able else None, reasons, asked, support.basis(spec.device), expected)


def fastest_first(spec: AttentionSpec, size: Work) -> tuple[str, ...]:
    """What ``"auto"`` asks, in this order, and takes the first that can run.

    On a GPU by the time that each is expected to take (``cost_model.py``), then those whose times
    were not measured for this kind of call. On a CPU, docs/design.md; Triton runs there in its interpreter alone, for
    tests, and is not asked.
    """
    if spec.device.type == "cpu":
        return ("cpu", "reference")
    expected = cost_model.expected_us(spec, size)
    others = [name for name in BACKENDS if name not in expected and name not in ("cpu", "reference")]
    return (*sorted(expected, key=expected.__getitem__), *others, "reference")


def choose(spec: AttentionSpec, size: Work, backend: str = "auto") -> Backend:
    """The backend that runs this call.

    ``"auto"`` gives way to ``use_backend``, then to the environment variable NT_ATTENTION_BACKEND, then takes the first
    of ``fastest_first`` that can run; where that is the reference, it says so in a SlowBackendWarning. A name is taken
    at its word.

    Raises:
        ValueError: no backend of that name, or it can't run this call; the message holds every backend's reasons.
    """
    asked = _asked(backend)
    if asked == "auto":
        for candidate in map(BACKENDS.__getitem__, fastest_first(spec, size)):
            if _is_able(candidate, spec):
                return candidate
    elif _is_able(BACKENDS[asked], spec):
        return BACKENDS[asked]
    raise ValueError(str(explain_spec(spec, size, asked)))


def warn_if_slow(problem: Problem, backend: str, stacklevel: int) -> None:
    """Say so where ``"auto"`` found nothing but the reference."""
    if _asked(backend) == "auto":
        order = fastest_first(problem.spec, work(problem.layout, problem.key_layout, problem.spec))
        here = [BACKENDS[name] for name in order if BACKENDS[name].missing() is None]
        fast = here[0] if not here[0].is_reference else BACKENDS[order[0]]
        why = " ".join(_reasons(fast, problem.spec))
        warnings.warn(
            f"attention runs on the reference backend, which is slow: {fast.name} {why} "
            "(nta.explain shows every backend; backend='reference' asks for this one and does not warn.)",
            SlowBackendWarning,
            stacklevel=stacklevel,
        )


def chosen_later(spec: AttentionSpec, backend: str) -> bool:
    """Whether some operator takes this call, so that in a graph the choice can wait until it runs."""
    check_backend_name(backend)
    able = BACKENDS.values() if backend == "auto" else (BACKENDS[backend],)
    return any(
        # a compiler traces this: the quick questions first
        one.backward is not None and one.device_type in (None, spec.device.type) and not one.unsupported(spec)
        for one in able
    )


def _choose_in_graph(problem: Problem, asked: str) -> int:
    """The place of the chosen backend on the list, for its backward to find it again."""
    size = work(problem.layout, problem.key_layout, problem.spec)
    chosen = choose(problem.spec, size, asked)
    if chosen.backward is None:
        raise ValueError(
            f"{chosen.name} is no operator, so a graph can't choose it when it runs: pass backend={chosen.name!r} to "
            f"this call, or make it outside of the graph.\n{explain_spec(problem.spec, size, asked)}"
        )
    return list(BACKENDS.values()).index(chosen)


def _on_the_list(place: int, problem: Problem) -> Backend:
    """The backend in that place.

    Raises:
        ValueError: it can't run this call. A graph that was recorded without gradients may have chosen it for its
            forward alone.
    """
    backend = list(BACKENDS.values())[place]
    if not _is_able(backend, problem.spec):
        raise ValueError(f"{backend.name} {' '.join(_reasons(backend, problem.spec))} Record the graph with gradients.")
    return backend


def circumstances(backend: str) -> tuple[object, ...]:
    """All that ``choose`` goes by beside the call itself."""
    return _asked(backend), support.in_force(), current_flash_attention_impl()


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
    check_backend_name(backend)
    token = _wanted.set(backend)
    try:
        yield
    finally:
        _wanted.reset(token)


def _asked(backend: str) -> str:
    if backend == "auto":
        backend = _wanted.get()
    if backend == "auto" and (named := os.environ.get(ENVIRONMENT_VARIABLE)):
        check_backend_name(named, f"{ENVIRONMENT_VARIABLE} asks for it, and ")
        return named
    check_backend_name(backend)
    return backend


def check_backend_name(backend: str, source: str = "") -> None:
    if backend != "auto" and backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"{source}there is no backend {backend!r}: pass 'auto' or one of {names}.")


def _is_able(backend: Backend, spec: AttentionSpec) -> bool:
    """Whether there are no reasons; kept by the kind of call, for all batches."""
    if spec.score_mod is not None or spec.mask_mod is not None:  # what is kept would keep these functions
        return not _reasons(backend, spec)
    kind = (id(backend), spec, support.in_force(), current_flash_attention_impl())
    if kind not in _able:
        if len(_able) > 4096:
            _able.clear()
        _able[kind] = (backend, not _reasons(backend, spec))
    return _able[kind][1]


_able: dict[tuple[object, ...], tuple[Backend, bool]] = {}  # holds the backend as well, or its id could be another's


def _reasons(backend: Backend, spec: AttentionSpec) -> list[str]:
    missing = backend.missing()
    return [missing] if missing is not None else support.reasons(backend, spec)


for _backend in BACKENDS.values():
    if _backend.backward is not None:
        custom_ops.register(_backend)
custom_ops.register_auto(_choose_in_graph, _on_the_list)
