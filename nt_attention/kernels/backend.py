"""`Backend`: the forward and backward of a kernel, and what they support.

Dimensions: T query tokens, S key tokens, H query heads, G key heads, D head dim of queries and keys, Dv head dim of
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
        d, v = (max(self.least, -(-dim // self.multiple) * self.multiple) for dim in (head_dim, value_dim))
        if self.equal:
            d = v = max(d, v)
        return (d, v) if max(d, v) <= self.most else None


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
            operators (`kernels/custom_ops.py`).
        prepare_forward, prepare_backward: Return a forward, or a backward, for other tensors of the same geometry
            (`geometry` in `kernels/call.py`). It runs in place of `forward` or `backward` if the call has no tensors
            but query, key and value, and needs no adapter. None if there is nothing to save by it.
        differentiable: Whether `forward` consists of differentiable operations. Outside of graphs, PyTorch then
            differentiates these, any number of times, and neither `backward` nor adapters are used, except that head
            dims are padded and made contiguous.
        inference_only: Whether the kernel has no gradients. One of `backward`, `differentiable` and `inference_only` is
            needed.
        paged_forward: `forward` for calls in which `call.key_layout` is a `PagedLayout`, and key and value are pools
            (pages, page size, G, D) or (rows, G, D) that are contiguous in the last dimension. Rows past the layout's
            total may be left unwritten. No adapter runs around it. If `features` has "paged", calls that need an
            adapter, and all calls if `paged_forward` is None, get keys that were copied into packed tensors.
        features: The features of `FEATURES` that the kernel supports, according to its documentation.
        device_type: The device type of its tensors; None for any.
        min_capability: The lowest supported compute capability of a CUDA device, (major, minor).
        dtypes: The supported dtypes; None for all.
        head_dims: The supported head dims.
        refuses: Returns further reasons why the backend cannot run a call, each a sentence that says what to change.
        lower_right_only: Whether the kernel supports only lower right alignment. Other calls are rewritten for it.
        takes_fully_masked_rows: Whether the kernel supports queries that see no key. If not, the kernel is called
            without these queries, and `features` must not have "window".
        reads_past_end: Whether the kernel reads rows past the last offset. If so, it is called without these rows.
        aligned_rows: Whether each row of a head must begin at a multiple of 16 bytes. If so, others are copied.
        takes_outputs: Whether `forward` takes `out=` (T, H, Dv) and `backward` takes `dq=` (T, H, D), and writes its
            result to this tensor, whatever the strides of rows and heads are.
        takes_parts: Whether `backward` computes the weights from `saved.lse`, and uses `saved.out` as
            `kernels/adapters.py` says. Then a softmax over several calls, each with a part of the keys, has the sum of
            their gradients, if each gets the output and the log-sum-exp of all keys (`kernels/tree.py`).
        takes_tree: Whether `tree_forward` and `tree_backward` can run a call with a `TreeLayout`, which is then
            `call.layout`. They return the rows of the tree. `tree_backward` gets no gradient of lse.
        lse_gradient: Whether `backward` supports the gradient of lse. If not, `kernels/adapters.py` adds it. This needs
            a backward that computes with `saved.out` and `saved.lse`.
        rng_on_host: Whether `forward` returns the random state on the CPU.
        is_reference: Whether it is the reference, which supports calls on every device.
        expected_us: Returns the expected device time in µs of a call that the backend can run: the forward, plus the
            backward if `spec.needs_grad`. None if it should not run this call under "auto". A registered backend
            without this function runs by name only. Our backends have a cost model instead (`kernels/cost_model.py`).

    Example:
        >>> import torch
        >>> from nt_attention.kernels.backend import COMMON, Backend
        >>> from nt_attention.kernels.backends import reference
        >>> from nt_attention.kernels.call import AttentionSpec
        >>> more = {"differentiable": True, "features": COMMON}
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
    prepare_forward: PrepareForward | None = None
    prepare_backward: PrepareBackward | None = None
    differentiable: bool = False
    inference_only: bool = False
    paged_forward: Forward | None = None
    features: frozenset[str] = frozenset()
    device_type: str | None = None
    min_capability: tuple[int, int] = (0, 0)
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: HeadDims = field(default_factory=HeadDims)
    refuses: Callable[[AttentionSpec], list[str]] = lambda spec: []
    lower_right_only: bool = False
    takes_fully_masked_rows: bool = True
    reads_past_end: bool = False
    aligned_rows: bool = False
    takes_outputs: bool = False
    takes_parts: bool = False
    takes_tree: Callable[[AttentionSpec], bool] | None = None
    tree_forward: Forward | None = None
    tree_backward: Backward | None = None
    lse_gradient: bool = False
    rng_on_host: bool = False
    is_reference: bool = False
    expected_us: Callable[[AttentionSpec, CallSize], float | None] | None = None

    def __post_init__(self) -> None:
        if self.backward is None and not (self.differentiable or self.inference_only):
            raise ValueError(
                f"{self.name}: pass backward, or differentiable=True if forward is, or inference_only=True."
            )
        # The rewrite that removes fully masked rows assumes that they are the first queries of a sequence.
        if not self.takes_fully_masked_rows and "window" in self.features:
            raise ValueError(f"{self.name}: takes_fully_masked_rows=False is not supported together with 'window'.")

    def reads_pools(self, spec: AttentionSpec) -> bool:
        """Whether `paged_forward` runs a call with keys in pools, and no adapter is needed. Else keys are copied."""
        if self.paged_forward is None or not self.takes_fully_masked_rows:
            return False
        dims = (spec.head_dim, spec.value_dim)
        return self.head_dims.padded(*dims) == dims and not (self.lower_right_only and spec.is_upper_left)

    @property
    def has_operators(self) -> bool:
        """Whether it runs as custom operators in graphs. Otherwise it runs outside of them."""
        return self.backward is not None or self.inference_only

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """Why the backend cannot run a call, according to its documentation; empty if it can."""
        reasons = []
        if self.device_type is not None and spec.device.type != self.device_type:
            wanted = "the CPU" if self.device_type == "cpu" else f"a {self.device_type.upper()} device"
            reasons.append(f"tensors must be on {wanted}, got {spec.device}: move them there.")
        elif spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < self.min_capability:
            needed = ".".join(map(str, self.min_capability))
            name = torch.cuda.get_device_name(spec.device)
            reasons.append(f"compute capability {needed} or higher is required, which {name} does not have.")
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
