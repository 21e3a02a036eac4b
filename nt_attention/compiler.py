"""Support for compilers and tracers: is one tracing, and functions that break graphs.

Dimensions: B sequences, N rows.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Proxy

from .torch_private import (
    PRE_DISPATCH,
    FakeTensor,
    constant_in_graphs,
    count_dispatch_modes,
    forward_ad_level,
    frame_callback,
    graph_tracer,
    is_dispatched,
    is_jit_tracing,
    is_legacy_mapped,
    is_output_of_cuda_graph,
    is_transformed,
    proxy_mode,
    set_frame_callback,
    skip_frames,
    transforms,
    unwrapped,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
TRACING = "tracing"  # see `active_compiler`


if TYPE_CHECKING:
    derived = functools.cached_property
else:

    class derived:
        """`functools.cached_property`, of which torch.compile traces the function alone: it has no lock."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function, self.__doc__ = function, function.__doc__

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                return self
            value = self.function(instance)
            if not torch.compiler.is_dynamo_compiling():
                instance.__dict__[self.function.__name__] = value
            return value


def outside_of_graphs(function: _F) -> _F:
    """Break graphs at `function`, as `torch.compiler.disable` does, but without importing the compiler."""
    return cast(_F, skip_frames(function, with_callees=True))


def inline_only(function: _F) -> _F:
    """Let torch.compile inline `function` into a graph, but never start a graph at it.

    If it runs outside of graphs, the functions that it calls are compiled on their own.
    """
    return cast(_F, skip_frames(function, with_callees=False))


@inline_only
def is_compiling() -> bool:
    """Whether torch.compile or torch.export is tracing, in this thread.

    `torch.compiler.is_compiling` and `is_exporting` are true in all threads, while one of them compiles or exports.
    """
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_exporting() and _is_in_make_fx())


# In a graph, `torch.compiler.is_exporting` of torch 2.11 is always true.
@constant_in_graphs
def is_exporting() -> bool:
    """Whether torch.export is tracing, in any thread."""
    return torch.compiler.is_exporting()


@inline_only
def needs_one_graph() -> bool:
    """Whether torch.compile is tracing and must not break the graph, because of `fullgraph=True`. True if unknown."""
    return torch.compiler.is_dynamo_compiling() and _traces_one_graph()


@constant_in_graphs
def _traces_one_graph() -> bool:
    tracer = graph_tracer()
    return any(getattr(tracer, name, True) for name in ("one_graph", "error_on_graph_break"))


@inline_only
def active_compiler() -> Any:
    """What torch.compile runs for each function that the caller calls, for `compiled_by`. It may differ in each call.

    None without torch.compile. `TRACING` if torch.compile is tracing the caller: then it can't be used.
    """
    return TRACING if torch.compiler.is_dynamo_compiling() else frame_callback()


@outside_of_graphs
def compiled_by(compiler: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, which `outside_of_graphs` would not compile. `compiler` is that of the code around it."""
    before = set_frame_callback(compiler)
    try:
        return function(*args)
    finally:
        set_frame_callback(before)


@inline_only  # in a graph that starts here, the answer would always be yes
def is_tracing() -> bool:
    """Whether torch.compile, torch.export or make_fx is tracing."""
    return torch.compiler.is_dynamo_compiling() or _is_in_make_fx()


@inline_only
def _is_in_make_fx() -> bool:
    return (count_dispatch_modes() > 0 and proxy_mode() is not None) or is_dispatched(PRE_DISPATCH)


@inline_only
def is_traced(tensor: object) -> bool:
    """Whether `tensor` is symbolic: its values are unknown until the graph runs."""
    return is_tracing() or isinstance(tensor, (FakeTensor, Proxy))


@inline_only
def can_be_read(*tensors: Tensor | None) -> bool:
    """Whether the host can read the values. It can't while tracing, on the meta device, or in function transforms."""
    if is_tracing() or is_jit_tracing() or is_transformed():
        return False
    return not any(x is not None and (isinstance(x, (FakeTensor, Proxy)) or x.is_meta) for x in tensors)


EAGER, OBSERVED, TRACED = "eager", "observed", "traced"  # see `call_mode`


@inline_only
def call_mode(*tensors: Tensor) -> str:
    """Who sees a call with these tensors. It is asked once in each call.

    Returns:
        TRACED: the call becomes a part of a graph, and values are not known. The first tensor decides that, outside of
            compilers and tracers. OBSERVED: a dispatch mode, function transform or tensor subclass must see an
            operator. EAGER: nobody; kernels can be called directly.
    """
    if (
        torch.compiler.is_dynamo_compiling()
        or (count_dispatch_modes() > 0 and proxy_mode() is not None)
        or is_dispatched(PRE_DISPATCH)
        or is_jit_tracing()
    ):
        return TRACED
    is_seen = count_dispatch_modes() > 0 or is_transformed() or forward_ad_level() >= 0
    for x in tensors:
        if type(x) not in _PLAIN_TENSORS or x.is_meta:
            is_seen = True
    if not is_seen:
        return EAGER
    return TRACED if isinstance(tensors[0], (FakeTensor, Proxy)) else OBSERVED


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which the host can't read the tensor."""
    if not tensor.is_cuda:
        return False
    if tensor.device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


class CapturedGraph(NamedTuple):
    """Identifies a CUDA graph while it is captured.

    Attributes:
        number: CUDA's number of the capture, which no other capture in this process has.
    """

    number: int


def captured_graph(tensor: Tensor) -> CapturedGraph | None:
    """The CUDA graph that is captured on the current stream of the tensor's device, or None."""
    if not is_captured(tensor):
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(tensor.device).cuda_stream)
    error = _driver().cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 failed with the CUDA error {error}.")
    return CapturedGraph(number.value)


