"""Keys that neighboring sequences have in common, such as those of a prompt with several answers.

Sequences are taken in bundles of `BUNDLE` neighbors. The device finds which pages the sequences of a bundle share, so
the host needs neither lengths nor tables.

Dimensions: B sequences, C bundles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionSpec, Call
from ..launch import Launch, launch
from .keys import NO_LIMIT, Keys

BUNDLE = 8
LEAST_SAVED = 1024  # the fewest reads of keys that a bundle saves
# If the keys and values of a batch may have fewer bytes, each sequence reads its own. Two more launches take 9 µs on an
# H100. From here on that is about a twentieth of the call or less, if nothing is shared.
LEAST_BYTES = 2**29
_MOST_ROWS = 16  # of a sequence and a key head: with more, its tiles are full without other sequences
PAGES_AT_ONCE, WARPS = 256, 8  # of `shared_keys_kernel`


class Bundles(NamedTuple):
    """The bundles of a call. All tensors are int64.

    Attributes:
        first_keys: (B,), the number of keys that a sequence shares, or 0.
        offsets: (C+1,), where the queries of bundles begin.
        keys: those that the sequences of a bundle share.
    """

    first_keys: Tensor
    offsets: Tensor
    keys: Keys


def window_of(spec: AttentionSpec) -> tuple[int, int]:
    """The keys that a query sees before and after its own position, as the kernels read them."""
    before, after = (int(min(side, NO_LIMIT)) for side in spec.window)
    return before, after


def rows_of(call: Call) -> int:
    """The most rows of a sequence and a key head: its queries times the query heads of a key head."""
    return call.layout.max_seqlen * call.spec.num_heads // call.spec.num_kv_heads


def can_win(call: Call, keys: Keys) -> bool:
    """Whether shared keys are looked for, by numbers that the host knows.

    All queries of a bundle must see its shared keys, at no particular distance. So there are no ALiBi slopes, and
    windows are open to the left.
    """
    spec, (before, after) = call.spec, window_of(call.spec)
    bytes_of_a_key = spec.num_kv_heads * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
    return (
        keys.page > 0
        and keys.batch_size > 1
        and 0 < rows_of(call) <= _MOST_ROWS
        and keys.batch_size * keys.max_seqlen * bytes_of_a_key >= LEAST_BYTES
        and before >= keys.max_seqlen
        and (spec.lower_right or after == NO_LIMIT)
        and not (spec.batch_invariant or spec.alibi)
    )


def find(call: Call, keys: Keys, offsets: Tensor) -> Bundles:
    """Find what bundles share, by one small kernel.

    Args:
        call: the call.
        keys: in pages.
        offsets: (B+1,), of the queries.
    """
    from . import triton_kernels as kernels

    count = -(-keys.batch_size // BUNDLE)
    width = (keys.batch_size + 2) // 2 * 2  # so that rows are aligned to 16 bytes
    rows = torch.empty(4, width, dtype=torch.int64, device=offsets.device)
    first_keys, bundle_offsets, shared, entries = rows
    integers = (keys.table.stride(0), keys.batch_size, keys.max_seqlen, window_of(call.spec)[1], LEAST_SAVED)
    constants = (keys.page, keys.table_offsets is not None, BUNDLE, PAGES_AT_ONCE)
    tensors = (offsets, keys.lengths)
    launch(
        Launch(kernels.shared_keys_kernel, (count, 1), tensors, integers, (), constants, WARPS, 1),
        (first_keys, bundle_offsets, shared, entries, keys.table, keys.table_offsets),
    )
    of_bundles = Keys(keys.table, entries, shared[:count], keys.page, keys.max_seqlen)
    return Bundles(first_keys, bundle_offsets[: count + 1], of_bundles)
