"""The Triton kernel of `rows.py`."""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl


@triton.jit
def _gather_columns(
    Out, out_stride, Table, First, first_stride, Second, second_stride, num_rows, num_first, width,
    TERMS: tl.constexpr, HAS_SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows and columns of the keys, or of the values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for term in tl.static_range(TERMS):
        source = tl.load(Table + row * TERMS + term, mask=is_row, other=-1).to(tl.int64)
        is_first = (source >= 0) & (source < num_first)
        at = source[:, None] * first_stride + column[None, :]
        total += tl.load(First + at, mask=is_first[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        if HAS_SECOND:
            at = (source - num_first)[:, None] * second_stride + column[None, :]
            mask = (source >= num_first)[:, None] & is_column[None, :]
            total += tl.load(Second + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        Out + row[:, None] * out_stride + column[None, :], total.to(Out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_first"])
def gather_kernel(
    OutKey, OutValue, FirstKey, FirstValue, Second, Table, num_rows, num_first, key_width, value_width, value_start,
    out_key_stride, out_value_stride, first_key_stride, first_value_stride, second_stride,
    TERMS: tl.constexpr, HAS_SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`RowTable.gather`: a program writes ROWS rows of the keys and of the values, COLUMNS columns each."""
    _gather_columns(
        OutKey, out_key_stride, Table, FirstKey, first_key_stride, Second, second_stride, num_rows, num_first,
        key_width, TERMS, HAS_SECOND, ROWS, COLUMNS,
    )  # fmt: skip
    _gather_columns(
        OutValue + value_start, out_value_stride, Table, FirstValue, first_value_stride, Second + key_width,
        second_stride, num_rows, num_first, value_width, TERMS, HAS_SECOND, ROWS, COLUMNS,
    )  # fmt: skip
