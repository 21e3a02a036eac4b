"""Attention for ragged batches: NestedTensors, packed tensors and padded batches, without computing padding."""

from . import torch_registry
from .functional import explain, varlen_attention
from .kernels.backend import Backend, HeadDims
from .kernels.registry import register_backend
from .kernels.relative import RelativeBias
from .kernels.select import available_backends, use_backend
from .layout import SequenceLayout
from .modules.multihead import VarlenMultiheadAttention
from .modules.rotary import Rotary
from .paged import PagedLayout
from .patching.patch import patch

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "HeadDims",
    "PagedLayout",
    "RelativeBias",
    "Rotary",
    "SequenceLayout",
    "VarlenMultiheadAttention",
    "available_backends",
    "explain",
    "hf",
    "patch",
    "register_backend",
    "use_backend",
    "varlen_attention",
]

if torch_registry.is_supported():
    torch_registry.register()


def __getattr__(name: str) -> object:
    if name == "hf":  # imported on first use, because it imports transformers
        import importlib

        return importlib.import_module(".hf", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
