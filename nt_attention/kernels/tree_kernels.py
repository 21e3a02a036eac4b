"""Triton kernels for sequences that share prefixes.

Dimensions: T rows, H heads, D head dim of values, R copies of rows, C columns of a row.
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
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
        column = head * DIM + columns[None, :]
        target = Out + far * out_row + column
        out = tl.load(target, mask=valid, other=0.0).to(lse.dtype)
        more = tl.load(More + far * more_row + column, mask=valid, other=0.0).to(lse.dtype)
        joined = out * (weight / safe)[:, None] + more * (more_weight / safe)[:, None]
        tl.store(target, joined.to(Out.dtype.element_ty), mask=valid)
        tl.store(Lse + at, tl.where(total == 0.0, -INF, finite + tl.log(safe)), mask=row < rows)


@triton.jit(do_not_specialize=["columns", "rows"])
def add_kernel(Copies, Order, Ends, Sums, columns, rows, BLOCK: tl.constexpr):
    """BLOCK columns of one row of `Sums` (T, C): the sum of its copies, in float32, in the order of `Order` (R,).

    Row t of the first `rows` has the copies Order[Ends[t − 1]] … Order[Ends[t] − 1]. Later rows are 0.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(Ends + row - 1, mask=(row > 0) & (row < rows), other=0)
    end = tl.load(Ends + row, mask=row < rows, other=0)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(begin, end):
        copy = tl.load(Order + at).to(tl.int64)
        total += tl.load(Copies + copy * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    target = Sums + row.to(tl.int64) * columns + column
    tl.store(target, total.to(Sums.dtype.element_ty), mask=column < columns)
