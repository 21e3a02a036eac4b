"""The mask of a `TreeLayout` for FlashAttention-4, in the language of its kernels."""

# No `from __future__ import annotations`: the compiler of these kernels reads annotations.

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def tree_mask(batch, head, query, key, lengths, tensors):
    """Whether the rows `query` see the rows `key`. The first of `tensors` is `TreeLayout.end` in int32."""
    end = utils.scalar_to_ssa(tensors[0][key[0]], cutlass.Int32)
    return (key <= query) & (end > query)
