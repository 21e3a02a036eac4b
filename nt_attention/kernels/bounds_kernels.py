"""Triton kernels for layouts whose lengths only the device knows.

Dimensions: B sequences, N rows.
"""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

NAN_BITS = tl.constexpr(0x7FC00000)  # of a float32 NaN


@triton.jit
def _count_invalid(Offsets, num_sequences, max_seqlen, max_tokens, BLOCK: tl.constexpr):
    """The number of sequences whose offsets decrease or exceed a bound, plus 1 if the first offset is not 0."""
    invalid = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_sequences, BLOCK):
        sequence = at + tl.arange(0, BLOCK)
        valid = sequence < num_sequences
        begin = tl.load(Offsets + sequence, mask=valid, other=0).to(tl.int64)
        end = tl.load(Offsets + sequence + 1, mask=valid, other=0).to(tl.int64)
        invalid += ((end < begin) | (end - begin > max_seqlen) | (end > max_tokens)).to(tl.int32)
    return tl.sum(invalid) + (tl.load(Offsets) != 0).to(tl.int32)


@triton.jit
def _store_checked(Offsets, Checked, is_valid, num_sequences, BLOCK: tl.constexpr):
    for at in range(0, num_sequences + 2, BLOCK):
        index = at + tl.arange(0, BLOCK)
        offset = tl.load(Offsets + index, mask=index <= num_sequences, other=0) * is_valid
        fill = (1 - is_valid) * NAN_BITS
        tl.store(Checked + index, tl.where(index > num_sequences, fill, offset), mask=index < num_sequences + 2)


@triton.jit(do_not_specialize=["num_sequences", "max_seqlen", "max_tokens", "max_key_seqlen", "max_key_tokens"])
def check_kernel(
    Offsets, KeyOffsets, Checked, KeyChecked, num_sequences, max_seqlen, max_tokens, max_key_seqlen, max_key_tokens,
    SAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the offsets (B+1,) of both sides, followed by the bits of 0.0.

    If any offset is not valid, write 0 for all of them, followed by the bits of NaN.
    """
    invalid = _count_invalid(Offsets, num_sequences, max_seqlen, max_tokens, BLOCK)
    if not SAME:
        invalid += _count_invalid(KeyOffsets, num_sequences, max_key_seqlen, max_key_tokens, BLOCK)
    is_valid = (invalid == 0).to(tl.int32)
    _store_checked(Offsets, Checked, is_valid, num_sequences, BLOCK)
    if not SAME:
        _store_checked(KeyOffsets, KeyChecked, is_valid, num_sequences, BLOCK)


@triton.jit(do_not_specialize=["num_sequences", "rows", "columns"])
def fill_kernel(Values, Checked, num_sequences, rows, columns, BLOCK: tl.constexpr):
    """Write the float that follows the offsets in `Checked` to the rows of `Values` (N, columns) past the last one."""
    total = tl.load(Checked + num_sequences)
    fill = tl.load(Checked + num_sequences + 1).to(tl.float32, bitcast=True)
    first = total.to(tl.int64) * columns
    last = tl.full([], 1, tl.int64) * rows * columns
    at = first + tl.program_id(0).to(tl.int64) * BLOCK
    while at < last:
        index = at + tl.arange(0, BLOCK)
        tl.store(Values + index, tl.zeros([BLOCK], tl.float32) + fill, mask=index < last)
        at += tl.num_programs(0).to(tl.int64) * BLOCK
