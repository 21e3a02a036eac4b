"""The private names of torch that this package uses because no public one does the same. No other file has one.

Each name is looked up once, at the import. If a version of torch does not have it, what stands here runs in its place:
something that is right but slower or, where there is no such thing, an object that raises an error when it is used. So
no missing name can break `import nt_attention`.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize


class Missing:
    """Stands for a name that this version of torch does not have. Every use of it raises an error."""

    def __init__(self, path: object, *_: object) -> None:
        self._path = path

    def _fail(self) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no {self._path}, which nt_attention needs for this call: install a version "
            "of torch with which nt_attention is tested (CONTRIBUTING.md)."
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        self._fail()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()

    def __instancecheck__(self, instance: object) -> bool:
        return False


def _find(path: str, instead: Any = None) -> Any:
    """What torch has at `path`; if it has nothing there, `instead` or a `Missing`."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return Missing(path) if instead is None else instead


def _attribute(owner: str, name: str) -> Callable[[Any], Any]:
    """A function that reads an attribute. It is no Python function, because some are read in every call."""
    return Missing(f"{owner}.{name}") if isinstance(_find(f"{owner}.{name}"), Missing) else attrgetter(name)


# Compilers, modes and transforms

_set_strategy = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_FrameExecStrategy = _find("torch._C._dynamo.eval_frame._FrameExecStrategy")
_FrameAction = _find("torch._C._dynamo.eval_frame._FrameAction")
frame_callback = _find("torch._C._dynamo.eval_frame.get_eval_frame_callback", lambda: None)
set_frame_callback = _find("torch._C._dynamo.eval_frame.set_eval_frame", lambda callback: None)


@functools.cache
def _disable() -> Callable[[Any], Any]:
    """`torch.compiler.disable`, if there is a compiler."""
    try:
        torch.compiler.disable(len)
    except (ImportError, AttributeError):  # it does not work without names that this version of torch lacks
        return lambda function: function
    return torch.compiler.disable


def skip_frames(function: Any, *, with_callees: bool) -> Any:
    """`function`, at which torch.compile starts no graph, nor in the functions that it calls if `with_callees`.

    With callees, it is not inlined either. It is `torch.compiler.disable`, but without importing the compiler.
    """
    if any(isinstance(x, Missing) for x in (_set_strategy, _FrameExecStrategy, _FrameAction)):
        return _disable()(function) if with_callees else function
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    _set_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
    if with_callees:
        function._torchdynamo_disable = True
    return function


def constant_in_graphs(function: Any) -> Any:
    """`function`, which torch.compile calls while it traces, and whose result is a constant of the graph.

    It is `torch.compiler.assume_constant_result`, but without importing the compiler.
    """
    function._dynamo_marked_constant = True
    return function


def graph_tracer() -> Any:
    """What of torch.compile traces the current function."""
    return _find("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", lambda: None)()


def graph_break(message: str) -> None:
    """Break the graph of torch.compile here."""
    torch._dynamo.graph_break(msg=message)


def recompile_limit(limit: int) -> Any:
    """A context with another number of programs that torch.compile keeps for a function."""
    return torch._dynamo.config.patch(recompile_limit=limit)


FakeTensor = _find("torch._subclasses.fake_tensor.FakeTensor")
TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode")
proxy_mode = _find("torch.fx.experimental.proxy_tensor.get_proxy_mode")
PRE_DISPATCH = _find("torch._C.DispatchKey.PreDispatch")
is_dispatched = _find("torch._C._dispatch_tls_is_dispatch_key_included")
count_dispatch_modes = _find("torch._C._len_torch_dispatch_stack", lambda: 1)  # what runs in a mode is always right
dispatch_modes = _find("torch.utils._python_dispatch._get_current_dispatch_mode_stack", list)
without_dispatch_modes = _find("torch.utils._python_dispatch._disable_current_modes")
is_transformed = _find("torch._C._are_functorch_transforms_active")
without_transforms = _find("torch._C._DisableFuncTorch")
without_torch_function = _find("torch._C.DisableTorchFunctionSubclass")
is_legacy_mapped = _find("torch._C._functorch.is_legacy_batchedtensor", lambda tensor: False)
unwrapped = functools.partial(torch.func.debug_unwrap, recurse=False)
pytree = _find("torch.utils._pytree")
is_jit_tracing = _find("torch.jit.is_tracing")
transforms = _find("torch._C._functorch.get_interpreter_stack", lambda: None)  # those of torch.func that are active
is_any_autocast_enabled = _find("torch._C._is_any_autocast_enabled", lambda: True)


