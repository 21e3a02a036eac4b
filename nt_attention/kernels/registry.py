"""The list of backends: our own, `BACKENDS`, and those that `register_backend` adds.

Only this file lists the backends. To add one to the package, write its file and add it to `BACKENDS`.
"""

from __future__ import annotations

import itertools
import threading
from types import TracebackType
from typing import NamedTuple

from . import split_kv, support, token_tiled
from .backend import Backend, HeadDims
from .backends import cpu, flash_attn_2, flash_attn_4, flex, reference, torch_efficient, torch_flash
from .checked import checked

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND
    for module in (
        *(token_tiled, flash_attn_4, torch_flash, flash_attn_2, torch_efficient, flex, split_kv),
        *(cpu, reference),
    )
}
_RESERVED = ("auto", *BACKENDS)


class Registered(NamedTuple):
    """A backend that was registered, and the number of its registration, which is never used again."""

    number: int
    backend: Backend


class _Registrations(NamedTuple):
    """What is registered. It is replaced and never changed, so that threads can read it without a lock.

    Attributes:
        version: The number of registrations and removals until now.
        registered: By name.
    """

    version: int
    registered: dict[str, Registered]


state = _Registrations(0, {})  # its version is a part of cache keys
_lock = threading.Lock()
_numbers = itertools.count(1)


class BackendHandle:
    """What `register_backend` returns: `remove()` takes the backend back. At the end of a `with` block it is removed.

    Attributes:
        backend: The backend that was registered.
    """

    __module__ = "nt_attention"

    def __init__(self, backend: Backend, number: int) -> None:
        self.backend = backend
        self._number = number

    def remove(self) -> None:
        """Take the backend back. Later calls of `remove` do nothing. Calls that are running are not interrupted."""
        global state
        name = self.backend.name
        with _lock:
            registered = dict(state.registered)
            if name in registered and registered[name].number == self._number:
                del registered[name]
                state = _Registrations(state.version + 1, registered)

    def __enter__(self) -> BackendHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend.name!r})"


def register_backend(backend: Backend) -> BackendHandle:
    """Add a backend of your own. `varlen_attention`, `use_backend`, `explain` and the others then know its name.

    It runs calls that name it. It runs calls with `backend="auto"` only if it has `expected_us`: on a GPU if no other
    backend has a shorter expected time, on a CPU before the backend `cpu`. It supports what its fields say, also on a
    GPU for which the support of our backends was verified. The registration holds for the process, in all threads.

    A compiled graph refers to a backend by its name. It raises an error if the backend was removed. A call raises a
    ValueError if the backend returns a tensor of another shape, dtype or device than `Backend` says.

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
        ...     "mine", "an example", lambda: None, reference.forward, differentiable=True, features=COMMON
        ... )
        >>> layout = nta.SequenceLayout.from_lengths([2, 3])
        >>> x = torch.randn(layout.total, 4, 16)
        >>> with nta.register_backend(mine):
        ...     out = nta.varlen_attention(x, x, x, layout, backend="mine")
        >>> "mine" in nta.available_backends()
        False
    """
    global state
    _check(backend)
    name = backend.name
    with _lock:
        if name in state.registered:
            raise ValueError(
                f"a backend {name!r} is already registered: pass a backend with another name, or remove that one "
                "first, with remove() of its handle."
            )
        support.support_as_documented(name)
        added = Registered(next(_numbers), checked(backend))
        state = _Registrations(state.version + 1, {**state.registered, name: added})
    return BackendHandle(backend, added.number)


def _check(backend: object) -> None:
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a nt_attention.Backend, got {type(backend).__name__}: {backend!r}.")
    name = backend.name
    kinds = {"features": frozenset, "dtypes": tuple | None, "head_dims": HeadDims, "min_capability": tuple}
    for field, kind in kinds.items():
        if not isinstance(getattr(backend, field), kind):
            raise TypeError(f"{field} of the backend {name!r} must be {kind}, got {getattr(backend, field)!r}.")
    for field in ("missing", "forward", "refuses"):
        if not callable(getattr(backend, field)):
            raise TypeError(f"{field} of the backend {name!r} must be a function, got {getattr(backend, field)!r}.")
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        raise ValueError(
            f"the name of a backend must be an identifier of ASCII letters, digits and underscores, such as "
            f"'my_kernel', got {name!r}."
        )
    if name in _RESERVED:
        names = ", ".join(map(repr, _RESERVED))
        raise ValueError(f"the name {name!r} is used by this library: pass another name than {names}.")


def backends() -> dict[str, Backend]:
    """All backends by name: our own, then those that are registered."""
    return {**BACKENDS, **{name: each.backend for name, each in state.registered.items()}}


def is_backend(name: str) -> bool:
    """Whether a backend of this name exists now."""
    return name in BACKENDS or name in state.registered


def number_of(backend: Backend) -> int:
    """The number of a backend for `find_by_number`: the index of our own, and a negative number of a registered one."""
    for each in state.registered.values():
        if each.backend is backend:
            return -each.number
    for index, own in enumerate(BACKENDS.values()):
        if own is backend:
            return index
    raise ValueError(f"{backend.name!r} was removed while this call selected it.")


def find_by_number(number: int) -> Backend:
    """The backend to which `number_of` gave this number.

    Raises:
        ValueError: It was removed.
    """
    if number >= 0:
        return list(BACKENDS.values())[number]
    for each in state.registered.values():
        if each.number == -number:
            return each.backend
    raise ValueError(
        "the backend that computed this forward was removed: keep a backend registered until the backward has run."
    )
