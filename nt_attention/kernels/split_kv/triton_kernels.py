"""Triton kernels for few queries and many keys, which are in a pool: split-KV attention (flash-decoding).

A tile is BLOCK_M rows of one sequence and one key head. Its rows are all query heads of the group: row r is query
r // GROUP and head r % GROUP of the group. So keys are read once for the whole group.

The keys of a sequence are cut into chunks of CHUNK. If all rows of a sequence fit in one tile, its chunks are split: an
item is a tile with some of the chunks, and `combine_kernel` adds up the results of the items. A split has one chunk, or
2, 4, … chunks, so that a sequence has at most MOST_SPLITS. All boundaries depend on the sequence alone, and the order
of all sums is fixed. So a sequence has the same bits in any batch. Other sequences are not split: an item is a tile
with all its chunks.

`plan_kernel` counts the items on the device, so the host needs no lengths, and programs share the items.

The softmax is that of FlashAttention-2 (Dao 2023), in base 2. Splitting and combining follow Flash-Decoding (Dao et al.
2023).

Dimensions: B sequences, M rows of a tile, N keys of a block, D and V head dims.
"""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

from ..triton_functions import INF, LOG2E, tanh

# Arguments for whose divisibility no kernels of their own are compiled.
UNSPECIALIZED = ["num_sequences", "max_seqlen", "before", "after", "least_rows", "most_rows"]


@triton.jit
def _clamp(x, least, most):
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def _sequence(Offsets, Lengths, sequence, valid, max_seqlen):
    """(first query, number of queries, number of keys, whether the number of keys is not valid), int64."""
    begin = tl.load(Offsets + sequence, mask=valid, other=0).to(tl.int64)
    queries = tl.load(Offsets + sequence + 1, mask=valid, other=0).to(tl.int64) - begin
    keys = tl.load(Lengths + sequence, mask=valid, other=0).to(tl.int64)
    is_wrong = (keys < 0) | (keys > max_seqlen)
    return begin, queries, tl.where(is_wrong, 0, keys), is_wrong


@triton.jit
def _visible(first, last, shift, keys, before, after):
    """The keys [lo, hi) that queries `first` to `last` see. Query i has the position of key i + shift."""
    return _clamp(first + shift - before, 0, keys), _clamp(last + shift + after + 1, 0, keys)


