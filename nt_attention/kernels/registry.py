"""The list of backends: our own, `BACKENDS`, and those that `register_backend` adds.

Only this file lists the backends. To add one to the package, write its file and add it to `BACKENDS`.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch
from torch import Tensor

from . import split_kv, support, token_tiled
from .backend import Backend, BackwardInputs
from .backends import cpu, flash_attn_2, flash_attn_4, flex, reference, torch_efficient, torch_flash
from .call import Call

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND
    for module in (
        *(token_tiled, flash_attn_4, torch_flash, flash_attn_2, torch_efficient, flex, split_kv),
        *(cpu, reference),
    )
}
registered: tuple[Backend, ...] = ()  # replaced and never changed, so that threads can read it; a part of cache keys
# The forward of a graph returns the index of its backend in this list, from which none is removed.
_numbered: list[Backend] = []
_lock = threading.Lock()


class BackendHandle:
    """What `register_backend` returns: `remove()` takes the backend back. At the end of a `with` block it is removed.

    Attributes:
        backend: The backend that was registered.
    """

    __module__ = "nt_attention"

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def remove(self) -> None:
        """Take the backend back. Later calls of `remove` do nothing. Calls that are running are not interrupted."""
        global registered
        with _lock:
            registered = tuple([x for x in registered if x is not self.backend])

    def __enter__(self) -> BackendHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend.name!r})"


def register_backend(backend: Backend) -> BackendHandle:
    """Add a backend of your own. `varlen_attention`, `use_backend`, `explain` and the others then know its name.

    It runs calls that name it. It runs calls with `backend="auto"` only if it has `expected_us`: on a GPU if no other
    backend has a shorter expected time, on a CPU before the backend `cpu`. It supports what its fields say, also on a
    GPU for which the support of our backends was verified. The registration holds for the process, in all threads.

    A compiled graph refers to a backend by its name. It raises an error if the backend was removed. A call raises a
    ValueError if `forward` or `backward` returns a tensor of another shape or dtype than `Backend` says.

    Args:
        backend: The description of the backend. `name` must be an ASCII identifier that no other backend has.

    Returns:
        A handle. `handle.remove()` takes the backend back, and so does the end of `with nta.register_backend(...):`.

    Raises:
        TypeError: `backend` is not a `Backend`.
        ValueError: the name is not valid or already used.

    Example:
        >>> import torch, nt_attention as nta
        >>> from nt_attention.kernels.backend import COMMON
        >>> from nt_attention.kernels.backends import reference
        >>> mine = nta.Backend(
        ...     "mine", "an example", lambda: None, reference.forward, features=COMMON, traits={"differentiable"}
        ... )
        >>> layout = nta.SequenceLayout.from_lengths([2, 3])
        >>> x = torch.randn(layout.total, 4, 16)
        >>> with nta.register_backend(mine):
        ...     out = nta.varlen_attention(x, x, x, layout, backend="mine")
        >>> "mine" in nta.available_backends()
        False
    """
    global registered
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a nt_attention.Backend, got {type(backend).__name__}: {backend!r}.")
    name = backend.name
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()) or name in ("auto", *backends()):
        raise ValueError(
            f"the name of a backend must be an identifier of ASCII letters, digits and underscores that is not used "
            f"yet, such as 'my_kernel', got {name!r}: pass another name, or first remove the backend that has it."
        )
    support.as_documented.add(name)
    added = _checked(backend)
    with _lock:
        registered = (*registered, added)
    return BackendHandle(added)


def _checked(backend: Backend) -> Backend:
    """The backend, whose forward and backward raise a ValueError if they return other shapes or dtypes."""

    def check(results: Any, *wanted: tuple[Any, torch.dtype]) -> Any:
        found = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in results]
        if found[: len(wanted)] != list(wanted):
            raise ValueError(f"the backend {backend.name!r} must return tensors of {list(wanted)}, got {found}.")
        return results

    def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, **more: Any) -> Any:
        out, lse = (*q.shape[:2], v.shape[2]), q.shape[:2]
        results = backend.forward(q, k, v, call, **more)
        return check(results, (out, q.dtype), (lse, torch.promote_types(q.dtype, torch.float32)))

    def backward(saved: BackwardInputs, *inputs: Any, **more: Any) -> Any:
        assert backend.backward is not None
        return check(backend.backward(saved, *inputs, **more), *[(x.shape, x.dtype) for x in inputs[:3]])

    return dataclasses.replace(backend, forward=forward, backward=backend.backward and backward)


def backends() -> dict[str, Backend]:
    """All backends by name: our own, then those that are registered."""
    return {**BACKENDS, **{backend.name: backend for backend in registered}} if registered else BACKENDS


def number_of(backend: Backend) -> int:
    """The number of a backend for `find_by_number`."""
    with _lock:
        if backend not in _numbered:
            _numbered.append(backend)
        return _numbered.index(backend)


def find_by_number(number: int) -> Backend:
    """The backend to which `number_of` gave this number, also if it was removed."""
    return _numbered[number]
