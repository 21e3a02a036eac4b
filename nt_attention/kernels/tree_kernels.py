"""The Triton kernel that joins two results of attention over parts of the keys.

Dimensions: T rows, H heads, D head dim of values.
"""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

from .triton_functions import INF


@triton.jit(do_not_specialize=["rows"])
def join_kernel(
    Out, Lse, More, MoreLse, rows, out_row, more_row,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join BLOCK rows of one head of `More` (T, H, D) to `Out`, in place. `Lse` and `MoreLse` are (H, T).

    Blocks that see none of the keys of `More` are not read.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = head.to(tl.int64) * rows + row
    lse = tl.load(Lse + at, mask=row < rows, other=-INF)
    more_lse = tl.load(MoreLse + at, mask=row < rows, other=-INF)
    if tl.max((more_lse != -INF).to(tl.int32)) > 0:
        highest = tl.maximum(lse, more_lse)
        finite = tl.where(highest == -INF, 0.0, highest)
        weight = tl.exp(lse - finite)
        more_weight = tl.exp(more_lse - finite)
        total = weight + more_weight
        safe = tl.where(total == 0.0, 1.0, total)
        columns = tl.arange(0, BLOCK_D)
        valid = (row < rows)[:, None] & (columns < DIM)[None, :]
        far = row.to(tl.int64)[:, None]
        target = Out + far * out_row + head * DIM + columns[None, :]
        out = tl.load(target, mask=valid, other=0.0).to(Lse.dtype.element_ty)
        more = tl.load(More + far * more_row + head * DIM + columns[None, :], mask=valid, other=0.0).to(
            Lse.dtype.element_ty
        )
        joined = out * (weight / safe)[:, None] + more * (more_weight / safe)[:, None]
        tl.store(target, joined.to(Out.dtype.element_ty), mask=valid)
        tl.store(Lse + at, tl.where(total == 0.0, -INF, finite + tl.log(safe)), mask=row < rows)
