"""CUDA graphs of the calls of a module: captured when a bucket of sizes is first met, and then replayed."""

from __future__ import annotations

import functools
import pickle
import random
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all_modules
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._graph_gradients import (
    SLOTS,
    Backward,
    Gradients,
    Replayed,
    Slot,
    backward_of,
    connect,
    reached_by,
    why_not_differentiable,
)
from ._module_state import ModuleState, Snapshot, version_of

GRAPHS, MEMORY = 128, 16 * 2**30  # the most graphs of a handle, and bytes of their inputs and outputs
LARGEST = 2 * 2**30  # bytes of the inputs and outputs of a graph: with larger ones, few graphs would fit into `MEMORY`
CudaGraphs = bool | Literal["training"]  # an option of `patch`: for calls without gradients, or for all
_capturing = threading.Lock()  # only one thread captures at a time


class NotCapturedError(Exception):
    """A call can't run as a CUDA graph. The message says why."""


class _TooLargeError(NotCapturedError):
    """A graph of this bucket would take too much memory. Graphs of smaller ones may not."""


class _ChangesItselfError(NotCapturedError):
    """The forward of a module changes the module, so its state is another one in each call."""


class _Thread(threading.local):
    """Whether this thread captures a graph, or runs its work before the capture."""

    is_capturing = False


_thread = _Thread()


def is_part_of_a_graph() -> bool:
    """Whether the calls of this thread become a part of a graph, so they can't be graphs of their own."""
    return _thread.is_capturing or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


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
    if getattr(module, "_is_replica", False):  # a new module in each call
        raise NotCapturedError("the module is a replica of DataParallel")
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        raise NotCapturedError("a dispatch mode or a transform is active")
    if any(getattr(hooks_of_all_modules, f"_global_{name}_hooks") for name in _GLOBAL_HOOKS):
        raise NotCapturedError("there are global hooks of modules")


_GLOBAL_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def process_settings(device: torch.device) -> tuple[object, ...]:
    """Settings of the process on which captured work depends, as a part of a key."""
    return (
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )


