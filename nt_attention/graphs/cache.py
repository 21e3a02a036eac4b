"""CUDA graphs of the calls of a module: captured when a bucket of sizes is first met, and then replayed."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_private import count_dispatch_modes, has_hooks_of_all_modules, is_replica, is_transformed
from .capture import (
    Bucket,
    ByChanceError,
    ChangesItselfError,
    Graph,
    Kind,
    TooLargeError,
    Work,
    capture,
    is_capturing,
)
from .device import Device, NotCapturedError, supports
from .gradients import SLOTS, Replayed, Slot, connect, why_not_differentiable
from .module_state import ModuleState, version_of

GRAPHS = 128  # the most graphs of a module, with or without gradients
MEMORY = 16 * 2**30  # the most bytes of the inputs and outputs of all graphs of a handle
RENEWALS = 8  # how often a module may change, before its graphs wait until it stays the same
CudaGraphs = bool | Literal["training"]  # an option of `patch`: for calls without gradients, or for all


def is_part_of_a_graph() -> bool:
    """Whether the calls of this thread become a part of a graph, so they can't be graphs of their own."""
    return is_capturing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def check_call(module: nn.Module, tensor: Tensor, training: bool) -> None:
    """Check what does not depend on the values of a call.

    Args:
        module: the module that is called.
        tensor: its input.
        training: whether calls with gradients can run as graphs.

    Raises:
        NotCapturedError: the call can't run as a graph.
    """
    if not supports(tensor):
        raise NotCapturedError("the inputs are not on a CUDA device")
    if torch.is_grad_enabled() and not training:
        raise NotCapturedError(
            'gradients are enabled: use torch.no_grad() or torch.inference_mode(), or pass cuda_graphs="training"'
        )
    if torch.is_grad_enabled() and (reason := why_not_differentiable()) is not None:
        raise NotCapturedError(reason)
    if module.training and not torch.is_grad_enabled():
        raise NotCapturedError("the module is in training mode, without gradients")
    if is_replica(module):
        raise NotCapturedError("the module is a replica of DataParallel")
    if count_dispatch_modes() or is_transformed():
        raise NotCapturedError("a dispatch mode or a transform is active")
    if has_hooks_of_all_modules():
        raise NotCapturedError("there are global hooks of modules")


def process_settings(device: torch.device) -> tuple[object, ...]:
    """Settings of the process on which captured work depends, as a part of a key."""
    return (
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )


_Key = tuple[tuple[Hashable, ...], Bucket]  # `Kind.of_graph`, and the bucket


class _Mode(NamedTuple):
    """How a module is called. Each mode has graphs of its own, so switching between modes makes none stale.

    Attributes:
        training: whether the module is in training mode.
        grad_mode: whether gradients are enabled.
        trains_parameters: whether gradients are enabled, and a parameter requires one.
    """

    training: bool
    grad_mode: bool
    trains_parameters: bool

    @classmethod
    def of(cls, module: nn.Module) -> _Mode:
        grad_mode = torch.is_grad_enabled()
        return cls(module.training, grad_mode, grad_mode and any(x.requires_grad for x in module.parameters()))


@dataclass(eq=False)
class _Record:
    """What is known about the graphs of a module in one mode.

    Attributes:
        module: the module.
        state: that of the last capture, or attempt.
        slots: device → memory for graphs with gradients.
        refused: what can't be captured in this state → the reason.
        waits: what is tried again later → after how many calls, and the reason.
        failures: how often it has failed.
        renewals: how many states there were.
        calls: how many calls of this state found no graph.
        changes: why a module that changes often is not captured at once.
    """

    module: weakref.ref[nn.Module]
    state: ModuleState | None = None
    slots: dict[torch.device, list[Slot]] = field(default_factory=dict)
    refused: dict[Hashable, str] = field(default_factory=dict)
    waits: dict[Hashable, tuple[int, str]] = field(default_factory=dict)
    failures: Counter[Hashable] = field(default_factory=Counter)
    renewals: int = 0
    calls: int = 0
    changes: str = "the module, its parameters or its attributes change too often"

    def renew(self, module: nn.Module) -> ModuleState:
        """Read the state of the module again."""
        self.state = ModuleState(module)
        self.refused, self.waits, self.failures = {}, {}, Counter()
        self.renewals, self.calls = self.renewals + 1, 0
        return self.state

    def check(self, what: Hashable, bucket: Bucket) -> None:
        """Raise a NotCapturedError if an attempt to capture would fail, or would not be worth its time."""
        for key in (what, (what, bucket)):
            if key in self.refused:
                raise NotCapturedError(self.refused[key])
            calls, reason = self.waits.get(key, (0, ""))
            if calls:
                self.waits[key] = calls - 1, reason
                raise NotCapturedError(reason)
        self.calls += 1
        # a module that was changed n times has to stay the same for n - RENEWALS calls
        if self.calls <= min(self.renewals - RENEWALS, 100):
            raise NotCapturedError(self.changes)

    def refuse(self, what: Hashable, bucket: Bucket, error: NotCapturedError) -> None:
        """Note why something can't be captured. If it is too large, smaller buckets are still tried."""
        key = (what, bucket) if isinstance(error, TooLargeError) else what
        if isinstance(error, ByChanceError):
            self.wait(key, str(error))
        else:
            self.refused[key] = str(error)
        if isinstance(error, ChangesItselfError):
            self.renewals, self.changes = max(self.renewals, RENEWALS + 1), str(error)

    def wait(self, key: Hashable, reason: str) -> None:
        """Try again later: at once after the first failure, and after twice as many calls each further time."""
        self.failures[key] += 1
        self.waits[key] = 2 ** min(self.failures[key], 10) - 2, reason


