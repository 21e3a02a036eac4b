"""What a CUDA graph computes (`Work`), for which sizes, and how it is captured."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import TorchDispatchMode, copy_each, pytree
from .device import Device, NotCapturedError, supports
from .gradients import OTHER_LEAF, Backward
from .module_state import Snapshot

READ_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
LARGEST = 2 * 2**30  # bytes of the inputs and outputs of a graph: of larger ones, few would fit into memory
_one_at_a_time = threading.Lock()  # only one thread captures
_thread = threading.local()


class ChangesItselfError(NotCapturedError):
    """The forward of a module changes the module, so its state may be another one in each call."""


def is_capturing() -> bool:
    """Whether this thread captures a graph, or runs its work before the capture."""
    return getattr(_thread, "is_capturing", False)


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
    layouts: object


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a structure."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a graph computes.

    Attributes:
        module: the module that is called. If it was changed since the capture, the graph is stale.
        key: everything else on which the graph depends, besides the inputs.
        inputs: the tensors of a call, by name.
        shapes: bucket → the shapes of `inputs` in the graph, which are not smaller.
        zeroed: the names of inputs that are 0 where the call's own tensor is smaller. The others are undefined there.
        function: computes the outputs of the tensors in the graph, for a bucket.
        part: cuts the result of the call out of an output of the graph. Arguments: the output and its form.
        prepare: changes the module before a graph of a bucket is captured.
    """

    module: nn.Module
    key: Hashable
    inputs: Mapping[str, Tensor]
    shapes: Callable[[Bucket], Mapping[str, tuple[int, ...]]]
    zeroed: frozenset[str]
    function: Callable[[dict[str, Tensor], Bucket], Computed]
    part: Callable[[Tensor, Any], Tensor]
    prepare: Callable[[Bucket], None] = lambda bucket: None

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The names of inputs that require a gradient."""
        return tuple([name for name, x in self.inputs.items() if x.requires_grad])


class Graph:
    """A captured graph. `capture` makes it.

    Attributes:
        memory: the bytes of its inputs and outputs. Gradients of parameters belong to the slot.
        backward: None for calls without gradients.
    """

    def __init__(self, work: Work, bucket: Bucket, device: Device, make_backward: Callable[..., Backward] | None):
        shapes = work.shapes(bucket)
        self.bucket, self.device = bucket, device
        self._function = work.function
        self._inputs = {name: x.new_zeros(shapes[name]) for name, x in work.inputs.items()}
        self._fill(work)
        leaves = [self._inputs[name].requires_grad_() for name in work.differentiable] if make_backward else []
        self.backward = make_backward and make_backward(leaves)

    def forward(self) -> Computed:
        """What is captured."""
        with nullcontext() if self.backward is None else self.backward.with_aliases():
            return self._function(dict(self._inputs), self.bucket)

    def try_once(self) -> None:
        """Run the forward and the backward without a graph."""
        computed = self.forward()
        outputs = tensors_of(computed.value)
        if self.backward is not None:
            self.backward.run(outputs)
        elif any(x.requires_grad for x in outputs):
            raise NotCapturedError(OTHER_LEAF)
        copies = 1 if self.backward is None else 2
        self.memory = sum(x.nbytes for x in self._inputs.values()) + copies * sum(x.nbytes for x in outputs)
        if self.memory > LARGEST:
            raise NotCapturedError(f"its inputs and outputs take more than {LARGEST / 2**30:g} GiB")

    def capture(self) -> None:
        """Capture both."""
        self._replay, computed = self.device.capture(self.forward)
        if self.backward is not None:
            self.backward.capture(self.device, tensors_of(computed.value))
        del self._function  # it has the tensors of a call
        leaves, self._structure = pytree.tree_flatten(computed.value)
        self._outputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._forms = computed.forms

    def replay(self, work: Work) -> list[Tensor]:
        """The results of a call: copies of parts of the outputs."""
        with self.device.in_order():
            self._fill(work)
            self._replay()
            parts = self.parts(work, [x for x in self._outputs if isinstance(x, Tensor)])
            return [cast(Tensor, x).clone(memory_format=torch.contiguous_format) for x in parts]

    def _fill(self, work: Work) -> None:
        tensors = [work.inputs[name] for name in self._inputs]  # a call may have them in another order
        parts = [x.detach()[tuple(map(slice, y.shape))] for x, y in zip(self._inputs.values(), tensors, strict=True)]
        for name in work.zeroed:
            if self._inputs[name].shape != work.inputs[name].shape:
                self._inputs[name].zero_()
        copy_each(parts, tensors)

    def parts(self, work: Work, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The parts of the outputs, or of their gradients, that belong to a call."""
        return [None if x is None else work.part(x, form) for x, form in zip(tensors, self._forms, strict=True)]

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        """The structure of the outputs, with these tensors."""
        rest = iter(results)
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._outputs]
        return pytree.tree_unflatten(leaves, self._structure)


