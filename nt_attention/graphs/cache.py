"""CUDA graphs of the calls of a module: captured when a bucket of sizes is first met, and then replayed."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..torch_private import count_dispatch_modes, has_hooks_of_all_modules, is_replica, is_transformed
from .capture import Bucket, ChangesItselfError, Graph, Work, capture, is_capturing
from .device import Device, NotCapturedError, supports
from .gradients import Backward, Replayed, Slot, why_not_differentiable
from .module_state import ModuleState

GRAPHS = 128  # the most graphs of a module, with or without gradients
MEMORY = 16 * 2**30  # the most bytes of the inputs and outputs of all graphs of a handle
CHANGES = 8  # how often a module may change, before its graphs wait until it stays the same
CudaGraphs = bool | Literal["training"]  # an option of `patch`: for calls without gradients, or for all


def is_part_of_a_graph() -> bool:
    """Whether the calls of this thread become a part of a graph, so they can't be graphs of their own."""
    return is_capturing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def why_not_a_graph(module: nn.Module, tensor: Tensor, training: bool) -> str | None:
    """Why a call can't run as a graph, for a reason that depends on no values, or None.

    Args:
        module: the module that is called.
        tensor: its input.
        training: whether calls with gradients can run as graphs.
    """
    if not supports(tensor):
        return "the inputs are not on a CUDA device"
    if torch.is_grad_enabled() and not training:
        return 'gradients are enabled: use torch.no_grad() or torch.inference_mode(), or pass cuda_graphs="training"'
    if torch.is_grad_enabled() and (reason := why_not_differentiable()) is not None:
        return reason
    if module.training and not torch.is_grad_enabled():
        return "the module is in training mode, without gradients"
    if is_replica(module):
        return "the module is a replica of DataParallel"
    if count_dispatch_modes() or is_transformed():
        return "a dispatch mode or a transform is active"
    if has_hooks_of_all_modules():
        return "there are global hooks of modules"
    return None


def process_settings(device: torch.device) -> tuple[object, ...]:
    """Settings of the process on which captured work depends, as a part of a key."""
    return (
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )


