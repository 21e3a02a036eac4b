"""The Triton kernels: tiles over packed tokens, not over sequences.

Whatever the mask (sequences, causality, windows), the keys that a query sees are one interval of the packed keys, and
the queries that see a key are one interval of the packed queries. ``plan.py`` puts both down for every token. So a
kernel knows nothing of sequences: a tile is a range of rows, it visits the union of their intervals block by block, and
compares places with interval ends only in blocks that not all of its rows see whole.

The softmax is FlashAttention-2's (Dao 2023), in powers of 2. Nothing is added atomically: each tile owns what it
writes, so the same call gives the same bits.

Dimensions, in names that end so: M query rows and N key rows of a tile, D and V the head dims.
"""

# Triton reads annotations when it compiles, so they are not postponed in this file.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def _of_head(Base, head, head_stride, UNIT: tl.constexpr, FAR: tl.constexpr):
    """Where a head's rows begin. Strides come in UNITs, so that Triton knows what they are multiples of.

    Only where heads lie FAR apart is that counted in 64 bits, which would cost ``key_kernel`` a third of its programs.
    """
    place = head * (head_stride * UNIT)
    if FAR:
        place = tl.full([], UNIT, tl.int64) * head_stride * head
    return Base + place


@triton.jit
def _places(
    Base, row_stride, first, last, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """(ROWS, BLOCK) pointers to rows from ``first``, and which of them are before ``last`` and DIM."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    here = (first + rows < last)[:, None]
    if BLOCK != DIM:
        here = here & (columns < DIM)[None, :]
    row_stride = row_stride * UNIT
    start = Base + (first + tl.full([], 0, tl.int64)) * row_stride
    return start + rows[:, None] * row_stride + columns[None, :], here


@triton.jit
def _tile(
    Base, row_stride, first, last, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """(ROWS, BLOCK): one head's rows from ``first``, 0 from ``last`` on and past the head dim."""
    places, here = _places(Base, row_stride, first, last, ROWS, DIM, BLOCK, UNIT)
    return tl.load(places, mask=here, other=0.0)


@triton.jit
def _put(
    Base, row_stride, first, last, x,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write what ``_tile`` would read."""
    places, here = _places(Base, row_stride, first, last, ROWS, DIM, BLOCK, UNIT)
    tl.store(places, x.to(Base.dtype.element_ty), mask=here)


@triton.jit
def _reach(Lo, Hi, start, end):
    """What any row of a tile meets, from … to; and what all of them meet, where nothing needs a mask."""
    first = tl.load(Lo + start)
    last = tl.load(Hi + end - 1)
    whole_from = tl.load(Lo + end - 1)
    whole_to = tl.load(Hi + start)
    return first, last, whole_from, whole_to


@triton.jit
def _across(Own, Slopes, rows, end, head, slope_row, ALIBI: tl.constexpr):
    """The key that stands across from each query, and the slope of its bias; neither is read without ALiBi."""
    own = rows
    slopes = 0.0 * rows
    if ALIBI:
        own = tl.load(Own + rows, mask=rows < end, other=0)
        slopes = tl.load(Slopes + rows * slope_row + head, mask=rows < end, other=0.0)
    return own, slopes


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    far = 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E)) + 1.0)
    if EXACT:  # that cancels near 0, which float32 would show: the series there
        y = x * x
        series = 62 / 2835 + y * (-1382 / 155925 + y * (21844 / 6081075))
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * series)))
        far = tl.where(tl.abs(x) < 0.4, x * series, far)
    return far


@triton.jit
def _scores(
    products,
    own,
    keys,
    slopes,
    scale,
    softcap,
    LINEAR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Scores in powers of 2, but for a factor of ``_unit``, and d score / d (scale · product)."""
    slope_of_cap = 1.0
    scores = products
    if not LINEAR:
        if SOFTCAP:
            capped = _tanh(products * (scale / softcap), EXACT)
            scores = capped * (softcap * LOG2E)
            slope_of_cap = 1.0 - capped * capped
        else:
            scores = products * (scale * LOG2E)
        if ALIBI:
            scores -= slopes * LOG2E * tl.abs(own - keys).to(tl.float32)
    return scores, slope_of_cap


@triton.jit
def _unit(scale, LINEAR: tl.constexpr):
    """What is left to multiply scores by: a positive scale alone, since it fuses with what follows."""
    unit = 1.0
    if LINEAR:
        unit = scale * LOG2E
    return unit


@triton.jit
def _kept(Seed, rows, keys, head, dropout_p):
    """Which weights dropout keeps: Philox at (key, query, head), so that forward and backward agree on any tiling."""
    seed = tl.load(Seed)
    draw, _, _, _ = tl.philox(seed, keys + 0 * rows, rows + 0 * keys, head + 0 * (rows + keys), 0 * (rows + keys), 7)
    return tl.uint_to_uniform_float(draw) >= dropout_p


@triton.jit
def _weights(
    products,
    grad_products,
    lse,
    delta,
    places,
    lo,
    hi,
    boundary,
    rows,
    keys,
    own,
    slopes,
    head,
    Seed,
    scale,
    softcap,
    dropout_p,
    LINEAR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A backward block: the weights as values saw them, and the gradient of scale · products. In either orientation."""
    scores, slope_of_cap = _scores(products, own, keys, slopes, scale, softcap, LINEAR, SOFTCAP, ALIBI, EXACT)
    if boundary:
        scores = tl.where((places >= lo) & (places < hi), scores, -INF)
    weights = tl.exp2(scores * _unit(scale, LINEAR) - lse)
    seen = weights
    if DROPOUT:
        factor = tl.where(_kept(Seed, rows, keys, head, dropout_p), 1.0 / (1.0 - dropout_p), 0.0)
        seen = weights * factor
        grad_products = grad_products * factor
    return seen, weights * (grad_products - delta) * slope_of_cap


@triton.jit
def _backward_lse(Lse, rows, end):
    """The log-sum-exp in powers of 2; +inf, which gives weight 0, for rows outside and rows that see nothing."""
    lse = tl.load(Lse + rows, mask=rows < end, other=INF) * LOG2E
    return tl.where(lse == -INF, INF, lse)


@triton.jit
def _delta(out, grad, GradLse, grad_lse_row, grad_lse_head, rows, end, head, LSE_GRADIENT: tl.constexpr):
    """What a row's weights give back together: rowsum(dout · out), less the gradient of its log-sum-exp."""
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if LSE_GRADIENT:
        delta -= tl.load(GradLse + rows * grad_lse_row + head * grad_lse_head, mask=rows < end, other=0.0)
    return delta


@triton.jit(do_not_specialize=["lse_head", "slope_row"])
def forward_kernel(
    Query, Key, Value, Out, Lse, Tiles, Lo, Hi, Own, Slopes, Seed,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, lse_head, slope_row,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one head."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(Tiles + 2 * tile)
    end = tl.load(Tiles + 2 * tile + 1)
    Query = _of_head(Query, head, query_head, UNIT, FAR)
    Key = _of_head(Key, head // GROUP, key_head, UNIT, FAR)
    Value = _of_head(Value, head // GROUP, value_head, UNIT, FAR)
    Out = _of_head(Out, head, out_head, UNIT, FAR)

    rows = start + tl.arange(0, BLOCK_M)
    lo = tl.load(Lo + rows, mask=rows < end, other=0)[:, None]
    hi = tl.load(Hi + rows, mask=rows < end, other=0)[:, None]
    first, last, whole_from, whole_to = _reach(Lo, Hi, start, end)
    own, slopes = _across(Own, Slopes, rows, end, head, slope_row, ALIBI)
    own, slopes = own[:, None], slopes[:, None]

    q = _tile(Query, query_row, start, end, BLOCK_M, DIM, BLOCK_D, UNIT)
    out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -INF, tl.float32)
    unit = _unit(scale, LINEAR)

    for at in range(first, last, BLOCK_N):
        keys = (at + tl.arange(0, BLOCK_N))[None, :]
        k = _tile(Key, key_row, at, last, BLOCK_N, DIM, BLOCK_D, UNIT)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores, _ = _scores(products, own, keys, slopes, scale, softcap, LINEAR, SOFTCAP, ALIBI, EXACT)
        if (at < whole_from) | (at + BLOCK_N > whole_to):
            scores = tl.where((keys >= lo) & (keys < hi), scores, -INF)
        higher = tl.maximum(peak, tl.max(scores, 1) * unit)
        finite = tl.where(higher == -INF, 0.0, higher)
        weights = tl.exp2(scores * unit - finite[:, None])
        shrink = tl.exp2(peak - finite)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None]
        if DROPOUT:
            kept = _kept(Seed, rows[:, None], keys, head, dropout_p)
            weights = tl.where(kept, weights, 0.0) * (1.0 / (1.0 - dropout_p))
        v = _tile(Value, value_row, at, last, BLOCK_N, VALUE_DIM, BLOCK_V, UNIT)
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        peak = higher

    masked = total == 0.0
    out = out / tl.where(masked, 1.0, total)[:, None]
    lse = tl.where(masked, -INF, (peak + tl.log2(tl.where(masked, 1.0, total))) / LOG2E)
    tl.store(Lse + head * lse_head + rows, lse, mask=rows < end)
    _put(Out, out_row, start, end, out, BLOCK_M, VALUE_DIM, BLOCK_V, UNIT)


@triton.jit(do_not_specialize=["lse_head", "grad_lse_row", "grad_lse_head", "slope_row"])
def query_kernel(
    Query, Key, Value, Out, Grad, Lse, GradLse, Delta, GradQuery, Tiles, Lo, Hi, Own, Slopes, Seed,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, grad_row, grad_head,
    grad_query_row, grad_query_head, lse_head, grad_lse_row, grad_lse_head, slope_row,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, one head; and delta, which ``key_kernel`` reads after this."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(Tiles + 2 * tile)
    end = tl.load(Tiles + 2 * tile + 1)
    Query = _of_head(Query, head, query_head, UNIT, FAR)
    Key = _of_head(Key, head // GROUP, key_head, UNIT, FAR)
    Value = _of_head(Value, head // GROUP, value_head, UNIT, FAR)
    Out = _of_head(Out, head, out_head, UNIT, FAR)
    Grad = _of_head(Grad, head, grad_head, UNIT, FAR)
    GradQuery = _of_head(GradQuery, head, grad_query_head, UNIT, FAR)

    rows = start + tl.arange(0, BLOCK_M)
    lo = tl.load(Lo + rows, mask=rows < end, other=0)[:, None]
    hi = tl.load(Hi + rows, mask=rows < end, other=0)[:, None]
    first, last, whole_from, whole_to = _reach(Lo, Hi, start, end)
    own, slopes = _across(Own, Slopes, rows, end, head, slope_row, ALIBI)
    own, slopes = own[:, None], slopes[:, None]

    q = _tile(Query, query_row, start, end, BLOCK_M, DIM, BLOCK_D, UNIT)
    grad = _tile(Grad, grad_row, start, end, BLOCK_M, VALUE_DIM, BLOCK_V, UNIT)
    out = _tile(Out, out_row, start, end, BLOCK_M, VALUE_DIM, BLOCK_V, UNIT)
    delta = _delta(out, grad, GradLse, grad_lse_row, grad_lse_head, rows, end, head, LSE_GRADIENT)
    tl.store(Delta + head * lse_head + rows, delta, mask=rows < end)
    delta = delta[:, None]
    lse = _backward_lse(Lse + head * lse_head, rows, end)[:, None]
    grad_query = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for at in range(first, last, BLOCK_N):
        keys = (at + tl.arange(0, BLOCK_N))[None, :]
        k = _tile(Key, key_row, at, last, BLOCK_N, DIM, BLOCK_D, UNIT)
        v = _tile(Value, value_row, at, last, BLOCK_N, VALUE_DIM, BLOCK_V, UNIT)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        grad_products = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        boundary = (at < whole_from) | (at + BLOCK_N > whole_to)
        _, slant = _weights(
            products, grad_products, lse, delta, keys, lo, hi, boundary, rows[:, None], keys, own, slopes, head, Seed,
            scale, softcap, dropout_p, LINEAR, SOFTCAP, ALIBI, DROPOUT, EXACT,
        )  # fmt: skip
        grad_query = tl.dot(slant.to(k.dtype), k, grad_query, input_precision=PRECISION)

    grad_query *= scale
    _put(GradQuery, grad_query_row, start, end, grad_query, BLOCK_M, DIM, BLOCK_D, UNIT)


@triton.jit(do_not_specialize=["lse_head", "slope_row"])
def key_kernel(
    Query, Key, Value, Grad, Lse, Delta, GradKey, GradValue, Tiles, Lo, Hi, Own, Slopes, Seed,
    query_row, query_head, key_row, key_head, value_row, value_head, grad_row, grad_head,
    grad_key_row, grad_key_head, grad_value_row, grad_value_head, lse_head, slope_row,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """What HEADS of a key head's query heads, in turn, give to the gradients of one tile of keys and their values."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    Key = _of_head(Key, part * HEADS // GROUP, key_head, UNIT, FAR)
    Value = _of_head(Value, part * HEADS // GROUP, value_head, UNIT, FAR)
    GradKey = _of_head(GradKey, part, grad_key_head, UNIT, FAR)
    GradValue = _of_head(GradValue, part, grad_value_head, UNIT, FAR)
    start = tl.load(Tiles + 2 * tile)
    end = tl.load(Tiles + 2 * tile + 1)

    keys = (start + tl.arange(0, BLOCK_N))[:, None]
    lo = tl.load(Lo + keys, mask=keys < end, other=0)
    hi = tl.load(Hi + keys, mask=keys < end, other=0)
    first, last, whole_from, whole_to = _reach(Lo, Hi, start, end)

    k = _tile(Key, key_row, start, end, BLOCK_N, DIM, BLOCK_D, UNIT)
    v = _tile(Value, value_row, start, end, BLOCK_N, VALUE_DIM, BLOCK_V, UNIT)
    grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    for head in range(part * HEADS, part * HEADS + HEADS):
        HeadQuery = _of_head(Query, head, query_head, UNIT, FAR)
        HeadGrad = _of_head(Grad, head, grad_head, UNIT, FAR)
        for at in range(first, last, BLOCK_M):
            rows = at + tl.arange(0, BLOCK_M)
            q = _tile(HeadQuery, query_row, at, last, BLOCK_M, DIM, BLOCK_D, UNIT)
            grad = _tile(HeadGrad, grad_row, at, last, BLOCK_M, VALUE_DIM, BLOCK_V, UNIT)
            lse = _backward_lse(Lse + head * lse_head, rows, last)[None, :]
            delta = tl.load(Delta + head * lse_head + rows, mask=rows < last, other=0.0)[None, :]
            own, slopes = _across(Own, Slopes, rows, last, head, slope_row, ALIBI)
            own, slopes = own[None, :], slopes[None, :]
            products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            grad_products = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            boundary = (at < whole_from) | (at + BLOCK_M > whole_to)
            weights, slant = _weights(
                products, grad_products, lse, delta, rows[None, :], lo, hi, boundary, rows[None, :], keys, own, slopes,
                head, Seed, scale, softcap, dropout_p, LINEAR, SOFTCAP, ALIBI, DROPOUT, EXACT,
            )  # fmt: skip
            grad_value = tl.dot(weights.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
            grad_key = tl.dot(slant.to(q.dtype), q, grad_key, input_precision=PRECISION)

    grad_key *= scale
    _put(GradKey, grad_key_row, start, end, grad_key, BLOCK_N, DIM, BLOCK_D, UNIT)
    _put(GradValue, grad_value_row, start, end, grad_value, BLOCK_N, VALUE_DIM, BLOCK_V, UNIT)


@triton.jit(do_not_specialize=["lse_head", "grad_lse_row", "grad_lse_head", "slope_row"])
def closed_kernel(
    Query, Key, Value, Out, Grad, Lse, GradLse, GradQuery, GradKey, GradValue, Tiles, Lo, Hi, Own, Slopes, Seed,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, grad_row, grad_head,
    grad_query_row, grad_query_head, grad_key_row, grad_key_head, grad_value_row, grad_value_head,
    lse_head, grad_lse_row, grad_lse_head, slope_row,
    scale, softcap, dropout_p,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, FAR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """All three gradients of a tile that holds whole sequences, both sides of them, one key head."""
    tile = tl.program_id(0)
    key_head_index = tl.program_id(1)
    Key = _of_head(Key, key_head_index, key_head, UNIT, FAR)
    Value = _of_head(Value, key_head_index, value_head, UNIT, FAR)
    GradKey = _of_head(GradKey, key_head_index, grad_key_head, UNIT, FAR)
    GradValue = _of_head(GradValue, key_head_index, grad_value_head, UNIT, FAR)
    first = tl.load(Tiles + 4 * tile)
    last = tl.load(Tiles + 4 * tile + 1)
    start = tl.load(Tiles + 4 * tile + 2)
    end = tl.load(Tiles + 4 * tile + 3)

    keys = (start + tl.arange(0, BLOCK_N))[:, None]
    lo = tl.load(Lo + keys, mask=keys < end, other=0)
    hi = tl.load(Hi + keys, mask=keys < end, other=0)
    k = _tile(Key, key_row, start, end, BLOCK_N, DIM, BLOCK_D, UNIT)
    v = _tile(Value, value_row, start, end, BLOCK_N, VALUE_DIM, BLOCK_V, UNIT)
    grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    for head in range(key_head_index * GROUP, key_head_index * GROUP + GROUP):
        HeadQuery = _of_head(Query, head, query_head, UNIT, FAR)
        HeadGrad = _of_head(Grad, head, grad_head, UNIT, FAR)
        HeadOut = _of_head(Out, head, out_head, UNIT, FAR)
        HeadGradQuery = _of_head(GradQuery, head, grad_query_head, UNIT, FAR)
        for at in range(first, last, BLOCK_M):
            rows = at + tl.arange(0, BLOCK_M)
            q = _tile(HeadQuery, query_row, at, last, BLOCK_M, DIM, BLOCK_D, UNIT)
            grad = _tile(HeadGrad, grad_row, at, last, BLOCK_M, VALUE_DIM, BLOCK_V, UNIT)
            out = _tile(HeadOut, out_row, at, last, BLOCK_M, VALUE_DIM, BLOCK_V, UNIT)
            delta = _delta(out, grad, GradLse, grad_lse_row, grad_lse_head, rows, last, head, LSE_GRADIENT)
            lse = _backward_lse(Lse + head * lse_head, rows, last)[None, :]
            own, slopes = _across(Own, Slopes, rows, last, head, slope_row, ALIBI)
            own, slopes = own[None, :], slopes[None, :]
            products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            grad_products = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            weights, slant = _weights(
                products, grad_products, lse, delta[None, :], rows[None, :], lo, hi, True, rows[None, :], keys, own,
                slopes, head, Seed, scale, softcap, dropout_p, LINEAR, SOFTCAP, ALIBI, DROPOUT, EXACT,
            )  # fmt: skip
            slant = slant.to(q.dtype)
            grad_value = tl.dot(weights.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
            grad_key = tl.dot(slant, q, grad_key, input_precision=PRECISION)
            grad_query = tl.dot(tl.trans(slant), k, input_precision=PRECISION) * scale
            _put(HeadGradQuery, grad_query_row, at, last, grad_query, BLOCK_M, DIM, BLOCK_D, UNIT)

    grad_key *= scale
    _put(GradKey, grad_key_row, start, end, grad_key, BLOCK_N, DIM, BLOCK_D, UNIT)
    _put(GradValue, grad_value_row, start, end, grad_value, BLOCK_N, VALUE_DIM, BLOCK_V, UNIT)
