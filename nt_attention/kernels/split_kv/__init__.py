"""The backend `split_kv`: attention of few queries over many keys, in pools or packed; see `triton_kernels.py`."""

from __future__ import annotations

from ..backend import COMMON, Backend, HeadDims, Hooks
from ..triton_support import missing, refuses
from . import launches

BACKEND = Backend(
    name="split_kv",
    about="this library's Triton kernels that split the keys of a sequence (GPU; inference, keys in pools or packed)",
    missing=missing,
    forward=launches.forward,
    features=COMMON | {"scale ≤ 0", "window", "softcap", "alibi", "batch_invariant", "bounds", "paged"},
    dtypes=launches.DTYPES,
    head_dims=HeadDims(576),
    refuses=refuses,
    hooks=Hooks(launches.prepare_forward, paged_forward=launches.paged_forward),
)