class _OfModule:
    """The graphs of a module.

    Attributes:
        state: the module when they were captured.
        graphs: capture key and bucket → graph, the least recently used first.
        refused: capture key and bucket → why there is no graph.
        slot: the memory of graphs with gradients.
        changes: how often the module was changed.
        calls: the number of calls since then.
        often: why a module that changes often is not captured at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.changes, self.often = 0, "the module, its parameters or its attributes change too often"
        self.renew(module)

    def renew(self, module: nn.Module) -> None:
        """Drop everything that belongs to an older state of the module."""
        self.state = ModuleState(module)
        self.graphs: OrderedDict[tuple[Hashable, Bucket], Graph] = OrderedDict()
        self.refused: dict[tuple[Hashable, Bucket], str] = {}
        self.slot: Slot | None = None
        self.changes, self.calls = self.changes + 1, 0

    def find(self, key: Hashable, sizes: Bucket) -> Graph | None:
        """The graph of the bucket of these sizes, or else the smallest other one that fits."""
        graph = self.graphs.get((key, tuple([one.bucket for one in sizes])))
        if graph is None:
            fitting = [
                other
                for (its_key, bucket), other in self.graphs.items()
                if its_key == key and all(one.fit(its) for one, its in zip(sizes, bucket, strict=True))
            ]
            graph = min(fitting, key=lambda other: [one.tokens for one in other.bucket], default=None)
        if graph is not None:
            self.graphs.move_to_end((key, graph.bucket))
        return graph

    def check(self, key: Hashable, bucket: Bucket) -> None:
        """Raise a NotCapturedError if a capture would fail again, or would not be worth its time."""
        if (reason := self.refused.get((key, bucket))) is not None:
            raise NotCapturedError(reason)
        self.calls += 1
        if self.calls <= min(self.changes - CHANGES, 100):
            raise NotCapturedError(self.often)


class CapturedCalls:
    """The CUDA graphs of a patched model or a module.

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
        self.captured: int = 0
        self._modules: weakref.WeakKeyDictionary[nn.Module, _OfModule] = weakref.WeakKeyDictionary()
        self._devices: dict[torch.device, Device] = {}  # of calls without gradients: all modules share their memory
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
        with self._lock:
            return sum(len(each.graphs) for each in self._modules.values())

    @property
    def memory(self) -> int:
        """The bytes of the inputs and outputs of all graphs, and of gradients.

        What is computed between them is not counted. Graphs share the memory for it.
        """
        with self._lock:
            slots = [each.slot for each in self._modules.values() if each.slot is not None]
            return self._memory_of_graphs() + sum(x.nbytes for slot in slots for x in slot.gradients)

    def _memory_of_graphs(self) -> int:
        return sum(graph.memory for each in self._modules.values() for graph in each.graphs.values())

    def counted(self) -> dict[str | None, int]:
        """A copy of `calls`."""
        with self._lock:
            return dict(self.calls)

    def clear(self) -> None:
        """Free all graphs."""
        with self._lock:
            for each in self._modules.values():
                _wait(each)
            self._modules.clear()
            self._devices.clear()

    def count(self, reason: str | None) -> None:
        with self._lock:
            self.calls[reason] += 1

    def run(self, work: Work, sizes: Bucket) -> Any:
        """Replay the graph of a call, which is captured first if there is none, or if the module was changed.

        Args:
            work: what is computed.
            sizes: the sizes of the call.

        Raises:
            NotCapturedError: this work can't be captured.
        """
        device, grad_mode = next(iter(work.inputs.values())).device, torch.is_grad_enabled()
        guard = functools.partial(self._guard, device)
        with guard():
            own = self._of_module(work.module)
            differentiates = grad_mode and bool(own.state.differentiable or work.differentiable)
            if (reason := own.state.why_not_captured(differentiates)) is not None:
                raise NotCapturedError(reason)
            if differentiates and own.slot is not None and not own.slot.is_free:
                raise NotCapturedError("an earlier call waits for its backward")
            key = work.key, own.state.training, grad_mode, work.differentiable if differentiates else None
            graph = own.find(key, sizes)
            if graph is None:
                bucket = tuple([one.bucket for one in sizes])
                work.prepare(bucket)
                own = self._of_module(work.module)
                graph = self._capture(own, work, key, bucket, device)
            results = graph.replay(work)
            call = None
            if graph.backward is not None:
                tensors = [*(work.inputs[name] for name in work.differentiable), *own.state.differentiable]
                parts = graph.parts(work, graph.backward.grads)
                call = Replayed(graph.backward, parts, tensors, own.state, guard, graph)
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
            own = self._modules[module] = _OfModule(module)
        elif not own.state.is_current:
            _wait(own)
            own.renew(module)
        return own

    def _capture(self, own: _OfModule, work: Work, key: tuple[Any, ...], bucket: Bucket, device: torch.device) -> Graph:
        own.check(key, bucket)
        *_, grad_mode, differentiable = key
        make_backward = None
        if differentiable is not None:
            own.slot = own.slot or Slot(Device(device))
            memory, make_backward = own.slot.device, functools.partial(Backward, own.state, own.slot)
        else:
            if device not in self._devices:
                self._devices[device] = Device(device)
            memory = self._devices[device]
        try:
            graph = capture(work, bucket, grad_mode, memory, make_backward)
        except NotCapturedError as error:
            own.refused[key, bucket] = str(error)
            if isinstance(error, ChangesItselfError):
                own.changes, own.often = max(own.changes, CHANGES + 1), str(error)
            raise
        if not own.state.is_current:  # the first call of a module may set attributes
            slot = own.slot
            own = self._of_module(work.module)
            own.slot = slot  # of this graph
        self.captured += 1
        own.graphs[key, bucket] = graph
        while len(own.graphs) > GRAPHS or (len(own.graphs) > 1 and self._memory_of_graphs() > MEMORY):
            _wait(own)
            freed, _ = own.graphs.popitem(last=False)
            own.refused[freed] = "its graph was freed, because there are too many"
        return graph


def _wait(own: _OfModule) -> None:
    """Wait, on the host, until no graph of a module runs, so that their tensors can be freed."""
    for device in {graph.device for graph in own.graphs.values()}:
        device.wait()
