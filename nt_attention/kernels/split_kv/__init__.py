"""The backend `split_kv`: attention of few queries over many keys, in pools or packed; see `triton_kernels.py`."""

from .backend import BACKEND as BACKEND
