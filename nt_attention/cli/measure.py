"""One implementation on one workload: whether it runs, its accuracy and its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from . import timing
from .accuracy import TOLERANCE, ExpectedResults
from .inputs import Implementation, WorkloadTensors


@dataclass(frozen=True)
class Measurement:
    """A forward, or a forward with its backward.

    Attributes:
        ms: its time, or None if it did not run.
        once: whether that is a single call's.
        errors: relative L2 errors of out, and dq, dk, dv; empty where they are not compared.
        wrong: those of them that are above the tolerance.
        reason: why it did not run.
        failed: whether it should have.
        chosen: the backend that "auto" selected.
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
    """The measurements of an implementation on a workload. ``both`` is None if only forwards were asked for."""

    forward: Measurement
    both: Measurement | None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return (self.forward,) if self.both is None else (self.forward, self.both)

    @property
    def has_run(self) -> bool:
        return any(each.ms is not None for each in self.measurements)

    @property
    def is_bad(self) -> bool:
        """Whether it gave wrong results, or none where it should have."""
        return any(each.wrong or each.failed for each in self.measurements)

    @property
    def max_error(self) -> float | None:
        return worst([error for each in self.measurements for error in each.errors.values()])


def worst(errors: list[float]) -> float | None:
    """The largest, NaN if there is one, None of none."""
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=None)


def measure(
    implementation: Implementation,
    tensors: WorkloadTensors,
    expected: ExpectedResults | None,
    *,
    forward_only: bool,
    patience: float,
) -> Result:
    """Compare and time an implementation, forward and then with its backward.

    Args:
        expected: what its results are compared with; None if no sequence is short enough.
        patience: seconds; a call that takes more is timed once.
    """

    def measured(backward: bool) -> Measurement:
        reasons = implementation.reasons(tensors, backward)
        if reasons:
            return Measurement(reason=" ".join(reasons))
        try:
            call = implementation.prepare(tensors)
            errors = expected.errors(call.results(backward)) if expected is not None and call.exact else {}
            ms, once = timing.call_ms(call.both if backward else call.forward, tensors.device, patience)
        except torch.OutOfMemoryError:
            return Measurement(reason="out of memory")
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return Measurement(reason=first_line(error), failed=True)
        tolerance = TOLERANCE[tensors.grad.dtype]
        wrong = tuple(name for name, x in errors.items() if not x <= tolerance)  # NaN is wrong
        return Measurement(ms, once, errors, wrong, chosen=implementation.chosen(tensors, backward))

    return Result(measured(backward=False), None if forward_only else measured(backward=True))


def host_us(implementation: Implementation, tensors: WorkloadTensors) -> float | str:
    """The host's time in µs to call an implementation's forward where gradients are wanted, or why there is none."""
    reasons = implementation.reasons(tensors, True)
    if reasons:
        return " ".join(reasons)
    try:
        return timing.host_us(implementation.prepare(tensors).attention)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return "failed: " + first_line(error)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
