"""Attention for ragged batches: NestedTensors, packed tensors and padded batches, without computing padding."""

from typing import TYPE_CHECKING, Any

from . import torch_registry
from ._estimate import Estimate, estimate
from ._patch import NotPackedError, NotPackedWarning, PatchHandle, patch
from ._patch_all import PatchAllHandle, patch_all
from .functional import explain, varlen_attention
from .kernels.backend import Backend, HeadDims
from .kernels.registry import BackendHandle, register_backend
from .kernels.relative import RelativeBias
from .kernels.select import Explanation, SlowBackendWarning, available_backends, use_backend
from .layouts.paged import PagedLayout
from .layouts.protocol import Sharded as _Sharded
from .layouts.sequence import SequenceLayout
from .layouts.tree import TreeLayout
from .modules.multihead import VarlenMultiheadAttention
from .modules.rotary import Rotary
from .patching.handle import Counts

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "BackendHandle",
    "Counts",
    "Estimate",
    "Explanation",
    "HeadDims",
    "NotPackedError",
    "NotPackedWarning",
    "PagedLayout",
    "PatchAllHandle",
    "PatchHandle",
    "RelativeBias",
    "Rotary",
    "SequenceLayout",
    "SlowBackendWarning",
    "TreeLayout",
    "VarlenMultiheadAttention",
    "available_backends",
    "data",
    "distributed",
    "estimate",
    "explain",
    "hf",
    "patch",
    "patch_all",
    "register_backend",
    "use_backend",
    "varlen_attention",
]

if torch_registry.is_supported():
    torch_registry.register()


def _divide(*args: Any, **kwargs: Any) -> Any:
    from .distributed import ShardedLayout  # on first use: its import takes long

    return ShardedLayout(*args, **kwargs)


_Sharded.divide = _divide


if TYPE_CHECKING:
    from . import data, distributed, hf
else:

    def __getattr__(name: str) -> Any:
        if name in ("data", "distributed", "hf"):  # imported on first use: torch.distributed and transformers take long
            import importlib

            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *[name for name in globals() if name.startswith("__")]])