class CapturedCalls:
    """The CUDA graphs of a patched model or a module, the least recently used first.

    Args:
        training: whether calls with gradients run as graphs too.

    Attributes:
        calls: reason → the number of packed calls that did not run as a graph for this reason. The key None counts
            those that did.
        captured: the number of captures. A graph with its backward counts once.
    """

    def __init__(self, training: bool = False) -> None:
        self.training = training
        self.calls: Counter[str | None] = Counter()
        self.captured = 0
        self._graphs: OrderedDict[_Key, Graph] = OrderedDict()
        # id and mode of a module → its record; not a global table, in which no module would be freed
        self._records: dict[tuple[int, _Mode], _Record] = {}
        self._without_gradients: dict[torch.device, Slot] = {}  # all modules share its memory
        self._freed: list[weakref.ref[nn.Module]] = []  # modules that were freed
        self._lock = threading.RLock()

    @classmethod
    def of_option(cls, cuda_graphs: CudaGraphs) -> CapturedCalls | None:
        """The graphs for this value of the option `cuda_graphs`, or None for False.

        Raises:
            ValueError: it is another value.
        """
        if not isinstance(cuda_graphs, bool) and cuda_graphs != "training":
            raise ValueError(f'cuda_graphs must be True, False or "training", got {cuda_graphs!r}.')
        return cls(cuda_graphs == "training") if cuda_graphs else None

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedCalls, (self.training,)  # graphs can't be copied

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def memory(self) -> int:
        """The bytes of the inputs and outputs of all graphs, and of gradients.

        The graphs of a slot share the memory for what is computed between. It is not counted.
        """
        with self._lock:
            of_gradients = [x.nbytes for slot in self._slots() for x in slot.gradients]
            return self._memory_of_graphs() + sum(of_gradients)

    def _memory_of_graphs(self) -> int:
        return sum(graph.memory for graph in self._graphs.values())

    def counted(self) -> dict[str | None, int]:
        """A copy of `calls`."""
        with self._lock:
            return dict(self.calls)

    def clear(self) -> None:
        """Free all graphs."""
        with self._lock:
            self._wait()
            self._graphs.clear()
            self._records.clear()
            self._without_gradients.clear()

    def count(self, reason: str | None) -> None:
        with self._lock:
            self.calls[reason] += 1

    def run(self, work: Work, sizes: Bucket) -> Any:
        """Replay the graph of a call, which is captured first if there is none or it is stale.

        Args:
            work: what is computed.
            sizes: the sizes of the call.

        Raises:
            NotCapturedError: this work can't be captured.
        """
        tensor = next(iter(work.inputs.values()))
        guard = functools.partial(self._guard, tensor.device)
        mode = _Mode.of(work.module)
        differentiates = mode.grad_mode and (mode.trains_parameters or bool(work.differentiable))
        with guard():
            if self._freed:
                self._drop_freed()
            record = self._record_of(work.module, mode)
            slot = self._free_slot(tensor.device, record if differentiates else None)
            kind = Kind(work, mode.grad_mode, differentiates, slot)
            state = record.state
            graph = None if state is None or not state.has_its_tensors else self._find(kind, sizes, state)
            if graph is not None and state is not None:
                # The rest of the state is compared while the device computes: a stale graph changes nothing.
                results = _replay(graph, kind)
                if not (state.is_current and state.why_not_captured(differentiates) is None):
                    graph = None
            if graph is None:
                graph = self._find_or_add(record, kind, sizes)
                results = _replay(graph, kind)
            if graph.backward is not None:
                tensors = [*(work.inputs[name] for name in work.differentiable), *graph.state.differentiable]
                token = slot.take()
                read = [(x, version_of(x), x.untyped_storage()) for x in graph.state.tensors()]
                parts = graph.parts(work, graph.backward.grads)
                call = Replayed(graph.backward, slot, guard, read, [x.shape for x in tensors], parts)
        if graph.backward is not None:
            results = connect(call, token, results, tensors)
        return work.rebuild(graph.computed, results)

    @contextmanager
    def _guard(self, device: torch.device) -> Iterator[None]:
        """A context in which one thread at a time uses the graphs of a device."""
        with self._lock, torch.inference_mode(False), torch.no_grad(), _current(device):
            yield

    def _record_of(self, module: nn.Module, mode: _Mode) -> _Record:
        key = id(module), mode
        record = self._records.get(key)
        if record is None or record.module() is not module:
            if record is not None:  # of a module that was freed, and had the same id
                self._drop(self._graphs_of(record.state))
            # the callback may run at any moment, so the lists and dictionaries here are changed later, in the lock
            record = self._records[key] = _Record(weakref.ref(module, self._freed.append))
        return record

    def _free_slot(self, device: torch.device, record: _Record | None) -> Slot:
        """A slot in which no call waits for its backward. Without a record, it is for calls without gradients."""
        if record is None:
            if device not in self._without_gradients:
                self._without_gradients[device] = Slot(0, Device(device))
            return self._without_gradients[device]
        slots = record.slots.setdefault(device, [])
        free = next((slot for slot in slots if slot.is_free), None)
        if free is None:
            if len(slots) == SLOTS:
                raise NotCapturedError(f"{SLOTS} earlier calls wait for their backward")
            free = Slot(len(slots), Device(device))
            slots.append(free)
        return free

    def _find_or_add(self, record: _Record, kind: Kind, sizes: Bucket) -> Graph:
        bucket = tuple([one.bucket for one in sizes])
        kind.work.prepare(bucket)
        state = record.state
        if state is None or not state.is_current:
            state = self._renew(record, kind.work.module)
        if (reason := state.why_not_captured(kind.differentiates)) is not None:
            raise NotCapturedError(reason)
        return self._find(kind, sizes, state) or self._add(record, kind, bucket, state)

    def _renew(self, record: _Record, module: nn.Module) -> ModuleState:
        """The state of a module as it is now. Graphs of the older state are dropped."""
        self._drop(self._graphs_of(record.state))
        return record.renew(module)

    def _drop_freed(self) -> None:
        """Drop what was kept for modules that were freed, such as copies of a patched model."""
        self._freed.clear()
        freed = [key for key, record in self._records.items() if record.module() is None]
        self._wait()
        for key in freed:
            self._drop(self._graphs_of(self._records[key].state))
            del self._records[key]

    def _drop(self, keys: Sequence[_Key]) -> None:
        if keys:
            self._wait()
        for key in keys:
            del self._graphs[key]

    def _graphs_of(self, state: ModuleState | None) -> list[_Key]:
        """The keys of the graphs that were captured in this state, the least recently used first."""
        return [key for key, graph in self._graphs.items() if graph.state is state]

    def _slots(self) -> Iterator[Slot]:
        yield from self._without_gradients.values()
        for record in self._records.values():
            for slots in record.slots.values():
                yield from slots

    def _wait(self) -> None:
        for slot in self._slots():
            slot.device.wait()

    def _find(self, kind: Kind, sizes: Bucket, state: ModuleState) -> Graph | None:
        """The graph of the bucket of these sizes, or else the smallest other one that fits."""
        graph = self._graphs.get((kind.of_graph, tuple([one.bucket for one in sizes])))
        if graph is None or graph.state is not state:
            others = [
                other
                for (key, bucket), other in self._graphs.items()
                if other.state is state
                and key == kind.of_graph
                and all(one.fit(its) for one, its in zip(sizes, bucket, strict=True))
            ]
            graph = min(others, key=lambda other: [one.tokens for one in other.bucket], default=None)
        if graph is not None:
            self._graphs.move_to_end((kind.of_graph, graph.bucket))
        return graph

    def _add(self, record: _Record, kind: Kind, bucket: Bucket, state: ModuleState) -> Graph:
        record.check(kind.of_work, bucket)
        try:
            graph = capture(kind, bucket, state)
        except NotCapturedError as error:
            record.refuse(kind.of_work, bucket, error)
            raise
        if not state.is_current:  # the first call of a module may set attributes
            graph = replace(graph, state=self._renew(record, kind.work.module))
        self.captured += 1
        self._graphs[kind.of_graph, bucket] = graph
        self._evict(graph.state)
        return graph

    def _evict(self, state: ModuleState) -> None:
        """Free the least recently used graphs: of the module if it has too many, or of all if they take much memory."""
        evicted = self._graphs_of(state)[:-GRAPHS]
        excess = self._memory_of_graphs() - MEMORY
        for key in list(self._graphs)[:-1]:
            if excess > 0 and key not in evicted:
                excess -= self._graphs[key].memory
                evicted.append(key)
        for of_graph, bucket in evicted:
            owner = self._graphs[of_graph, bucket].state
            record = next(x for x in self._records.values() if x.state is owner)
            record.wait((of_graph[:-1], bucket), "its graph was freed, because there are too many")
        self._drop(evicted)


def _replay(graph: Graph, kind: Kind) -> list[Tensor]:
    with kind.slot.device.in_order():
        return graph.run(kind.work)


def _current(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)