# Autograd


@contextlib.contextmanager
def recording_in_operators() -> Iterator[None]:
    """A context for an operator in which autograd records operations with `enable_grad`. In others it does not.

    Some backends, such as the reference, have no kernel for the backward, and are differentiated by autograd.
    """
    exclude = _find("torch._C._dispatch_tls_set_dispatch_key_excluded")
    with torch.no_grad(), _find("torch._C._PreserveDispatchKeyGuard")():
        for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
            exclude(getattr(torch._C.DispatchKey, name), False)
        yield


# The level of forward-mode AD, -1 if it is not active. Not a Python function: it is asked in every call.
forward_ad_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level", -1)
backward_id: Callable[[], int] = _find("torch._C._current_graph_task_id")  # -1 outside of a backward
saved_tensors_hooks = _find("torch._C._autograd._top_saved_tensors_default_hooks")


def caches_parametrizations() -> bool:
    """Whether the values of parametrizations are cached now."""
    return getattr(parametrize, "_cache_enabled", 0) > 0


# Tensors

version_of = _attribute("torch.Tensor", "_version")  # how often a tensor was changed in place
base_of = _attribute("torch.Tensor", "_base")  # the tensor of which it is a view
backward_hooks_of_tensor = _attribute("torch.Tensor", "_backward_hooks")
make_wrapper = _find("torch.Tensor._make_wrapper_subclass")
to_copy: Any = _find("torch.ops.aten._to_copy")  # what converts a tensor to another dtype or device
disabled_torch_function = _find("torch._C._disabled_torch_function_impl")  # of tensor classes that only dispatch
is_output_of_cuda_graph: Callable[[Tensor], bool] = _find(  # of torch.compile, which replays it without a new version
    "torch._C._is_cached_tensor", lambda tensor: tensor.is_cuda
)
end_pool = _find("torch._C._cuda_endAllocateToPool", lambda device, pool: None)
sleep_on_device = _find("torch.cuda._sleep", lambda cycles: None)


def _copy_each(to: list[Tensor], of: list[Tensor]) -> None:
    for x, y in zip(to, of, strict=True):
        x.copy_(y)


copy_each: Callable[[list[Tensor], list[Tensor]], Any] = _find("torch._foreach_copy_", _copy_each)
relu_of_addmm: Callable[[Tensor, Tensor, Tensor], Tensor] = _find(
    "torch._addmm_activation", lambda bias, x, weight: torch.addmm(bias, x, weight).relu_()
)

# NestedTensors with the layout torch.jagged

NestedTensor = _find("torch.nested._internal.nested_tensor.NestedTensor")
# What `torch.nested.nested_tensor_from_jagged` calls. That function first asks whether torch.fx traces, and this logs a
# warning in every program.
nested_from_jagged: Callable[..., Tensor] = _find(
    "torch.nested._internal.nested_tensor.nested_view_from_values_offsets_lengths",
    torch.nested.nested_tensor_from_jagged,
)
nested_values_of = attrgetter("_values")  # without autograd
extremes_of = attrgetter("_metadata_cache")  # the shortest and longest length, as the sizes of empty tensors


def ragged_dim_of(nested: Any) -> int:
    """The ragged dimension. A function, because torch.compile does not support `attrgetter`."""
    return nested._ragged_idx


