"""Triton kernels for few queries and many keys, which are in a pool: split-KV attention (flash-decoding).

A tile is BLOCK_M rows of one sequence and one key head. Its rows are all query heads of the group: row r is query
r // GROUP and head r % GROUP of the group. So keys are read once for the whole group.

The keys of a sequence are cut into chunks of 2^chunk_bits. The chunks of sequences with at most `split_rows` rows are
split: an item is a tile with some of the chunks, and `combine_kernel` adds up the results of the items. A split has one
chunk, or 2, 4, … chunks, so that a sequence has at most `most_splits`. Other sequences are not split: an item is a tile
with all chunks. For given arguments, all boundaries depend on the sequence alone, and the order of all sums is fixed.

Each program counts the items of all sequences, so the host needs no lengths, and programs share the items.

Neighboring sequences of a bundle may have their first pages in common. `shared_keys_kernel` finds these keys. Then
`attention_kernel` runs twice: with bundles in place of sequences, for the shared keys, and with the other keys of each
sequence. `combine_kernel` adds up both. This is the cascade of Hydragen (Juravsky et al. 2024) and FlashInfer.

The softmax is that of FlashAttention-2 (Dao 2023), in base 2. Splitting and combining follow Flash-Decoding (Dao et al.
2023).

Dimensions: B sequences, M rows of a tile, N keys of a block, D and V head dims.
"""

# No `from __future__ import annotations`: Triton reads annotations when it compiles.

import triton
import triton.language as tl

from ..triton_functions import INF, LOG2E, add_product, filled, row_products, score_factor_of, tanh, times

