"""CUDA graphs on a machine without a GPU: operators are recorded, and a replay runs them again on the same memory.

So what Python computed in the capture stays as it was, as in a real graph. Memory from outside of the capture is not
kept: a replay that reads freed memory raises an error.

No CPU backend supports layouts that know only bounds. So attention is one step, which reads the lengths, and runs as
with known ones. tests/token_tiled/test_token_tiled_bounds.py tests the kernels.
"""

import dataclasses
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import nt_attention as nta
from nt_attention.graphs import cache as graph_cache
from nt_attention.graphs import capture as graph_capture
from nt_attention.graphs import device as graph_device
from nt_attention.graphs import policy as graph_policy
from nt_attention.kernels import adapters, select
from nt_attention.kernels.backend import Hooks
from nt_attention.layouts import cache

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
_recorders = []  # that which records now


class Outside:
    """A tensor from outside of a capture, which is not kept."""

    def __init__(self, x):
        storage = x.untyped_storage()
        self.storage, self.address = StorageWeakRef(storage), storage.data_ptr()
        self.geometry = x.storage_offset(), x.shape, x.stride()
        self.dtype = x.dtype

    def get(self):
        expired = self.storage.expired()
        storage = None if expired else torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None or storage.data_ptr() != self.address:
            raise AssertionError(f"a replay reads memory that was freed: {tuple(self.geometry[1])}, {self.dtype}")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.geometry)


class Recorder(TorchDispatchMode):
    """Records operators, and runs them again in `replay`. `memory` holds the memory of all graphs of a device."""

    def __init__(self, memory):
        super().__init__()
        self.memory, self.steps = memory, []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __enter__(self):
        _recorders.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _recorders.pop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.add(func, args, kwargs or {}, out)
        return out

    def add(self, function, args, kwargs, out):
        """Record a step. Its new tensors belong to the graphs."""
        given = {_key(x) for x in leaves((args, kwargs))}
        arguments = _map(lambda x: self._refer(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        new = [x.detach() if _key(x) not in given else None for x in leaves(out)]
        self.memory.update({_key(x): x.untyped_storage() for x in new if x is not None})
        self.steps.append((function, arguments, new))

    def _refer(self, x):
        if x.dim() == 0 and _key(x) not in self.memory:
            return x.detach()  # numbers of the host are arguments of a kernel
        return x.detach() if _key(x) in self.memory else Outside(x)

    @torch.no_grad()
    def replay(self):
        for function, arguments, new in self.steps:
            args, kwargs = _map(lambda x: x.get() if isinstance(x, Outside) else x, arguments)
            for target, x in zip(new, leaves(function(*args, **kwargs)), strict=True):
                if target is not None:
                    target.copy_(x)


def _key(x):
    return x.untyped_storage()._cdata


def _map(function, arguments):
    """As `pytree.tree_map`, for the arguments of an operator, and several times as fast."""
    if type(arguments) in (tuple, list):
        return type(arguments)([_map(function, x) for x in arguments])
    if type(arguments) is dict:
        return {name: _map(function, x) for name, x in arguments.items()}
    return function(arguments)


class FakeSlot(graph_device.Slot):
    """Records in place of a capture."""

    def __init__(self, device):
        self.device, self.memory, self.gradients, self.waiting = device, {}, [], None

    @contextmanager
    def in_order(self):
        yield

    on_stream = in_order

    def wait(self):
        """Nothing runs."""

    def capture(self, function):
        recorder = Recorder(self.memory)
        with recorder:
            outputs = function()
        return recorder.replay, outputs


class FakeEvent:
    """An event of a device that takes `slower` times as long as the host, which launches nothing ahead of it."""

    slower = 1.0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1e3 * self.slower * (other.at - self.at)


def with_known_lengths(call):
    """A call with layouts that know only bounds, whose offsets are valid: the same with layouts that know the lengths.

    Returns it with the backend that runs it.
    """
    layouts = [nta.SequenceLayout.from_offsets(x.operator_offsets.clone()) for x in (call.layout, call.key_layout)]
    same = call.key_layout is call.layout
    keyless = layouts[1].min_seqlen == 0
    spec = dataclasses.replace(call.spec, bounded=False, equal_lengths=same, keyless=keyless)
    key_layout = layouts[0] if same else layouts[1]
    call = call._replace(layout=layouts[0], key_layout=key_layout, spec=spec, prepared=None, is_direct=False)
    with select.automatic_choice():
        backend, _, dims, *_ = select.choose_for(call, "auto")
    return backend, call._replace(head_dims=dims)


def as_one_step(function):
    """Record a call of `function(*tensors, call)` as one step."""

    def run(*arguments):
        *tensors, call = arguments
        if not _recorders:
            return function(*tensors, call)
        recorder = _recorders[-1]
        with _disable_current_modes(), outside_of_records():
            out = function(*tensors, call)
        recorder.add(lambda *again: function(*again, call), tensors, {}, out)
        return out

    return run


@contextmanager
def outside_of_records():
    before = _recorders[:]
    _recorders.clear()
    try:
        yield
    finally:
        _recorders[:] = before


@as_one_step
def forward(query, key, value, call):
    """The forward of a backend for layouts that know only bounds."""
    backend, call = with_known_lengths(call)
    out, lse, state = adapters.forward(backend, adapters.Tensors(query, key, value), call)
    return (out, lse) if state is None else (out, lse, state)


@as_one_step
def backward(saved, query, key, value, call):
    backend, call = with_known_lengths(call)
    return adapters.backward(backend, saved, adapters.Tensors(query, key, value), call)


@pytest.fixture
def cuda_graphs(monkeypatch):
    """Calls can run as CUDA graphs: real ones on a GPU, else fake ones."""
    if GPU:
        yield
        return
    no_modes = cache.no_modes  # tensors that are cached in a capture are computed in each replay
    monkeypatch.setattr(cache, "no_modes", lambda: nullcontext() if _recorders else no_modes())
    monkeypatch.setattr(graph_cache, "Slot", FakeSlot)
    monkeypatch.setattr(graph_policy, "new_event", FakeEvent)
    for module in (graph_cache, graph_capture):
        monkeypatch.setattr(module, "supports", lambda tensor: True)
    known = select.BACKENDS["token_tiled"]
    given = {"forward": forward, "backward": backward, "hooks": Hooks()}
    fake = dataclasses.replace(known, **given, dtypes=None, refuses=lambda spec: [])
    monkeypatch.setitem(select.BACKENDS, "token_tiled", fake)
    with nta.use_backend("token_tiled"):
        yield


def leaves(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
