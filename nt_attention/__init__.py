"""The attention layer for ragged batches: nested, packed and padded tensors through one padding-free path."""

from .functional import explain, varlen_attention
from .kernels.select import available_backends, use_backend
from .layout import SequenceLayout

__version__ = "0.1.0"
__all__ = ["SequenceLayout", "available_backends", "explain", "use_backend", "varlen_attention"]