# Arguments for whose divisibility no kernels of their own are compiled.
UNSPECIALIZED = ["num_sequences", "max_seqlen", "before", "after", "least_rows", "most_rows"]
UNSPECIALIZED += ["split_rows", "chunk_bits", "most_splits", "doublings"]
UNSPECIALIZED += [f"shared_{name}" for name in ("rows", "bits", "splits", "doublings", "at")]
UNSPECIALIZED += ["least_saved"]


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
    queries, begin_key, keys, before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UPPER_LEFT: tl.constexpr,
):  # fmt: skip
    """(tiles, splits of each tile, first chunk, chunks of a split) of a sequence, for its keys from `begin_key` on.

    A sequence has no tiles if it has at most `least_rows` rows or more than `most_rows`.
    """
    rows = queries * GROUP
    tiles = tl.where((rows > least_rows) & (rows <= most_rows), (rows + BLOCK_M - 1) // BLOCK_M, 0)
    shift = keys - queries
    if UPPER_LEFT:
        shift = 0 * shift
    lo, hi = _visible(0, queries - 1, shift, keys, before, after)
    first_chunk = tl.maximum(lo, begin_key) >> chunk_bits
    last_chunk = tl.maximum((hi - 1) >> chunk_bits, first_chunk)
    doubled = 0 * keys
    for _ in range(doublings):
        doubled += (((last_chunk - first_chunk) >> doubled) >= most_splits).to(tl.int64)
    splits = tl.where(rows <= split_rows, ((last_chunk - first_chunk) >> doubled) + 1, 1)
    return tiles, splits, first_chunk, (0 * keys + 1) << doubled


@triton.jit
def _begin_key(FirstKeys, sequences, valid, keys, PART: tl.constexpr):
    """The key at which the work of a sequence begins, int64: after those that it shares, if PART is "other"."""
    first = 0 * keys
    if PART == "other":
        first += tl.load(FirstKeys + sequences, mask=valid, other=0)
    return first


@triton.jit
def _count_items(
    FirstKeys, Offsets, Lengths, sequences, num_sequences, max_seqlen,
    before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UPPER_LEFT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The number of items of each sequence, int32."""
    is_valid = sequences < num_sequences
    _, queries, keys, _ = _sequence(Offsets, Lengths, sequences, is_valid, max_seqlen)
    begin_key = _begin_key(FirstKeys, sequences, is_valid, keys, PART)
    tiles, splits, _, _ = _work(
        queries, begin_key, keys, before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings,
        GROUP, BLOCK_M, UPPER_LEFT,
    )  # fmt: skip
    if PART == "shared":  # most bundles share nothing
        tiles = tl.where(keys > 0, tiles, 0)
    return (tiles * splits).to(tl.int32)


@triton.jit
def _scores(
    products, own, keys, slopes, scale, softcap,
    LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Scores in base 2. If LINEAR, they are without their factor `scale * LOG2E`, which fuses into later operations."""
    scores = products
    if not LINEAR:
        scores = products * (scale * LOG2E)
    if SOFTCAP:
        scores = tanh(products * (scale / softcap), EXACT) * (softcap * LOG2E)
    if ALIBI:
        scores -= slopes * LOG2E * tl.abs(own - keys).to(tl.float32)
    return scores


@triton.jit
def _find_keys(
    Table, first_entry, at, is_key, total_rows, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, INDEX: tl.constexpr
):
    """Where the keys from position `at` on, a multiple of N, are: (pages, row, more, whether they are in the pool).

    They are in the rows `row + more` of their pages. `row` differs between blocks. `more` mostly does not, so it is
    computed once. `PAGE` is the number of rows of a page, and `INDEX` the type of `more`.
    """
    n = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        page = tl.load(Table + first_entry + at // PAGE).to(tl.int64)
        row, more = at % PAGE, n.to(INDEX)
    elif BLOCK_N % PAGE == 0:
        page = tl.load(Table + first_entry + at // PAGE + n // PAGE, mask=is_key, other=0).to(tl.int64)
        row, more = 0 * at, (n % PAGE).to(INDEX)
    else:
        page = tl.load(Table + first_entry + (at + n) // PAGE, mask=is_key, other=0).to(tl.int64)
        row, more = 0 * at, ((at + n) % PAGE).to(INDEX)
    is_page = (page >= 0) & (page < total_rows)
    rows_left = tl.where(is_page, total_rows - (tl.where(is_page, page, 0) * PAGE + row), 0)
    return page, row, more, is_key & (more < rows_left)


@triton.jit
def _load_columns(Rows, is_row, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """(M, BLOCK) the columns of rows; 0 in columns from DIM, and in rows that are not to be read."""
    columns = tl.arange(0, BLOCK)
    mask = is_row[:, None]
    if BLOCK > DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(Rows + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load(Rows, is_row, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Both parts of rows. `Rows` (M, 1) points to them, as in the other functions."""
    rest = 0.0
    if REST:
        rest = _load_columns(Rows + BLOCK, is_row, DIM - BLOCK, REST)
    return _load_columns(Rows, is_row, DIM, BLOCK), rest


@triton.jit
def _store(Rows, x, is_row, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Store both parts of `x` to the elements that `_load` reads."""
    columns = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < DIM)[None, :]
    tl.store(Rows + columns[None, :], x[0].to(Rows.dtype.element_ty), mask=mask)
    if REST:
        more = BLOCK + tl.arange(0, REST)
        tl.store(Rows + more[None, :], x[1].to(Rows.dtype.element_ty), mask=is_row[:, None] & (more < DIM)[None, :])


@triton.jit
def _load_keys(Base, start, more, is_inside, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Both parts of N keys or values of one head, at the elements `start + more`; 0 where they may not be read.

    `start` is a number or (N,).
    """
    rows = Base + start
    if start.type.is_block():
        rows = rows[:, None]
    return _load(rows + more[:, None], is_inside, DIM, BLOCK, REST)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_kernel(
    Query, Key, Value, Out, Lse, Parts, PartLse, Slopes, Table, TableOffsets, FirstKeys, Offsets, Lengths,
    query_row, query_head, key_page, key_row, key_head, value_page, value_row, value_head, out_row, out_head, lse_head,
    slopes_row, table_row, total_rows, num_sequences,
    max_seqlen, before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, UPPER_LEFT: tl.constexpr, LINEAR: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """out and lse of the items of this program, or their parts, for one key head.

    `Parts` (B, S, G, R, V) and `PartLse` (B, S, G, R) are float32, with S = `most_splits` and R = `split_rows`. `WIDE`
    is whether the offsets of a block's rows need 64 bits. `PART` says for which keys: "all", "shared" (the sequences
    are bundles) or "other" (the sequences begin at `FirstKeys`).
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    key_head_index = tl.program_id(1)
    Key += key_head_index.to(tl.int64) * key_head
    Value += key_head_index.to(tl.int64) * value_head
    item = tl.program_id(0)
    end = 0
    for at_sequence in range(0, num_sequences, BLOCK):
        sequences = at_sequence + tl.arange(0, BLOCK)
        items = _count_items(
            FirstKeys, Offsets, Lengths, sequences, num_sequences, max_seqlen,
            before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings,
            GROUP, BLOCK_M, UPPER_LEFT, PART,
        )  # fmt: skip
        begin = end
        ends = begin + tl.cumsum(items)
        end = tl.max(ends)
        while item < end:
            is_before = ends <= item
            sequence = at_sequence + tl.sum(is_before.to(tl.int32))
            index = item - tl.max(tl.where(is_before, ends, begin))
            first, queries, keys, is_wrong = _sequence(Offsets, Lengths, sequence, True, max_seqlen)
            begin_key = _begin_key(FirstKeys, sequence, True, keys, PART)
            _, splits, first_chunk, per_split = _work(
                queries, begin_key, keys, before, after, least_rows, most_rows, split_rows, chunk_bits,
                most_splits, doublings, GROUP, BLOCK_M, UPPER_LEFT,
            )  # fmt: skip
            shift = keys - queries
            if UPPER_LEFT:
                shift = 0 * shift
            tile = index // splits
            split = index % splits
            row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            is_row = row < queries * GROUP
            query = row // GROUP
            head = (key_head_index * GROUP + row % GROUP).to(tl.int64)

            first_query = tile * BLOCK_M // GROUP
            last_query = tl.minimum(queries - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
            lo, hi = _visible(first_query, last_query, shift, keys, before, after)
            if PART == "other":
                lo = tl.maximum(lo, begin_key)
            if splits > 1:
                lo = tl.maximum(lo, (first_chunk + split * per_split) << chunk_bits)
                hi = tl.minimum(hi, (first_chunk + (split + 1) * per_split) << chunk_bits)
            first_entry = sequence.to(tl.int64) * table_row
            if RAGGED:
                first_entry = tl.load(TableOffsets + sequence).to(tl.int64)
            slot = first_entry
            if PAGE == 0:  # the keys are in one piece
                slot = tl.load(Table + first_entry).to(tl.int64)
                is_wrong = is_wrong | ((lo < hi) & ((slot < 0) | (hi > total_rows - slot)))
                hi = tl.where(is_wrong, lo, hi)

            query_row_start = (first + query) * query_row + head * query_head
            q = _load(Query + query_row_start[:, None], is_row, DIM, BLOCK_D, REST_D)
            own = (query + shift)[:, None]
            slopes = 0.0
            if ALIBI:
                slopes = tl.load(Slopes + sequence * slopes_row + head, mask=is_row, other=0.0)[:, None]
            out = filled(0.0, BLOCK_M, BLOCK_V, REST_V)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            row_max = tl.full([BLOCK_M], -INF, tl.float32)
            num_wrong = tl.zeros([BLOCK_N], tl.int32) + is_wrong.to(tl.int32)

            # all rows see the keys [all_from, all_to)
            all_from = tl.maximum(lo, last_query + shift - before)
            all_to = tl.minimum(hi, first_query + shift + after + 1)
            factor = score_factor_of(scale, LINEAR)
            n = tl.arange(0, BLOCK_N)
            for at in range(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N):
                # positions are compared relative to `at`, in 32 bits
                first_key = _clamp(lo - at, 0, BLOCK_N).to(tl.int32)
                last_key = _clamp(hi - at - 1, -1, BLOCK_N).to(tl.int32)
                is_inside = (n >= first_key) & (n <= last_key)
                if PAGE == 0:
                    page, page_row, more = slot, at, n.to(INDEX)
                else:
                    is_key = is_inside
                    page, page_row, more, is_inside = _find_keys(
                        Table, first_entry, at, is_key, total_rows, PAGE, BLOCK_N, INDEX
                    )
                    num_wrong += (is_key & (is_inside == 0)).to(tl.int32)
                start = page * key_page + page_row * key_row
                k = _load_keys(Key, start, more * key_row, is_inside, DIM, BLOCK_D, REST_D)
                products = row_products(q, k, REST_D, PRECISION)
                scores = _scores(products, own - at, n[None, :], slopes, scale, softcap, LINEAR, SOFTCAP, ALIBI, EXACT)
                if (at < all_from) | (at + BLOCK_N > all_to):
                    least = tl.maximum(_clamp(own - at - before, 0, BLOCK_N).to(tl.int32), first_key)
                    most = tl.minimum(_clamp(own - at + after, -1, BLOCK_N).to(tl.int32), last_key)
                    scores = tl.where((n[None, :] >= least) & (n[None, :] <= most), scores, -INF)
                new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
                finite = tl.where(new_max == -INF, 0.0, new_max)
                weights = tl.exp2(scores * factor - finite[:, None])
                rescale = tl.exp2(row_max - finite)
                row_sum = row_sum * rescale + tl.sum(weights, 1)
                start = page * value_page + page_row * value_row
                v = _load_keys(Value, start, more * value_row, is_inside, VALUE_DIM, BLOCK_V, REST_V)
                out = add_product(weights, v, times(out, rescale[:, None], REST_V), REST_V, PRECISION)
                row_max = new_max

            masked = row_sum == 0.0
            wrong = tl.where(tl.sum(num_wrong) > 0, float("nan"), 0.0)
            out = times(out, ((1.0 + wrong) / tl.where(masked, 1.0, row_sum))[:, None], REST_V)
            lse = tl.where(masked, -INF, (row_max + tl.log2(tl.where(masked, 1.0, row_sum))) / LOG2E) + wrong
            is_part = splits > 1
            if PART == "shared":
                is_part = splits > 0
            if PART == "other":
                is_part = (splits > 1) | (begin_key > 0)
            if is_part:
                part = sequence.to(tl.int64) * most_splits + split
                at_row = (part * tl.num_programs(1) + key_head_index) * split_rows + row
                tl.store(PartLse + at_row, lse, mask=is_row)
                _store(Parts + at_row[:, None] * VALUE_DIM, out, is_row, VALUE_DIM, BLOCK_V, REST_V)
            else:
                at_query = first + query
                tl.store(Lse + head * lse_head + at_query, lse, mask=is_row)
                at_row = at_query * out_row + head * out_head
                _store(Out + at_row[:, None], out, is_row, VALUE_DIM, BLOCK_V, REST_V)
            item += tl.num_programs(0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    Out, Lse, Parts, PartLse, FirstKeys, BundleOffsets, SharedKeys, Offsets, Lengths,
    out_row, out_head, lse_head,
    max_seqlen, before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings,
    shared_rows, shared_bits, shared_splits, shared_doublings, shared_at,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, UPPER_LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, BUNDLE: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row of a tile, for one key head: their mean, weighted by the exponential of lse.

    A program has COLUMNS of the V columns of `Parts`. If `PART` is "other", the parts of bundles follow in `Parts`,
    from row `shared_at` on. The numbers `shared_…` are those with which `attention_kernel` made them.
    """
    programs_per_row: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) // programs_per_row % split_rows
    sequence = tl.program_id(0) // programs_per_row // split_rows
    key_head_index = tl.program_id(1)
    begin, queries, keys, _ = _sequence(Offsets, Lengths, sequence, True, max_seqlen)
    begin_key = _begin_key(FirstKeys, sequence, True, keys, PART)
    tiles, splits, _, _ = _work(
        queries, begin_key, keys, before, after, least_rows, most_rows, split_rows, chunk_bits, most_splits, doublings,
        GROUP, BLOCK_M, UPPER_LEFT,
    )  # fmt: skip
    all_splits = splits
    if PART == "other":
        if begin_key > 0:
            bundle = sequence // BUNDLE
            in_bundle, bundle_queries, bundle_keys, _ = _sequence(BundleOffsets, SharedKeys, bundle, True, max_seqlen)
            _, more_splits, _, _ = _work(
                bundle_queries, 0 * keys, bundle_keys, max_seqlen, max_seqlen, 0, shared_rows, shared_rows,
                shared_bits, shared_splits, shared_doublings, GROUP, BLOCK_M, False,
            )  # fmt: skip
            all_splits += more_splits
            first_shared = bundle.to(tl.int64) * shared_splits * tl.num_programs(1) + key_head_index
            first_shared = shared_at + first_shared * shared_rows + row + (begin - in_bundle) * GROUP
        else:
            first_shared = 0 * keys
    if (tiles > 0) & (all_splits > 1) & (row < queries * GROUP):
        step = tl.num_programs(1).to(tl.int64) * split_rows
        first_row = (sequence.to(tl.int64) * most_splits * tl.num_programs(1) + key_head_index) * split_rows + row
        # each of the BLOCK_S lanes adds up every BLOCK_S-th split
        sums = tl.zeros([BLOCK_S, COLUMNS], tl.float32)
        totals = tl.zeros([BLOCK_S], tl.float32)
        most = tl.full([BLOCK_S], -INF, tl.float32)
        for at in range(0, all_splits, BLOCK_S):
            split = at + tl.arange(0, BLOCK_S)
            is_split = split < all_splits
            rows = first_row + split * step
            if PART == "other":
                of_bundle = first_shared + (split - splits) * (tl.num_programs(1).to(tl.int64) * shared_rows)
                rows = tl.where(split < splits, rows, of_bundle)
            lse = tl.load(PartLse + rows, mask=is_split, other=-INF)
            mask = is_split[:, None] & (column < VALUE_DIM)[None, :]
            parts = tl.load(Parts + rows[:, None] * VALUE_DIM + column[None, :], mask=mask, other=0.0)
            new_most = tl.where(lse > most, lse, most)
            finite = tl.where(new_most == -INF, 0.0, new_most)
            weights = tl.exp2((lse - finite) * LOG2E)
            rescale = tl.exp2((most - finite) * LOG2E)
            totals = totals * rescale + weights
            sums = sums * rescale[:, None] + weights[:, None] * parts
            most = new_most
        overall = tl.max(most, 0)
        overall = tl.where(overall == -INF, 0.0, overall)
        weights = tl.exp2((most - overall) * LOG2E)
        total = tl.sum(weights * totals, 0)
        masked = total == 0.0
        out = tl.sum(weights[:, None] * sums, 0) / tl.where(masked, 1.0, total)
        head = (key_head_index * GROUP + row % GROUP).to(tl.int64)
        query = begin + row // GROUP
        tl.store(Lse + head * lse_head + query, tl.where(masked, -INF, overall + tl.log(total)))
        pointers = Out + query * out_row + head * out_head + column
        tl.store(pointers, out.to(Out.dtype.element_ty), mask=column < VALUE_DIM)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def shared_keys_kernel(
    FirstKeys, BundleOffsets, SharedKeys, Entries, Table, TableOffsets, Offsets, Lengths,
    table_row, num_sequences, max_seqlen, after, least_saved,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, BUNDLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the keys that sequences of one bundle share: full pages that are equal from the first one on.

    The pages of each sequence are compared with those of the one in the middle. If a bundle has sequences of two
    groups, that is one of the larger group. Among the lengths of common prefixes, the kernel takes the one that saves
    most reads of keys. Only keys that all queries of a sequence see are shared. Writes, all int64:

        FirstKeys: (B,), the number of shared keys of a sequence, or 0.
        BundleOffsets: (C+1,), where the queries of the C bundles begin.
        SharedKeys: (C,), the number of keys that a bundle shares. 0 if this saves less than `least_saved` keys.
        Entries: (C,), the entry of the table at which the pages of a bundle begin.
    """
    bundle = tl.program_id(0)
    first = bundle * BUNDLE
    last = tl.minimum(first + BUNDLE, num_sequences)
    sequences = first + tl.arange(0, BUNDLE)
    is_valid = sequences < last
    is_leader = sequences == (first + last) // 2
    _, queries, keys, _ = _sequence(Offsets, Lengths, sequences, is_valid, max_seqlen)
    _, visible = _visible(0, 0, keys - queries, keys, 0, after)
    pages = tl.where(is_valid & (queries > 0), visible // PAGE, 0)
    entries = sequences.to(tl.int64) * table_row
    if RAGGED:
        entries = tl.load(TableOffsets + sequences, mask=is_valid, other=0).to(tl.int64)
    entry = tl.sum(tl.where(is_leader, entries, 0))
    pages_of_leader = tl.sum(tl.where(is_leader, pages, 0))

    equal = tl.where(is_leader, 0, tl.minimum(pages, pages_of_leader))
    at = 0
    end = tl.max(equal)
    while at < end:
        page = at + tl.arange(0, BLOCK)
        is_page = page[None, :] < equal[:, None]
        its = tl.load(Table + entry + page, mask=page < pages_of_leader, other=0)
        others = tl.load(Table + entries[:, None] + page[None, :], mask=is_page, other=0)
        differs = is_page & (others != its[None, :])
        equal = tl.minimum(equal, tl.min(tl.where(differs, page[None, :], 2**31 - 1), 1).to(tl.int64))
        at += BLOCK
        end = tl.max(equal)

    saved = equal * tl.sum((equal[None, :] >= equal[:, None]).to(tl.int64), 1)
    most = tl.max(saved)
    shared = tl.max(tl.where(saved == most, equal, 0))
    shared = tl.where((shared > 0) & (most * PAGE >= least_saved), shared, 0)
    is_sharing = is_leader | (equal >= shared)
    tl.store(FirstKeys + sequences, tl.where(is_sharing, shared * PAGE, 0), mask=is_valid)
    tl.store(SharedKeys + bundle, shared * PAGE)
    tl.store(Entries + bundle, entry)
    tl.store(BundleOffsets + bundle, tl.load(Offsets + first).to(tl.int64))
    tl.store(BundleOffsets + bundle + 1, tl.load(Offsets + last).to(tl.int64))
