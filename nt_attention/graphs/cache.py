"""CUDA graphs of the calls of modules: captured when a bucket of sizes is first met, and then replayed."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import torch_private
from .capture import Bucket, Captured, ChangesItselfError, Work, capture, is_capturing
from .device import NotCapturedError, Reasons, Slot, check, supports
from .gradients import Waiting
from .module_state import ModuleState
from .policy import SELDOM, TOO_MANY, UNUSED, Policy

GRAPHS = 128  # the most graphs of a module, with or without gradients
SLOTS = 4  # how many calls of a module can wait for their backward. Each slot has memory for all activations
MEMORY = 16 * 2**30  # the most bytes of the inputs and outputs of all graphs of a handle
LARGER = 0.5  # how many more tokens, as a share, the graph may have that is used by a size that comes seldom
CHANGES = 8  # how often a module may change, before its graphs wait until it stays the same
CudaGraphs = bool | Literal["training", "auto"]  # an option of `patch`: for calls without gradients, or for all
Key = tuple[Any, ...]


def is_part_of_a_graph() -> bool:
    """Whether the calls of this thread become a part of a graph, so they can't be graphs of their own."""
    return is_capturing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def reasons_of_call(module: nn.Module, tensor: Tensor, training: bool) -> Reasons:
    """Why a call with this input can't run as a graph. `training`: whether calls with gradients can."""
    yield not supports(tensor), "the inputs are not on a CUDA device"
    if torch.is_grad_enabled():
        use = 'use torch.no_grad() or torch.inference_mode(), or pass cuda_graphs="training"'
        yield not training, f"gradients are enabled: {use}"
        # dropout would not be that of the first forward
        yield torch_private.backward_id() != -1, "it runs in a backward, as the second forward of a checkpoint does"
        hooks = torch_private.saved_tensors_hooks(True)
        yield hooks is not None, "there are hooks on saved tensors, as in a checkpoint"
        yield torch_private.forward_ad_level() >= 0, "forward-mode AD is active"
        yield torch.is_anomaly_enabled(), "anomalies are detected, which reads values on the host"
        yield torch_private.caches_parametrizations(), "the values of parametrizations are cached"
    else:
        yield module.training, "the module is in training mode, without gradients"
    yield torch_private.is_replica(module), "the module is a replica of DataParallel"
    is_observed = torch_private.count_dispatch_modes() or torch_private.is_transformed()
    yield is_observed, "a dispatch mode or a transform is active"
    yield torch_private.has_hooks_of_all_modules(), "there are global hooks of modules"


class _OfModule:
    """The graphs of a module.

    Attributes:
        state: the module when they were captured.
        graphs: slot, key and bucket → graph, the least recently used first.
        refused: key and bucket → why there is no graph.
        slots: the memory of graphs with gradients. Each call that waits for its backward has a slot of its own.
        changes: how often the module was changed.
        calls: the number of attempts to capture since then.
        often: why a module that changes often is not captured at once.
        policy: decides which calls are captured; None if all are.
        used: the number of calls that ran as graphs.
    """

    def __init__(self, module: nn.Module, is_automatic: bool) -> None:
        self.policy = Policy() if is_automatic else None
        self.used = self.changes = 0
        self.often = "the module, its parameters or its attributes change too often"
        self.slots: list[Slot] = []
        self.renew(module)

    def renew(self, module: nn.Module) -> None:
        """Drop everything that belongs to an older state of the module."""
        self.state = ModuleState(module)
        self.graphs: OrderedDict[tuple[Slot, Key, Bucket], Captured] = OrderedDict()
        self.refused: dict[tuple[Key, Bucket], str] = {}
        self.changes, self.calls = self.changes + 1, 0
        if self.policy is not None:
            self.policy.forget()

    def find(self, slot: Slot, key: Key, work: Work, more: float = 0.0) -> Captured | None:
        """The graph of the bucket of a call, or else the smallest other one that fits, with this many more tokens."""
        at = slot, key, work.bucket
        if at not in self.graphs:
            others = [x for x in self.graphs if x[0] is slot and x[1] == key and work.fits(x[2], more)]
            at = min(others, key=lambda x: [one.tokens for one in x[2]], default=at)
        if at in self.graphs:
            self.graphs.move_to_end(at)
        return self.graphs.get(at)

    def drop_useless(self) -> None:
        """Free the graphs that gain nothing, and those that no call has used for a long time."""
        items = self.graphs.items()
        for at in [at for at, x in items if not x.times.pays or x.last_used + UNUSED < self.used]:
            self.wait()
            del self.graphs[at]

    def free_slot(self, device: torch.device) -> Slot:
        """A slot in which no call waits for its backward."""
        slots = [slot for slot in self.slots if slot.device == device]
        slot = next((slot for slot in slots if slot.is_free), None)
        if slot is None:
            if len(slots) >= SLOTS:
                raise NotCapturedError(f"{SLOTS} earlier calls wait for their backward")
            self.slots.append(slot := Slot(device))
        return slot

    def wait(self) -> None:
        """Wait, on the host, until none of them runs, so that their tensors can be freed."""
        for slot in {graph.slot for graph in self.graphs.values()}:
            slot.wait()


