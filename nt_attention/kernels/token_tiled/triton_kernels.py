"""The Triton kernels: tiles over packed tokens, not over sequences.

The visible keys of a query are one interval of the packed keys, whatever the sequences, causality and window. The
queries that see a key are one interval of the packed queries. `plan.py` computes both intervals for every token, so the
kernels need no other description of the mask. A tile is a range of rows. Its kernel loops over the union of the rows'
intervals, block by block. It applies a mask only in blocks that are not fully visible to all rows of the tile.

The softmax is that of FlashAttention-2 (Dao 2023), in base 2. Each output row is written by one program only, so
results are bitwise reproducible. Only the gradients of a relative bias are added by atomic operations. Their order is
fixed only if RELATIVE has the flag ORDERED, which is slower.

Dimensions: M query rows of a tile, N key rows of a tile, D and V head dims. Names such as BLOCK_M end with them.
"""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

from ..triton_functions import INF, LOG2E, add_product, filled, row_products, score_factor_of, tanh, times
from .plan_kernels import HEADER, KEYS, OWN

# RELATIVE is a sum of these flags: the biases that are given, whether their gradients are needed, and in a fixed order,
# and whether queries and keys are the same tokens.
BIAS = tl.constexpr(1)
QUERY_BIAS = tl.constexpr(2)
KEY_BIAS = tl.constexpr(4)
BIAS_GRADIENT = tl.constexpr(8)
ORDERED = tl.constexpr(16)
SAME_TOKENS = tl.constexpr(32)
# The gradient of `bias` has this many tables of sums, so that fewer programs wait for each other. If ORDERED, each tile
# has a table of its own.
PARTS = tl.constexpr(16)
# Arguments for whose divisibility no kernels of their own are compiled. The last six describe a relative bias.
UNSPECIALIZED = ["lse_head", "grad_lse_row", "grad_lse_head", "slope_row", "radius", "num_buckets"]
UNSPECIALIZED += ["query_bias_row", "query_bias_head", "key_bias_row", "key_bias_head"]