@functools.cache
def _driver() -> ctypes.CDLL:
    """CUDA's driver: PyTorch has no function for the number of a capture."""
    if torch.version.hip:
        raise RuntimeError("on ROCm, graphs can't capture layouts that were made with max_tokens.")
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def is_replayed(tensor: Tensor) -> bool:
    """Whether it is an output of a CUDA graph of torch.compile. Replays write to it without changing its version."""
    return is_output_of_cuda_graph(tensor)


@inline_only
def is_in_jit_trace() -> bool:
    """Whether torch.jit.trace is tracing."""
    return not torch.compiler.is_dynamo_compiling() and is_jit_tracing()


@inline_only
def refuse_tracers() -> None:
    """Raise an error in torch.jit.trace and make_fx, which would store the lengths of example inputs as constants.

    Raises:
        RuntimeError: one of the two is tracing.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if is_jit_tracing() or (_is_in_make_fx() and not torch.compiler.is_exporting()):
        raise RuntimeError(
            f"{'torch.jit.trace' if is_jit_tracing() else 'make_fx'} keeps the lengths of its example inputs as "
            "constants, so other lengths would give wrong results: use torch.export or torch.compile."
        )


@inline_only
def enters_graph() -> bool:
    """`is_compiling`, after `refuse_tracers`: whether NestedTensors that are taken apart become a part of a graph."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if is_jit_tracing() or (count_dispatch_modes() > 0 and proxy_mode() is not None) or is_dispatched(PRE_DISPATCH):
        refuse_tracers()
        return torch.compiler.is_exporting()
    return False


@inline_only
def refuse_transforms(*grads: Tensor | None) -> None:
    """Raise an error in transforms for which kernels have no rule: all but torch.func.grad and vjp.

    Args:
        grads: the gradients that a backward gets.

    Raises:
        NotImplementedError: such a transform is active, or the gradients are a batch of gradients.
    """
    in_graph = torch.compiler.is_dynamo_compiling()
    if _is_in_unknown_transform() or (not in_graph and any(x is not None and is_legacy_mapped(x) for x in grads)):
        raise NotImplementedError(
            "kernels run eagerly, in torch.compile, torch.export and torch.func.grad. In other transforms (torch.vmap, "
            "jacrev, jvp), in forward-mode AD and with is_grads_batched=True, pass backend='reference', or use "
            "nta.use_backend('reference'): it consists of PyTorch's own operators."
        )


@constant_in_graphs  # torch.compile enters transforms while it traces them
def _is_in_unknown_transform() -> bool:
    return forward_ad_level() >= 0 or (is_transformed() and any(x.key().name != "Grad" for x in transforms() or ()))


@inline_only
def check_readable(tensor: Tensor, name: str) -> None:
    """Raise an error if the host can't read a tensor's values, or if a graph would store them as constants.

    Raises:
        RuntimeError: torch.jit.trace or make_fx is tracing.
        ValueError: the tensor is on the meta device or a FakeTensor, or torch.vmap maps over it, or torch.export is
            tracing.
    """
    refuse_tracers()
    if is_transformed() and is_in_vmap(tensor):
        raise ValueError(
            f"{name} has other values in each sample of torch.vmap, and a layout has the lengths of one batch: make "
            "the layout outside of vmap. A patched model runs outside of vmap, or after remove() of its handle."
        )
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        where = "a FakeTensor" if isinstance(tensor, FakeTensor) else "on the meta device"
        instead = "" if isinstance(tensor, FakeTensor) else ", or use SequenceLayout.from_lengths(list, device='meta')"
        raise ValueError(f"{name} is {where} and has no values to read: pass a tensor on the CPU or a GPU{instead}.")
    if not torch.compiler.is_dynamo_compiling() and _is_in_make_fx():
        raise ValueError(
            f"{name} would be read while torch.export is tracing, and become a constant: compute offsets from it "
            "outside of the exported function, and pass the offsets to SequenceLayout.from_offsets."
        )


def is_in_vmap(tensor: Tensor) -> bool:
    """Whether torch.vmap maps over a dimension of the tensor."""
    while (inner := unwrapped(tensor)) is not tensor:
        if inner.dim() != tensor.dim():  # other transforms keep the dimensions
            return True
        tensor = inner
    return False
