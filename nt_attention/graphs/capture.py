"""What a CUDA graph computes (`Work`), for which sizes, and the graph of it (`Captured`)."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import TorchDispatchMode, copy_each, pytree
from .device import NotCapturedError, Slot, supports
from .gradients import OTHER_LEAF, Backward, Gradients, alias, first_part
from .module_state import ModuleState, Snapshot
from .policy import Times

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
    """The sizes of one side of a ragged batch, or of its bucket. `longest` is the longest length, or a bound of it."""

    sequences: int
    longest: int
    tokens: int

    @property
    def bucket(self) -> Sizes:
        """Sequences and lengths are rounded up to powers of two, tokens to one of eight numbers between two of them."""
        sequences, longest = (1 << (x - 1).bit_length() for x in (self.sequences, self.longest))
        return Sizes(sequences, max(16, longest), -(-self.tokens // self._step) * self._step)

    @property
    def _step(self) -> int:
        return max(64, 1 << max(0, (self.tokens - 1).bit_length() - 4))

    def fit(self, graph: Sizes, more: float = 0.0) -> bool:
        """Whether the graph of another bucket can run these sizes, with at most a step or this share of more tokens."""
        bucket = self.bucket
        tokens = bucket.tokens + max(self._step, int(more * bucket.tokens))
        most = max(16, 4 * bucket.sequences), max(128, 4 * bucket.longest), max(512, tokens)
        return all(size <= other <= limit for size, other, limit in zip(self, graph, most, strict=True))


Bucket = tuple[Sizes, ...]  # one for each side


class Form(NamedTuple):
    """What the first dimensions of an input or output are: the name of a kind in `dims`, and a side of the batch."""

    kind: str
    side: int = 0

    def dims(self, sizes: Bucket) -> tuple[int, ...]:
        """The first dimensions, for these sizes. Those that follow are the same in each call."""
        rows, longest, tokens = sizes[self.side]
        dims = {"padded": (rows, longest), "packed": (1, tokens), "tokens": (tokens,), "rows": (rows,), "other": ()}
        return dims[self.kind]


class Computed(NamedTuple):
    """What the function of a `Work` computed."""

    value: Any  # tensors in a structure
    forms: Sequence[Form]  # of each of them
    layouts: object  # operators of compiled models find layouts by offsets, so these exist until the backward has run


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a structure."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call computes.

    Attributes:
        module: the module that is called. If it was changed since the capture, the graph is stale.
        options: everything else on which the graph depends, besides the inputs and settings of PyTorch.
        inputs: its tensors, by name. In the graph they have the sizes of a bucket, and are 0 where the call has none.
        function: computes the outputs of the tensors in the graph, for a bucket.
        grad: whether gradients are enabled.
    """

    module: nn.Module
    options: Hashable
    sizes: Bucket
    inputs: Mapping[str, Tensor]
    forms: Mapping[str, Form]
    function: Callable[[dict[str, Tensor], Bucket], Computed]
    grad: bool = field(default_factory=torch.is_grad_enabled)

    @functools.cached_property
    def bucket(self) -> Bucket:
        return tuple([one.bucket for one in self.sizes])

    @functools.cached_property
    def differentiable(self) -> tuple[str, ...]:
        """The names of inputs that get a gradient."""
        return tuple([name for name, x in self.inputs.items() if self.grad and x.requires_grad])

    @property
    def key(self) -> Hashable:
        """Everything on which its graphs depend, but the module and settings."""
        named = [(name, self.forms[name], x.dtype, x.device, self.others(name)) for name, x in self.inputs.items()]
        return self.options, frozenset(named), self.grad, self.differentiable

    def others(self, name: str) -> torch.Size:
        """The dimensions of an input that are the same in each call."""
        return self.inputs[name].shape[len(self.forms[name].dims(self.sizes)) :]

    def fits(self, bucket: Bucket, more: float) -> bool:
        """Whether the graph of another bucket can run this, see `Sizes.fit`."""
        return all(one.fit(other, more) for one, other in zip(self.sizes, bucket, strict=True))


