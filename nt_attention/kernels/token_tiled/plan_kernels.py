"""The Triton kernels that make the tiles of a `BoundedPlan` on the device.

Dimensions: B sequences, N rows of one side, R tiles at most.
"""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

# The kinds of tiles, see `bounded_plan.py`.
FIXED = tl.constexpr(0)
ALIGNED = tl.constexpr(1)
LONG = tl.constexpr(2)
FUSED = tl.constexpr(3)

# Before the tiles come these integers: the number of tiles, and the bits of the float32 to write to rows that belong to
# no sequence. Then the first and the last of these rows, of the side of the tiles, and if FUSED of the keys.
HEADER = tl.constexpr(8)
OWN = tl.constexpr(0)
KEYS = tl.constexpr(1)


@triton.jit
def _fitting(Offsets, sequence, num_sequences, SHARED: tl.constexpr):
    """The largest number of the sequence before which at most SHARED tokens follow the start of `sequence`."""
    limit = tl.load(Offsets + tl.minimum(sequence, num_sequences)) + SHARED
    low = tl.minimum(sequence, num_sequences)
    high = tl.zeros_like(low) + num_sequences
    while tl.max(high - low) > 0:  # Offsets[low] fits
        middle = (low + high + 1) // 2
        fits = tl.load(Offsets + middle) <= limit
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["num_sequences", "steps"])
def runs_kernel(
    Queries, Keys, Ends, Next, IsFirst, num_sequences, steps,
    SAME: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Group neighboring sequences into runs of up to SHARED tokens on each side. One program.

    `Ends` (B,) is the sequence after a run that begins at this sequence. `IsFirst` (B+1,) is 1 for the sequences at
    which a run begins. They are found by following `Next` (2, B+1) from sequence 0, in jumps of 1, 2, 4, … runs.
    """
    size = num_sequences + 1
    for at in range(0, size, BLOCK):
        sequence = at + tl.arange(0, BLOCK)
        end = _fitting(Queries, sequence, num_sequences, SHARED)
        if not SAME:
            end = tl.minimum(end, _fitting(Keys, sequence, num_sequences, SHARED))
        end = tl.minimum(tl.maximum(end, sequence + 1), num_sequences)
        tl.store(Ends + sequence, end, mask=sequence < num_sequences)
        tl.store(Next + sequence, end, mask=sequence < size)
        tl.store(IsFirst + sequence, (sequence == 0).to(tl.int32), mask=sequence < size)
    tl.debug_barrier()
    for step in range(steps):
        now = (step % 2) * size
        then = size - now
        for at in range(0, size, BLOCK):
            sequence = at + tl.arange(0, BLOCK)
            valid = sequence < size
            following = tl.load(Next + now + sequence, mask=valid, other=0)
            is_first = tl.load(IsFirst + sequence, mask=valid, other=0)
            tl.store(IsFirst + following, is_first, mask=is_first > 0)
            tl.store(Next + then + sequence, tl.load(Next + now + following, mask=valid, other=0), mask=valid)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_sequences"])
def count_kernel(
    Offsets, Other, Ends, IsFirst, Before, num_sequences,
    ROWS: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Before` (B+1,), the number of tiles before those of each sequence. One program."""
    total = 0
    for at in range(0, num_sequences, BLOCK):
        sequence = at + tl.arange(0, BLOCK)
        valid = sequence < num_sequences
        after = sequence + 1
        if KIND == FUSED:
            after = tl.load(Ends + sequence, mask=valid, other=0)
        length = tl.load(Offsets + after, mask=valid, other=0) - tl.load(Offsets + sequence, mask=valid, other=0)
        other = tl.load(Other + after, mask=valid, other=0) - tl.load(Other + sequence, mask=valid, other=0)
        is_short = tl.maximum(length, other) <= SHARED
        if KIND == FUSED:
            count = tl.load(IsFirst + sequence, mask=valid, other=0) * is_short.to(tl.int32)
        else:
            count = (length + ROWS - 1) // ROWS
            if KIND == LONG:
                count = tl.where(is_short, 0, count)
        tl.store(Before + sequence, total + tl.cumsum(count, 0) - count, mask=valid)
        total += tl.sum(count)
    tl.store(Before + num_sequences, total)


@triton.jit(do_not_specialize=["num_sequences", "num_tiles", "num_rows", "num_keys"])
def tile_kernel(
    Offsets, Keys, Ends, Before, Tiles, num_sequences, num_tiles, num_rows, num_keys,
    ROWS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK tiles, each begin and end of its rows, and if FUSED also begin and end of its keys; and `HEADER`."""
    COLUMNS: tl.constexpr = 4 if KIND == FUSED else 2
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(Offsets + num_sequences)
    target = Tiles + HEADER + COLUMNS * tile
    if KIND == FIXED:
        used = (total + ROWS - 1) // ROWS
        begin = tile * ROWS
        end = tl.minimum(begin + ROWS, total)
    else:
        used = tl.load(Before + num_sequences)
        low = tl.zeros([BLOCK], tl.int32)
        high = low + num_sequences - 1
        while tl.max(high - low) > 0:  # the last sequence with at most `tile` tiles before it
            middle = (low + high + 1) // 2
            is_at = tl.load(Before + middle) <= tile
            low = tl.where(is_at, middle, low)
            high = tl.where(is_at, high, middle - 1)
        if KIND == FUSED:
            after = tl.load(Ends + low)
            begin = tl.load(Offsets + low)
            end = tl.load(Offsets + after)
            tl.store(target + 2, tl.load(Keys + low), mask=(tile < used) & (tile < num_tiles))
            tl.store(target + 3, tl.load(Keys + after), mask=(tile < used) & (tile < num_tiles))
        else:
            begin = tl.load(Offsets + low) + (tile - tl.load(Before + low)) * ROWS
            end = tl.minimum(begin + ROWS, tl.load(Offsets + low + 1))
    valid = (tile < used) & (tile < num_tiles)
    tl.store(target, begin, mask=valid)
    tl.store(target + 1, end, mask=valid)
    if tl.program_id(0) == 0:
        tl.store(Tiles, used)
        tl.store(Tiles + 1, tl.load(Offsets + num_sequences + 1))
        tl.store(Tiles + 2, num_rows if KIND == LONG else total)
        tl.store(Tiles + 3, num_rows)
        tl.store(Tiles + 4, tl.load(Keys + num_sequences))
        tl.store(Tiles + 5, num_keys)