class Sizes(NamedTuple):
    """The sizes of one side of a ragged batch, or of its bucket.

    Attributes:
        sequences: the number of sequences.
        longest: the longest length, or a bound of it.
        tokens: the number of tokens.
    """

    sequences: int
    longest: int
    tokens: int

    @property
    def bucket(self) -> Sizes:
        """Sequences and lengths are rounded up to powers of two, tokens to one of eight numbers between two of them."""
        return Sizes(_power(self.sequences, 1), _power(self.longest, 16), -(-self.tokens // self._step) * self._step)

    @property
    def _step(self) -> int:
        return max(64, 1 << max(0, (self.tokens - 1).bit_length() - 4))

    def fit(self, graph: Sizes) -> bool:
        """Whether the graph of another bucket can run these sizes, and takes about as long as one of their own."""
        bucket = self.bucket
        most = max(16, 4 * bucket.sequences), max(128, 4 * bucket.longest), max(512, bucket.tokens + self._step)
        return all(size <= other <= limit for size, other, limit in zip(self, graph, most, strict=True))


def _power(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


Bucket = tuple[Sizes, ...]  # one for each side


class Computed(NamedTuple):
    """What the function of a `Work` computed.

    Attributes:
        value: tensors in a structure.
        notes: something about each tensor in `value`, for `Work.part`.
        layouts: what has to exist until the backward has run: operators of compiled models find layouts by offsets.
    """

    value: Any
    notes: Sequence[Any]
    layouts: object

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in `value`."""
        return [x for x in pytree.tree_leaves(self.value) if isinstance(x, Tensor)]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a graph computes.

    Attributes:
        module: the module that is called. If its state differs from that of the capture, the graph is stale.
        key: everything else on which the graph depends, besides the inputs.
        inputs: the tensors of a call, by name.
        shapes: bucket → the shapes of `inputs` in the graph, which are not smaller.
        zeroed: the names of inputs that are 0 where the call's own tensor is smaller. The others are undefined there.
        function: computes the outputs of the tensors in the graph, for a bucket.
        part: the first part of an output of the graph in each dimension, which is the output of the call. It gets the
            output and the note about it.
        rebuild: the outputs of `function` with other tensors.
        prepare: changes the module before a graph of a bucket is captured.
    """

    module: nn.Module
    key: Hashable
    inputs: Mapping[str, Tensor]
    shapes: Callable[[Bucket], Mapping[str, tuple[int, ...]]]
    zeroed: frozenset[str]
    function: Callable[[dict[str, Tensor], Bucket], Computed]
    part: Callable[[Tensor, Any], Tensor]
    rebuild: Callable[[Any, list[Tensor]], Any]
    prepare: Callable[[Bucket], None] = lambda bucket: None

    def differentiable(self) -> tuple[str, ...]:
        """The names of inputs that require a gradient."""
        return tuple([name for name, x in self.inputs.items() if x.requires_grad])


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured graph, and the tensors that it reads and writes. `backward` is None for calls without gradients."""

    bucket: Bucket
    state: ModuleState
    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    value: Any
    outputs: list[Tensor]
    notes: Sequence[Any]
    backward: Backward | None
    _parts: dict[tuple[torch.Size, ...], list[Tensor]] = field(default_factory=dict)

    def run(self, work: Work) -> list[Tensor]:
        """The results of a call: copies of the first parts of the outputs."""
        fill(self.inputs, work, self._parts)
        self.replay()
        parts = [work.part(x, note) for x, note in zip(self.outputs, self.notes, strict=True)]
        return [x.clone(memory_format=torch.contiguous_format) for x in parts]

    @property
    def memory(self) -> int:
        grads = [] if self.backward is None else [x for x in self.backward.grads if x is not None]
        return _nbytes(*self.inputs.values(), *self.outputs, *grads)


def fill(inputs: dict[str, Tensor], work: Work, cached: dict[tuple[torch.Size, ...], list[Tensor]]) -> None:
    """Copy the tensors of a call to those of a graph, which are not smaller. `cached`: the parts that were written."""
    tensors = [work.inputs[name] for name in inputs]  # a call may have them in another order
    shapes = tuple([x.shape for x in tensors])
    parts = cached.get(shapes)
    if parts is None:
        if len(cached) >= 64:
            cached.clear()
        parts = [x.detach()[tuple(map(slice, shape))] for x, shape in zip(inputs.values(), shapes, strict=True)]
        cached[shapes] = parts
    for name in work.zeroed:
        if inputs[name].shape != work.inputs[name].shape:
            inputs[name].zero_()
    torch._foreach_copy_(parts, tensors)


class Device:
    """Captures graphs on a CUDA device, and runs them one after another, because they share memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream, self._done = torch.cuda.Stream(device), torch.cuda.Event()
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """A context that waits, on the current stream, until the one before is done."""
        torch.cuda.current_stream().wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(torch.cuda.current_stream())

    def wait(self) -> None:
        """Wait, on the host, until no graph runs, so that their tensors can be freed."""
        self._done.synchronize()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A context that runs on the stream of captures."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """A function that replays the work of `function`, and the outputs to which it writes.

        Raises:
            NotCapturedError: the work can't be captured.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves these to us
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            self._end_for_random_numbers()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            cause = error.__context__ or error  # the error at the end of a capture hides the first one
            raise NotCapturedError(f"a CUDA graph can't be captured: {str(cause).splitlines()[0]}") from error
        return graph.replay, outputs

    def _end_for_random_numbers(self) -> None:
        """End a failed capture for the random number generator, which would raise an error in each later call.

        It has no function for this, but the end of another capture does it.
        """
        x = torch.zeros(1, device=self.device)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            x.zero_()

    def capture_both(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any]
    ) -> tuple[Callable[[], None], Any, Callable[[], None], Any]:
        """`capture` of a forward, and of a backward that gets its outputs."""
        replay, outputs = self.capture(forward)
        return replay, outputs, *self.capture(lambda: backward(outputs))


def supports(tensor: Tensor) -> bool:
    """Whether calls with tensors on this device can run as graphs."""
    return tensor.is_cuda


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
        self._graphs: OrderedDict[tuple[Hashable, Bucket], _Graph] = OrderedDict()
        # what is computed, and the bucket if there was no memory for it → the state of the module, None for any state,
        # and the reason
        self._refused: dict[tuple[Hashable, Bucket | None], tuple[ModuleState | None, str]] = {}
        # id of a module, and if gradients are computed → the module and its state; not a global table, in which no
        # module would be freed
        self._states: dict[tuple[int, bool], tuple[weakref.ref[nn.Module], ModuleState]] = {}
        # device, and id of the module for slots with gradients → the module and its slots
        self._slots: dict[tuple[torch.device, int | None], tuple[weakref.ref[nn.Module], list[Slot]]] = {}
        self._lock = threading.RLock()

    @classmethod
    def of_option(cls, cuda_graphs: CudaGraphs) -> CapturedCalls | None:
        """The graphs for this value of the option `cuda_graphs`, or None for False."""
        if not isinstance(cuda_graphs, bool) and cuda_graphs != "training":
            raise ValueError(f'cuda_graphs must be True, False or "training", got {cuda_graphs!r}.')
        return cls(cuda_graphs == "training") if cuda_graphs else None

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedCalls, (self.training,)  # graphs can't be copied

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def memory(self) -> int:
        """The bytes of the inputs and outputs of all graphs. They share the memory for what is computed between."""
        with self._lock:
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
            self._refused.clear()
            self._states.clear()
            self._slots.clear()

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
        differentiates = torch.is_grad_enabled() and self._is_differentiable(work)
        with guard():
            kind = _Kind(work, differentiates, self._slot(tensor.device, work.module, differentiates))
            state = self._state_of(work.module, differentiates)
            graph = None if state is None or not state.has_its_tensors else self._find(kind, sizes, state)
            if graph is not None and state is not None:
                # The rest of the state is compared while the device computes: a stale graph changes nothing.
                results = _replay(graph, kind)
                if not (state.is_current and state.why_not_captured(differentiates) is None):
                    graph = None
            if graph is None:
                graph = self._find_or_add(kind, sizes)
                results = _replay(graph, kind)
            if graph.backward is not None:
                tensors = [*(work.inputs[name] for name in work.differentiable()), *graph.state.differentiable]
                number, token = kind.slot.take()
                read = [(x, version_of(x), x.untyped_storage()) for x in graph.state.tensors()]
                call = Replayed(graph.backward, kind.slot, number, guard, read, [x.shape for x in tensors])
        if graph.backward is not None:
            results = connect(call, token, results, tensors)
        return work.rebuild(graph.value, results)

    @contextmanager
    def _guard(self, device: torch.device) -> Iterator[None]:
        """A context in which one thread at a time uses the graphs of a device."""
        with self._lock, torch.inference_mode(False), torch.no_grad(), _current(device):
            yield

    def _is_differentiable(self, work: Work) -> bool:
        """Whether an input or a parameter requires a gradient."""
        return bool(work.differentiable()) or any(x.requires_grad for x in work.module.parameters())

    def _slot(self, device: torch.device, module: nn.Module, differentiates: bool) -> Slot:
        """A slot that is free. Without gradients, all modules share one."""
        key = device, id(module) if differentiates else None
        reference, slots = self._slots.get(key, (lambda: None, []))
        if not slots or (differentiates and reference() is not module):
            slots = []
            self._slots[key] = weakref.ref(module), slots
        free = next((slot for slot in slots if slot.is_free), None)
        if free is None:
            if len(slots) == SLOTS:
                raise NotCapturedError(f"{SLOTS} earlier calls wait for their backward")
            free = Slot(len(slots), Device(device))
            slots.append(free)
        return free

    def _state_of(self, module: nn.Module, differentiates: bool) -> ModuleState | None:
        """The state of a module in the last capture."""
        reference, state = self._states.get((id(module), differentiates), (lambda: None, None))
        return state if reference() is module else None

    def _find_or_add(self, kind: _Kind, sizes: Bucket) -> _Graph:
        bucket = tuple([one.bucket for one in sizes])
        work, differentiates = kind.work, kind.differentiates
        work.prepare(bucket)
        state = self._state_of(work.module, differentiates)
        if state is None or not state.is_current:
            state = self._renew_state(work.module, differentiates)
        if (reason := state.why_not_captured(differentiates)) is not None:
            raise NotCapturedError(reason)
        return self._find(kind, sizes, state) or self._add(kind, bucket, state)

    def _renew_state(self, module: nn.Module, differentiates: bool) -> ModuleState:
        """The state of a module as it is now. What was kept for an older state is dropped."""
        old = self._state_of(module, differentiates)
        self._drop_freed()
        self._drop(lambda graph: graph.state is old)
        if old is not None:
            self._refused = {key: refusal for key, refusal in self._refused.items() if refusal[0] is not old}
        state = ModuleState(module)
        self._states[id(module), differentiates] = weakref.ref(module), state
        return state

    def _drop_freed(self) -> None:
        """Drop what was kept for modules that were freed, such as copies of a patched model."""
        freed = [key for key, (reference, _) in self._states.items() if reference() is None]
        states = [self._states.pop(key)[1] for key in freed]
        self._drop(lambda graph: any(graph.state is x for x in states))
        self._slots = {
            (device, at): (reference, slots)
            for (device, at), (reference, slots) in self._slots.items()
            if at is None or reference() is not None
        }

    def _drop(self, is_stale: Callable[[_Graph], bool]) -> None:
        if stale := [key for key, graph in self._graphs.items() if is_stale(graph)]:
            self._wait()
            for key in stale:
                del self._graphs[key]

    def _wait(self) -> None:
        for _, slots in self._slots.values():
            for slot in slots:
                slot.device.wait()

    def _find(self, kind: _Kind, sizes: Bucket, state: ModuleState) -> _Graph | None:
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

    def _add(self, kind: _Kind, bucket: Bucket, state: ModuleState) -> _Graph:
        for what in (None, bucket):
            refusal = self._refused.get((kind.of_work, what))
            if refusal is not None and refusal[0] in (None, state):
                raise NotCapturedError(refusal[1])
        try:
            graph = _capture(kind, bucket, state)
        except NotCapturedError as error:
            what = bucket if isinstance(error, _TooLargeError) else None
            in_state = None if isinstance(error, _ChangesItselfError) else state
            self._refused[kind.of_work, what] = in_state, str(error)
            raise
        if not state.is_current:  # the first call of a module may set attributes
            state = self._renew_state(kind.work.module, kind.differentiates)
            graph = replace(graph, state=state)
        self.captured += 1
        self._graphs[kind.of_graph, bucket] = graph
        while len(self._graphs) > 1 and (len(self._graphs) > GRAPHS or self.memory > MEMORY):
            self._wait()
            self._graphs.popitem(last=False)
        return graph


class _Kind:
    """What is computed, with or without gradients, in which slot, and two keys: of this, and of its graphs."""

    def __init__(self, work: Work, differentiates: bool, slot: Slot) -> None:
        self.work, self.differentiates, self.slot = work, differentiates, slot
        self.of_work = (work.key, work.differentiable() if differentiates else None)
        self.of_graph = (*self.of_work, slot.number)


def _replay(graph: _Graph, kind: _Kind) -> list[Tensor]:
    with kind.slot.device.in_order():
        return graph.run(kind.work)


def _current(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _capture(kind: _Kind, bucket: Bucket, state: ModuleState) -> _Graph:
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # cached casts would belong to the graph
    _thread.is_capturing = True
    try:
        # in this thread, for all gradients: see `_alias`
        with (
            _capturing,
            torch.set_grad_enabled(kind.differentiates),
            torch.autograd.set_multithreading_enabled(False),
        ):
            return _Program(kind, bucket, state).capture()
    except torch.OutOfMemoryError as error:
        raise _TooLargeError("there was no memory to capture it") from error
    finally:
        torch.set_autocast_cache_enabled(cached)
        _thread.is_capturing = False


class _Program:
    """What is captured: the work of a call on the tensors of a graph, and its backward.

    Attributes:
        inputs: the inputs of the graph.
        own: the inputs that require a gradient.
        parameters: aliases of the parameters that require a gradient. Autograd would let the stream of a capture wait
            for the stream where the parameters themselves were used first, which ends the capture with an error.
        grads: the gradients of the outputs, which the backward reads; None for an output without gradient.
    """

    def __init__(self, kind: _Kind, bucket: Bucket, state: ModuleState) -> None:
        self.kind, self.bucket, self.state = kind, bucket, state
        shapes = kind.work.shapes(bucket)
        self.inputs = {name: x.new_zeros(shapes[name]) for name, x in kind.work.inputs.items()}
        with torch.no_grad():
            fill(self.inputs, kind.work, {})
        names = kind.work.differentiable() if kind.differentiates else ()
        self.own = [self.inputs[name].requires_grad_() for name in names]
        self.parameters = [_alias(x) for x in state.differentiable] if kind.differentiates else []
        self.grads: Gradients | None = None
        self.reached: list[frozenset[int]] = []

    def forward(self) -> Computed:
        with self.state.replaced(self.parameters) if self.kind.differentiates else nullcontext():
            return self.kind.work.function(dict(self.inputs), self.bucket)

    def backward(self, computed: Computed) -> Gradients:
        """The gradients of the inputs, and those of the parameters, which are in the memory of the slot."""
        outputs = computed.tensors
        if self.grads is None:
            self._begin(outputs)
        grads = cast(Gradients, self.grads)
        found = backward_of(outputs, grads, [*self.own, *self.parameters])
        of_inputs, of_parameters = found[: len(self.own)], found[len(self.own) :]
        shared = self.kind.slot.gradients_like(self.parameters)
        pairs = [(x, y) for x, y in zip(shared, of_parameters, strict=True) if y is not None]
        if pairs:
            torch._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])
        return [*of_inputs, *(None if y is None else x for x, y in zip(shared, of_parameters, strict=True))]

    def _begin(self, outputs: list[Tensor]) -> None:
        """Find on what the outputs depend, and make their gradients."""
        if not any(x.requires_grad for x in outputs):
            raise NotCapturedError("its outputs have no gradients")
        for x in outputs:
            reached = reached_by(x, [*self.own, *self.parameters])
            if reached is None:
                raise NotCapturedError("its outputs have gradients of tensors that are no parameters of the module")
            self.reached.append(reached)
        self.grads = [torch.zeros_like(x, requires_grad=False) if x.requires_grad else None for x in outputs]

    def run(self) -> list[Tensor]:
        """Run the forward and the backward. Returns the tensors that a graph would keep."""
        computed = self.forward()
        if self.kind.differentiates:
            try:
                self.backward(computed)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotCapturedError(f"its backward can't be captured ({str(error).splitlines()[0]})") from error
            if any(x.grad is not None for x in (*self.own, *self.parameters)):
                raise NotCapturedError("its forward runs a backward")
        return [*self.inputs.values(), *computed.tensors, *(x for x in self.grads or () if x is not None)]

    def capture(self) -> _Graph:
        """Run the program, run it again in a mode that finds reads of the host, and capture it."""
        device, before = self.kind.slot.device, Snapshot(self.kind.work.module)
        try:
            with device.on_stream():
                self._try()
        except BaseException:
            before.restore()  # the call runs without a graph
            raise
        backward = None
        if self.kind.differentiates:
            replay, computed, replay_backward, gradients = device.capture_both(self.forward, self.backward)
        else:
            replay, computed = device.capture(self.forward)
        value = pytree.tree_map_only(Tensor, Tensor.detach, computed.value)
        outputs = computed._replace(value=value).tensors
        if self.kind.differentiates:
            kept = self.inputs, outputs, replay
            backward = Backward(replay_backward, cast(Gradients, self.grads), gradients, self.reached, kept)
        return _Graph(self.bucket, self.state, replay, self.inputs, value, outputs, computed.notes, backward)

    def _try(self) -> None:
        """Run the program twice. Raises a NotCapturedError if a replay would not do the same."""
        module = self.kind.work.module
        if _nbytes(*self.run()) > LARGEST:  # compiles what can't be compiled in a mode
            raise _TooLargeError(f"its inputs and outputs take more than {LARGEST / 2**30:g} GiB")
        first, drawn = Snapshot(module), host_random_state()
        with _NoHostReads():
            self.run()
        if not first.is_current:  # replays do not run Python code
            raise _ChangesItselfError("its forward changes attributes or buffers of a module")
        if drawn != host_random_state():
            raise NotCapturedError("its forward draws random numbers on the host")


def host_random_state() -> bytes:
    """The states of the random number generators of Python, NumPy and PyTorch on the host."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))


def _alias(x: Tensor) -> Tensor:
    """A leaf with the same memory. `x` gets the gradients of other threads that use the module during the capture."""
    if isinstance(x, nn.Parameter):
        alias: Tensor = nn.Parameter(x.detach())
        vars(alias).update(vars(x))
    else:
        alias = x.detach().requires_grad_()

    def pass_on(alias: Tensor) -> None:
        if not _thread.is_capturing:  # else the forward runs a backward, which `_Program.run` refuses
            grad, alias.grad = alias.grad, None
            x.backward(grad)

    alias.register_post_accumulate_grad_hook(pass_on)
    return alias


def _nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


_READ_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _NoHostReads(TorchDispatchMode):
    """Raises a `NotCapturedError` if the host reads values of a tensor on a GPU, or shapes depend on them."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that are compiled already run so in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(x, Tensor)]
        on_gpu = any(supports(x) for x in given)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):  # has the tag for masks
            is_read = any(x.dtype in (torch.bool, torch.uint8) for x in pytree.tree_leaves(args[1]) if x is not None)
        else:
            is_read = any(tag in func.tags for tag in _READ_TAGS)
        if on_gpu and is_read:
            raise NotCapturedError(f"its forward reads values on the host ({func})")
        out = func(*args, **(kwargs or {}))
        if on_gpu and isinstance(out, Tensor) and not supports(out) and out.device.type != "meta":
            raise NotCapturedError(f"its forward copies values to the host ({func})")
        return out