class Captured:
    """The graph of a call, and of its backward. `capture` makes it.

    Attributes:
        memory: the bytes of its inputs and outputs. Gradients of parameters belong to the slot.
        backward: None for calls without gradients.
        last_used: the number of calls of the module that were replays, when it was used last.
        times: what a policy knows of its bucket.
    """

    def __init__(self, work: Work, slot: Slot, state: ModuleState | None) -> None:
        """`state`: the module, whose parameters get gradients; None for calls without gradients."""
        self.slot, self.last_used, self.times = slot, 0, Times()
        shapes = {name: (*work.forms[name].dims(work.bucket), *work.others(name)) for name in work.inputs}
        self._inputs = {name: x.new_zeros(shapes[name]) for name, x in work.inputs.items()}
        self._fill(work)
        self.backward: Backward | None = None
        aliases = [] if state is None else [alias(x) for x in state.differentiable]
        if state is not None:
            leaves = [self._inputs[name].requires_grad_() for name in work.differentiable]
            self.backward = Backward(slot, leaves, aliases)

        def forward() -> Computed:
            with nullcontext() if state is None else state.replaced(aliases):
                return work.function(dict(self._inputs), work.bucket)

        self._forward: Callable[[], Computed] | None = forward

    def try_once(self) -> None:
        """Run the forward and the backward without a graph."""
        assert self._forward is not None
        computed = self._forward()
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
        assert self._forward is not None
        self._replay, computed = self.slot.capture(self._forward)
        if self.backward is not None:
            self.backward.capture(self.slot, tensors_of(computed.value))
        self._forward = None  # it has the tensors of a call
        leaves, self._structure = pytree.tree_flatten(computed.value)
        self._outputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._forms = computed.forms

    def replay(self, work: Work) -> list[Tensor]:
        """The results of a call: copies of parts of the outputs."""
        with self.slot.in_order():
            self._fill(work)
            self._replay()
            parts = self.parts(work, [x for x in self._outputs if isinstance(x, Tensor)])
            return [cast(Tensor, x).clone(memory_format=torch.contiguous_format) for x in parts]

    def _fill(self, work: Work) -> None:
        tensors = [work.inputs[name] for name in self._inputs]  # a call may have them in another order
        pairs = list(zip(self._inputs.values(), tensors, strict=True))
        for x, y in pairs:
            if x.shape != y.shape:  # NaN of another batch would spread to the gradients of weights
                x.detach().zero_()
        copy_each([first_part(x.detach(), y.shape) for x, y in pairs], tensors)

    def parts(self, work: Work, tensors: Sequence[Tensor | None]) -> Gradients:
        """The parts of the outputs, or of their gradients, that belong to a call."""
        pairs = zip(tensors, self._forms, strict=True)
        return [None if x is None else first_part(x, form.dims(work.sizes)) for x, form in pairs]

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        """The structure of the outputs, with these tensors."""
        rest = iter(results)
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._outputs]
        return pytree.tree_unflatten(leaves, self._structure)


def capture(work: Work, slot: Slot, state: ModuleState | None) -> Captured:
    """Run some work twice, to compile it and to find what a replay would not do, and capture it.

    Raises:
        NotCapturedError: it can't be captured, or a replay would not compute the same. The module is as it was.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # cached casts would belong to the graph
    _thread.is_capturing = True
    try:
        with _one_at_a_time, torch.autograd.set_multithreading_enabled(False):
            graph, before = Captured(work, slot, state), Snapshot(work.module)
            with torch.set_grad_enabled(work.grad):
                try:
                    with slot.on_stream(), _same_random_numbers():
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
    before, random_state, watch = Snapshot(module), _host_random_state(), _Watch()
    with watch:
        run()
    if not before.is_current:  # replays do not run Python code
        raise ChangesItselfError("its forward changes attributes or buffers of a module")
    if _host_random_state() not in (random_state, _after_unused_numbers(module, random_state)):
        raise NotCapturedError("its forward draws random numbers on the host")
    if watch.has_left_tensors():
        raise NotCapturedError("its forward keeps tensors that it computes, such as losses in a list")


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A context after which the random number generators of the host are as before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _host_random_state() -> tuple[bytes, bytes]:
    """The states of the random number generators of Python and NumPy, and of PyTorch, on the host."""
    return pickle.dumps((random.getstate(), np.random.get_state())), torch.get_rng_state().numpy().tobytes()


def _after_unused_numbers(module: nn.Module, state: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """The state after a number was drawn for each layer that is left out at a rate of 0.

    BART and its like do that in some versions of transformers. The numbers have no effect.
    """
    others, of_torch = state
    layers = [getattr(x, "layers", ()) for x in module.modules() if x.training and vars(x).get("layerdrop") == 0]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
        for _ in range(sum(map(len, layers))):
            torch.rand(())
        return others, torch.get_rng_state().numpy().tobytes()


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
