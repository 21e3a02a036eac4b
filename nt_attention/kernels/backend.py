"""What a backend is: a kernel's forward and backward, and what they support.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D the head dim of queries and keys, Dv that of
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .call import FEATURES, AttentionSpec, Call

# Features that every backend supports, by itself or through ``kernels/adapters.py``.
COMMON = frozenset({"causal", "grouped heads", "cross", "upper_left", "no keys", "value dim"})

# (query (T, H, D), key (S, G, D), value (S, G, Dv), call) → out (T, H, Dv), lse (T, H) in at least float32 and, with
# dropout, the state of the random number generator (2,) int64
Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, ...]]


class BackwardInputs(NamedTuple):
    """What a backward takes besides the forward's inputs.

    ``grad`` (T, H, Dv) and ``grad_lse`` (T, H) or None are the gradients of ``out`` and ``lse``, and ``rng_state`` is
    the forward's third result, if it had one.
    """

    grad: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    rng_state: Tensor | None


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
Backward = Callable[[BackwardInputs, Tensor, Tensor, Tensor, Call], Gradients]


@dataclass(frozen=True)
class HeadDims:
    """The head dims (D, Dv) that a kernel takes. Other head dims are padded with zeros to these.

    Attributes:
        most: the largest head dim.
        multiple: both are multiples of it.
        equal: whether D and Dv have to be the same.
        only: all supported (D, Dv), if there are only a few.
        compiled: the head dims that the kernel is compiled for, if others run in the next larger one.
    """

    most: float = math.inf
    multiple: int = 1
    equal: bool = False
    only: tuple[tuple[int, int], ...] | None = None
    compiled: tuple[int, ...] | None = None

    def padded(self, head_dim: int, value_dim: int, *, ignore_only: bool = False) -> tuple[int, int] | None:
        """The head dims (D, Dv) that these are padded to; None if they are too large."""
        if self.only is not None and not ignore_only:
            enough = [(d, v) for d, v in self.only if d >= head_dim and v >= value_dim]
            return min(enough, key=sum, default=None)
        d, v = (-(-dim // self.multiple) * self.multiple for dim in (head_dim, value_dim))
        if self.equal:
            d = v = max(d, v)
        return (d, v) if max(d, v) <= self.most else None


@dataclass(frozen=True)
class Backend:
    """A kernel's name, what it supports, and how to run it. ``kernels/adapters.py`` adds support around it.

    Attributes:
        name: the value of ``backend=``.
        about: a description of one line.
        missing: gives the reason why it can't run on this machine at all, or None.
        forward: rows past the layout's total may be left unwritten. A fully masked row gives 0 and −inf.
        backward: the gradients; rows past the totals may be left unwritten. None if ``forward`` is made of
            differentiable operations; else both are registered as operators (``kernels/custom_ops.py``).
        features: the features of ``FEATURES`` that it supports, by its own documentation.
        device_type: the device of its tensors; None for any.
        min_capability: the lowest compute capability of a CUDA device, (major, minor).
        dtypes: the supported dtypes; None for all.
        head_dims: the supported head dims.
        refuses: gives further reasons why it can't run a call, each a sentence that says what to change.
        lower_right_only: whether it only has lower right alignment. Calls that need upper left are then rewritten.
        takes_fully_masked_rows: whether it takes queries that see no key. If not, they are left out of its call.
        reads_past_end: whether it multiplies rows past the last offset by 0. If so, they are left out of its call.
        lse_gradient: whether ``backward`` takes the gradient of lse. If not, ``kernels/adapters.py`` adds it.
        rng_on_host: whether ``forward`` returns the random state on the CPU.
        is_reference: whether it is the reference, which supports every call on every device.
    """

    name: str
    about: str
    missing: Callable[[], str | None]
    forward: Forward
    backward: Backward | None = None
    features: frozenset[str] = frozenset()
    device_type: str | None = None
    min_capability: tuple[int, int] = (0, 0)
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: HeadDims = field(default_factory=HeadDims)
    refuses: Callable[[AttentionSpec], list[str]] = lambda spec: []
    lower_right_only: bool = False
    takes_fully_masked_rows: bool = True
    reads_past_end: bool = False
    lse_gradient: bool = False
    rng_on_host: bool = False
    is_reference: bool = False

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """Why it can't run a call, by its own documentation; empty if it can."""
        reasons = []
        if self.device_type is not None and spec.device.type != self.device_type:
            wanted = "the CPU" if self.device_type == "cpu" else f"a {self.device_type.upper()} device"
            reasons.append(f"needs tensors on {wanted}, got {spec.device}: move them there.")
        elif spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < self.min_capability:
            needed = ".".join(map(str, self.min_capability))
            name = torch.cuda.get_device_name(spec.device)
            reasons.append(f"needs compute capability {needed} or more; {name} has less.")
        if self.dtypes is not None and spec.dtype not in self.dtypes:
            *most, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(
                f"needs {', '.join(most)} or {last}, got {spec.dtype}: cast the inputs or use torch.autocast."
            )
        wide = max(spec.head_dim, spec.value_dim)
        if wide > self.head_dims.most:
            reasons.append(f"head dims go up to {self.head_dims.most}, got {wide}.")
        lacking = spec.features - self.features
        reasons += [advice for feature, advice in FEATURES.items() if feature in lacking]
        return reasons + self.refuses(spec)