@triton.jit(do_not_specialize=["num_sequences", "total", "before", "after"])
def interval_kernel(
    Offsets, Other, Lo, Hi, Own, num_sequences, total, before, after, UPPER_LEFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The visible rows of BLOCK tokens of one side, see `plan.Intervals`.

    `Offsets` are those of this side, and `Other` those of the other side. A token sees the rows from `before` rows
    before its own position to `after` rows after it.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = token < total
    low = tl.zeros([BLOCK], tl.int32)
    high = low + num_sequences
    while tl.max(high - low) > 0:
        middle = (low + high) // 2
        is_past = tl.load(Offsets + middle + 1, mask=low < high, other=0) <= token
        high = tl.where(is_past, high, middle)
        low = tl.where(is_past & (low < high), middle + 1, low)
    sequence = low  # the number of sequences that end at the token or before it
    begin = tl.load(Offsets + sequence, mask=valid, other=0)
    lowest = tl.load(Other + sequence, mask=valid, other=0).to(tl.int64)
    highest = tl.load(Other + sequence + 1, mask=valid, other=0).to(tl.int64)
    own = token - begin + lowest
    if not UPPER_LEFT:
        own += highest - lowest - (tl.load(Offsets + sequence + 1, mask=valid, other=0) - begin)
    lo = tl.minimum(tl.maximum(own - before, lowest), highest)
    hi = tl.minimum(tl.maximum(own + after + 1, lowest), highest)
    tl.store(Lo + token, lo.to(tl.int32), mask=valid)
    tl.store(Hi + token, hi.to(tl.int32), mask=valid)
    tl.store(Own + token, own.to(tl.int32), mask=valid)


@triton.jit
def _head_pointer(Base, head, head_stride, UNIT: tl.constexpr, FAR: tl.constexpr):
    """The pointer to the first row of a head. Strides are in units of UNIT, so that Triton knows a divisor of them.

    The offset has 64 bits only if FAR, because it then needs more registers and a third fewer programs fit.
    """
    offset = head * (head_stride * UNIT)
    if FAR:
        offset = tl.full([], UNIT, tl.int64) * head_stride * head
    return Base + offset


@triton.jit
def _row_pointers(
    Base, row_stride, first, last, zero,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK) pointers to the rows from `first`, and a mask: rows before `last`, columns before DIM.

    `zero` is that of `_unknown_zero`, or 0.
    """
    rows = tl.arange(0, ROWS) + zero
    columns = tl.arange(0, BLOCK)
    valid = (first + rows < last)[:, None]
    if BLOCK > DIM:
        valid = valid & (columns < DIM)[None, :]
    row_stride = row_stride * UNIT
    start = Base + (first + tl.full([], 0, tl.int64)) * row_stride
    return start + rows[:, None] * row_stride + columns[None, :], valid


@triton.jit
def _load(
    Base, row_stride, first, last, zero,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK) and (ROWS, REST), the rows of one head from `first`; 0 in rows from `last` and columns from DIM."""
    pointers, valid = _row_pointers(Base, row_stride, first, last, zero, ROWS, DIM, BLOCK, UNIT)
    rest = 0.0
    if REST:
        more, is_valid = _row_pointers(Base + BLOCK, row_stride, first, last, zero, ROWS, DIM - BLOCK, REST, UNIT)
        rest = tl.load(more, mask=is_valid, other=0.0)
    return tl.load(pointers, mask=valid, other=0.0), rest


@triton.jit
def _store(
    Base, row_stride, first, last, x, zero,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store both parts of `x` to the elements that `_load` reads."""
    pointers, valid = _row_pointers(Base, row_stride, first, last, zero, ROWS, DIM, BLOCK, UNIT)
    tl.store(pointers, x[0].to(Base.dtype.element_ty), mask=valid)
    if REST:
        more, is_valid = _row_pointers(Base + BLOCK, row_stride, first, last, zero, ROWS, DIM - BLOCK, REST, UNIT)
        tl.store(more, x[1].to(Base.dtype.element_ty), mask=is_valid)


@triton.jit
def _own_tiles(Tiles, BOUNDED: tl.constexpr):
    """(Tiles, first, last, step): the tiles of this program, and where they begin in memory.

    A program has one tile. If BOUNDED, only the device knows how many tiles there are, and programs share them.
    """
    first = tl.program_id(0)
    last = first + 1
    step = 1
    if BOUNDED:
        last = tl.load(Tiles)
        step = tl.num_programs(0)
        Tiles += HEADER
    return Tiles, first, last, step


@triton.jit
def _unknown_zero(start, BOUNDED: tl.constexpr):
    """0. If BOUNDED, the compiler does not know it, and computes the pointers of each tile anew.

    Otherwise it would compute them once, before the loop over tiles. In `query_kernel` they take 40 registers.
    """
    if BOUNDED:
        return tl.minimum(start, 0)
    return 0


@triton.jit
def _fill_rows(
    Base, row_stride, Header, SIDE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the share of this program of the rows of one head that belong to no sequence, see `plan_kernels.HEADER`."""
    rows = filled(tl.load(Header + 1).to(tl.float32, bitcast=True), ROWS, BLOCK, REST)
    last = tl.load(Header + 3 + 2 * SIDE)
    for at in range(tl.load(Header + 2 + 2 * SIDE) + tl.program_id(0) * ROWS, last, tl.num_programs(0) * ROWS):
        _store(Base, row_stride, at, last, rows, 0, ROWS, DIM, BLOCK, REST, UNIT)


@triton.jit
def _fill_lse(Lse, Header, ROWS: tl.constexpr):
    """The same for the log-sum-exp of one head: −inf, or NaN."""
    value = tl.full([ROWS], -INF, tl.float32) + tl.load(Header + 1).to(tl.float32, bitcast=True)
    last = tl.load(Header + 3)
    for at in range(tl.load(Header + 2) + tl.program_id(0) * ROWS, last, tl.num_programs(0) * ROWS):
        rows = at + tl.arange(0, ROWS)
        tl.store(Lse + rows, value, mask=rows < last)


@triton.jit
def _visible_range(Lo, Hi, start, end):
    """The union of the intervals of a tile's rows, and their intersection, in which no mask is needed."""
    first = tl.load(Lo + start)
    last = tl.load(Hi + end - 1)
    unmasked_from = tl.load(Lo + end - 1)
    unmasked_to = tl.load(Hi + start)
    return first, last, unmasked_from, unmasked_to


@triton.jit
def _bias_inputs(Own, Slopes, rows, end, head, slope_row, ALIBI: tl.constexpr, RELATIVE: tl.constexpr):
    """The key at each query's own position, and each query's slope. Unused without ALiBi and a relative bias."""
    own = rows
    slopes = 0.0 * rows
    if (ALIBI or RELATIVE) and not (SAME_TOKENS & RELATIVE):
        own = tl.load(Own + rows, mask=rows < end, other=0)
    if ALIBI:
        slopes = tl.load(Slopes + rows * slope_row + head, mask=rows < end, other=0.0)
    return own, slopes


@triton.jit
def _row(Base, row, row_stride, head, head_stride):
    """Pointers to the first bucket of rows and a head. Offsets have 64 bits: T · H · N can exceed 32."""
    zero = tl.full([], 0, tl.int64)
    return Base + (row + zero) * row_stride + (head + zero) * head_stride


@triton.jit
def _relative(relative, rows, keys, own, last_row, last_key, head, RELATIVE: tl.constexpr):
    """(distance, bucket, bias) of each pair in a block, also of pairs that are not visible. Unused without a bias.

    Distances are clamped and count from −R: they are in [0, 2R]. Buckets are clamped to [0, N), because the host can't
    check them without a sync. Rows after `last_row` get the values of `last_row`, and so do keys.
    """
    distance = 0
    bucket = 0
    bias = 0.0
    if RELATIVE:
        Buckets, Bias, QueryBias, KeyBias, radius, num_buckets, query_row, query_head, key_row, key_head = relative
        distance = radius + tl.minimum(tl.maximum(keys - own, -radius), radius)
        if BIAS & RELATIVE:
            bias += tl.load(Bias + head * (2 * radius + 1) + distance).to(tl.float32)
        if (QUERY_BIAS + KEY_BIAS) & RELATIVE:
            bucket = tl.minimum(tl.maximum(tl.load(Buckets + distance), 0), num_buckets - 1)
            if QUERY_BIAS & RELATIVE:
                row = _row(QueryBias, tl.minimum(rows, last_row), query_row, head, query_head)
                bias += tl.load(row + bucket).to(tl.float32)
            if KEY_BIAS & RELATIVE:
                row = _row(KeyBias, tl.minimum(keys, last_key), key_row, head, key_head)
                bias += tl.load(row + bucket).to(tl.float32)
    return distance, bucket, bias


@triton.jit
def _bias_sums(GradBias, tile, heads, head, radius, RELATIVE: tl.constexpr):
    """The sums (2R+1,) to which a program adds the gradient of `bias`, by distance."""
    part = tile + tl.full([], 0, tl.int32)  # Triton's interpreter has Python's integers in loops
    if not (ORDERED & RELATIVE):
        part = part % PARTS
    return _row(GradBias, part, heads * (2 * radius + 1), head, 2 * radius + 1)


@triton.jit
def _add_bias_gradients(
    GradBias, GradQueryBias, GradKeyBias, relative, distance, bucket, visible, grad_scores, first,
    KEY_AXIS: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """Add a block's gradient of the scores to those of the biases.

    `GradBias` points to the sums of `_bias_sums`. `GradQueryBias` and `GradKeyBias` point to the rows (N,) of the
    block's queries and keys. RELATIVE has the flags of those that this kernel adds to. `first` is the distance of the
    block's first pair, not clamped.
    """
    Buckets, _, _, _, radius, num_buckets, _, _, _, _ = relative
    by_diagonals: tl.constexpr = BIAS & RELATIVE and SAME_TOKENS & RELATIVE
    if by_diagonals:
        _add_diagonals(GradBias, tl.where(visible, grad_scores, 0.0), first, radius, KEY_AXIS, ORDERED & RELATIVE)
    if not (ORDERED & RELATIVE):
        if BIAS & RELATIVE and not by_diagonals:
            tl.atomic_add(GradBias + distance, grad_scores, mask=visible, sem="relaxed")
        if QUERY_BIAS & RELATIVE:
            tl.atomic_add(GradQueryBias + bucket, grad_scores, mask=visible, sem="relaxed")
        if KEY_BIAS & RELATIVE:
            tl.atomic_add(GradKeyBias + bucket, grad_scores, mask=visible, sem="relaxed")
    elif (QUERY_BIAS + KEY_BIAS) & RELATIVE or (BIAS & RELATIVE and not by_diagonals):
        # one distance after another: one thread adds to each element, so the order is fixed
        end = 2 * radius + 1
        distance = tl.where(visible, distance, end)
        at = tl.min(distance)
        while at < end:
            of_distance = tl.where(distance == at, grad_scores, 0.0)
            if BIAS & RELATIVE and not by_diagonals:
                tl.atomic_add(GradBias + at, tl.sum(of_distance), sem="relaxed")
            if (QUERY_BIAS + KEY_BIAS) & RELATIVE:  # rows past the end of a tile have a sum of 0
                at_bucket = tl.minimum(tl.maximum(tl.load(Buckets + at), 0), num_buckets - 1)
                if QUERY_BIAS & RELATIVE:
                    row_sum = tl.sum(of_distance, KEY_AXIS, keep_dims=True)
                    tl.atomic_add(GradQueryBias + at_bucket, row_sum, mask=row_sum != 0.0, sem="relaxed")
                if KEY_BIAS & RELATIVE:
                    row_sum = tl.sum(of_distance, 1 - KEY_AXIS, keep_dims=True)
                    tl.atomic_add(GradKeyBias + at_bucket, row_sum, mask=row_sum != 0.0, sem="relaxed")
            at = tl.min(tl.where(distance > at, distance, end))


@triton.jit
def _add_diagonals(Sums, x, first, radius, KEY_AXIS: tl.constexpr, IN_ORDER: tl.constexpr):
    """Add the sum of each diagonal of a block (A, B) to the sum of its distance.

    Row a is rotated by a, so that column c has the elements whose b − a is c, c − B, c − 2B, …
    """
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    columns = tl.arange(0, B)[None, :] + tl.arange(0, A)[:, None]
    rotated = tl.gather(x, columns % B, 1)
    for turn in tl.static_range(A // B + 1 if A > B else 2):
        sums = tl.sum(tl.where(columns // B == turn, rotated, 0.0), 0)
        diagonal = tl.arange(0, B) - turn * B
        distance = first + (diagonal if KEY_AXIS == 1 else -diagonal)
        changed = sums != 0.0
        if IN_ORDER:  # only the two farthest distances have several diagonals
            farthest = (distance >= radius) & (distance > -radius)
            tl.atomic_add(Sums, tl.sum(tl.where(distance <= -radius, sums, 0.0)), sem="relaxed")
            tl.atomic_add(Sums + 2 * radius, tl.sum(tl.where(farthest, sums, 0.0)), sem="relaxed")
            changed = changed & (distance > -radius) & (distance < radius)
        distance = radius + tl.minimum(tl.maximum(distance, -radius), radius)
        tl.atomic_add(Sums + distance, sums, mask=changed, sem="relaxed")
        if IN_ORDER:
            tl.debug_barrier()


@triton.jit
def _scores(
    products,
    own,
    keys,
    slopes,
    bias,
    scale,
    softcap,
    LINEAR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(scores, d score / d (scale · product)). Scores times `score_factor_of` are in base 2."""
    cap_gradient = 1.0
    scores = products
    if not LINEAR:
        if SOFTCAP:
            capped = tanh(products * (scale / softcap), EXACT)
            scores = capped * (softcap * LOG2E)
            cap_gradient = 1.0 - capped * capped
        else:
            scores = products * (scale * LOG2E)
        if ALIBI:
            scores -= slopes * LOG2E * tl.abs(own - keys).to(tl.float32)
        if RELATIVE:
            scores += bias * LOG2E
    return scores, cap_gradient


@triton.jit
def _dropout_mask(Seed, rows, keys, head, dropout_p):
    """True for weights that dropout keeps. Philox at (key, query, head) gives the same mask for any tiling."""
    seed = tl.load(Seed)
    draw, _, _, _ = tl.philox(seed, keys + 0 * rows, rows + 0 * keys, head + 0 * (rows + keys), 0 * (rows + keys), 7)
    return tl.uint_to_uniform_float(draw) >= dropout_p


@triton.jit
def _weights(
    products,
    grad_products,
    lse,
    delta,
    indices,
    lo,
    hi,
    boundary,
    rows,
    keys,
    own,
    slopes,
    relative,
    last_row,
    last_key,
    head,
    Seed,
    scale,
    softcap,
    dropout_p,
    LINEAR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    RELATIVE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(weights after dropout, gradient of scale · products, gradient of the scores, distances, buckets) of one block.

    All are (M, N) or (N, M). `indices` are those of the rows that intervals `lo` … `hi` refer to. Distances and buckets
    are those of `_relative`.
    """
    distance, bucket, bias = _relative(relative, rows, keys, own, last_row, last_key, head, RELATIVE)
    scores, cap_gradient = _scores(
        products, own, keys, slopes, bias, scale, softcap, LINEAR, SOFTCAP, ALIBI, RELATIVE, EXACT
    )
    if boundary:
        scores = tl.where((indices >= lo) & (indices < hi), scores, -INF)
    weights = tl.exp2(scores * score_factor_of(scale, LINEAR) - lse)
    kept_weights = weights
    if DROPOUT:
        factor = tl.where(_dropout_mask(Seed, rows, keys, head, dropout_p), 1.0 / (1.0 - dropout_p), 0.0)
        kept_weights = weights * factor
        grad_products = grad_products * factor
    grad_scores = weights * (grad_products - delta)
    return kept_weights, grad_scores * cap_gradient, grad_scores, distance, bucket


@triton.jit
def _backward_lse(Lse, rows, end):
    """The log-sum-exp in base 2. It is +inf from row `end` and in fully masked rows, so their weights are 0."""
    lse = tl.load(Lse + rows, mask=rows < end, other=INF) * LOG2E
    return tl.where(lse == -INF, INF, lse)


@triton.jit
def _delta(
    out, grad, GradLse, grad_lse_row, grad_lse_head, rows, end, head, REST: tl.constexpr, LSE_GRADIENT: tl.constexpr
):
    """rowsum(dout · out) minus the gradient of the log-sum-exp."""
    delta = tl.sum(out[0].to(tl.float32) * grad[0].to(tl.float32), 1)
    if REST:
        delta += tl.sum(out[1].to(tl.float32) * grad[1].to(tl.float32), 1)
    if LSE_GRADIENT:
        delta -= tl.load(GradLse + rows * grad_lse_row + head * grad_lse_head, mask=rows < end, other=0.0)
    return delta


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    Query, Key, Value, Out, Lse, Slopes, Seed, Buckets, Bias, QueryBias, KeyBias, Tiles, Lo, Hi, Own,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, lse_head, slope_row,
    radius, num_buckets, query_bias_row, query_bias_head, key_bias_row, key_bias_head,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, RELATIVE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries and one head."""
    head = tl.program_id(1)
    Header = Tiles
    Tiles, first_tile, last_tile, step = _own_tiles(Tiles, BOUNDED)
    Query = _head_pointer(Query, head, query_head, UNIT, FAR)
    Key = _head_pointer(Key, head // GROUP, key_head, UNIT, FAR)
    Value = _head_pointer(Value, head // GROUP, value_head, UNIT, FAR)
    Out = _head_pointer(Out, head, out_head, UNIT, FAR)

    relative = (
        Buckets, Bias, QueryBias, KeyBias, radius, num_buckets, query_bias_row, query_bias_head, key_bias_row,
        key_bias_head,
    )  # fmt: skip

    for tile in range(first_tile, last_tile, step):
        start = tl.load(Tiles + 2 * tile)
        end = tl.load(Tiles + 2 * tile + 1)
        zero = _unknown_zero(start, BOUNDED)
        rows = start + tl.arange(0, BLOCK_M)
        lo = tl.load(Lo + rows, mask=rows < end, other=0)[:, None]
        hi = tl.load(Hi + rows, mask=rows < end, other=0)[:, None]
        first, last, unmasked_from, unmasked_to = _visible_range(Lo, Hi, start, end)
        own, slopes = _bias_inputs(Own, Slopes, rows, end, head, slope_row, ALIBI, RELATIVE)
        own, slopes = own[:, None], slopes[:, None]
        q = _load(Query, query_row, start, end, zero, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)
        out = filled(0.0, BLOCK_M, BLOCK_V, REST_V)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        row_max = tl.full([BLOCK_M], -INF, tl.float32)
        score_factor = score_factor_of(scale, LINEAR)

        for at in range(first, last, BLOCK_N):
            keys = (at + tl.arange(0, BLOCK_N))[None, :]
            k = _load(Key, key_row, at, last, zero, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
            products = row_products(q, k, REST_D, PRECISION)
            _, _, bias = _relative(relative, rows[:, None], keys, own, end - 1, last - 1, head, RELATIVE)
            scores, _ = _scores(
                products, own, keys, slopes, bias, scale, softcap, LINEAR, SOFTCAP, ALIBI, RELATIVE, EXACT
            )
            if (at < unmasked_from) | (at + BLOCK_N > unmasked_to):
                scores = tl.where((keys >= lo) & (keys < hi), scores, -INF)
            new_max = tl.maximum(row_max, tl.max(scores, 1) * score_factor)
            finite = tl.where(new_max == -INF, 0.0, new_max)
            weights = tl.exp2(scores * score_factor - finite[:, None])
            rescale = tl.exp2(row_max - finite)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            out = times(out, rescale[:, None], REST_V)
            if DROPOUT:
                kept = _dropout_mask(Seed, rows[:, None], keys, head, dropout_p)
                weights = tl.where(kept, weights, 0.0) * (1.0 / (1.0 - dropout_p))
            v = _load(Value, value_row, at, last, zero, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)
            out = add_product(weights, v, out, REST_V, PRECISION)
            row_max = new_max

        masked = row_sum == 0.0
        out = times(out, 1.0 / tl.where(masked, 1.0, row_sum)[:, None], REST_V)
        lse = tl.where(masked, -INF, (row_max + tl.log2(tl.where(masked, 1.0, row_sum))) / LOG2E)
        tl.store(Lse + head * lse_head + rows, lse, mask=rows < end)
        _store(Out, out_row, start, end, out, zero, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)

    if BOUNDED:
        _fill_rows(Out, out_row, Header, OWN, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)
        _fill_lse(Lse + head * lse_head, Header, BLOCK_M)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_kernel(
    Query, Key, Value, Out, Grad, Lse, GradLse, Delta, GradQuery, GradBias, GradQueryBias,
    Slopes, Seed, Buckets, Bias, QueryBias, KeyBias, Tiles, Lo, Hi, Own,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, grad_row, grad_head,
    grad_query_row, grad_query_head, lse_head, grad_lse_row, grad_lse_head, slope_row,
    radius, num_buckets, query_bias_row, query_bias_head, key_bias_row, key_bias_head,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, RELATIVE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries and one head, and delta, which `key_kernel` reads."""
    head = tl.program_id(1)
    Header = Tiles
    Tiles, first_tile, last_tile, step = _own_tiles(Tiles, BOUNDED)
    Query = _head_pointer(Query, head, query_head, UNIT, FAR)
    Key = _head_pointer(Key, head // GROUP, key_head, UNIT, FAR)
    Value = _head_pointer(Value, head // GROUP, value_head, UNIT, FAR)
    Out = _head_pointer(Out, head, out_head, UNIT, FAR)
    Grad = _head_pointer(Grad, head, grad_head, UNIT, FAR)
    GradQuery = _head_pointer(GradQuery, head, grad_query_head, UNIT, FAR)

    relative = (
        Buckets, Bias, QueryBias, KeyBias, radius, num_buckets, query_bias_row, query_bias_head, key_bias_row,
        key_bias_head,
    )  # fmt: skip

    for tile in range(first_tile, last_tile, step):
        start = tl.load(Tiles + 2 * tile)
        end = tl.load(Tiles + 2 * tile + 1)
        zero = _unknown_zero(start, BOUNDED)
        rows = start + tl.arange(0, BLOCK_M)
        lo = tl.load(Lo + rows, mask=rows < end, other=0)[:, None]
        hi = tl.load(Hi + rows, mask=rows < end, other=0)[:, None]
        first, last, unmasked_from, unmasked_to = _visible_range(Lo, Hi, start, end)
        own, slopes = _bias_inputs(Own, Slopes, rows, end, head, slope_row, ALIBI, RELATIVE)
        own, slopes = own[:, None], slopes[:, None]
        if BIAS_GRADIENT & RELATIVE:
            heads = tl.num_programs(1)
            TileGradBias = _bias_sums(GradBias, tile, heads, head, radius, RELATIVE)
            TileGradQueryBias = _row(GradQueryBias, rows[:, None], heads * num_buckets, head, num_buckets)

        q = _load(Query, query_row, start, end, zero, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)
        grad = _load(Grad, grad_row, start, end, zero, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)
        out = _load(Out, out_row, start, end, zero, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)
        delta = _delta(out, grad, GradLse, grad_lse_row, grad_lse_head, rows, end, head, REST_V, LSE_GRADIENT)
        tl.store(Delta + head * lse_head + rows, delta, mask=rows < end)
        delta = delta[:, None]
        lse = _backward_lse(Lse + head * lse_head, rows, end)[:, None]
        grad_query = filled(0.0, BLOCK_M, BLOCK_D, REST_D)

        for at in range(first, last, BLOCK_N):
            keys = (at + tl.arange(0, BLOCK_N))[None, :]
            k = _load(Key, key_row, at, last, zero, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
            v = _load(Value, value_row, at, last, zero, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)
            products = row_products(q, k, REST_D, PRECISION)
            grad_products = row_products(grad, v, REST_V, PRECISION)
            boundary = (at < unmasked_from) | (at + BLOCK_N > unmasked_to)
            _, grad_scaled, grad_scores, distance, bucket = _weights(
                products, grad_products, lse, delta, keys, lo, hi, boundary, rows[:, None], keys, own, slopes, relative,
                end - 1, last - 1, head, Seed, scale, softcap, dropout_p, LINEAR, SOFTCAP, ALIBI, DROPOUT, RELATIVE,
                EXACT,
            )  # fmt: skip
            if BIAS_GRADIENT & RELATIVE:
                _add_bias_gradients(
                    TileGradBias, TileGradQueryBias, TileGradQueryBias, relative, distance, bucket,
                    (keys >= lo) & (keys < hi), grad_scores, at - start, 1, ~KEY_BIAS & RELATIVE,
                )  # fmt: skip
            grad_query = add_product(grad_scaled, k, grad_query, REST_D, PRECISION)

        grad_query = times(grad_query, scale, REST_D)
        _store(GradQuery, grad_query_row, start, end, grad_query, zero, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)

    if BOUNDED:
        _fill_rows(GradQuery, grad_query_row, Header, OWN, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_kernel(
    Query, Key, Value, Grad, Lse, Delta, GradKey, GradValue, GradKeyBias,
    Slopes, Seed, Buckets, Bias, QueryBias, KeyBias, Tiles, Lo, Hi, Own,
    query_row, query_head, key_row, key_head, value_row, value_head, grad_row, grad_head,
    grad_key_row, grad_key_head, grad_value_row, grad_value_head, lse_head, slope_row,
    radius, num_buckets, query_bias_row, query_bias_head, key_bias_row, key_bias_head,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, RELATIVE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values, summed over HEADS of the query heads of one key head."""
    part = tl.program_id(1)
    Header = Tiles
    Tiles, first_tile, last_tile, step = _own_tiles(Tiles, BOUNDED)
    Key = _head_pointer(Key, part * HEADS // GROUP, key_head, UNIT, FAR)
    Value = _head_pointer(Value, part * HEADS // GROUP, value_head, UNIT, FAR)
    GradKey = _head_pointer(GradKey, part, grad_key_head, UNIT, FAR)
    GradValue = _head_pointer(GradValue, part, grad_value_head, UNIT, FAR)
    heads = tl.num_programs(1) * HEADS
    relative = (
        Buckets, Bias, QueryBias, KeyBias, radius, num_buckets, query_bias_row, query_bias_head, key_bias_row,
        key_bias_head,
    )  # fmt: skip

    for tile in range(first_tile, last_tile, step):
        start = tl.load(Tiles + 2 * tile)
        end = tl.load(Tiles + 2 * tile + 1)
        zero = _unknown_zero(start, BOUNDED)
        keys = (start + tl.arange(0, BLOCK_N))[:, None]
        lo = tl.load(Lo + keys, mask=keys < end, other=0)
        hi = tl.load(Hi + keys, mask=keys < end, other=0)
        first, last, unmasked_from, unmasked_to = _visible_range(Lo, Hi, start, end)

        k = _load(Key, key_row, start, end, zero, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
        v = _load(Value, value_row, start, end, zero, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)
        grad_key = filled(0.0, BLOCK_N, BLOCK_D, REST_D)
        grad_value = filled(0.0, BLOCK_N, BLOCK_V, REST_V)

        for head in range(part * HEADS, part * HEADS + HEADS):
            HeadQuery = _head_pointer(Query, head, query_head, UNIT, FAR)
            HeadGrad = _head_pointer(Grad, head, grad_head, UNIT, FAR)
            for at in range(first, last, BLOCK_M):
                rows = at + tl.arange(0, BLOCK_M)
                q = _load(HeadQuery, query_row, at, last, zero, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)
                grad = _load(HeadGrad, grad_row, at, last, zero, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)
                lse = _backward_lse(Lse + head * lse_head, rows, last)[None, :]
                delta = tl.load(Delta + head * lse_head + rows, mask=rows < last, other=0.0)[None, :]
                own, slopes = _bias_inputs(Own, Slopes, rows, last, head, slope_row, ALIBI, RELATIVE)
                own, slopes = own[None, :], slopes[None, :]
                products = row_products(k, q, REST_D, PRECISION)
                grad_products = row_products(v, grad, REST_V, PRECISION)
                boundary = (at < unmasked_from) | (at + BLOCK_M > unmasked_to)
                weights, grad_scaled, grad_scores, distance, bucket = _weights(
                    products, grad_products, lse, delta, rows[None, :], lo, hi, boundary, rows[None, :], keys, own,
                    slopes, relative, last - 1, end - 1, head, Seed, scale, softcap, dropout_p, LINEAR, SOFTCAP, ALIBI,
                    DROPOUT, RELATIVE, EXACT,
                )  # fmt: skip
                if (BIAS_GRADIENT & RELATIVE) and (KEY_BIAS & RELATIVE):
                    HeadGradKeyBias = _row(GradKeyBias, keys, heads * num_buckets, head, num_buckets)
                    _add_bias_gradients(
                        GradKeyBias, GradKeyBias, HeadGradKeyBias, relative, distance, bucket,
                        (rows[None, :] >= lo) & (rows[None, :] < hi), grad_scores, start - at, 0,
                        ~(BIAS + QUERY_BIAS) & RELATIVE,
                    )  # fmt: skip
                grad_value = add_product(weights, grad, grad_value, REST_V, PRECISION)
                grad_key = add_product(grad_scaled, q, grad_key, REST_D, PRECISION)

        grad_key = times(grad_key, scale, REST_D)
        _store(GradKey, grad_key_row, start, end, grad_key, zero, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
        _store(GradValue, grad_value_row, start, end, grad_value, zero, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)

    if BOUNDED:
        _fill_rows(GradKey, grad_key_row, Header, OWN, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
        _fill_rows(GradValue, grad_value_row, Header, OWN, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def fused_kernel(
    Query, Key, Value, Out, Grad, Lse, GradLse, GradQuery, GradKey, GradValue, GradBias, GradQueryBias, GradKeyBias,
    Slopes, Seed, Buckets, Bias, QueryBias, KeyBias, Tiles, Lo, Hi, Own,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, grad_row, grad_head,
    grad_query_row, grad_query_head, grad_key_row, grad_key_head, grad_value_row, grad_value_head,
    lse_head, grad_lse_row, grad_lse_head, slope_row,
    radius, num_buckets, query_bias_row, query_bias_head, key_bias_row, key_bias_head,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, RELATIVE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, keys and values of one tile of whole sequences and one key head."""
    key_head_index = tl.program_id(1)
    Header = Tiles
    Tiles, first_tile, last_tile, step = _own_tiles(Tiles, BOUNDED)
    Key = _head_pointer(Key, key_head_index, key_head, UNIT, FAR)
    Value = _head_pointer(Value, key_head_index, value_head, UNIT, FAR)
    GradKey = _head_pointer(GradKey, key_head_index, grad_key_head, UNIT, FAR)
    GradValue = _head_pointer(GradValue, key_head_index, grad_value_head, UNIT, FAR)
    heads = tl.num_programs(1) * GROUP
    relative = (
        Buckets, Bias, QueryBias, KeyBias, radius, num_buckets, query_bias_row, query_bias_head, key_bias_row,
        key_bias_head,
    )  # fmt: skip

    for tile in range(first_tile, last_tile, step):
        first = tl.load(Tiles + 4 * tile)
        last = tl.load(Tiles + 4 * tile + 1)
        start = tl.load(Tiles + 4 * tile + 2)
        end = tl.load(Tiles + 4 * tile + 3)
        zero = _unknown_zero(start, BOUNDED)
        keys = (start + tl.arange(0, BLOCK_N))[:, None]
        lo = tl.load(Lo + keys, mask=keys < end, other=0)
        hi = tl.load(Hi + keys, mask=keys < end, other=0)
        k = _load(Key, key_row, start, end, zero, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
        v = _load(Value, value_row, start, end, zero, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)
        grad_key = filled(0.0, BLOCK_N, BLOCK_D, REST_D)
        grad_value = filled(0.0, BLOCK_N, BLOCK_V, REST_V)

        for head in range(key_head_index * GROUP, key_head_index * GROUP + GROUP):
            HeadQuery = _head_pointer(Query, head, query_head, UNIT, FAR)
            HeadGrad = _head_pointer(Grad, head, grad_head, UNIT, FAR)
            HeadOut = _head_pointer(Out, head, out_head, UNIT, FAR)
            HeadGradQuery = _head_pointer(GradQuery, head, grad_query_head, UNIT, FAR)
            for at in range(first, last, BLOCK_M):
                rows = at + tl.arange(0, BLOCK_M)
                q = _load(HeadQuery, query_row, at, last, zero, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)
                grad = _load(HeadGrad, grad_row, at, last, zero, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)
                out = _load(HeadOut, out_row, at, last, zero, BLOCK_M, VALUE_DIM, BLOCK_V, REST_V, UNIT)
                delta = _delta(out, grad, GradLse, grad_lse_row, grad_lse_head, rows, last, head, REST_V, LSE_GRADIENT)
                lse = _backward_lse(Lse + head * lse_head, rows, last)[None, :]
                own, slopes = _bias_inputs(Own, Slopes, rows, last, head, slope_row, ALIBI, RELATIVE)
                own, slopes = own[None, :], slopes[None, :]
                products = row_products(k, q, REST_D, PRECISION)
                grad_products = row_products(v, grad, REST_V, PRECISION)
                weights, grad_scaled, grad_scores, distance, bucket = _weights(
                    products, grad_products, lse, delta[None, :], rows[None, :], lo, hi, True, rows[None, :], keys, own,
                    slopes, relative, last - 1, end - 1, head, Seed, scale, softcap, dropout_p, LINEAR, SOFTCAP, ALIBI,
                    DROPOUT, RELATIVE, EXACT,
                )  # fmt: skip
                if BIAS_GRADIENT & RELATIVE:
                    _add_bias_gradients(
                        _bias_sums(GradBias, tile, heads, head, radius, RELATIVE),
                        _row(GradQueryBias, rows[None, :], heads * num_buckets, head, num_buckets),
                        _row(GradKeyBias, keys, heads * num_buckets, head, num_buckets),
                        relative, distance, bucket, (rows[None, :] >= lo) & (rows[None, :] < hi), grad_scores,
                        start - at, 0, RELATIVE,
                    )  # fmt: skip
                grad_value = add_product(weights, grad, grad_value, REST_V, PRECISION)
                grad_key = add_product(grad_scaled, q, grad_key, REST_D, PRECISION)
                grad_query = filled(0.0, BLOCK_M, BLOCK_D, REST_D)
                grad_query = add_product(tl.trans(grad_scaled), k, grad_query, REST_D, PRECISION)
                grad_query = times(grad_query, scale, REST_D)
                _store(HeadGradQuery, grad_query_row, at, last, grad_query, zero, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)

        grad_key = times(grad_key, scale, REST_D)
        _store(GradKey, grad_key_row, start, end, grad_key, zero, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
        _store(GradValue, grad_value_row, start, end, grad_value, zero, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)

    if BOUNDED:
        for head in range(key_head_index * GROUP, key_head_index * GROUP + GROUP):
            HeadGradQuery = _head_pointer(GradQuery, head, grad_query_head, UNIT, FAR)
            _fill_rows(HeadGradQuery, grad_query_row, Header, OWN, BLOCK_M, DIM, BLOCK_D, REST_D, UNIT)
        _fill_rows(GradKey, grad_key_row, Header, KEYS, BLOCK_N, DIM, BLOCK_D, REST_D, UNIT)
        _fill_rows(GradValue, grad_value_row, Header, KEYS, BLOCK_N, VALUE_DIM, BLOCK_V, REST_V, UNIT)
