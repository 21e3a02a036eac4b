"""What a CUDA graph computes (`Work`), for which sizes, and how it is captured."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import TorchDispatchMode, copy_each, pytree
from .device import NotCapturedError, supports
from .gradients import Backward, Gradients, Slot, backward_of, dependencies_of, used_by
from .module_state import ModuleState, Snapshot

LARGEST = 2 * 2**30  # bytes of the inputs and outputs of a graph: of larger ones, few would fit into memory
_one_at_a_time = threading.Lock()  # only one thread captures


class TooLargeError(NotCapturedError):
    """A graph of this bucket would take too much memory. Graphs of smaller ones may not."""


class ChangesItselfError(NotCapturedError):
    """The forward of a module changes the module, so its state is another one in each call."""


class ByChanceError(NotCapturedError):
    """Another thread or another program may be the reason. Another attempt may succeed."""


class NoMemoryError(TooLargeError, ByChanceError):
    """There was not enough memory. There may be enough later."""


class _Thread(threading.local):
    """Whether this thread captures a graph, or runs its work before, and whether that work has run a backward."""

    is_capturing = False
    ran_backward = False


_thread = _Thread()


def is_capturing() -> bool:
    """Whether this thread captures a graph, or runs its work before the capture."""
    return _thread.is_capturing


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
        forms: for each tensor in `value`, what `Work.part` has to know, such as which of its dimensions are padded.
        layouts: what has to exist until the backward has run: operators of compiled models find layouts by offsets.
    """

    value: Any
    forms: Sequence[Any]
    layouts: object = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in `value`."""
        return tensors_of(self.value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a structure."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


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
        part: cuts the result of the call out of an output of the graph. Arguments: the output and its form.
        rebuild: the result of the call. Arguments: what `function` computed, and the tensors of the result.
        prepare: changes the module before a graph of a bucket is captured.
    """

    module: nn.Module
    key: Hashable
    inputs: Mapping[str, Tensor]
    shapes: Callable[[Bucket], Mapping[str, tuple[int, ...]]]
    zeroed: frozenset[str]
    function: Callable[[dict[str, Tensor], Bucket], Computed]
    part: Callable[[Tensor, Any], Tensor]
    rebuild: Callable[[Computed, list[Tensor]], Any]
    prepare: Callable[[Bucket], None] = lambda bucket: None

    @functools.cached_property
    def differentiable(self) -> tuple[str, ...]:
        """The names of inputs that require a gradient."""
        return tuple([name for name, x in self.inputs.items() if x.requires_grad])


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured graph, and the tensors that it reads and writes. `backward` is None for calls without gradients.

    `memory` is the number of bytes of these tensors, without the gradients of parameters, which graphs share.
    """

    bucket: Bucket
    state: ModuleState
    memory: int
    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    computed: Computed
    outputs: list[Tensor]
    backward: Backward | None
    _parts: dict[tuple[torch.Size, ...], list[Tensor]] = field(default_factory=dict)

    def run(self, work: Work) -> list[Tensor]:
        """The results of a call: copies of parts of the outputs."""
        _fill(self.inputs, work, self._parts)
        self.replay()
        parts = self.parts(work, self.outputs)
        return [x.clone(memory_format=torch.contiguous_format) for x in parts if x is not None]

    def parts(self, work: Work, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The parts of the outputs, or of their gradients, that belong to a call."""
        forms = self.computed.forms
        return [None if x is None else work.part(x, form) for x, form in zip(tensors, forms, strict=True)]


def _fill(inputs: dict[str, Tensor], work: Work, cached: dict[tuple[torch.Size, ...], list[Tensor]]) -> None:
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
    copy_each(parts, tensors)


class Kind:
    """What is computed, with or without gradients, in which slot, and two keys: of this, and of its graphs.

    Attributes:
        grad_mode: whether gradients are enabled.
        differentiates: whether an input or a parameter requires a gradient too, so that there is a backward.
    """

    def __init__(self, work: Work, grad_mode: bool, differentiates: bool, slot: Slot) -> None:
        self.work, self.grad_mode, self.differentiates, self.slot = work, grad_mode, differentiates, slot
        self.of_work = (work.key, grad_mode, work.differentiable if differentiates else None)
        self.of_graph = (*self.of_work, slot.number)


