"""CUDA graphs of the calls of a module: captured when a bucket of sizes is first met, and then replayed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks_of_all_modules
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

GRAPHS, MEMORY = 128, 8 * 2**30  # the most graphs of a handle, and bytes of their inputs and outputs
LARGEST = 2**30  # bytes of the inputs and outputs of a graph: with larger ones, few graphs would fit into `MEMORY`
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


def check_call(module: nn.Module, tensor: Tensor) -> None:
    """Check what does not depend on the values of a call.

    Args:
        module: the module that is called.
        tensor: its input.

    Raises:
        NotCapturedError: the call can't run as a graph.
    """
    if not supports(tensor):
        raise NotCapturedError("the inputs are not on a CUDA device")
    if torch.is_grad_enabled():
        raise NotCapturedError("gradients are enabled: use torch.no_grad() or torch.inference_mode()")
    if module.training:
        raise NotCapturedError("the module is in training mode")
    if getattr(module, "_is_replica", False):  # a new module in each call
        raise NotCapturedError("the module is a replica of DataParallel")
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        raise NotCapturedError("a dispatch mode or a transform is active")
    if hooks_of_all_modules._global_forward_hooks or hooks_of_all_modules._global_forward_pre_hooks:
        raise NotCapturedError("there are global forward hooks")


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
        prepare: changes the module before a graph of a bucket is captured.
    """

    module: nn.Module
    key: Hashable
    inputs: Mapping[str, Tensor]
    shapes: Callable[[Bucket], Mapping[str, tuple[int, ...]]]
    zeroed: frozenset[str]
    function: Callable[[dict[str, Tensor], Bucket], Any]
    prepare: Callable[[Bucket], None] = lambda bucket: None


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured graph, and the tensors that it reads and writes."""

    bucket: Bucket
    state: ModuleState
    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    outputs: Any
    _parts: dict[tuple[torch.Size, ...], list[Tensor]] = field(default_factory=dict)

    def fill(self, given: Mapping[str, Tensor], zeroed: frozenset[str]) -> None:
        """Copy the tensors of a call to those of the graph, which are not smaller. For `zeroed` see `Work`."""
        tensors = [given[name] for name in self.inputs]  # a call may have them in another order
        shapes = tuple([x.shape for x in tensors])
        parts = self._parts.get(shapes)
        if parts is None:
            if len(self._parts) >= 64:
                self._parts.clear()
            parts = [x[tuple(map(slice, shape))] for x, shape in zip(self.inputs.values(), shapes, strict=True)]
            self._parts[shapes] = parts
        for name in zeroed:
            if self.inputs[name].shape != given[name].shape:
                self.inputs[name].zero_()
        torch._foreach_copy_(parts, tensors)

    @property
    def memory(self) -> int:
        return _nbytes(self.inputs, self.outputs)


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
            if isinstance(error, torch.OutOfMemoryError):
                raise
            cause = error.__context__ or error  # the error at the end of a capture hides the first one
            raise NotCapturedError(f"a CUDA graph can't be captured: {str(cause).splitlines()[0]}") from error
        return graph.replay, outputs


def supports(tensor: Tensor) -> bool:
    """Whether calls with tensors on this device can run as graphs."""
    return tensor.is_cuda


class CapturedCalls:
    """The CUDA graphs of a patched model or a module, the least recently used first.

    Attributes:
        calls: reason → the number of packed calls that did not run as a graph for this reason. The key None counts
            those that did.
        captured: the number of captures.
    """

    def __init__(self) -> None:
        self.calls: Counter[str | None] = Counter()
        self.captured = 0
        self._graphs: OrderedDict[tuple[Hashable, Bucket], _Graph] = OrderedDict()
        # key of the work, and the bucket if there was no memory for it → the state of the module, None for any state,
        # and the reason
        self._refused: dict[tuple[Hashable, Bucket | None], tuple[ModuleState | None, str]] = {}
        # id of a module → the module and its state; not a global table, in which no module would be freed
        self._states: dict[int, tuple[weakref.ref[nn.Module], ModuleState]] = {}
        self._devices: dict[torch.device, Device] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedCalls, ()  # graphs can't be copied

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

    def count(self, reason: str | None) -> None:
        with self._lock:
            self.calls[reason] += 1

    def run(self, work: Work, sizes: Bucket, finish: Callable[[Any, Bucket], Any]) -> Any:
        """Replay the graph of a call, which is captured first if there is none or it is stale.

        Args:
            work: what is computed.
            sizes: the sizes of the call.
            finish: makes the call's results of the outputs. They must not share memory with the outputs.

        Raises:
            NotCapturedError: this work can't be captured.
        """
        tensor = next(iter(work.inputs.values()))
        with self._lock, torch.inference_mode(False), torch.no_grad(), _current(tensor.device):
            device = self._devices.get(tensor.device)
            if device is None:
                device = self._devices[tensor.device] = Device(tensor.device)
            state = self._state_of(work.module)
            graph = None if state is None or not state.has_its_tensors else self._find(work, sizes, state)
            if graph is not None and state is not None:
                # The rest of the state is compared while the device computes: a stale graph changes nothing.
                out = _replay(graph, work, device, finish)
                if state.is_current and state.reason is None:
                    return out
            return _replay(self._find_or_add(work, sizes, device), work, device, finish)

    def _state_of(self, module: nn.Module) -> ModuleState | None:
        """The state of a module in the last capture."""
        reference, state = self._states.get(id(module), (lambda: None, None))
        return state if reference() is module else None

    def _find_or_add(self, work: Work, sizes: Bucket, device: Device) -> _Graph:
        bucket = tuple([one.bucket for one in sizes])
        work.prepare(bucket)
        state = self._state_of(work.module)
        if state is None or not state.is_current:
            state = self._renew_state(work.module)
        if (reason := state.reason) is not None:
            raise NotCapturedError(reason)
        return self._find(work, sizes, state) or self._add(work, bucket, device, state)

    def _renew_state(self, module: nn.Module) -> ModuleState:
        """The state of a module as it is now. What was kept for an older state is dropped."""
        old = self._state_of(module)
        if stale := [key for key, graph in self._graphs.items() if graph.state is old]:
            self._wait()
            for key in stale:
                del self._graphs[key]
        if old is not None:
            self._refused = {key: refusal for key, refusal in self._refused.items() if refusal[0] is not old}
        state = ModuleState(module)
        self._states[id(module)] = weakref.ref(module), state
        return state

    def _wait(self) -> None:
        for device in self._devices.values():
            device.wait()

    def _find(self, work: Work, sizes: Bucket, state: ModuleState) -> _Graph | None:
        """The graph of the bucket of these sizes, or else the smallest other one that fits."""
        graph = self._graphs.get((work.key, tuple([one.bucket for one in sizes])))
        if graph is None or graph.state is not state:
            others = [
                other
                for (key, bucket), other in self._graphs.items()
                if other.state is state
                and key == work.key
                and all(one.fit(its) for one, its in zip(sizes, bucket, strict=True))
            ]
            graph = min(others, key=lambda other: [one.tokens for one in other.bucket], default=None)
        if graph is not None:
            self._graphs.move_to_end((work.key, graph.bucket))
        return graph

    def _add(self, work: Work, bucket: Bucket, device: Device, state: ModuleState) -> _Graph:
        for what in (None, bucket):
            refusal = self._refused.get((work.key, what))
            if refusal is not None and refusal[0] in (None, state):
                raise NotCapturedError(refusal[1])
        try:
            graph = _capture(work, bucket, device, state)
        except NotCapturedError as error:
            what = bucket if isinstance(error, _TooLargeError) else None
            in_state = None if isinstance(error, _ChangesItselfError) else state
            self._refused[work.key, what] = in_state, str(error)
            raise
        if not state.is_current:  # the first call of a module may set attributes
            state = self._renew_state(work.module)
            graph = replace(graph, state=state)
        self.captured += 1
        self._graphs[work.key, bucket] = graph
        while len(self._graphs) > 1 and (len(self._graphs) > GRAPHS or self.memory > MEMORY):
            self._wait()
            self._graphs.popitem(last=False)
        return graph


def _replay(graph: _Graph, work: Work, device: Device, finish: Callable[[Any, Bucket], Any]) -> Any:
    with device.in_order():
        graph.fill(work.inputs, work.zeroed)
        graph.replay()
        return finish(graph.outputs, graph.bucket)


def _current(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _capture(work: Work, bucket: Bucket, device: Device, state: ModuleState) -> _Graph:
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # cached casts would belong to the graph
    _thread.is_capturing = True
    try:
        with _capturing:
            shapes = work.shapes(bucket)
            given = {name: x.new_zeros(shapes[name]) for name, x in work.inputs.items()}
            graph = _Graph(bucket, state, lambda: None, given, None)
            graph.fill(work.inputs, work.zeroed)
            with device.on_stream():
                outputs = work.function(dict(given), bucket)  # compiles what can't be compiled in a mode
                if _nbytes(given, outputs) > LARGEST:
                    raise _TooLargeError(f"its inputs and outputs take more than {LARGEST / 2**30:g} GiB")
                del outputs
                first = ModuleState(work.module)
                with _NoHostReads():
                    work.function(dict(given), bucket)
                if not first.is_unchanged:  # replays do not run Python code
                    raise _ChangesItselfError("its forward changes attributes or buffers of a module")
            replay, outputs = device.capture(lambda: work.function(dict(given), bucket))
    except torch.OutOfMemoryError as error:
        raise _TooLargeError("there was no memory to capture it") from error
    finally:
        torch.set_autocast_cache_enabled(cached)
        _thread.is_capturing = False
    return replace(graph, replay=replay, outputs=outputs)


def _nbytes(inputs: Mapping[str, Tensor], outputs: Any) -> int:
    return sum(x.nbytes for x in (*inputs.values(), *pytree.tree_leaves(outputs)) if isinstance(x, Tensor))


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


# Modules whose forward hooks may run while a graph is captured: they only collect tensors that are then returned.
_HOOKS = {"transformers.utils.output_capturing"}


class ModuleState:
    """What a captured graph of a module depends on, compared in about 0.3 µs for each module and parameter.

    This is every attribute of every module in it, by identity: parameters, buffers, child modules, hooks, options, the
    training mode and replaced forwards. Changes inside of other objects, such as a config, are not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._attributes = [vars(x) for x in modules]
        self._children = [x._modules for x in modules]
        self._tables: list[dict[str, Any]] = [table for x in modules for table in (x._parameters, x._buffers)]
        self._hooks = [table for x in modules for table in (x._forward_hooks, x._forward_pre_hooks)]
        self._adapters: list[Any] = [x for x in modules if hasattr(x, "merged_adapters")]
        # tensors that are neither parameters nor buffers
        self._others = [(own, name) for own in self._attributes for name, x in own.items() if isinstance(x, Tensor)]
        tensors = self._tensors()
        self._objects, self._values = list(self._read_objects()), self._read_values()
        # what is compared before a replay, without empty dictionaries, which take half of the time
        self._parents = [x for x in self._children if x]
        self._owners = [x for x in self._tables if x]
        self._before_replay = self._read_before_replay()
        self._versions = [None if x.is_inference() else x._version for x in tensors]
        kinds = set(map(type, tensors))
        other = next((kind for kind in kinds if kind not in (Tensor, nn.Parameter)), None)
        self._kind = None if other is None else f"its parameters are {other.__name__}s"
        if len({x.device for x in tensors if x.is_cuda}) > 1:
            self._kind = "its parameters are on several devices"
        self._storages = [] if other else [StorageWeakRef(x.untyped_storage()) for x in tensors]
        self._addresses = [x.cdata for x in self._storages]  # of the weak references

    def _tensors(self) -> list[Tensor]:
        registered = [x for x in chain.from_iterable(map(dict.values, self._tables)) if x is not None]
        return registered + [x for own, name in self._others if isinstance(x := own.get(name), Tensor)]

    def _read_before_replay(self) -> tuple[list[Any], list[int]]:
        addresses = [x.data_ptr() for owner in self._owners for x in owner.values() if x is not None]
        return list(map(id, chain(*map(dict.values, self._parents)))), addresses

    def _read_objects(self) -> Iterator[Any]:
        """What is compared by identity, and the end. Registered tensors are not kept, so they can be freed."""
        return chain(*map(dict.values, self._attributes), *map(dict.values, self._children), (_END,))

    def _read_values(self) -> tuple[list[Any], ...]:
        """What is compared by value."""
        tensors = self._tensors()
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.stride, tensors)),
            [(x.dtype, x.shape) for x in tensors],
            [[getattr(x, name, None) for name in _OF_ADAPTERS] for x in self._adapters],
            [dict(getattr(x, "scaling", {})) for x in self._adapters],
        )

    @property
    def has_its_tensors(self) -> bool:
        """Whether the module has the same parts, and its tensors are in the same memory.

        If not, no graph may run: the memory may have been freed, or a table may have too few rows for the inputs. Takes
        about 0.1 µs for each module and tensor. Children are kept by `_objects`, so their ids stay unique.
        """
        was_freed = any(map(torch.UntypedStorage._expired, self._addresses))
        return not was_freed and self._read_before_replay() == self._before_replay

    @property
    def is_current(self) -> bool:
        """Whether the module is as it was. The values of tensors may be others."""
        return all(map(is_, self._read_objects(), self._objects)) and self._read_values() == self._values

    @property
    def is_unchanged(self) -> bool:
        """Whether the module is as it was, with the same values of tensors."""
        return self.is_current and self._versions == [None if x.is_inference() else x._version for x in self._tensors()]

    @property
    def reason(self) -> str | None:
        """Why the module can't be captured, or None."""
        hooks = chain.from_iterable(table.values() for table in self._hooks if table)
        if any(getattr(hook, "__module__", "") not in _HOOKS for hook in hooks):
            return "a module has forward hooks"
        return self._kind


_END = object()
_OF_ADAPTERS = ("merged", "disable_adapters", "active_adapters")  # of PEFT, computed from other objects
