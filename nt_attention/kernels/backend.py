"""`Backend`: the forward and backward of a kernel, and what they support.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D head dim of queries and keys, Dv head dim of
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .call import FEATURES, AttentionSpec, Call
from .call_size import CallSize

# Features that every backend supports, in its kernel or through `kernels/adapters.py`.
COMMON = frozenset({"causal", "grouped heads", "cross", "upper_left", "no keys", "value dim"})

# (query (T, H, D), key (S, G, D), value (S, G, Dv), call) → out (T, H, Dv) in the dtype of query, lse (T, H) in float32
# (in float64 for float64 inputs), and with dropout the state of the random number generator (2,) int64
Forward = Callable[..., tuple[Tensor, ...]]


class BackwardInputs(NamedTuple):
    """The arguments of a backward besides the inputs of the forward.

    Attributes:
        grad: (T, H, Dv) the gradient of `out`.
        grad_lse: (T, H) the gradient of `lse`, or None if there is none.
        out: (T, H, Dv) the output of the forward.
        lse: (T, H) the log-sum-exp of the forward.
        rng_state: (2,) the third result of the forward, or None if it had none.
    """

    grad: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    rng_state: Tensor | None


# Of query, key and value. If `call.spec.relative_grad`, then also of `call.relative.tensors`: in the dtype of the
# tensor or a more precise one, 0 in rows past the totals.
Gradients = tuple[Tensor, ...]
Backward = Callable[..., Gradients]
# They return a forward, or a backward, without the argument `call`.
PrepareForward = Callable[[Tensor, Tensor, Tensor, Call], Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]]
PrepareBackward = Callable[
    [BackwardInputs, Tensor, Tensor, Tensor, Call], Callable[[BackwardInputs, Tensor, Tensor, Tensor], Gradients]
]


@dataclass(frozen=True)
class HeadDims:
    """The head dims (D, Dv) that a kernel supports. Other head dims are padded with zeros to these.

    Attributes:
        most: The largest head dim.
        multiple: D and Dv must be multiples of it.
        least: The smallest head dim.
        equal: Whether D and Dv must be equal.
        only: All supported (D, Dv), if there are only a few.
        compiled: The head dims for which the kernel is compiled, if it runs others as the next larger one.

    Example:
        >>> from nt_attention.kernels.backend import HeadDims
        >>> HeadDims(256, multiple=8, equal=True).padded(60, 36)
        (64, 64)
        >>> HeadDims(256).padded(300, 64) is None
        True
    """

    most: float = math.inf
    multiple: int = 1
    least: int = 1
    equal: bool = False
    only: tuple[tuple[int, int], ...] | None = None
    compiled: tuple[int, ...] | None = None

    def padded(self, head_dim: int, value_dim: int, *, ignore_only: bool = False) -> tuple[int, int] | None:
        """The supported (D, Dv) to which these head dims are padded; None if they are too large."""
        if self.only is not None and not ignore_only:
            enough = [(d, v) for d, v in self.only if d >= head_dim and v >= value_dim]
            return min(enough, key=sum, default=None)
        d = max(self.least, -(-head_dim // self.multiple) * self.multiple)
        v = max(self.least, -(-value_dim // self.multiple) * self.multiple)
        if self.equal:
            d = v = max(d, v)
        return (d, v) if max(d, v) <= self.most else None


# What the adapters must know of a kernel.
TRAITS = {
    "differentiable": "`forward` consists of differentiable operations: outside of graphs, PyTorch differentiates "
    "them. Adapters only pad head dims and make them contiguous.",
    "lower_right_only": "It supports only lower right alignment. Other calls are rewritten.",
    "no_fully_masked_rows": "It is called without queries that see no key. `features` must not have 'window'.",
    "reads_past_end": "It reads rows past the last offset, so it is called without these rows.",
    "aligned_rows": "Each row of a head must begin at a multiple of 16 bytes. Others are copied.",
    "takes_outputs": "`forward` takes `out=` (T, H, Dv) and `backward` `dq=` (T, H, D), tensors of any strides of rows "
    "and heads, and writes its result there.",
    "takes_parts": "`backward` computes the weights from `saved.lse`, and uses `saved.out` as `adapters.py` says. So "
    "the gradients of calls with parts of the keys add up, if each gets `out` and `lse` of all keys (`tree.py`).",
    "lse_gradient": "`backward` supports the gradient of lse. Otherwise it is added, which needs a backward that "
    "computes with `saved.out` and `saved.lse`.",
}


@dataclass(frozen=True, eq=False)
class Hooks:
    """What few kernels have besides a forward and a backward. All are optional.

    Attributes:
        prepare_forward, prepare_backward: Return a forward, or a backward, for other tensors of the same geometry
            (`geometry` in `kernels/call.py`). It runs in place of `forward` or `backward` if the call has no tensors
            but query, key and value, and needs no adapter.
        paged_forward: `forward` for calls in which `call.key_layout` is a `PagedLayout`, and key and value are pools
            (pages, page size, G, D) or (rows, G, D) that are contiguous in the last dimension. Rows past the layout's
            total may be left unwritten. No adapter runs around it. If `features` has "paged", calls that need an
            adapter, and all calls without `paged_forward`, get keys that were copied into packed tensors.
        takes_tree: Whether `tree_forward` and `tree_backward` can run a call with a `TreeLayout`, which is then
            `call.layout`. They return the rows of the tree. `tree_backward` gets no gradient of lse.
    """

    prepare_forward: PrepareForward | None = None
    prepare_backward: PrepareBackward | None = None
    paged_forward: Forward | None = None
    takes_tree: Callable[[AttentionSpec], bool] = lambda spec: False
    tree_forward: Forward | None = None
    tree_backward: Backward | None = None


@dataclass(frozen=True, eq=False)  # two with the same fields are two; hashed in each call
class Backend:
    """A kernel: its name, what it supports, and the functions that run it.

    `kernels/adapters.py` runs around the kernel and adds what it does not support, such as other head dims. A new
    backend is added to `BACKENDS` in `kernels/registry.py`, or by another package with `nt_attention.register_backend`.

    Attributes:
        name: The value of `backend=`.
        about: A description of one line.
        missing: Returns why the backend cannot run on this machine, or None if it can.
        forward: `forward(query, key, value, call)` returns out (T, H, Dv), lse (T, H), and with dropout the random
            state (2,). A fully masked row gives 0 and −inf. Rows past the layout's total may be left unwritten.
        backward: `backward(saved, query, key, value, call)` returns `Gradients`. In those of query, key and value, rows
            past the totals may be left unwritten. If it is not None, forward and backward are registered as custom
            operators (`kernels/custom_ops.py`). A backend without it that is not "differentiable" is for inference.
        features: The features of `FEATURES` that the kernel supports, according to its documentation.
        traits: What the adapters must know of the kernel: names in `TRAITS`.
        device_type: The device type of its tensors; None for any.
        dtypes: The supported dtypes; None for all.
        head_dims: The supported head dims.
        refuses: Returns further reasons why the backend cannot run a call, each a sentence that says what to change.
        expected_us: Returns the expected device time in µs of a call that the backend can run: the forward, plus the
            backward if `spec.needs_grad`. None if it should not run this call under "auto". A registered backend
            without this function runs by name only. Our backends have a cost model instead (`kernels/cost_model.py`).
        hooks: Further functions, see `Hooks`.

    Example:
        >>> import torch
        >>> from nt_attention.kernels.backend import COMMON, Backend
        >>> from nt_attention.kernels.backends import reference
        >>> from nt_attention.kernels.call import AttentionSpec
        >>> more = {"traits": {"differentiable"}, "features": COMMON}
        >>> backend = Backend("mine", "an example", lambda: None, reference.forward, **more)
        >>> shapes, options = ((14, 8, 64),) * 3, {"scale": None, "dropout_p": 0.1}
        >>> spec = AttentionSpec.of(torch.device("cpu"), torch.float32, shapes, options)
        >>> backend.unsupported(spec)
        ['dropout is not supported: leave dropout_p at 0.']
    """

    name: str
    about: str
    missing: Callable[[], str | None]
    forward: Forward
    backward: Backward | None = None
    features: Set[str] = frozenset()
    traits: Set[str] = frozenset()
    device_type: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: HeadDims = field(default_factory=HeadDims)
    refuses: Callable[[AttentionSpec], list[str]] = lambda spec: []
    expected_us: Callable[[AttentionSpec, CallSize], float | None] | None = None
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", frozenset(self.traits))
        if unknown := sorted(self.traits - TRAITS.keys()):
            raise ValueError(f"{self.name}: there is no trait {unknown[0]!r}: pass some of {', '.join(TRAITS)}.")
        # The rewrite that removes fully masked rows assumes that they are the first queries of a sequence.
        if "no_fully_masked_rows" in self.traits and "window" in self.features:
            raise ValueError(f"{self.name}: 'no_fully_masked_rows' is not supported together with 'window'.")

    def reads_pools(self, spec: AttentionSpec) -> bool:
        """Whether `paged_forward` runs a call with keys in pools, and no adapter is needed. Else keys are copied."""
        if self.hooks.paged_forward is None or "no_fully_masked_rows" in self.traits:
            return False
        dims = (spec.head_dim, spec.value_dim)
        return self.head_dims.padded(*dims) == dims and not ("lower_right_only" in self.traits and spec.is_upper_left)

    @property
    def differentiable(self) -> bool:
        return "differentiable" in self.traits

    @property
    def inference_only(self) -> bool:
        """Whether it has no gradients."""
        return self.backward is None and not self.differentiable

    @property
    def has_operators(self) -> bool:
        """Whether it runs as custom operators in graphs. Otherwise it runs outside of them."""
        return self.backward is not None or not self.differentiable

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """Why the backend cannot run a call, according to its documentation; empty if it can."""
        reasons = []
        if self.device_type is not None and spec.device.type != self.device_type:
            wanted = "the CPU" if self.device_type == "cpu" else f"a {self.device_type.upper()} device"
            reasons.append(f"tensors must be on {wanted}, got {spec.device}: move them there.")
        if self.dtypes is not None and spec.dtype not in self.dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(f"dtype must be {names}, got {spec.dtype}: cast the inputs or use torch.autocast.")
        wide = max(spec.head_dim, spec.value_dim)
        if wide > self.head_dims.most:
            reasons.append(f"head dims above {self.head_dims.most} are not supported, got {wide}.")
        if self.inference_only and spec.needs_grad:
            reasons.append("gradients are not supported: call it in torch.no_grad(), or pass another backend.")
        not_supported = spec.features - self.features
        reasons += [advice for feature, advice in FEATURES.items() if feature in not_supported]
        return reasons + self.refuses(spec)
