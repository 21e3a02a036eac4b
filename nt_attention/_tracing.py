"""Compilers and tracers: whether one is recording, the layout in its graph, and where graphs break.

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

_F = TypeVar("_F", bound=Callable[..., Any])
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def outside_of_graphs(function: _F) -> _F:
    """``torch.compiler.disable`` without the import of the compiler: graphs break at ``function``."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _only_inlined(function: _F) -> _F:
    """Let torch.compile inline ``function`` into a graph, but never compile ``function`` on its own.

    If it were compiled on its own, it would always answer that a compiler is recording.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return function


@_only_inlined
def is_tracing() -> bool:
    """Whether torch.compile, torch.export or make_fx is recording operators."""
    return torch.compiler.is_compiling() or _is_in_make_fx()


@_only_inlined
def _is_in_make_fx() -> bool:
    """The same as ``get_proxy_mode() is not None``, in a third of the host time."""
    in_mode = torch._C._get_dispatch_mode(_PROXY_MODE) is not None
    return in_mode or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


@_only_inlined
def is_traced(tensor: object) -> bool:
    """Whether ``tensor`` is symbolic: its values are only known when a recorded program runs."""
    return is_tracing() or isinstance(tensor, (FakeTensor, Proxy))


@_only_inlined
def can_be_read(tensor: Tensor) -> bool:
    """Whether the host can read the values: not while tracing, on the meta device, or under function transforms."""
    return not (
        is_traced(tensor) or torch._C._is_tracing() or tensor.is_meta or torch._C._are_functorch_transforms_active()
    )


@_only_inlined
def is_observed(*tensors: Tensor) -> bool:
    """Whether a compiler, a dispatch mode, a function transform or a tensor subclass has to see custom operators."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any(type(x) not in _PLAIN_TENSORS or x.is_meta for x in tensors)
    )


@_only_inlined
def refuse_jit_trace() -> None:
    """Raise under torch.jit.trace, which would record the lengths of its example inputs as constants.

    Raises:
        RuntimeError: torch.jit.trace is recording.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise RuntimeError(
            "torch.jit.trace keeps the lengths of its example inputs as constants, and would give wrong values for "
            "others: use torch.export or torch.compile for ragged inputs."
        )


@_only_inlined
def check_readable(tensor: Tensor, name: str) -> None:
    """Raise if the host can't read a tensor's values, or if a recorded program would have them as constants.

    Raises:
        RuntimeError: torch.jit.trace is recording.
        ValueError: a tensor on the meta device, a FakeTensor, or one that make_fx is tracing.
    """
    refuse_jit_trace()
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        where = "a FakeTensor" if isinstance(tensor, FakeTensor) else "on the meta device"
        raise ValueError(f"{name} is {where} and has no values to read: pass a tensor on the CPU or a GPU.")
    if not torch.compiler.is_compiling() and _is_in_make_fx():
        raise ValueError(
            f"{name} would be read while make_fx is tracing, and become a constant: compute offsets from it outside of "
            "the traced function, and pass them to SequenceLayout.from_offsets."
        )


class TracedLayout:
    """A ``SequenceLayout`` in a graph of torch.compile, torch.export or make_fx. It has offsets, but no lengths.

    The operators in the graph read and check the lengths when it runs, once for each offsets tensor. After a graph
    break, eager code may receive a ``TracedLayout``. It then reads its offsets and has all attributes of a layout.
    """

    _read_offsets: ClassVar[Callable[[Tensor], Any]]  # SequenceLayout.from_offsets, outside of graphs; set by layout.py

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = self.cu_seqlens = offsets  # operators take int32 and int64
        self.batch_size, self.device = offsets.shape[0] - 1, offsets.device

    def __getattr__(self, name: str) -> Any:
        if not is_traced(self.offsets) and not name.startswith("__"):
            return getattr(TracedLayout._read_offsets(self.offsets), name)
        if name == "min_seqlen":
            return 0
        raise AttributeError(f"{name} wants lengths, which a graph does not know: ask for it outside of the graph.")

    def cached(self, key: object, build: Any, other: object = None) -> Any:
        return build()

    def same_lengths(self, other: object) -> bool:
        return self is other

    def check_rows(self, values: Tensor, name: str) -> None:
        if values.device != self.device:
            raise ValueError(f"{name} is on {values.device} and the layout on {self.device}.")

    def check_keys(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key", key), ("value", value)):
            self.check_rows(x, name)  # the operator checks the numbers of rows

    def check_saved(self) -> None:
        """Nothing: the operator of the backward checks whether the offsets were changed."""

    def extended(self, extra: int) -> TracedLayout:
        return TracedLayout(self.offsets + extra * torch.arange(self.offsets.shape[0], device=self.device))

    def locate_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(rows, device=self.device)
        found = torch.searchsorted(self.offsets, row, right=True) - 1
        sequence = found.clamp(max=self.offsets.shape[0] - 2)
        return sequence, row - self.offsets[sequence]

    def fill_past_end(self, values: Tensor, value: float) -> Tensor:
        past = torch.arange(values.shape[0], device=values.device) >= self.offsets[-1]
        return values.masked_fill(past.view(-1, *[1] * (values.dim() - 1)), value)