class CapturedCalls:
    """The CUDA graphs of a patched model or a module.

    Args:
        training: whether calls with gradients run as graphs too.
        is_automatic: whether a `Policy` decides which calls are captured.

    Attributes:
        calls: reason → the number of packed calls that did not run as a graph for this reason. The key None counts
            those that did.
        captured: the number of captures. A graph with its backward counts once.
    """

    def __init__(self, training: bool = False, is_automatic: bool = False) -> None:
        self.training, self.is_automatic = training, is_automatic
        self.calls: Counter[str | None] = Counter()
        self.captured: int = 0
        self._modules: weakref.WeakKeyDictionary[nn.Module, _OfModule] = weakref.WeakKeyDictionary()
        self._shared: dict[torch.device, Slot] = {}  # of calls without gradients, which never wait: of all modules
        self._lock = threading.RLock()

    @classmethod
    def of_option(cls, cuda_graphs: CudaGraphs) -> CapturedCalls | None:
        """The graphs for this value of the option `cuda_graphs`, or None for False.

        Raises:
            ValueError: it is another value.
        """
        if not isinstance(cuda_graphs, bool) and cuda_graphs not in ("training", "auto"):
            raise ValueError(f'cuda_graphs must be True, False, "training" or "auto", got {cuda_graphs!r}.')
        return cls(cuda_graphs in ("training", "auto"), cuda_graphs == "auto") if cuda_graphs else None

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedCalls, (self.training, self.is_automatic)  # graphs can't be copied

    def __len__(self) -> int:
        with self._lock:
            return len(self._graphs)

    @property
    def memory(self) -> int:
        """The bytes of the inputs and outputs of all graphs, and of gradients.

        What is computed between them is not counted. Graphs share the memory for it.
        """
        with self._lock:
            gradients = [x for each in self._modules.values() for slot in each.slots for x in slot.gradients]
            return sum(graph.memory for graph in self._graphs) + sum(x.nbytes for x in gradients)

    @property
    def _graphs(self) -> list[Captured]:
        return [graph for each in self._modules.values() for graph in each.graphs.values()]

    def counted(self) -> dict[str | None, int]:
        """A copy of `calls`."""
        with self._lock:
            return dict(self.calls)

    def clear(self) -> None:
        """Free all graphs."""
        with self._lock:
            for each in self._modules.values():
                each.wait()
            self._modules.clear()
            self._shared.clear()

    def count(self, reason: str | None) -> None:
        with self._lock:
            self.calls[reason] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context that counts a call, by the `NotCapturedError` that is raised in it."""
        try:
            yield
        except NotCapturedError as error:
            self.count(str(error))
            raise
        self.count(None)

    def run(self, work: Work) -> Any:
        """Replay the graph of a call, which is captured first if there is none, or if the module was changed.

        Raises:
            NotCapturedError: this work can't be captured.
        """
        device = next(iter(work.inputs.values())).device
        guard = functools.partial(self._guard, device)
        with guard():
            own = self._of_module(work.module)
            differentiates = work.grad and bool(own.state.differentiable or work.differentiable)
            check(own.state.reasons(differentiates))
            if device not in self._shared:
                self._shared[device] = Slot(device)
            slot = own.free_slot(device) if differentiates else self._shared[device]
            key = work.key, _settings(device), own.state.training
            graph = own.find(slot, key, work)
            if graph is None or not graph.times.pays:
                graph = self._choose(own, slot, key, work, differentiates)
            own.used += 1
            graph.last_used = own.used
            span = None if own.policy is None else own.policy.time_replay(graph.times, device)
            results = graph.replay(work)
            if span is not None:
                span.end()
            call = None if graph.backward is None else Waiting(graph, work, own.state, guard)
        return graph.rebuild(results if call is None else call.connect(results))

    @contextmanager
    def _guard(self, device: torch.device) -> Iterator[None]:
        """A context in which one thread at a time uses the graphs of a device."""
        current = torch.cuda.device(device if device.type == "cuda" else -1)
        with self._lock, torch.inference_mode(False), torch.no_grad(), current:
            yield

    def _of_module(self, module: nn.Module) -> _OfModule:
        """The graphs of a module. They are dropped if it was changed since they were captured."""
        own = self._modules.get(module)
        if own is None:
            own = self._modules[module] = _OfModule(module, self.is_automatic)
        elif not own.state.is_current:
            own.wait()
            own.renew(module)
        return own

    def _choose(self, own: _OfModule, slot: Slot, key: Key, work: Work, differentiates: bool) -> Captured:
        """A new graph, or with a policy perhaps a larger one that exists.

        Raises:
            NotCapturedError: there is none, and none is captured now.
        """
        if own.policy is None:
            return self._capture(own, slot, key, work, differentiates)
        own.drop_useless()
        reason = own.policy.why_not(key, work.bucket)
        if reason is None:
            own.policy.captures += 1
            graph = self._capture(own, slot, key, work, differentiates)
            graph.times = own.policy.times_of(key, work.bucket)
            return graph
        larger = own.find(slot, key, work, LARGER) if reason in (SELDOM, TOO_MANY) else None
        if larger is None:
            begin = functools.partial(own.policy.time_call, key, work.bucket, slot.device)
            raise NotCapturedError(reason, begin if reason == SELDOM else None)
        return larger

    def _capture(self, own: _OfModule, slot: Slot, key: Key, work: Work, differentiates: bool) -> Captured:
        bucket = work.bucket
        if (reason := own.refused.get((key, bucket))) is not None:
            raise NotCapturedError(reason)
        own.calls += 1
        if own.calls <= min(own.changes - CHANGES, 100):
            raise NotCapturedError(own.often)
        try:
            graph = capture(work, slot, own.state if differentiates else None)
        except NotCapturedError as error:
            own.refused[key, bucket] = str(error)
            if isinstance(error, ChangesItselfError):
                own.changes, own.often = max(own.changes, CHANGES + 1), str(error)
            raise
        self._of_module(work.module)  # the first call of a module may set attributes
        self.captured += 1
        own.graphs[slot, key, bucket] = graph
        while len(own.graphs) > GRAPHS or (len(own.graphs) > 1 and sum(x.memory for x in self._graphs) > MEMORY):
            own.wait()
            (_, key, bucket), _ = own.graphs.popitem(last=False)
            own.refused[key, bucket] = "its graph was freed, because there are too many"
        return graph


def _settings(device: torch.device) -> tuple[object, ...]:
    """Settings of the process on which captured work depends."""
    products = torch.backends.cuda.matmul
    return (
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction),
    )
