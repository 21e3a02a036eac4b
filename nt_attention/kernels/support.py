"""Verified support: what each backend computes correctly on a GPU.

`tools/verify_backends.py --save` verifies the backends and writes one file for each compute capability, such as
`verified/sm90.json`. On these GPUs only verified calls are supported. On other devices a backend supports what its own
file declares. `explain` prints which of the two applies.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch

from .backend import Backend
from .call import AttentionSpec
from .measurements import dims_of

uses_results: ContextVar[bool] = ContextVar("nt_attention_verified_support", default=True)
as_documented: set[str] = set()  # registered backends, which support what they document, also on verified GPUs
BY_HEAD_DIMS = frozenset({"value dim"})  # features that are verified as pairs of head dims, such as "192/128"


@dataclass(frozen=True)
class VerifiedSupport:
    """What was verified on a GPU.

    Attributes:
        gpu: The name of the GPU.
        versions: Package → the version that was verified.
        results: Backend → dtype → "head dims" or "features" → which one ("64", "192/128"; "causal") → "both",
            "forward" (gradients are wrong or raise an error), or "no".
    """

    gpu: str
    versions: dict[str, str]
    results: dict[str, dict[str, dict[str, dict[str, str]]]]
    _found: dict[Any, tuple[int, int] | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def has(self, backend: Backend, spec: AttentionSpec, kind: str, which: str) -> bool:
        """Whether a head dim or feature is verified, with gradients if the call needs them."""
        found = self._of(backend, spec).get(kind, {}).get(which)
        return found in (("both",) if spec.needs_grad else ("both", "forward"))

    def _of(self, backend: Backend, spec: AttentionSpec) -> dict[str, dict[str, str]]:
        return self.results.get(backend.name, {}).get(_name(spec.dtype), {})

    def head_dims(self, backend: Backend, spec: AttentionSpec) -> tuple[int, int] | None:
        """The verified head dims (D, Dv) to which a call is padded; None if there are none."""
        key = (backend, spec.dtype, spec.head_dim, spec.value_dim, spec.needs_grad)
        if key not in self._found:  # asked for each batch, and it takes 40 µs
            self._found[key] = self._find_head_dims(backend, spec)
        return self._found[key]

    def _find_head_dims(self, backend: Backend, spec: AttentionSpec) -> tuple[int, int] | None:
        listed = self._of(backend, spec).get("head dims", {})
        verified = [dims_of(which) for which in listed if self.has(backend, spec, "head dims", which)]
        padded = backend.head_dims.padded(spec.head_dim, spec.value_dim)
        any_dims = backend.head_dims.only is None
        if any_dims and padded is not None and self._is_verified(backend, padded, listed, verified):
            return padded
        enough = [(d, v) for d, v in verified if d >= spec.head_dim and v >= spec.value_dim]
        return min(enough, key=sum, default=None)

    @staticmethod
    def _is_verified(
        backend: Backend, dims: tuple[int, int], listed: Iterable[str], verified: list[tuple[int, int]]
    ) -> bool:
        """Whether `dims` are verified, or if they were not run, the next larger ones, which run in that kernel.

        If D and Dv differ, another pair whose values are narrower, or wider, must be verified too.
        """
        run = [dims_of(which) for which in listed]
        if dims in run:
            return dims in verified
        kernels = backend.head_dims.compiled or [d for d, v in run if d == v]
        wider = min((d for d in kernels if d >= max(dims)), default=0)
        alike = dims[0] == dims[1] or any(d != v and (d > v) == (dims[0] > dims[1]) for d, v in verified)
        return alike and (wider, wider) in verified

    def reasons(self, backend: Backend, spec: AttentionSpec) -> list[str]:
        """Why a call is not verified, if the documentation supports it; empty if it is verified."""
        source = f"on {self.gpu} by `tools/verify_backends.py`"
        if backend.name not in self.results:
            advice = "pass another backend, or run that program with --save where this one is installed."
            return [f"this backend was not run {source}: {advice}"]
        if not self._of(backend, spec):
            return [f"{spec.dtype} is not verified {source}: cast the inputs, or pass another backend."]
        gradients = " with gradients" if spec.needs_grad else ""
        reasons = []
        if self.head_dims(backend, spec) is None:
            dims = str(spec.head_dim)
            if spec.head_dim != spec.value_dim:
                dims += f" with values of {spec.value_dim}"
            reasons.append(f"no head dim for {dims} is verified{gradients} {source}: pass another backend.")
        for feature in sorted((spec.features & backend.features) - BY_HEAD_DIMS):
            if not self.has(backend, spec, "features", feature):
                reasons.append(f"{feature!r} is not verified{gradients} {source}: omit it, or pass another backend.")
        return reasons


@functools.cache
def verified_on(capability: tuple[int, int]) -> VerifiedSupport | None:
    """What was verified on GPUs of this compute capability; None if nothing."""
    file = resources.files(__package__) / "verified" / f"sm{capability[0]}{capability[1]}.json"
    if not file.is_file():
        return None
    table: dict[str, Any] = json.loads(file.read_text())
    return VerifiedSupport(table["gpu"], table["versions"], table["results"])


def _verified(backend: Backend, device: torch.device) -> VerifiedSupport | None:
    """`verified_for` this backend."""
    return None if backend.name == "reference" or backend.name in as_documented else verified_for(device)


def verified_for(device: torch.device) -> VerifiedSupport | None:
    """What was verified on this device; None if nothing was, or on a CPU, on ROCm or in `by_documentation`."""
    if device.type != "cuda" or not uses_results.get() or torch.version.hip:
        return None
    return verified_on(torch.cuda.get_device_capability(device))


def reasons(backend: Backend, spec: AttentionSpec) -> list[str]:
    """Why a backend cannot run a call, each a sentence that says what to change; empty if it can."""
    documented = backend.unsupported(spec)
    verified = _verified(backend, spec.device)
    if documented or verified is None:
        return documented
    return verified.reasons(backend, spec)


def head_dims(backend: Backend, spec: AttentionSpec) -> tuple[int, int] | None:
    """The head dims (D, Dv) after padding with which a backend is called; None if the call's are too large."""
    verified = _verified(backend, spec.device)
    if verified is not None:
        return verified.head_dims(backend, spec)
    return backend.head_dims.padded(spec.head_dim, spec.value_dim, ignore_only=not uses_results.get())


def basis(device: torch.device) -> str:
    """A text that says whether support was verified on this GPU or is only documented; empty on a CPU."""
    if device.type != "cuda":
        return ""
    verified = verified_for(device)
    return "as documented; not verified on this GPU yet" if verified is None else f"verified on {verified.gpu}"


@contextmanager
def by_documentation() -> Iterator[None]:
    """Within the block, backends support what is documented, verified or not. `check` uses this."""
    token = uses_results.set(False)
    try:
        yield
    finally:
        uses_results.reset(token)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