def capture(
    work: Work, bucket: Bucket, grad_mode: bool, device: Device, make_backward: Callable[..., Backward] | None
) -> Graph:
    """Run some work twice, to compile it and to find what a replay would not do, and capture it.

    `make_backward` makes its backward of the inputs of the graph that require a gradient; None without gradients.

    Raises:
        NotCapturedError: it can't be captured, or a replay would not compute the same. The module is as it was.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # cached casts would belong to the graph
    _thread.is_capturing = True
    try:
        with _one_at_a_time, torch.autograd.set_multithreading_enabled(False):
            graph, before = Graph(work, bucket, device, make_backward), Snapshot(work.module)
            with torch.set_grad_enabled(grad_mode):
                try:
                    with device.on_stream():
                        _try(work.module, graph.try_once)
                except BaseException:
                    before.restore()  # the call runs without a graph
                    raise
                graph.capture()
            return graph
    except torch.OutOfMemoryError as error:
        raise NotCapturedError("there was no memory to capture it") from error
    finally:
        torch.set_autocast_cache_enabled(cached)
        _thread.is_capturing = False


def _try(module: nn.Module, run: Callable[[], None]) -> None:
    """Run some work twice. Raises a NotCapturedError if a replay would not do the same."""
    run()  # compiles what can't be compiled in a mode, and may set attributes
    before, drawn, watch = Snapshot(module), _host_random_state(), _Watch()
    with watch:
        run()
    if not before.is_current:  # replays do not run Python code
        raise ChangesItselfError("its forward changes attributes or buffers of a module")
    if drawn != _host_random_state():
        raise NotCapturedError("its forward draws random numbers on the host")
    if watch.has_left_tensors():
        raise NotCapturedError("its forward keeps tensors that it computes, such as losses in a list")


def _host_random_state() -> bytes:
    """The states of the random number generators of Python, NumPy and PyTorch on the host."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))


class _Watch(TorchDispatchMode):
    """Finds what a replay would not do: reads of the host, which raise a `NotCapturedError`, and tensors that stay."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that are compiled already run so in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = tensors_of((args, kwargs))
        on_gpu = any(supports(x) for x in arguments)
        is_read = any(tag in func.tags for tag in READ_TAGS)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):  # has the tag for masks
            is_read = any(x.dtype in (torch.bool, torch.uint8) for x in pytree.tree_leaves(args[1]) if x is not None)
        if on_gpu and is_read:
            raise NotCapturedError(f"its forward reads values on the host ({func})")
        out = func(*args, **(kwargs or {}))
        if on_gpu and isinstance(out, Tensor) and not supports(out) and out.device.type != "meta":
            raise NotCapturedError(f"its forward copies values to the host ({func})")
        known = {StorageWeakRef(x.untyped_storage()) for x in arguments}
        made = [StorageWeakRef(x.untyped_storage()) for x in tensors_of(out)]
        self._made += [x for x in made if x not in known]
        return out

    def has_left_tensors(self) -> bool:
        """Whether a tensor that was made exists after the run."""
        if not all(x.expired() for x in self._made):
            gc.collect()
        return not all(x.expired() for x in self._made)