def capture(kind: Kind, bucket: Bucket, state: ModuleState) -> Graph:
    """Capture a graph for a bucket of sizes.

    Raises:
        NotCapturedError: it can't be captured, or a replay would not compute the same.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # cached casts would belong to the graph
    _thread.is_capturing = True
    try:
        # in this thread, for all gradients: see `_alias`
        with (
            _one_at_a_time,
            torch.set_grad_enabled(kind.grad_mode),
            torch.autograd.set_multithreading_enabled(False),
        ):
            return _Program(kind, bucket, state).capture()
    except torch.OutOfMemoryError as error:
        raise NoMemoryError("there was no memory to capture it") from error
    finally:
        torch.set_autocast_cache_enabled(cached)
        _thread.is_capturing = False


_OTHER_LEAF = "its outputs have gradients of tensors that are no parameters of the module"


class _Program:
    """What is captured: the work of a call on the tensors of a graph, and its backward.

    Attributes:
        inputs: the inputs of the graph.
        own: the inputs that require a gradient.
        parameters: aliases of the parameters that require a gradient. Autograd would let the stream of a capture wait
            for the stream where the parameters themselves were used first, which ends the capture with an error.
        grads: the gradients of the outputs, which the backward reads; None for an output without gradient.
    """

    def __init__(self, kind: Kind, bucket: Bucket, state: ModuleState) -> None:
        self.kind, self.bucket, self.state = kind, bucket, state
        shapes = kind.work.shapes(bucket)
        self.inputs = {name: x.new_zeros(shapes[name]) for name, x in kind.work.inputs.items()}
        with torch.no_grad():
            _fill(self.inputs, kind.work, {})
        names = kind.work.differentiable if kind.differentiates else ()
        self.own = [self.inputs[name].requires_grad_() for name in names]
        self.parameters = [_alias(x) for x in state.differentiable] if kind.differentiates else []
        self.grads: Gradients | None = None
        self.depends_on: list[frozenset[int]] = []
        self.used_by: list[frozenset[int]] = []

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
            copy_each([x for x, _ in pairs], [y for _, y in pairs])
        return [*of_inputs, *(None if y is None else x for x, y in zip(shared, of_parameters, strict=True))]

    def _begin(self, outputs: list[Tensor]) -> None:
        """Find on what the outputs depend, and make their gradients."""
        if not any(x.requires_grad for x in outputs):
            raise NotCapturedError("its outputs have no gradients")
        for x in outputs:
            depends_on = dependencies_of(x, [*self.own, *self.parameters])
            if depends_on is None:
                raise NotCapturedError(_OTHER_LEAF)
            self.depends_on.append(depends_on)
        self.used_by = used_by(outputs)
        self.grads = [torch.zeros_like(x, requires_grad=False) if x.requires_grad else None for x in outputs]

    def run(self) -> list[Tensor]:
        """Run the forward and the backward. Returns the tensors that a graph would keep."""
        _thread.ran_backward = False
        computed = self.forward()
        if self.kind.differentiates:
            try:
                self.backward(computed)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotCapturedError(f"its backward can't be captured ({str(error).splitlines()[0]})") from error
            if _thread.ran_backward or any(x.grad is not None for x in self.own):
                raise NotCapturedError("its forward runs a backward")
        elif any(x.requires_grad for x in computed.tensors):
            raise NotCapturedError(_OTHER_LEAF)
        return [*self.inputs.values(), *computed.tensors, *self._grads(), *self.own]

    def _grads(self) -> list[Tensor]:
        return [x for x in self.grads or () if x is not None]

    def capture(self) -> Graph:
        """Run the program, run it again in a mode that finds reads of the host, and capture it."""
        device, before = self.kind.slot.device, Snapshot(self.kind.work.module)
        try:
            with device.on_stream():
                self._try()
        except BaseException:
            before.restore()  # the call runs without a graph
            raise
        backward, of_inputs = None, []
        if self.kind.differentiates:
            replay, computed, replay_backward, gradients = device.capture_both(self.forward, self.backward)
        else:
            replay, computed = device.capture(self.forward)
        computed = Computed(pytree.tree_map_only(Tensor, Tensor.detach, computed.value), computed.forms)
        outputs = computed.tensors
        if self.kind.differentiates:
            kept = self.inputs, outputs, replay
            grads = cast(Gradients, self.grads)
            backward = Backward(replay_backward, grads, gradients, self.depends_on, self.used_by, kept)
            of_inputs = gradients[: len(self.own)]
        memory = _nbytes(*self.inputs.values(), *outputs, *self._grads(), *(x for x in of_inputs if x is not None))
        return Graph(self.bucket, self.state, memory, replay, self.inputs, computed, outputs, backward)

    def _try(self) -> None:
        """Run the program twice. Raises a NotCapturedError if a replay would not do the same."""
        module = self.kind.work.module
        if _nbytes(*self.run()) > LARGEST:  # compiles what can't be compiled in a mode
            raise TooLargeError(f"its inputs and outputs take more than {LARGEST / 2**30:g} GiB")
        first, drawn, watch = Snapshot(module), _host_random_state(), _Watch()
        with watch:
            self.run()
        if not first.is_current:  # replays do not run Python code
            raise ChangesItselfError("its forward changes attributes or buffers of a module")
        if drawn != _host_random_state():
            raise ByChanceError("its forward draws random numbers on the host")
        if watch.has_left_tensors():
            raise NotCapturedError("its forward keeps tensors that it computes, such as losses in a list")


def _host_random_state() -> bytes:
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
        grad, alias.grad = alias.grad, None
        if _thread.is_capturing:
            _thread.ran_backward = True
        else:
            x.backward(grad)

    alias.register_post_accumulate_grad_hook(pass_on)
    return alias


def _nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


_READ_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Watch(TorchDispatchMode):
    """Finds what a replay would not do.

    Raises a `NotCapturedError` if the host reads values of a tensor on a GPU, or shapes depend on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that are compiled already run so in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_of((args, kwargs))
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
        known = {StorageWeakRef(x.untyped_storage()) for x in given}
        self._made += {StorageWeakRef(x.untyped_storage()) for x in tensors_of(out)} - known
        return out

    def has_left_tensors(self) -> bool:
        """Whether a tensor that was made exists after the run."""
        if all(x.expired() for x in self._made):
            return False
        gc.collect()
        return not all(x.expired() for x in self._made)
