"""Whether tensors have values that the host can read, or a tracer is recording what is done with them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses.fake_tensor import FakeTensor

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_tracing() -> bool:
    """Whether torch.compile, torch.export or make_fx is recording operators."""
    return torch.compiler.is_compiling() or _is_in_make_fx()


def _is_in_make_fx() -> bool:
    """As ``get_proxy_mode() is not None``, in a third of its host time."""
    in_mode = torch._C._get_dispatch_mode(_PROXY) is not None
    return in_mode or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


def is_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for values that a recorded program will have later."""
    return is_tracing() or isinstance(tensor, FakeTensor)


def refuse_jit_trace() -> None:
    """Refuse to be recorded by torch.jit.trace, which would keep the lengths of its example as constants.

    Raises:
        RuntimeError: torch.jit.trace is recording.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise RuntimeError(
            "torch.jit.trace keeps the lengths of its example inputs as constants, and would give wrong values for "
            "others: use torch.export or torch.compile for ragged inputs."
        )


def check_readable(tensor: Tensor, name: str) -> None:
    """Refuse a tensor whose values the host can't read.

    Raises:
        ValueError: a tensor on the meta device, a FakeTensor, or one that make_fx is tracing.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        where = "a FakeTensor" if isinstance(tensor, FakeTensor) else "on the meta device"
        raise ValueError(f"{name} is {where} and has no values to read: pass a tensor on the CPU or a GPU.")
    if not torch.compiler.is_compiling() and _is_in_make_fx():
        raise ValueError(
            f"{name} would be read while make_fx is tracing, and become a constant: compute offsets from it outside of "
            "the traced function, and pass them to SequenceLayout.from_offsets."
        )


# torch.compile may inline these functions into a graph, but must not compile a call that comes from outside of a graph:
# in the compiled function the answer would always be True.
_NOT_BY_ITSELF = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
for _function in (is_tracing, _is_in_make_fx, is_traced, refuse_jit_trace, check_readable):
    set_code_exec_strategy(_function.__code__, _NOT_BY_ITSELF)
