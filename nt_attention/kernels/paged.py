"""Run calls whose keys are in pools, at the rows of a `PagedLayout`.

Dimensions: B sequences, T query tokens, H query heads, G key heads, D and Dv head dims, N rows of a pool.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import adapters
from .adapters import Tensors
from .backend import Backend
from .call import Call


def forward(backend: Backend, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H). Rows past the layout's total are 0 and −inf.

    Args:
        backend: A backend that supports the call.
        query: (T, H, D).
        key, value: Pools (pages, page size, G, D) or (N, G, D).
        call: The other arguments, with a `PagedLayout` as `key_layout`.
    """
    if not backend.reads_pools(call.spec):
        return _gather_and_forward(backend, query, key, value, call)
    assert backend.hooks.paged_forward is not None
    layout, (rows, heads, _) = call.layout, query.shape
    if not query.numel() or not layout.batch_size:  # kernels can't be launched on empty tensors
        lse = query.new_full((heads, rows), -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32)).T
        return query.new_zeros(rows, heads, value.shape[-1]), lse
    out, lse = backend.hooks.paged_forward(adapters.contiguous_in_head_dim(query)[0], key, value, call)[:2]
    if rows > layout.total:  # kernels do not write these rows
        out[layout.total :] = 0
        lse[layout.total :] = -torch.inf
    return out, lse if lse.T.is_contiguous() else lse.T.contiguous().T


def _gather_and_forward(
    backend: Backend, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """Copy the keys into packed tensors, and run the forward on them. Syncs once."""
    key_layout, (key, value) = call.paged.gather(key, value)
    spec = dataclasses.replace(call.spec, paged=False, keyless=key_layout.min_seqlen == 0)
    call = call._replace(key_layout=key_layout, spec=spec, prepared=None, is_direct=False)  # these are of other lengths
    return adapters.forward(backend, Tensors(query, key, value), call)[:2]