def extremes_in_graph(nested: Any) -> tuple[int | None, int | None]:
    """The shortest and longest length, if known, in a graph of torch.compile."""
    return nested._maybe_min_seqlen, nested._maybe_max_seqlen


def make_nested(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged_dim: int, extremes: Mapping[str, Tensor]
) -> Tensor:
    """A NestedTensor of its parts, without autograd."""
    with without_torch_function():
        nested: Any = NestedTensor(values, offsets, lengths=lengths, _ragged_idx=ragged_dim)
        nested._metadata_cache = dict(extremes)
    return nested


def share_version_counter(base: Tensor, alias: Tensor) -> Tensor:
    """Set the version counter of `alias`, which shares the memory of `base`, to that of `base`, and return `alias`.

    The result of `detach` has the counter of its input. So `base.detach()` is called here in a mode in which it returns
    `alias`. Inference tensors have no counter.
    """
    if alias.is_inference():
        return alias
    with _ReturnInstead(alias):
        return base.detach()


class _ReturnInstead(TorchDispatchMode):  # type: ignore[misc, valid-type]
    """A dispatch mode under which every operator returns one tensor."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return self.result


# Operators

flash_forward = _find("torch.ops.aten._flash_attention_forward")
flash_backward = _find("torch.ops.aten._flash_attention_backward")
efficient_forward = _find("torch.ops.aten._efficient_attention_forward")
efficient_backward = _find("torch.ops.aten._efficient_attention_backward")
cpu_flash_forward = _find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
cpu_flash_backward = _find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
# Operators that `torch_registry` replaces, by the names of its functions. The third is newer than torch 2.11.
FLASH_OPERATORS = {
    "forward": "_flash_attention_forward",
    "backward": "_flash_attention_backward",
    "forward_into": "_flash_attention_forward_no_dropout_inplace",
    "sdpa_forward": "_scaled_dot_product_flash_attention",
    "sdpa_backward": "_scaled_dot_product_flash_attention_backward",
}
schema_of = attrgetter("_schema")  # of an operator


# Modules

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")  # with None, and each twice
PARAMETERS = "_parameters"
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")


HOOKS = frozenset(name for name in vars(nn.Module()) if re.fullmatch("_(forward|backward)_(pre_)?hooks", name))


def _hooks(direction: str, number: int = 2) -> Callable[[nn.Module], tuple[dict[int, Any], ...]]:
    """A function that gives a module's hooks of its forward or of its backward, and those before it."""
    names = [name for name in vars(nn.Module()) if re.fullmatch(f"_{direction}_(pre_)?hooks", name)]
    return attrgetter(*names) if len(names) == number else Missing(f"hooks of the {direction} of a module")


forward_hooks_of, backward_hooks_of, hooks_of = _hooks("forward"), _hooks("backward"), _hooks("(forward|backward)", 4)
SAME_DIMS = "_qkv_same_embed_dim"  # of nn.MultiheadAttention: whether it has one weight for query, key and value
REPLICATE = "_replicate_for_data_parallel"  # the method that makes a replica for DataParallel
PREPARE_SCRIPT = "__prepare_scriptable__"  # the method that gives what torch.jit.script compiles


def set_buffers(module: nn.Module, table: Mapping[str, Tensor | None]) -> None:
    """Give a module another table of buffers."""
    vars(module)["_buffers"] = dict(table)


def has_hooks_of_all_modules() -> bool:
    """Whether there are hooks that run for every module of the process."""
    tables = vars(nn.modules.module).items()
    return any(table for name, table in tables if name.startswith("_global_") and name.endswith("_hooks"))


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_replica(module: nn.Module) -> bool:
    """Whether a module is a replica of DataParallel, which makes a new one for each call."""
    return "_is_replica" in vars(module)


def inside_compiled(module: Any) -> Any:
    """The module inside of what `torch.compile(module)` returns; another module itself."""
    return getattr(module, "_orig_mod", module)