@triton.jit
def _work(
    queries, keys, before, after, least_rows, most_rows,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UPPER_LEFT: tl.constexpr,
    CHUNK: tl.constexpr, MOST_SPLITS: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """(tiles, splits of each tile, first chunk, chunks of a split) of a sequence.

    A sequence has no tiles if it has at most `least_rows` rows or more than `most_rows`.
    """
    rows = queries * GROUP
    tiles = tl.where((rows > least_rows) & (rows <= most_rows), (rows + BLOCK_M - 1) // BLOCK_M, 0)
    shift = keys - queries
    if UPPER_LEFT:
        shift = 0 * shift
    lo, hi = _visible(0, queries - 1, shift, keys, before, after)
    first_chunk = lo // CHUNK
    chunks = tl.maximum((hi + CHUNK - 1) // CHUNK - first_chunk, 1)
    per_split = 0 * chunks + 1
    for _ in tl.static_range(DOUBLINGS):
        per_split = tl.where((chunks + per_split - 1) // per_split > MOST_SPLITS, 2 * per_split, per_split)
    splits = tl.where(tiles == 1, (chunks + per_split - 1) // per_split, 1)
    return tiles, splits, first_chunk, per_split


@triton.jit(do_not_specialize=UNSPECIALIZED)
def plan_kernel(
    Offsets, Lengths, Ends, num_sequences, max_seqlen, before, after, least_rows, most_rows,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UPPER_LEFT: tl.constexpr,
    CHUNK: tl.constexpr, MOST_SPLITS: tl.constexpr, DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write to `Ends` (2, B) the number of items up to each sequence, and of items whose results are combined."""
    items_before = 0
    parts_before = 0
    for at in range(0, num_sequences, BLOCK):
        sequence = at + tl.arange(0, BLOCK)
        valid = sequence < num_sequences
        _, queries, keys, _ = _sequence(Offsets, Lengths, sequence, valid, max_seqlen)
        tiles, splits, _, _ = _work(
            queries, keys, before, after, least_rows, most_rows,
            GROUP, BLOCK_M, UPPER_LEFT, CHUNK, MOST_SPLITS, DOUBLINGS,
        )  # fmt: skip
        items = tl.where(valid, tiles * splits, 0).to(tl.int32)
        parts = tl.where(splits > 1, items, 0)
        tl.store(Ends + sequence, items_before + tl.cumsum(items), mask=valid)
        tl.store(Ends + num_sequences + sequence, parts_before + tl.cumsum(parts), mask=valid)
        items_before += tl.sum(items)
        parts_before += tl.sum(parts)


@triton.jit
def _find_sequence(Ends, item, num_sequences, BLOCK: tl.constexpr):
    """The sequence of an item, and the index of the item in it."""
    found = 0
    for at in range(0, num_sequences, BLOCK):
        sequence = at + tl.arange(0, BLOCK)
        end = tl.load(Ends + sequence, mask=sequence < num_sequences, other=2147483647)
        found += tl.sum((end <= item).to(tl.int32))
    return found, item - tl.load(Ends + found - 1, mask=found > 0, other=0)


@triton.jit
def _scores(
    products, own, keys, slopes, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr
):
    """Scores in base 2."""
    scores = products * (scale * LOG2E)
    if SOFTCAP:
        scores = tanh(products * (scale / softcap), EXACT) * (softcap * LOG2E)
    if ALIBI:
        scores -= slopes * LOG2E * tl.abs(own - keys).to(tl.float32)
    return scores


@triton.jit
def _find_keys(Table, first_entry, position, is_key, total_rows, PAGE: tl.constexpr):
    """(pages of keys, rows in their pages, whether they are in the pool), int64, int64 and bool.

    PAGE is the number of rows of a page; 0 if keys are in one piece, whose first row is the only entry.
    """
    if PAGE == 0:
        entry = tl.load(Table + first_entry).to(tl.int64) + 0 * position
        page_row = position
        row = entry + position
    else:
        entry = tl.load(Table + first_entry + position // PAGE, mask=is_key, other=0).to(tl.int64)
        page_row = position % PAGE
        row = entry * PAGE + page_row
    return entry, page_row, is_key & (entry >= 0) & (entry < total_rows) & (row < total_rows)


@triton.jit
def _load_keys(Base, offsets, is_inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """(N, BLOCK) keys or values of one head; 0 where they may not be read."""
    columns = tl.arange(0, BLOCK)
    mask = is_inside[:, None]
    if BLOCK != DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(Base + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_kernel(
    Query, Key, Value, Out, Lse, Parts, PartLse, Slopes, Table, TableOffsets, Offsets, Lengths, Ends,
    query_row, query_head, key_page, key_row, key_head, value_page, value_row, value_head, out_row, out_head, lse_head,
    slopes_row, table_row, total_rows, part_rows, num_sequences, max_seqlen, before, after, least_rows, most_rows,
    scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, UPPER_LEFT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, MOST_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of the items of this program, or their parts, for one key head.

    `Parts` (P, G, R, V) and `PartLse` (P, G, R) are float32, with P items that are combined and R = `part_rows`.
    """
    key_head_index = tl.program_id(1)
    Key += key_head_index.to(tl.int64) * key_head
    Value += key_head_index.to(tl.int64) * value_head
    last_item = tl.load(Ends + num_sequences - 1)
    for item in range(tl.program_id(0), last_item, tl.num_programs(0)):
        sequence, local = _find_sequence(Ends, item, num_sequences, BLOCK)
        begin, queries, keys, is_wrong = _sequence(Offsets, Lengths, sequence, True, max_seqlen)
        _, splits, first_chunk, per_split = _work(
            queries, keys, before, after, least_rows, most_rows,
            GROUP, BLOCK_M, UPPER_LEFT, CHUNK, MOST_SPLITS, DOUBLINGS,
        )  # fmt: skip
        shift = keys - queries
        if UPPER_LEFT:
            shift = 0 * shift
        tile = local // splits
        split = local % splits
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = row < queries * GROUP
        query = row // GROUP
        head = (key_head_index * GROUP + row % GROUP).to(tl.int64)

        first_query = tile * BLOCK_M // GROUP
        last_query = tl.minimum(queries - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
        lo, hi = _visible(first_query, last_query, shift, keys, before, after)
        if splits > 1:
            lo = tl.maximum(lo, (first_chunk + split * per_split) * CHUNK)
            hi = tl.minimum(hi, (first_chunk + (split + 1) * per_split) * CHUNK)
        first_entry = sequence.to(tl.int64) * table_row
        if RAGGED:
            first_entry = tl.load(TableOffsets + sequence).to(tl.int64)

        columns = tl.arange(0, BLOCK_D)
        pointers = Query + ((begin + query) * query_row + head * query_head)[:, None] + columns[None, :]
        q = tl.load(pointers, mask=is_row[:, None] & (columns < DIM)[None, :], other=0.0)
        own = (query + shift)[:, None]
        slopes = 0.0
        if ALIBI:
            slopes = tl.load(Slopes + sequence * slopes_row + head, mask=is_row, other=0.0)[:, None]
        out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        row_max = tl.full([BLOCK_M], -INF, tl.float32)
        num_wrong = tl.zeros([BLOCK_N], tl.int32) + is_wrong.to(tl.int32)

        for at in range(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N):
            position = at + tl.arange(0, BLOCK_N).to(tl.int64)
            is_key = (position >= lo) & (position < hi)
            page, page_row, is_inside = _find_keys(Table, first_entry, position, is_key, total_rows, PAGE)
            num_wrong += (is_key & (is_inside == 0)).to(tl.int32)
            k = _load_keys(Key, page * key_page + page_row * key_row, is_inside, DIM, BLOCK_D)
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = _scores(products, own, position[None, :], slopes, scale, softcap, SOFTCAP, ALIBI, EXACT)
            distance = position[None, :] - own
            is_visible = is_inside[None, :] & (distance >= -before) & (distance <= after)
            scores = tl.where(is_visible, scores, -INF)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            finite = tl.where(new_max == -INF, 0.0, new_max)
            weights = tl.exp2(scores - finite[:, None])
            rescale = tl.exp2(row_max - finite)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            v = _load_keys(Value, page * value_page + page_row * value_row, is_inside, VALUE_DIM, BLOCK_V)
            out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision=PRECISION)
            row_max = new_max

        masked = row_sum == 0.0
        wrong = tl.where(tl.sum(num_wrong) > 0, float("nan"), 0.0)
        out = out / tl.where(masked, 1.0, row_sum)[:, None] + wrong
        lse = tl.where(masked, -INF, (row_max + tl.log2(tl.where(masked, 1.0, row_sum))) / LOG2E) + wrong
        columns = tl.arange(0, BLOCK_V)
        is_stored = is_row[:, None] & (columns < VALUE_DIM)[None, :]
        if splits > 1:
            part = tl.load(Ends + num_sequences + sequence - 1, mask=sequence > 0, other=0) + split
            at_row = (part.to(tl.int64) * tl.num_programs(1) + key_head_index) * part_rows + row
            tl.store(PartLse + at_row, lse, mask=is_row)
            tl.store(Parts + at_row[:, None] * VALUE_DIM + columns[None, :], out, mask=is_stored)
        else:
            at_query = begin + query
            tl.store(Lse + head * lse_head + at_query, lse, mask=is_row)
            pointers = Out + (at_query * out_row + head * out_head)[:, None] + columns[None, :]
            tl.store(pointers, out.to(Out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    Out, Lse, Parts, PartLse, Offsets, Lengths, Ends,
    out_row, out_head, lse_head, part_rows, num_sequences, max_seqlen, before, after, least_rows, most_rows,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, UPPER_LEFT: tl.constexpr,
    CHUNK: tl.constexpr, MOST_SPLITS: tl.constexpr, DOUBLINGS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row of a tile, for one key head: their mean, weighted by the exponential of lse."""
    sequence = tl.program_id(0) // part_rows
    row = tl.program_id(0) % part_rows
    key_head_index = tl.program_id(1)
    begin, queries, keys, _ = _sequence(Offsets, Lengths, sequence, True, max_seqlen)
    tiles, splits, _, _ = _work(
        queries, keys, before, after, least_rows, most_rows,
        GROUP, BLOCK_M, UPPER_LEFT, CHUNK, MOST_SPLITS, DOUBLINGS,
    )  # fmt: skip
    if (tiles == 1) & (splits > 1) & (row < queries * GROUP):
        first_part = tl.load(Ends + num_sequences + sequence - 1, mask=sequence > 0, other=0).to(tl.int64)
        all_splits = tl.arange(0, MOST_SPLITS)
        step = tl.num_programs(1).to(tl.int64) * part_rows
        first_row = (first_part * tl.num_programs(1) + key_head_index) * part_rows + row
        all_lse = tl.load(PartLse + first_row + all_splits * step, mask=all_splits < splits, other=-INF)
        most = tl.max(all_lse, 0)
        most = tl.where(most == -INF, 0.0, most)
        total = tl.sum(tl.exp2((all_lse - most) * LOG2E))
        columns = tl.arange(0, BLOCK_V)
        out = tl.zeros([BLOCK_V], tl.float32)
        for at in range(0, splits, BLOCK_S):
            split = at + tl.arange(0, BLOCK_S)
            rows = first_row + split * step
            weights = tl.exp2((tl.load(PartLse + rows, mask=split < splits, other=-INF) - most) * LOG2E)
            mask = (split < splits)[:, None] & (columns < VALUE_DIM)[None, :]
            parts = tl.load(Parts + rows[:, None] * VALUE_DIM + columns[None, :], mask=mask, other=0.0)
            out += tl.sum(weights[:, None] * parts, 0)
        masked = total == 0.0
        head = (key_head_index * GROUP + row % GROUP).to(tl.int64)
        query = begin + row // GROUP
        tl.store(Lse + head * lse_head + query, tl.where(masked, -INF, most + tl.log(total)))
        out = out / tl.where(masked, 1.0, total)
        pointers = Out + query * out_row + head * out_head + columns
        tl.store(pointers, out.to(Out.dtype.element_ty), mask=columns < VALUE_DIM)
