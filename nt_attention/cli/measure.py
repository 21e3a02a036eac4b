"""One rival on one batch: does it run, is it right, and how long does it take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from . import timing
from .accuracy import TOLERANCE, Truth
from .inputs import Problem, Rival


@dataclass(frozen=True)
class Pass:
    """A forward, or a forward with its backward.

    Attributes:
        ms: its time, or None if it did not run.
        once: whether that is a single call's.
        errors: relative L2 errors of out, and dq, dk, dv; empty where they are not compared.
        wrong: those of them that are above the tolerance.
        reason: why it did not run.
        failed: whether it should have.
        chosen: the backend that "auto" took.
    """

    ms: float | None = None
    once: bool = False
    errors: dict[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    reason: str | None = None
    failed: bool = False
    chosen: str | None = None


@dataclass(frozen=True)
class Result:
    """What a rival does on a batch. ``both`` is None if only forwards were asked for."""

    forward: Pass
    both: Pass | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.forward,) if self.both is None else (self.forward, self.both)

    @property
    def is_bad(self) -> bool:
        """Whether it gave wrong results, or none where it should have."""
        return any(each.wrong or each.failed for each in self.passes)

    @property
    def max_error(self) -> float | None:
        return worst([error for each in self.passes for error in each.errors.values()])


def worst(errors: list[float]) -> float | None:
    """The largest, NaN if there is one, None of none."""
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=None)


def measure(rival: Rival, p: Problem, truth: Truth | None, forward_only: bool, patience: float) -> Result:
    """Compare and time a rival, forward and then with its backward.

    Args:
        truth: what its results are compared with, if they can be.
        patience: seconds; a call that takes more is timed once.
    """
    forward = _guarded(rival, p, truth, False, patience)
    return Result(forward, None if forward_only else _guarded(rival, p, truth, True, patience))


def _guarded(rival: Rival, p: Problem, truth: Truth | None, backward: bool, patience: float) -> Pass:
    reasons = rival.reasons(p, backward)
    if reasons:
        return Pass(reason=" ".join(reasons))
    try:
        run = rival.prepare(p)
        errors = truth.errors(run.results(backward)) if truth is not None and run.exact else {}
        ms, once = timing.call_ms(run.both if backward else run.forward, p.grad.device, patience)
    except torch.OutOfMemoryError:
        return Pass(reason="out of memory")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Pass(reason=first_line(error), failed=True)
    tolerance = TOLERANCE[p.grad.dtype]
    wrong = tuple(name for name, x in errors.items() if not x <= tolerance)  # NaN is wrong
    return Pass(ms, once, errors, wrong, chosen=rival.chosen(p, backward))


def host_us(rival: Rival, p: Problem) -> float | str:
    """The host's time in µs to call a rival's forward where gradients are wanted, or why there is none."""
    reasons = rival.reasons(p, True)
    if reasons:
        return " ".join(reasons)
    try:
        return timing.host_us(rival.prepare(p).attention)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return "failed: " + first_line(error)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
